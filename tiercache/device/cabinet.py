"""Idle checkpoints on the device beside an engine that keeps its own running states.

This is the door for adapters: an engine whose pools are not ours (vLLM, SGLang) hands over one of its slots
at a boundary, and gets the state back into any of its slots later. What lies between is one pool of its own
byte budget, in one codec, and one policy. A state goes in as it is computed on and comes out at that
precision; INT8 costs it half a step of its scale, once per stay.

    seat = Seat(layout, ranks=8, rank=0, device="cuda")
    states = EngineStates.packed(seat, [(kv_caches["layers.0"], ("0.conv", "0.recurrent")), ...])
    cabinet = Cabinet(seat, namespace, Terms(budget_bytes=2 << 30, codec="int8"))

    tokens = cabinet.find(prompt, limit)                    # While scheduling.
    cabinet.restore(prompt, tokens, states, slot)           # Queued on the current stream.
    cabinet.save(prompt, tokens, states, slot, rounded)     # At a boundary; the slot may be written next.
    cabinet.poll()                                          # Once per step.

Nothing blocks, and nothing raises for want of room. One thread owns it, the one that queues the engine's
kernels: all work goes to that thread's current stream, in the order of the calls.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tiercache.device.codecs import codec_named, encoded
from tiercache.device.engine_states import EngineStates
from tiercache.device.index import Entry, Index, Prompt
from tiercache.device.lanes import lane_for
from tiercache.device.leaving import Demoted, Leaving, Outlet
from tiercache.device.ownership import (
    NO_CHECKPOINT_SLOT,
    REQUANTISED_MAX,
    TOO_OFTEN_QUANTISED,
)
from tiercache.device.placement import Worth, placement_named
from tiercache.device.pools import CheckpointPool, Seat
from tiercache.device.slots import Hold, Shared, Skipped
from tiercache.device.stacks import aligned_nbytes
from tiercache.device.staging import Named, Outward, Staging
from tiercache.errors import LayoutError
from tiercache.state import Namespace

NOT_HERE: Final = "not_here"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a cabinet may take and how it keeps. `budget_bytes`: of the device, all that it ever takes
    there. `host_bytes_max`: of host memory, for copies on their way to an outlet."""

    budget_bytes: int
    codec: str = "native"
    placement: str = "least_recent"
    host_bytes_max: int = 0
    requantised_max: int = REQUANTISED_MAX


@dataclass(frozen=True, slots=True)
class Stats:
    """`checkpoints` can be found, of `slots` there are; `used` are not free, which those on their way out
    are not. `nbytes` is what one takes, `budget_bytes` what there was to take. `counters`: "saved",
    "held" (was there already), "restored", "dropped" and "demoted" to make room, "lost_..." on the way
    out and "skipped_...", each with its reason."""

    checkpoints: int
    slots: int
    used: int
    nbytes: int
    budget_bytes: int
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Idle:
    slot: Shared
    requantised: int


