"""The engines of `twins`, and what their ranks must have."""

from dataclasses import dataclass, field

from tiercache.core.cluster import commands as ccm
from tiercache.state import Layout, Shard
from tiercache.state.seats import RanksOf
from tiercache.testing.sim.pair import Nodes
from tiercache.testing.sim.rig import BLOCK, Client, hybrid, part
from tiercache.testing.sim.seated import RANKS, WINDOW


@dataclass(slots=True)
class Promise:
    """What a node said of a plan last, and what could have become of it since."""

    ends: list[int]
    name: tuple[bytes, int]
    at: float
    broken: bool = False


@dataclass(slots=True)
class Engine:
    """Its ranks in order, and its two nodes; `cut` ranks sit at the first. `promises`: what the other one
    said of a request last; `said`: all it ever said, of a request, a prompt and a limit."""

    nodes: tuple[str, str]
    ranks: list[Client]
    cut: int
    reshard: bool = False
    promises: dict[str, Promise] = field(default_factory=dict)
    said: dict[tuple[str, bytes, int], set[int]] = field(default_factory=dict)

    def of(self, name: str) -> list[Client]:
        """Return the ranks at a node."""
        return self.ranks[: self.cut] if name == self.nodes[0] else self.ranks[self.cut :]


def engine_of(
    nodes: Nodes, names: tuple[str, str], layout: Layout, split: tuple[int, int]
) -> Engine:
    """Return an engine whose first rank plans; `split`: how many ranks it has, and how many of them sit at
    the first node."""
    (one, other), (ranks, cut) = names, split
    clients = []
    for rank in range(ranks):
        name = names[rank >= cut]
        client = Client(nodes.rigs[name], layout, ranks=ranks, rank=rank)
        client.writer = f"engine-{one}"
        client.seats = [
            RanksOf("" if name == one else one, 0, cut),
            RanksOf("" if name == other else other, cut, ranks),
        ]
        clients.append(client.attach())
    clients[0].all_ranks = True
    return Engine(names, clients, cut)


def strays(nodes: Nodes, name: str, layout: Layout) -> list[Client]:
    """Return the ranks of an engine that has all of them at one node, where it only saves."""
    ranks = [Client(nodes.rigs[name], layout, ranks=RANKS, rank=at) for at in range(RANKS)]
    for rank in ranks:
        rank.writer = f"stray-{name}"
    return [rank.attach() for rank in ranks]


def must_have(rank: Client, digests: list[bytes], end: int, *, reshard: bool) -> None:
    """A rank has all that a boundary rests on, or it is on its way to its node."""
    held: dict[tuple[str, bytes], list[Shard]] = {}
    for item in rank.rig.machine.items():
        if item.host is not None or item.nvme is not None or item.target is not None:
            held.setdefault((item.slot.part, item.entry.digest), []).append(item.slot.shard)
    for each in rank.layout.parts:
        own = each.shards(rank.ranks)[rank.rank]
        first = end if each.is_snapshot else BLOCK
        if each.window is not None and not each.is_snapshot:
            first = max(BLOCK, end - (WINDOW - 1) * BLOCK)
        for at in range(first, end + 1, BLOCK):
            shards = held.get((each.name, digests[at // BLOCK - 1]), [])
            units = {unit for s in shards for unit in range(s.start, s.stop)}
            whole = units >= set(range(own.start, own.stop)) if reshard else own in shards
            assert whole, f"rank {rank.rank} has not {each.name} at {at} of {end}: {shards}"


def must_need(ranks: list[Client], pull: ccm.Pull) -> None:
    """What a node fetches are shards that ranks there need."""
    for record, _ in pull.objects:
        each = ranks[0].layout.part(record.key.part)
        own = [each.shards(r.ranks)[r.rank] for r in ranks]
        assert any(_meet(shard, record.key.shard) for shard in own), f"for others: {record}"


def split_blocks() -> Layout:
    """Return a layout whose blocks are split between the ranks, too."""
    kv, state, conv = hybrid(RANKS).parts
    return Layout((part("kv", kv.kind, None, BLOCK, RANKS), state, conv), BLOCK)


def _meet(one: Shard, other: Shard) -> bool:
    return one.start < other.stop and other.start < one.stop
