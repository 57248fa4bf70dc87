"""What the core wants of the pool, done in threads: each call blocks, and ends within its time.

No call returns while the pool may still touch the memory it was given. One that hangs keeps its thread, and
its objects stay where they are.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import xxhash

from tiercache.core.cluster import commands as cm
from tiercache.errors import Fault, LayoutError, StorageFault
from tiercache.state import Boundary, Layout, Record
from tiercache.state.names import short
from tiercache.tiers.base import Arena
from tiercache.tiers.remote import Get, Had, Late, Put
from tiercache.tiers.remote_sets import MEMBERS_MAX, Announced, Sets, Slice, Sought, cut_of
from tiercache.tiers.remote_store import SealedStore

BOUNDARIES_MAX = 8
"""Boundaries of one prompt that are looked for, the deepest ones."""

CUTS_MAX = 16
"""Ways to cut a state that are looked for at each of them."""

WRITER_CHARS_MAX = 64
"""What goes to the pool of the name of who made an object: a header is small."""

LOOKED_MAX = {"s3": 128}
"""Members of a set that are looked for before any is fetched, where each costs a request. What is put there
stays; and what is not there after all is a miss."""


class Found(NamedTuple):
    """What the pool has of a prompt: the boundary, 0 for none, and the objects that the asker lacks. At the
    deeper ones in `missed` it has nothing whole that this engine could use."""

    boundary: int
    records: list[Record]
    missed: list[Sought]


def find(
    store: SealedStore, asked: cm.Locate, layout: Layout, known: set[int], within_s: float
) -> Found:
    """Look for the deepest boundary of a prompt; `known` are the short names of those there may be.

    Raises StorageFault.
    """
    namespace, step = asked.namespace, layout.block_tokens
    boundaries = [
        Boundary(count * step, asked.digests[count - 1])
        for count in range(min(len(asked.digests), asked.limit // step), 0, -1)
        if short(namespace, asked.digests[count - 1]) in known
    ][:BOUNDARIES_MAX]
    cuts = list(itertools.islice(cuts_of(layout, asked), CUTS_MAX))
    sought = [Sought(boundary, cut) for boundary in boundaries for cut in cuts]
    found = None
    if sought:
        looked_max = LOOKED_MAX.get(store.name, MEMBERS_MAX)
        sets = Sets(store.at(namespace, asked.flush))
        found = sets.find(namespace, sought, within_s, looked_max=looked_max)
    depth = found.boundary.tokens if found is not None else 0
    missed = [each for each in sought if each.boundary.tokens > depth]
    if found is None:
        return Found(0, [], missed)
    needed = [record for record in found.members if _lacks(record, layout, asked.whole)]
    return Found(depth, needed, missed)


def _lacks(record: Record, layout: Layout, whole: int) -> bool:
    """Return whether who has all blocks of the first `whole` tokens lacks this one."""
    if record.end > whole:
        return True
    try:
        return layout.part(record.key.part).window is not None
    except LayoutError:
        return True  # Not of this layout: the core will not take it in.


def cuts_of(layout: Layout, asked: cm.Locate) -> Iterator[str]:
    """Yield the names of the ways to cut a state that an engine can use, its own first."""
    others = (1 << power for power in range(asked.ranks.bit_length() + 3))
    ways = [asked.ranks, *(others if asked.reshard else ())]
    for ranks in dict.fromkeys(ways):
        if any(part.units % ranks and ranks % part.units for part in layout.parts):
            continue
        for codecs in itertools.product(dict.fromkeys(asked.codecs), repeat=len(layout.parts)):
            yield cut_of(
                Slice(part.name, shard, codec)
                for part, codec in zip(layout.parts, codecs, strict=True)
                for shard in part.shards(ranks)
            )


def retract(store: SealedStore, asked: cm.Locate, missed: list[Sought], within_s: float) -> None:
    """Take back what was announced and is not whole, so that it is put there again."""
    fault = Sets(store.at(asked.namespace, asked.flush)).retract(asked.namespace, missed, within_s)
    if fault is not None:
        raise fault


def fetch(store: SealedStore, arena: Arena, asked: cm.Pull, within_s: float) -> list[Fault | None]:
    """Fill the targets; return what became of each. It waits for a pool that has not let go of them.

    What comes damaged is asked for once more. If it is damaged again, in the same way or where most of the
    rest is not, it is so in the pool and not on the way: it is removed, and has room again.
    """
    until = time.monotonic() + within_s
    gets = [
        Get(record.key, arena.view(target)[: record.nbytes], record.checksum)
        for record, target in asked.objects
    ]
    (namespace,) = {record.key.namespace for record, _ in asked.objects}
    view = store.at(namespace, asked.flush)
    outcomes = view.get(gets, within_s)
    settle(outcomes)
    faults = [_fault_of(outcome) for outcome in outcomes]
    damaged = [at for at, fault in enumerate(faults) if fault is Fault.DAMAGED]
    if damaged:
        first = {at: xxhash.xxh3_128_digest(gets[at].target) for at in damaged}
        again = view.get([gets[at] for at in damaged], until - time.monotonic())
        settle(again)
        for at, outcome in zip(damaged, again, strict=True):
            faults[at] = _fault_of(outcome)
        wrong = [at for at in damaged if faults[at] is Fault.DAMAGED]
        if len(wrong) >= faults.count(None):
            wrong = [at for at in wrong if xxhash.xxh3_128_digest(gets[at].target) == first[at]]
        if wrong:
            view.forget([gets[at].key for at in wrong], until - time.monotonic())
    return faults


def _fault_of(outcome: Had) -> Fault | None:
    match outcome:
        case Record():
            return None
        case StorageFault(fault=fault):
            return fault
        case None:
            return Fault.MISSING


def settle(outcomes: Sequence[Had]) -> None:
    """Wait until the pool has let go of all memory."""
    for outcome in outcomes:
        if isinstance(outcome, Late):
            outcome.settled.wait()


def deposit(
    store: SealedStore, arena: Arena, asked: cm.Deposit, writer: str, within_s: float
) -> tuple[StorageFault | None, str]:
    """Put a set there, then announce it; return why that failed, and the cut of the set."""
    until = time.monotonic() + within_s
    view = store.at(asked.namespace, asked.flush)
    records = [
        replace(record, writer=record.writer[:WRITER_CHARS_MAX]) for record, _ in asked.objects
    ]
    there = view.describe([record.key for record in records], until - time.monotonic())
    puts = [
        Put(record, arena.view(source)[: record.nbytes])
        for record, (_, source), head in zip(records, asked.objects, there, strict=True)
        if not isinstance(head, Record)
    ]
    try:
        kept = iter(view.put(puts, until - time.monotonic()))
    except LayoutError:
        return StorageFault(Fault.NO_SPACE, "its names have no room in a header"), ""
    outcomes = [head if isinstance(head, Record) else next(kept) for head in there]
    settle(outcomes)
    members = [outcome for outcome in outcomes if isinstance(outcome, Record)]
    if len(members) < len(outcomes):
        return next(each for each in outcomes if isinstance(each, StorageFault)), ""
    boundary = Boundary(asked.boundary, asked.digest)
    announced = Announced(asked.namespace, boundary, tuple(members))
    fault = Sets(view).announce(announced, writer, until - time.monotonic())
    return fault, announced.cut