class Cabinet:
    """See the module. `namespace`: of the model, without adapter and salt, which each prompt names.

    `outlet` is offered what has to go; without one it is dropped, which is right where the states are in
    the node already. Raises LayoutError for an unknown codec or a namespace of another layout, ValueError
    for an unknown placement or a budget that holds no checkpoint.
    """

    def __init__(
        self, seat: Seat, namespace: Namespace, terms: Terms, outlet: Outlet | None = None
    ) -> None:
        codec = codec_named(terms.codec)
        if namespace.layout != seat.layout.fingerprint:
            raise LayoutError("the namespace is of another layout than the seat")
        nbytes = aligned_nbytes([encoded(codec, part) for part in seat.parts], seat.shards)
        if terms.budget_bytes < nbytes:
            raise ValueError(f"{terms.budget_bytes} bytes hold no checkpoint of {nbytes}")
        self.counters: Counter[str] = Counter()
        self._terms = terms
        self._nbytes = nbytes
        self._policy = placement_named(terms.placement)
        self._pool = CheckpointPool(seat, codec, terms.budget_bytes // nbytes)
        self._index: Index[_Idle] = Index(namespace)
        lane = lane_for(self._pool.store.device)
        self._staging = Staging(self._pool.store, lane, terms.host_bytes_max)
        self._leaving = None if outlet is None else Leaving(outlet, self.counters)

    def find(self, prompt: Prompt, limit: int) -> int:
        """Return the most tokens of a prompt, up to `limit`, after which the state is here; 0 for none.

        It stays here until the next `save`, `drop` or `clear`.
        """
        found = next(self._index.prefixes(prompt, limit), None)
        if found is None:
            return 0
        self._policy.used(found[0])
        return found[1].tokens

    def save(
        self, prompt: Prompt, tokens: int, states: EngineStates, slot: int, rounded: int = 0
    ) -> Skipped | None:
        """Keep the state in one of the engine's slots, which is after `tokens` tokens of the prompt.

        `rounded`: how often it went through a lossy codec, as `restore` said. What is here already stays
        as it is. Raises ValueError for a position outside the prompt or at its start, IndexError for a
        slot that there is not.
        """
        if tokens < 1:
            raise ValueError("a checkpoint contains at least one token")
        self._suits(states, slot)
        name = self._index.name(prompt, tokens)
        if self._index.get(name) is not None:
            self._policy.used(name)
            self.counters["held"] += 1
            return None
        if self._pool.lossy and rounded > self._terms.requantised_max:
            return self._skipped(TOO_OFTEN_QUANTISED)
        taken = self._pool.take()
        if taken is None:
            self._make_room()
            taken = self._pool.take()
        if taken is None:
            return self._skipped(NO_CHECKPOINT_SLOT)
        try:
            self._pool.encode_from(states, slot, taken)
        except BaseException:
            self._pool.table.give(taken)
            raise
        shared = self._pool.table.share(taken)
        assert isinstance(shared, Shared)
        self._index.add(name, Entry(_Idle(shared, rounded), prompt, tokens))
        self._policy.used(name)
        self.counters["saved"] += 1
        return None

    def restore(
        self, prompt: Prompt, tokens: int, states: EngineStates, slot: int
    ) -> int | Skipped:
        """Write the state after exactly `tokens` tokens into one of the engine's slots, over all of it.

        Returns how often it has been through a lossy codec by now. Skipped, with nothing written, when it
        is not here. Kernels queued after this see it.
        """
        self._suits(states, slot)
        name = self._index.name(prompt, tokens)
        entry = self._index.get(name)
        if entry is None:
            return self._skipped(NOT_HERE)
        self._pool.decode_into(entry.held.slot, states, slot)
        self._policy.used(name)
        self.counters["restored"] += 1
        return entry.held.requantised + self._pool.lossy

    def drop(self, prompt: Prompt, tokens: int) -> bool:
        """Forget one; return whether there was one. Nobody is offered it."""
        entry = self._forget(self._index.name(prompt, tokens))
        if entry is not None:
            self._pool.table.give(entry.held.slot)
        return entry is not None

    def clear(self) -> int:
        """Forget all, as after new weights or an engine's own reset; return how many there were."""
        names = list(self._index)
        for name in names:
            entry = self._forget(name)
            assert entry is not None
            self._pool.table.give(entry.held.slot)
        return len(names)

    def poll(self) -> None:
        """Finish what copies have done since the last time. Never blocks."""
        if self._leaving is not None:
            self._leaving.poll()

    def stats(self) -> Stats:
        """Return how full it is, and what has happened so far."""
        return Stats(
            checkpoints=len(self._index),
            slots=self._pool.store.slots,
            used=len(self._pool.table),
            nbytes=self._nbytes,
            budget_bytes=self._terms.budget_bytes,
            counters=dict(self.counters),
        )

    def _make_room(self) -> None:
        """Let the one go that the policy names. With an outlet its slot may be free some `poll` later."""
        name = self._policy.victim(self._worth)
        entry = None if name is None else self._forget(name)
        if entry is None:
            return
        table, slot = self._pool.table, entry.held.slot
        if self._leaving is None:
            table.give(slot)
            self.counters["dropped"] += 1
            return
        hold = table.hold(slot)
        assert isinstance(hold, Hold)
        table.give(slot)  # The hold keeps it until the copy is done.
        parts = self._pool.seat.parts
        codecs = {part.name: self._pool.codec_in(part.name) for part in parts}
        named = Named(entry.tokens, codecs, entry.held.requantised)
        copy = self._staging.outward(slot.number, named, hold)
        if isinstance(copy, Outward):
            self._leaving.add(Demoted(entry.prompt, entry.tokens, copy))
        else:
            self.counters[f"lost_{copy.reason}"] += 1
        self._leaving.poll()

    def _forget(self, name: bytes) -> Entry[_Idle] | None:
        self._policy.gone(name)
        return self._index.remove(name)

    def _worth(self, name: bytes) -> Worth:
        return Worth(self._index.marginal(name), self._nbytes)

    def _suits(self, states: EngineStates, slot: int) -> None:
        ours, theirs = self._pool.seat, states.seat
        if (ours.layout, ours.ranks, ours.rank) != (theirs.layout, theirs.ranks, theirs.rank):
            raise LayoutError("the states are of another layout or rank")
        states.check(slot)

    def _skipped(self, reason: str) -> Skipped:
        self.counters[f"skipped_{reason}"] += 1
        return Skipped(reason)
