"""An engine of four ranks, two on node a and two on node b, in a test's hands."""

from typing import NamedTuple

import msgspec

from tiercache.core import commands as cm
from tiercache.state import Kind, Layout
from tiercache.state.seats import RanksOf
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import BLOCK, Client, Rig, hybrid, part, saved

RANKS = 4
WINDOW = 2
"""Blocks that `sliding` needs of one part."""

SEATS = [RanksOf("", 0, 2), RanksOf("b", 2, 4)]


class Engine(NamedTuple):
    """Its nodes, and its ranks in order: two sessions on each."""

    nodes: Nodes
    ranks: list[Client]

    @property
    def head(self) -> Client:
        """Whoever plans: on node a."""
        return self.ranks[0]

    @property
    def other(self) -> Rig:
        """Node b."""
        return self.nodes.rigs["b"]

    def save(self, *ends: int, ranks: range = range(RANKS)) -> None:
        """Have these ranks save boundaries."""
        for rank in ranks:
            saved(self.ranks[rank], *ends)

    def plan(self, request: str = "r") -> cm.Planned:
        """Plan, with the others asked."""
        asked = plan(self.head, request)
        self.nodes.agree("a")
        return planned(self.head, asked)


def sliding() -> Layout:
    """Return a layout that needs the last two blocks of one part, and a state."""
    return Layout(
        (
            part("kv", Kind.KV, None, BLOCK),
            part("window", Kind.KV, WINDOW, BLOCK, RANKS),
            part("state", Kind.RECURRENT, 1, 0, RANKS),
        ),
        BLOCK,
    )


def seated(policy: str = "lru") -> Engine:
    """Return an engine with nothing saved yet; `policy`: which eviction its nodes follow."""
    limits = clustered(nvme_pages=64)
    evicting = msgspec.structs.replace(limits.evicting, policy=policy)
    limits = msgspec.structs.replace(limits, evicting=evicting)
    nodes = Nodes(a=Rig(limits), b=Rig(limits))
    ranks = [
        Client(nodes.rigs["a" if rank < 2 else "b"], hybrid(4), ranks=RANKS, rank=rank).attach()
        for rank in range(RANKS)
    ]
    ranks[0].all_ranks = True
    ranks[0].seats = SEATS
    return Engine(nodes, ranks)
