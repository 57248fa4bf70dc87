"""Histories of an engine whose ranks sit on two nodes, whatever becomes of what these ask each other."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.agreeing import Agreeing
from tiercache.core.route import Route
from tiercache.errors import Fault
from tiercache.state.seats import RanksOf
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import Client, Rig, evict, hybrid
from tiercache.testing.sim.seated import WINDOW, sliding

SEEDS = 80
STEPS = 80
RANKS = 4
BLOCK = 4
PROMPTS = ([*range(21)], [*range(12), *range(50, 59)], [*range(4), *range(80, 97)])
ENDS = (4, 8, 12, 16, 20)
NAMES = ("r", "s", "t", "u")


Name: TypeAlias = tuple[str, bytes, int]
"""A request, its prompt, and how deep it may go."""


@dataclass
class Asked:
    """A plan that waits for its answer."""

    event: ev.PlanAsked
    prompt: list[int]


class History:
    """One seed. Raises AssertionError for a boundary that some rank did not have.

    Requests plan again: other prompts, with other limits, before they are answered, and after. `assented`
    is what the other node ever said of a request's prompt, up to a limit; `kept` what it said of a request
    last, and so keeps, and how often it had been cleared by then.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes = Nodes(a=Rig(clustered(256, 256)), b=Rig(clustered(256, 256)))
        self.layout = self.rng.choice((hybrid(4), sliding()))
        self.ranks = [
            Client(self.rig("a" if at < 2 else "b"), self.layout, ranks=RANKS, rank=at).attach()
            for at in range(RANKS)
        ]
        self.head = self.ranks[0]
        self.head.all_ranks = True
        self.head.seats = [RanksOf("", 0, 2), RanksOf("b", 2, 4)]
        self.plans: dict[int, Asked] = {}
        self.questions: list[ccm.Agree] = []
        self.answers: list[cev.AgreeEnded] = []
        self.assented: dict[Name, set[int]] = {}
        self.kept: dict[str, tuple[Name, list[int], int]] = {}
        self.clears: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def rig(self, name: str) -> Rig:
        return self.nodes.rigs[name]

    def run(self) -> Counter[str]:
        choices = (self.save, self.save, self.plan, self.plan, self.carry, self.carry, self.answer)
        seldom = (self.answer, self.drop, self.wait, self.release)
        for _ in range(STEPS):
            uneven = self.clears["a"] != self.clears["b"]
            clears = self.rng.random() < (0.2 if uneven else 0.005)
            self.clear() if clears else self.rng.choice((*choices, *seldom))()
            self.judge()
        while self.questions or self.answers:
            self.carry()
            self.answer()
        self.rig("a").wait(10.0)
        self.judge()
        assert not self.plans, "a plan without its answer"
        return self.counts

    def save(self) -> None:
        """The ranks of a node, or some of them, save a boundary."""
        chain = self.head.chain(self.rng.choice(PROMPTS))
        end, request = self.rng.choice(ENDS), f"s{self.rng.random()}"
        ranks = self.rng.choice((self.ranks[:2], self.ranks[2:], self.ranks, self.ranks[1:]))
        for rank in ranks:
            rank.save(request, rank.offers(chain, end))
            rank.release(request)
        if self.rng.random() < 0.3:
            for rig in self.nodes.rigs.values():
                rig.run()

    def plan(self) -> None:
        prompt = self.rng.choice(PROMPTS)[: self.rng.choice((18, 21, 21))]
        name = self.rng.choice(NAMES)
        limit = self.rng.choice((len(prompt), len(prompt) - 1, len(prompt) - 1, 9))
        event = self.head.planning(name, self.head.chain(prompt), limit=limit)
        self.plans[event.call] = Asked(event, prompt)
        self.rig("a").later(event)
        self.questions += self.rig("a").take(ccm.Agree)

    def carry(self) -> None:
        """A question comes to the other node, once or twice; or it is lost."""
        if not self.questions:
            return
        question = self.questions.pop(self.rng.randrange(len(self.questions)))
        if self.rng.random() < 0.15:
            self.answers.append(cev.AgreeEnded(question.job, [], Fault.IO))
            return
        for _ in range(self.rng.choice((1, 1, 2))):
            ends = self.nodes.assent("a", question)
            self.answers.append(cev.AgreeEnded(question.job, ends, None))
        name = question.request, question.digests[-1], question.limit
        self.assented.setdefault(name, set()).update(ends)
        self.kept[question.request] = name, ends, self.clears["b"]

    def answer(self) -> None:
        """An answer comes back, in any order."""
        if self.answers:
            self.rig("a").tell(self.answers.pop(self.rng.randrange(len(self.answers))))

    def drop(self) -> None:
        """A node makes room."""
        evict(self.rig(self.rng.choice("ab")), self.rng.choice(("host", "nvme")))

    def wait(self) -> None:
        for rig in self.nodes.rigs.values():
            rig.wait(self.rng.choice((0.001, 0.01, 0.1, 0.1, 1.0)))

    def release(self) -> None:
        """A request is over, answered or not; and as all of its name, so far."""
        name = self.rng.choice(NAMES)
        if not any(asked.event.request == name for asked in self.plans.values()):
            self.head.release(name)

    def clear(self) -> None:
        """A node carries out a flush; the other one does, sooner or later."""
        behind = [name for name in "ab" if self.clears[name] < max(self.clears.values(), default=0)]
        name = self.rng.choice(behind or "ab")
        rig = self.rig(name)
        self.clears[name] += 1
        space = self.head.namespace.digest.hex()
        rig.later(ev.ClearAsked(900, rig.number(), space, self.clears[name]))
        rig.run()
        self.counts["cleared"] += 1

    def judge(self) -> None:
        """Look at every plan that was answered meanwhile."""
        for call, asked in list(self.plans.items()):
            found = self.rig("a").answers.get((self.head.session, call))
            if found is None:
                continue
            del self.plans[call]
            assert isinstance(found, cm.Planned), found
            self.counts["resumed" if found.boundary else found.reason] += 1
            if not found.boundary:
                continue
            assert found.boundary <= asked.event.limit
            digests = asked.event.digests
            limit = min(asked.event.limit, BLOCK * len(digests))
            name = asked.event.request, digests[-1], limit
            assert found.boundary in self.assented.get(name, ()), "the other node did not say so"
            self.counts["here"] += self.fetched(self.ranks[:2], asked, found.boundary)
            kept, ends, clears = self.kept[asked.event.request]
            if kept == name and found.boundary in ends and clears == self.clears["b"]:
                self.counts["there"] += self.fetched(self.ranks[2:], asked, found.boundary)

    def fetched(self, ranks: list[Client], asked: Asked, boundary: int) -> bool:
        """Have ranks fetch what a boundary rests on: nothing of it is missing, now that it was promised."""
        chain = self.head.chain(asked.prompt)
        for rank in ranks:
            name = f"{asked.event.request}/fetch"
            wanted = [
                rank.wanted(chain, offer.part, offer.end)
                for offer in rank.offers(chain, boundary)
                if offer.end > boundary - WINDOW * BLOCK
                or self.layout.parts[offer.part].window is None
            ]
            event = rank.fetching(name, wanted)
            if rank.rig.later(event) is None:
                rank.rig.run()
            found = rank.rig.answers[rank.session, event.call]
            assert isinstance(found, cm.Fetched), found
            rank.release(name)
            assert None not in found.pieces, f"rank {rank.rank} lacks something at {boundary}"
        return True


def histories(seeds: int) -> Counter[str]:
    """Run the histories of so many seeds; return what became of their plans."""
    counts: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            counts += History(seed).run()
        except AssertionError as fault:
            raise AssertionError(f"seed {seed}: {fault}") from fault
    return counts


def test_every_rank_has_what_was_agreed_on() -> None:
    counts = histories(SEEDS)
    assert counts["here"] == counts["resumed"] > SEEDS // 2
    assert counts["resumed"] // 2 < counts["there"] <= counts["resumed"]
    assert counts["cleared"] > SEEDS // 4
    assert min(counts["elsewhere"], counts["unknown_prefix"], counts["no_state"]) > SEEDS // 10


# --- each of these mistakes would cost a wrong token


def _give_out_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Route, "agrees", lambda *_: True)


def _ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreeing, "ask", lambda *_: False)


@pytest.mark.parametrize("mistake", [_give_out_what_is_here, _ask_nobody])
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        histories(20)
