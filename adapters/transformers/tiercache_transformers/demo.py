"""The demo: two engine processes share the state of real hybrid models through a node.

Run it with `tiercache demo`.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiercache.testing.recall import MODELS, episode
from tiercache_transformers.demo_engine import CHUNK_TOKENS, Answer, Open
from tiercache_transformers.demo_processes import POLL_S, START_S, EngineProcess, NodeProcess

PROMPT_TOKENS = 1500
SHARED_TOKENS = 1100
SIBLING_TOKENS = 400
PAIRS = 32
QUESTIONS = 9
COUNT = 16

_LAYERS = {"full_attention": "MLA", "linear_attention": "KDA"}


@dataclass(frozen=True, slots=True)
class Row:
    """One case: what an engine answered, how much it should have reused, and the uninterrupted run
    (None where only the reuse counts). `value`: the token that was asked for. `stored`: the state
    cannot have come from host memory."""

    case: str
    answer: Answer
    value: int
    expected: int
    reference: Answer | None = None
    stored: bool = False

    @property
    def same_tokens(self) -> bool:
        """Whether the greedy tokens are those of the uninterrupted run."""
        return self.reference is None or self.answer.tokens == self.reference.tokens

    @property
    def same_logits(self) -> bool:
        """Whether the logits are those of the uninterrupted run, bit for bit."""
        return self.reference is None or self.answer.logits == self.reference.logits

    @property
    def holds(self) -> bool:
        """Whether the case came out as it must."""
        reused = self.answer.reused == self.expected
        found = self.answer.waited or not self.stored
        return reused and found and self.same_tokens and self.same_logits


class Case(msgspec.Struct, frozen=True):
    """One case as JSON tells it. `ttft_s` and `uncached_ttft_s` (None where only the reuse counts) are
    seconds to the first token; `outcome` is what the table says."""

    model: str
    case: str
    reused: int
    recomputed: int
    ttft_s: float
    uncached_ttft_s: float | None
    outcome: str
    holds: bool


class Told(msgspec.Struct, frozen=True):
    """The demo as JSON tells it: `stored` says whether all that had earned it was on NVMe."""

    holds: bool
    stored: bool
    cases: list[Case]


@dataclass(frozen=True, slots=True)
class Played:
    """All that happened: the cases of each model, and whether all that had earned it was stored."""

    cases: Mapping[str, Sequence[Row]]
    stored: bool

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return self.stored and all(row.holds for rows in self.cases.values() for row in rows)

    def told(self) -> Told:
        """Return it for JSON."""
        cases = [
            Case(
                model,
                row.case,
                row.answer.reused,
                row.answer.recomputed,
                row.answer.ttft_s,
                row.reference.ttft_s if row.reference is not None else None,
                outcome(row),
                row.holds,
            )
            for model, rows in self.cases.items()
            for row in rows
        ]
        return Told(self.holds, self.stored, cases)


class Stage:
    """One model, two engines and their node; its methods are the acts of the demo, in their order."""

    def __init__(
        self, model: str, node: NodeProcess, first: EngineProcess, second: EngineProcess
    ) -> None:
        self.model = model
        self._node = node
        self._first = first
        self._second = second
        task = episode(1, tokens=PROMPT_TOKENS, pairs=PAIRS)
        siblings = [episode(seed, tokens=SIBLING_TOKENS, pairs=PAIRS) for seed in (2, 3)]
        self._prompt = task.asked(QUESTIONS)
        self._value = task.answers[QUESTIONS - 1]
        self._others = [sibling.answers[QUESTIONS - 1] for sibling in siblings]
        self._siblings = [
            self._prompt[:SHARED_TOKENS] + sibling.asked(QUESTIONS) for sibling in siblings
        ]

    def share(self) -> Iterator[Row]:
        """One engine fills the node, the other resumes. A prompt that parts from it on the way shows where
        a checkpoint is worth having; the next one that does resumes there."""
        for engine in (self._first, self._second):
            engine.open(self._order("alone", socket=""))
            engine.open(self._order("shared"))
            # No figure shall include a process's first calls.
            self._alone(engine, self._siblings[0])
        cold = self._shared(self._first, self._prompt)
        yield Row("A: cold", cold, self._value, 0, self._alone(self._first, self._prompt))
        whole = self._alone(self._second, self._prompt)
        again = self._shared(self._second, self._prompt)
        yield Row("B: the same prompt", again, self._value, len(self._prompt) - 1, whole)
        common = SHARED_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
        for case, sibling, value, expected in zip(
            (f"B: {SHARED_TOKENS:,} tokens in common", "B: another such prompt"),
            self._siblings,
            self._others,
            (0, common),
            strict=True,
        ):
            part = self._alone(self._second, sibling)
            yield Row(case, self._shared(self._second, sibling), value, expected, part)

    def store(self) -> bool:
        """Wait until what has earned it is on NVMe; return whether all of it is."""
        done = [
            engine.flush(self._order("shared").session) for engine in (self._first, self._second)
        ]
        return not any(one.waiting or one.lost or one.reason for one in done)

    def survive(self) -> Iterator[Row]:
        """The node was killed and started again, so that its memory is empty."""
        until = time.monotonic() + START_S
        while self._second.touch(self._order("shared").session) != "attached":
            if time.monotonic() > until or not self._node.runs_for(POLL_S):
                break
        whole = self._alone(self._second, self._prompt)
        again = self._shared(self._second, self._prompt)
        yield Row(
            "B: after kill -9, from NVMe",
            again,
            self._value,
            len(self._prompt) - 1,
            whole,
            stored=True,
        )

    def differ(self) -> Iterator[Row]:
        """The same prompt under another identity finds nothing."""
        for case, order in (
            ("B: another tokenizer", self._order("tokenizer", tokenizer="another")),
            ("B: another dtype", self._order("dtype", dtype="bfloat16")),
            ("B: other weights", self._order("weights", nudged=True)),
            ("B: another tenant's salt", self._order("salt", salt="another tenant")),
        ):
            self._second.open(order)
            yield Row(case, self._second.ask(order.session, self._prompt, COUNT), self._value, 0)

    def _order(self, session: str, **changed: str | bool) -> Open:
        """Return the order for a session of this model, as usual but for what is `changed`."""
        usual = Open(f"{self.model}/{session}", self.model, str(self._node.socket))
        return msgspec.structs.replace(usual, **changed)

    def _alone(self, engine: EngineProcess, prompt: tuple[int, ...]) -> Answer:
        return engine.ask(self._order("alone").session, prompt, COUNT)

    def _shared(self, engine: EngineProcess, prompt: tuple[int, ...]) -> Answer:
        return engine.ask(self._order("shared").session, prompt, COUNT)


def run(console: Console, directory: Path) -> Played:
    """Play the demo with all it writes under `directory`; tell it on `console` meanwhile."""
    with NodeProcess(directory) as node, EngineProcess() as first, EngineProcess() as second:
        node.start()
        console.print(
            f"One node, and two engine processes: A ({first.pid}) and B ({second.pid}). A prompt of "
            f"{PROMPT_TOKENS:,} tokens holds {PAIRS} keys with values; a question of "
            f"{2 * QUESTIONS - 1} tokens asks for some of them."
        )
        stages = [Stage(model, node, first, second) for model in MODELS]
        rows = [list(stage.share()) for stage in stages]
        done = [stage.store() for stage in stages]
        console.print(
            "B's visit was the prompt's second: that earned its state a place on NVMe (write-back is "
            "not eager)." + ("" if all(done) else " [red]Not all of it got there.[/red]")
        )
        node.kill()
        console.print(f"The node was killed with SIGKILL; it is back after {node.start():.1f} s.\n")
        for stage, cases in zip(stages, rows, strict=True):
            cases += [*stage.survive(), *stage.differ()]
            console.print(table(stage.model, cases), "")
    right = [row.answer.tokens[0] == row.value for cases in rows for row in cases]
    console.print(f"The value asked for was the next token in {sum(right)} of {len(right)} runs.")
    cases_by_model = {stage.model: cases for stage, cases in zip(stages, rows, strict=True)}
    played = Played(cases_by_model, all(done))
    console.print(
        "[green]Every check holds.[/green]" if played.holds else "[red]A check failed.[/red]"
    )
    return played


def table(model: str, rows: list[Row]) -> Table:
    """Return what happened, for people; times are milliseconds to the first token."""
    layers = ", ".join(_LAYERS[kind] for kind in MODELS[model])
    title = f"{model} ({layers})"
    shown = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,  # It fits into 80 columns.
        pad_edge=False,
    )
    shown.add_column("case", no_wrap=True)
    for heading in ("reused", "recomputed", "TTFT ms", "uncached"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("output")
    for row in rows:
        shown.add_row(
            row.case,
            f"{row.answer.reused:,}",
            f"{row.answer.recomputed:,}",
            f"{row.answer.ttft_s * 1e3:.1f}",
            f"{row.reference.ttft_s * 1e3:.1f}" if row.reference is not None else "",
            Text(outcome(row), style="green" if row.holds else "red"),
        )
    return shown


def outcome(row: Row) -> str:
    """Return in a few words how a case came out."""
    if row.answer.reused != row.expected:
        return f"{row.expected} expected: {row.answer.reason}"
    if not row.same_tokens or not row.same_logits:
        return "logits differ" if row.same_tokens else "tokens differ"
    if not row.holds:
        return "not from NVMe"
    return "no reuse" if row.reference is None else "bit for bit"


def play(console: Console) -> Played:
    """Play the demo in a directory of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tiercache-demo-") as directory:
        return run(console, Path(directory))
