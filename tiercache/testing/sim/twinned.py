"""Two engines of one model, each with two ranks at two nodes of its own, in a test's hands."""

from typing import NamedTuple

from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import Client, Rig, hybrid, saved
from tiercache.testing.sim.seated import RANKS
from tiercache.testing.sim.twin_engines import engine_of


class Twinned(NamedTuple):
    """Engine A at a1 and a2, engine B at b1 and b2: two ranks on each, in order."""

    nodes: Nodes
    one: list[Client]
    other: list[Client]

    @property
    def head(self) -> Client:
        """Who plans for engine B."""
        return self.other[0]

    def rig(self, name: str) -> Rig:
        """Return a node."""
        return self.nodes.rigs[name]

    def gossip(self) -> None:
        """Have all told what all could resume."""
        for name in self.nodes.rigs:
            self.nodes.gossip(name)

    def locate(self, name: str) -> list[ccm.Locate]:
        """Have all that a node asks answered, until it asks no more; return the questions."""
        asked: list[ccm.Locate] = []
        while found := self.rig(name).take(ccm.Locate):
            for question in found:
                answer = self.nodes.ask(name, question)
                assert answer is not None
                self.nodes.answer(name, question.job, answer)
            asked += found
        return asked

    def agree(self) -> tuple[list[int], list[ccm.Locate]]:
        """Have the head's question answered; return the answer, and what node b2 asked before."""
        (question,) = self.head.rig.take(ccm.Agree)
        call = self.nodes.assenting("b1", question)
        asked = self.locate("b2")
        ends = self.nodes.assented(question, call)
        assert ends is not None
        self.head.rig.tell(cev.AgreeEnded(question.job, ends, None))
        return ends, asked

    def resumed(self, request: str = "r") -> int:
        """Plan, with all that is asked answered."""
        asked = plan(self.head, request)
        self.locate("b1")
        self.agree()
        return planned(self.head, asked).boundary


def twinned(**pulls_max: int) -> Twinned:
    """Return both engines with nothing saved yet; `pulls_max`: of some nodes, by name."""
    rigs = {
        name: Rig(clustered(nvme_pages=64, pulls_max=pulls_max.get(name, 1024)))
        for name in ("a1", "a2", "b1", "b2")
    }
    nodes = Nodes(**rigs)
    return Twinned(nodes, on(nodes, "a1", "a2"), on(nodes, "b1", "b2"))


def on(nodes: Nodes, one: str, other: str, ranks: int = RANKS) -> list[Client]:
    """Return the ranks of an engine, half of them at each of two nodes."""
    return engine_of(nodes, (one, other), hybrid(RANKS), (ranks, ranks // 2)).ranks


def save(engine: list[Client], *ends: int) -> None:
    """Have all ranks save boundaries."""
    for rank in engine:
        saved(rank, *ends)
