"""`python -m tiercache.testing.sim.scale`: what nodes of large clusters know of one another, at what cost.

A model of metadata: prompts arrive at nodes, boundaries are held and evicted, summaries are old by up to
their interval. The tables, the messages and the views are the real ones, and are measured; what is told
to 1,000 nodes is told once, since all of them hear the same. No objects are moved, and no time passes.
"""

import argparse
import random
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tiercache.core.cluster.commands import Summarised
from tiercache.core.cluster.peers import Peers
from tiercache.core.limits import Clustering
from tiercache.registry.base import Member, View
from tiercache.runtime.cluster import messages as said
from tiercache.state.canonical import DIGEST_BYTES

SUMMARY_S = 0.5
TTL_S = 10
KEEPS_PER_TTL = 3
HELD = 300
"""Boundaries that a node of the model holds."""

PROMPTS_PER_NODE = 2_000
FAMILIES_PER_NODE = 2_000
ZIPF = 0.8
RATE = 2.0
"""Prompts that arrive at each node in a second."""

TOLD = 1_000
"""Boundaries that each node tells where tables are measured."""

BLOCKS = 1_024
LOOKUPS = 200


@dataclass(frozen=True, slots=True)
class Reuse:
    """What became of the prompts: shares of those that came again."""

    local: float
    fetched: float
    stale: float
    shared: float
    asked_per_s: float
    changes_per_s: float


