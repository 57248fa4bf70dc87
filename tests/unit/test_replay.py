"""Reading traces, replaying them, bounding what can be saved, and the command."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiercache.cli.app import app
from tiercache.core.cost import Work
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.visits import Shape, Tree, Visit
from tiercache.models import MODELS, ModelShape
from tiercache.replay.bound import Bound, runs_of
from tiercache.replay.cells import Plan, replay, steps
from tiercache.replay.engine import POLICIES, Cell, cache_of, run, shape_of
from tiercache.replay.objects import Objects
from tiercache.replay.traces import Request, Trace, TraceError, read_trace

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
AGENTS = TRACES / "agents_dev.ptrace.gz"
SMALL = ModelShape("small", 10, 300, Work(1.0, 0.01), "made up")


def ptrace(path: Path, rows: list[list[object]], block: int = 4) -> Path:
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"format": "ptrace1", "block": block}) + "\n")
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_ptrace_paths_refer_to_earlier_ones(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        [0, 17, 1, 0, -1, 0, [1, 4], 0],
        [500, 25, 1, 0, 0, 2, [10, 2, 20, 2], 0],
        [900, 3, 1, 0, -1, 0, [], 0],
    ]
    trace = read_trace(ptrace(tmp_path / "t", rows))
    assert trace.requests == [
        Request(0.0, 17, [1, 2, 3, 4]),
        Request(0.5, 25, [1, 2, 10, 11, 20, 21]),
        Request(0.9, 3, []),
    ]
    assert [r.pages for r in read_trace(tmp_path / "t", 8).requests] == [[2, 4], [2, 11, 21], []]


def test_mooncake_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    row = {"timestamp": 3000, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    trace = read_trace(path)
    assert (trace.page, trace.name) == (512, "m.jsonl")
    assert trace.requests == [Request(3.0, 1300, [7, 8])] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a trace"),
        (b"{}", "neither"),
        (b"[1]\n", "neither"),
        (b"\x1f\x8bxx", "not a trace"),
        (b'{"format": "ptrace1", "block": 4}\n', "no requests"),
        (b'{"format": "ptrace1", "block": 4}\n[1]\n', "not a trace"),
        (b'{"format": "ptrace1", "block": 4}\n[0, 9, 1, 0, 0, 0, []]\n', "refers to"),
        (b'{"format": "ptrace1", "block": 4}\n[0, 0, 1, 0, -1, 0, []]\n', "of 0 tokens"),
        (
            b'{"format": "ptrace1", "block": 4}\n[0, 9, 1, 0, -1, 0, [1, 2]]\n[0, 9, 1, 0, 0, 3, []]\n',
            "in common",
        ),
        (b'{"hash_ids": [1], "timestamp": "x", "input_length": 3}\n', "not a trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_page_is_a_multiple_of_a_block() -> None:
    with pytest.raises(TraceError, match="multiple of 16"):
        read_trace(AGENTS, 24)
    with pytest.raises(FileNotFoundError):
        read_trace(Path("nowhere"))


def made_up(*requests: tuple[int, list[int]]) -> Trace:
    return Trace("t", 4, [Request(float(n), tokens, p) for n, (tokens, p) in enumerate(requests)])


def test_a_replay_counts() -> None:
    trace = made_up((17, [1, 2, 3, 4]), (25, [1, 2, 3, 4, 5, 6]), (17, [9, 8, 7, 6]))
    done = run(trace, Cell(SMALL, 10_000, "point-lru"))
    total = sum(SMALL.work.flops(tokens) for tokens in (17, 25, 17))
    assert done.saved_flops_fraction == SMALL.work.flops(16) / total
    assert done.token_hit_rate == 16 / 59
    assert done.request_hit_rate == 1 / 3
    assert (done.kv_bytes_written, done.state_bytes_written) == (10 * 40, 3 * 300)
    assert done.bytes_written == done.resident_bytes_max == 1300
    assert done.resident_bytes == round((460 + 840 + 1300) / 3)
    assert done.evictions == 0


@pytest.mark.parametrize("policy", [*POLICIES, "marconi@0.5"])
def test_every_policy_stays_within_budget_and_bound(policy: str) -> None:
    trace = read_trace(AGENTS, 64)
    model = MODELS["qwen3-next-80b"]
    budget = 2.0230668288e9
    done = run(trace, Cell(model, budget, policy))
    bound = Bound(trace, shape_of(model, 64), runs_of(trace)).of(budget)
    assert done.resident_bytes_max <= budget
    assert 0.9 < done.saved_flops_fraction <= bound <= 1


def test_unknown_policies() -> None:
    for name in ("nothing", "index@0.5"):
        with pytest.raises(ValueError, match=name):
            cache_of(name, 1.0, Reuse(1))


def test_lru_over_objects_is_what_engines_do() -> None:
    """A page goes when nothing behind it is held; a checkpoint dies with its page."""
    tree = Tree("t", Shape(4, 10, 30, Work(1.0, 0.0)))

    def visit(*pages: int) -> Visit:
        return Visit(tree, list(pages), len(pages), (len(pages),), 0.0)

    cache = Objects(150)
    assert [cache.visit(visit(1, 2)), cache.visit(visit(1, 2, 3)), cache.used] == [0, 2, 90]
    cache.visit(visit(7, 8, 9))  # 60 bytes more fit exactly.
    assert (cache.used, cache.tally.evictions) == (150, 0)
    cache.visit(visit(5))
    assert cache.used <= 150
    assert cache.resident(tree, [7, 8, 9]) == 3
    assert cache.visit(visit(7, 8, 9)) == 3
    assert cache.tally.state_bytes == 4 * 30


def test_the_bound_of_a_case_that_can_be_reckoned_by_hand() -> None:
    """One page and a checkpoint, used at once: whoever has room for it saves it, nobody without."""
    trace = made_up((5, [1]), (5, [1]))
    shape = Shape(4, 40, 300, SMALL.work)
    bound = Bound(trace, shape, runs_of(trace))
    best = SMALL.work.flops(4) / bound.total
    assert bound.infinite() == pytest.approx(best)
    assert bound.of(340) == pytest.approx(best)
    assert bound.of(34) == pytest.approx(best / 10, rel=0.02)
    nothing = made_up((5, [1]), (5, [2]))
    assert Bound(nothing, shape, runs_of(nothing)).of(1e9) == 0.0


def test_lru_and_marconi_are_those_of_the_reference() -> None:
    """Figures of a simulator that keeps every page by itself."""
    trace = read_trace(TRACES / "mooncake_conversation.ptrace.gz", 512)
    model = MODELS["kimi-k3"]
    for policy, known in (("lru", 0.0522), ("marconi@0.5", 0.0569)):
        done = run(trace, Cell(model, 78.25604419584e9, policy))
        assert done.saved_flops_fraction == pytest.approx(known, abs=0.002)


def test_cells_in_processes_are_those_in_turn() -> None:
    plan = Plan(AGENTS, 64, "kimi-k3", (3e9, 9e9), ("lru", "index"))
    seen: list[int] = []
    rows = replay(plan, 2, seen.append)
    assert seen == list(range(1, steps(plan) + 1))
    assert rows == replay(plan, 1, lambda _: None)
    assert [(row.budget_bytes, row.policy) for row in rows] == [
        (3_000_000_000, "lru"),
        (3_000_000_000, "index"),
        (9_000_000_000, "lru"),
        (9_000_000_000, "index"),
    ]


# --- the command


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", str(AGENTS), "--page", "64", *arguments])
    return result.exit_code, result.output


def test_the_command_prints_json() -> None:
    code, output = call(
        "--model", "kimi-k3", "--budget", "4GB", "--policy", "lru", "--json", "--jobs", "1"
    )
    assert code == 0
    (row,) = json.loads(output.strip().splitlines()[-1])
    assert (row["budget_bytes"], row["policy"], row["requests"]) == (4_000_000_000, "lru", 819)
    named = {"saved_flops_fraction", "token_hit_rate", "bytes_written", "resident_bytes"}
    assert named | {"upper_bound"} <= row.keys()


def test_the_command_prints_a_table() -> None:
    code, output = call("--model", "kimi-k3", "--budget", "4GiB", "--no-bound", "--jobs", "1")
    assert code == 0
    assert "auto" in output
    assert "lru" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt", "--budget", "1GB"), "no model"),
        (("--model", "kimi-k3", "--budget", "lots"), "--budget"),
        (("--model", "kimi-k3", "--budget", "0B"), "more than nothing"),
        (("--model", "kimi-k3", "--budget", "1GB", "--policy", "best"), "no policy"),
        (("--model", "kimi-k3", "--budget", "1GB", "--policy", "marconi@9"), "no policy"),
        (("--model", "kimi-k3", "--budget", "1GB", "--retention", "x"), "no retention"),
    ],
)
def test_what_cannot_be_asked(arguments: tuple[str, ...], message: str) -> None:
    code, output = call(*arguments)
    assert code == 2
    assert message in output


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("{}")
    arguments = ["replay", str(path), "--model", "kimi-k3", "--budget", "1GB", "--jobs", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "neither" in result.output
