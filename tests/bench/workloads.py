"""Request traces that are made up, each a shape of its own; a seed gives the same trace on every machine.

No policy was made on them: they say what one does on traffic that it has not met. Pages have 256 tokens.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import pi, sin

from tiercache.replay.traces import Request, Trace

PAGE = 256
DAY_S = 7200.0
"""A day of these traces: two hours."""


@dataclass(slots=True)
class Pages:
    """Gives out pages that no other text has."""

    number: int = 0

    def new(self, tokens: int) -> list[int]:
        """Return the pages of a new text."""
        first = self.number
        self.number += max(1, tokens // PAGE)
        return list(range(first, self.number))


@dataclass(slots=True)
class Draft:
    """A trace that is being written: requests in any order."""

    seed: int
    chance: random.Random = field(init=False)
    pages: Pages = field(default_factory=Pages)
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def ask(self, at: float, path: list[int]) -> None:
        """A request comes, with a few tokens beyond its whole pages."""
        self.requests.append(Request(at, len(path) * PAGE + 1 + len(path) % 7, list(path)))

    def length(self, median: float, spread: float = 0.8) -> int:
        """Return a length in tokens, log-normal."""
        return max(PAGE, int(median * self.chance.lognormvariate(0.0, spread)))

    def talk(self, at: float, start: list[int], turns: int, added: float, pause_s: float) -> None:
        """A conversation: each turn goes on from the one before."""
        path = list(start)
        for _ in range(turns):
            path = path + self.pages.new(self.length(added))
            self.ask(at, path)
            at += 1.0 + self.chance.lognormvariate(0.0, 1.0) * pause_s

    def once(self, at: float, median: float) -> None:
        """A prompt that never comes back."""
        self.ask(at, self.pages.new(self.length(median)))


def _zipf(chance: random.Random, count: int, power: float) -> Callable[[], int]:
    weights = list(accumulate((rank + 1) ** -power for rank in range(count)))
    return lambda: chance.choices(range(count), cum_weights=weights)[0]


def documents(draft: Draft) -> None:
    """Questions about documents, some of which many ask about."""
    chance = draft.chance
    texts = [draft.pages.new(draft.length(24_000)) for _ in range(400)]
    pick = _zipf(chance, len(texts), 1.0)
    for _ in range(4000):
        at = chance.uniform(0, DAY_S)
        draft.ask(at, texts[pick()] + draft.pages.new(draft.length(400)))


def fanout(draft: Draft) -> None:
    """Agents that work in loops, and hand parts of their task to several others at once."""
    chance = draft.chance
    tools = [draft.pages.new(8_000) for _ in range(3)]
    for _ in range(60):
        at = chance.uniform(0, DAY_S)
        path = chance.choice(tools) + draft.pages.new(draft.length(6_000))
        for _ in range(chance.randint(2, 12)):
            path = path + draft.pages.new(draft.length(1_500))
            draft.ask(at, path)
            if chance.random() < 0.25:
                for _ in range(chance.randint(2, 6)):
                    draft.talk(at + 2, path, chance.randint(2, 8), 1_200, 6)
                at += 60
            at += 3 + chance.expovariate(1 / 15)


def floods(draft: Draft) -> None:
    """Conversations, and from time to time a flood of long prompts that never come back."""
    chance = draft.chance
    for _ in range(350):
        start = draft.pages.new(draft.length(2_000))
        draft.talk(chance.uniform(0, DAY_S), start, chance.randint(2, 12), 1_500, 60)
    for _ in range(8):
        at = chance.uniform(0, DAY_S)
        for _ in range(250):
            draft.once(at, 8_000)
            at += chance.expovariate(2)


def diurnal(draft: Draft) -> None:
    """People by day, batch jobs by night: who comes, and how many, swings twice."""
    chance = draft.chance
    batch = [draft.pages.new(12_000) for _ in range(6)]
    while len(draft.requests) < 5000:
        at = chance.uniform(0, 2 * DAY_S)
        day = 0.5 + 0.5 * sin(2 * pi * at / DAY_S)
        if chance.random() < day:
            draft.talk(at, draft.pages.new(draft.length(3_000)), chance.randint(1, 10), 1_000, 90)
        else:
            draft.ask(at, chance.choice(batch) + draft.pages.new(draft.length(3_000)))


def shifting(draft: Draft) -> None:
    """What is popular changes every ten minutes."""
    chance = draft.chance
    at = 0.0
    for _ in range(12):
        texts = [draft.pages.new(draft.length(16_000)) for _ in range(60)]
        pick = _zipf(chance, len(texts), 1.2)
        for _ in range(400):
            draft.ask(at, texts[pick()] + draft.pages.new(draft.length(500)))
            at += chance.expovariate(1 / 1.5)


def bursts(draft: Draft) -> None:
    """Each text is asked about several times at once and never again; long ago is worth nothing."""
    chance = draft.chance
    for _ in range(900):
        at = chance.uniform(0, DAY_S)
        text = draft.pages.new(draft.length(16_000))
        for _ in range(chance.randint(1, 8)):
            draft.ask(at, text + draft.pages.new(draft.length(300)))
            at += chance.expovariate(1 / 20)


def rounds(draft: Draft) -> None:
    """The same texts one after the other, over and over, among conversations."""
    chance = draft.chance
    texts = [draft.pages.new(draft.length(12_000, 0.3)) for _ in range(150)]
    at = 0.0
    for _ in range(14):
        for text in texts:
            draft.ask(at, text + draft.pages.new(400))
            at += chance.uniform(0.5, 5.5)
    for _ in range(150):
        draft.talk(chance.uniform(0, at), [], chance.randint(1, 8), 2_500, 45)


def turning(draft: Draft) -> None:
    """What was learned is wrong from half time on: talks went on and documents did not; now the reverse."""
    chance = draft.chance
    for half in (0.0, DAY_S):
        talk_turns, asks = (9, 1) if not half else (1, 9)
        for _ in range(250):
            at = half + chance.uniform(0, DAY_S * 0.9)
            draft.talk(at, [], max(1, talk_turns + chance.randint(-1, 1)), 2_500, 60)
            text = draft.pages.new(draft.length(12_000))
            for _ in range(asks):
                draft.ask(at, text + draft.pages.new(300))
                at += chance.expovariate(1 / 60)


def few(draft: Draft) -> None:
    """A handful of agents at a time, each with a long history: hardly any fit."""
    chance = draft.chance
    tools = draft.pages.new(3_000)
    for _ in range(25):
        at = chance.uniform(0, DAY_S / 2)
        start = tools + draft.pages.new(draft.length(20_000))
        draft.talk(at, start, chance.randint(5, 60), 900, 12)


def reasked(draft: Draft) -> None:
    """Conversations of which many are asked again from some turn before, as when an answer is discarded."""
    chance = draft.chance
    for _ in range(300):
        at = chance.uniform(0, DAY_S)
        path = draft.pages.new(draft.length(1_500))
        before = [path]
        for _ in range(chance.randint(2, 14)):
            if chance.random() < 0.3:
                path = chance.choice(before)
            path = path + draft.pages.new(draft.length(900))
            before.append(path)
            draft.ask(at, path)
            at += 2.0 + chance.lognormvariate(0.0, 1.0) * 40


def chatty(draft: Draft) -> None:
    """Conversations in short sentences: most turns add less than a page."""
    chance = draft.chance
    for _ in range(500):
        at = chance.uniform(0, DAY_S)
        tokens = draft.length(1_500)
        path = draft.pages.new(tokens)
        for _ in range(chance.randint(1, 20)):
            draft.ask(at, path)
            tokens += int(90 * chance.lognormvariate(0.0, 0.7))
            while (len(path) + 1) * PAGE <= tokens:
                path = path + draft.pages.new(PAGE)
            at += 2.0 + chance.lognormvariate(0.0, 1.0) * 45


SHAPES = (
    documents, fanout, floods, diurnal, shifting, bursts, rounds, turning, few, reasked, chatty,
)  # fmt: skip


def made(shape: Callable[[Draft], None], seed: int) -> Trace:
    """Return the trace of one shape, named by it and the seed."""
    draft = Draft(seed)
    shape(draft)
    requests = sorted(draft.requests, key=lambda request: request.at)
    return Trace(f"{shape.__name__}-{seed}", PAGE, requests)


def footprint(trace: Trace, block_bytes: float, state_bytes: float) -> float:
    """Return the bytes of everything: each page once, and a checkpoint for each request."""
    pages = {page for request in trace.requests for page in request.pages}
    return len(pages) * block_bytes + len(trace.requests) * state_bytes


def all_made(seeds: range) -> Iterator[Trace]:
    """Yield every shape with every seed."""
    for seed in seeds:
        for shape in SHAPES:
            yield made(shape, seed)