class Shelf:
    """Names held, the least recently used goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[int, None] = OrderedDict()
        self.changes = 0

    def __contains__(self, name: int) -> bool:
        return name in self._held

    def use(self, name: int) -> list[int]:
        """Hold a name, and return those that go for it."""
        if name in self._held:
            self._held.move_to_end(name)
            return []
        self._held[name] = None
        self.changes += 1
        gone = []
        while len(self._held) > self._most:
            gone.append(self._held.popitem(last=False)[0])
            self.changes += 1
        return gone


def reuse(nodes: int, rng: random.Random) -> Reuse:
    """Serve prompts on a cluster, and on one cache of the same size in all."""
    shelves = [Shelf(HELD) for _ in range(nodes)]
    shared = Shelf(HELD * nodes)
    holders: dict[int, set[int]] = {}
    told: dict[int, frozenset[int]] = {}
    fresh: set[int] = set()  # Names whose holders changed since they were told.
    families = FAMILIES_PER_NODE * nodes
    weights = [1 / (rank + 1) ** ZIPF for rank in range(families)]
    count = PROMPTS_PER_NODE * nodes
    drawn = rng.choices(range(families), weights, k=count)
    seen: set[int] = set()
    interval = max(1, int(nodes * RATE * SUMMARY_S))
    sums = dict.fromkeys(("again", "local", "fetched", "stale", "shared", "asked"), 0)
    for at, name in enumerate(drawn):
        if at % interval == 0:
            for changed in fresh:
                told[changed] = frozenset(holders.get(changed, ()))
            fresh.clear()
        node = rng.randrange(nodes)
        sums["again"] += name in seen
        sums["shared"] += name in shared
        seen.add(name)
        shared.use(name)
        if name in shelves[node]:
            sums["local"] += 1
        elif others := told.get(name, frozenset()) - {node}:
            sums["asked"] += 1
            holder = min(others, key=lambda other: hash((other, name)))
            sums["fetched" if name in shelves[holder] else "stale"] += 1
            if name in shelves[holder]:
                shelves[holder].use(name)
        for gone in shelves[node].use(name):
            holders[gone].discard(node)
            fresh.add(gone)
        holders.setdefault(name, set()).add(node)
        fresh.add(name)
    seconds = count / (nodes * RATE)
    again = max(1, sums["again"])
    return Reuse(
        sums["local"] / again,
        sums["fetched"] / again,
        sums["stale"] / again,
        sums["shared"] / again,
        sums["asked"] / nodes / seconds,
        sum(shelf.changes for shelf in shelves) / nodes / seconds,
    )


def tables(nodes: int, rng: random.Random) -> tuple[float, float]:
    """Return the bytes that a node keeps for each boundary another one told, and the microseconds that
    looking for an absent prompt of `BLOCKS` blocks takes."""
    names = [f"node-{number}" for number in range(nodes - 1)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    peers = Peers(Clustering(peers_max=nodes))
    peers.members(dict.fromkeys(names, "boot"))
    for name in names:
        told = [rng.getrandbits(64) for _ in range(TOLD)]
        peers.told(name, TOLD, told, [], whole=True)
    nbytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    prompts = [[rng.randbytes(DIGEST_BYTES) for _ in range(BLOCKS)] for _ in range(LOOKUPS)]
    began = time.perf_counter()
    for digests in prompts:
        assert peers.deepest(bytes(DIGEST_BYTES), digests, 0, 0.0) == (0, [])
    took = time.perf_counter() - began
    return nbytes / (len(names) * TOLD), took / LOOKUPS * 1e6


def summary_bytes(changes: float) -> tuple[int, int]:
    """Return the bytes of a question for a summary, and of an answer with so many changes."""
    question = said.encode(said.Summarise(1_000_000))
    names = [1 << 60] * round(changes)
    answer = said.encode(said.answer_of(Summarised(1_000_000, False, names, [])))
    return len(question), len(answer)


def view_bytes(nodes: int) -> int:
    """Return what etcd sends for one reading of the members."""
    members = {
        f"node-{number}": Member(
            name=f"node-{number}",
            boot="0123456789abcdef",
            address="10.100.100.100:7411",
            protocols=(1, 1),
            host_bytes=1 << 39,
            nvme_bytes=1 << 42,
        )
        for number in range(nodes)
    }
    text = msgspec.json.encode(View(members=members))
    return len(text) * 4 // 3  # Values and keys are in base64.


def told(nodes: int, seed: int) -> str:
    """Return the figures of one size."""
    rng = random.Random(seed)
    found = reuse(nodes, rng)
    nbytes, lookup_us = tables(nodes, rng)
    question, answer = summary_bytes(found.changes_per_s * SUMMARY_S)
    others = nodes - 1
    view, keeps = view_bytes(nodes), nodes * KEEPS_PER_TTL / TTL_S
    lines = (
        ("prompts seen before: resumed locally", f"{found.local:.1%}"),
        ("  resumed from another node", f"{found.fetched:.1%}"),
        ("  asked a node that had evicted it", f"{found.stale:.1%}"),
        ("  in one shared cache of the same size", f"{found.shared:.1%}"),
        ("table bytes for each boundary told", f"{nbytes:.0f}"),
        (
            "table bytes of a node, 65,536 told by each",
            f"{nbytes * 65_536 * others / 2**20:,.0f} MiB",
        ),
        (f"looking for an absent prompt of {BLOCKS:,} blocks", f"{lookup_us:,.0f} us"),
        ("questions for summaries a node asks and answers", f"{2 * others / SUMMARY_S:,.0f} /s"),
        ("  bytes in and out", f"{2 * others * (question + answer) / SUMMARY_S / 1e3:,.1f} kB/s"),
        ("questions about prompts a node asks", f"{found.asked_per_s:.2f} /s"),
        ("etcd: requests of all nodes", f"{2 * keeps:,.0f} /s"),
        (
            "  bytes it sends when nothing changes",
            f"{view * nodes * KEEPS_PER_TTL / TTL_S / 1e6:,.2f} MB/s",
        ),
        ("  bytes it sends when one node joins", f"{view * nodes / 1e6:,.2f} MB"),
    )
    return "\n".join(f"{name:<52}{value:>14}" for name, value in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the figures of each size."""
    parser = argparse.ArgumentParser(prog="python -m tiercache.testing.sim.scale")
    parser.add_argument("--nodes", default="10,100,1000", help="sizes, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    for nodes in map(int, str(asked.nodes).split(",")):
        sys.stdout.write(f"{nodes:,} nodes\n{told(nodes, asked.seed)}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
