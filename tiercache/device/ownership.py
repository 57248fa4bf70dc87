"""Who owns which state on the device: running requests, and the checkpoints taken from them.

A *run* is a running request: it owns a private slot, and nobody else sees that slot. A *checkpoint* is
read-only and shared. Between them:

    start      a run with the state before the first token
    resume     a run with its own copy of a checkpoint, dequantised once; the checkpoint stays
    snapshot   a checkpoint that copies a run's state as it is now
    donate     the run ends and its slot becomes a checkpoint, without a copy
    adopt      donate undone: a run takes a checkpoint's active slot over, without a copy
    turn       lazy ping-pong: the next step reads one slot and writes a second one, so that what was
               read can stay as a checkpoint without a copy; a second slot exists only at a boundary
    settle     a checkpoint that sits in an active slot moves to the checkpoint pool, in its codec
    clear      every slot that a run or a checkpoint stands for is let go

Checkpoints are optional: with no free slot one is skipped, and counted; no call raises for it. A handle
of something that has ended gets `Stale`. Calls are for one thread, the one that schedules the engine's
steps; on a GPU all work goes to that thread's current stream, in the order of the calls.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from tiercache.device.handles import Checkpoint, Run, Standing, Turn
from tiercache.device.pools import ActivePool, CheckpointPool
from tiercache.device.slots import Hold, Private, Shared, Skipped, SlotTable, Stale
from tiercache.device.stacks import Store
from tiercache.state import NATIVE

REQUANTISED_MAX: Final = 16
"""How often a state may have been quantised before; the error of one more grows with the root."""

NO_ACTIVE_SLOT: Final = "no_active_slot"
NO_CHECKPOINT_SLOT: Final = "no_checkpoint_slot"
TOO_OFTEN_QUANTISED: Final = "requantised_max"
SLOT_IN_USE: Final = "slot_in_use"


_numbers = count(1)
"""Of all owners together: a handle of one is stale at every other."""


class _Running:
    """A run: its slot, the one it turns to, and how often its state went through quantisation."""

    __slots__ = ("rounded", "slot", "target")

    def __init__(self, slot: Private, rounded: int) -> None:
        self.slot = slot
        self.target: Private | None = None
        self.rounded = rounded


@dataclass(frozen=True, slots=True)
class _Kept:
    """A checkpoint: its slot, and in which pool that is."""

    slot: Shared
    standing: Standing


class Ownership:
    """All runs and checkpoints of one rank. See the module for the words, and for threads."""

    def __init__(
        self,
        active: ActivePool,
        checkpoints: CheckpointPool,
        *,
        requantised_max: int = REQUANTISED_MAX,
    ) -> None:
        if checkpoints.per_block != 1:
            raise ValueError("checkpoints are owned one by one: per_block must be 1")
        self.active = active
        self.checkpoints = checkpoints
        self.requantised_max = requantised_max
        self.counters: Counter[str] = Counter()
        self._runs: dict[int, _Running] = {}
        self._kept: dict[int, _Kept] = {}
        self._receiving: set[Private] = set()

    # --- runs

    def start(self) -> Run | Skipped:
        """Return a run whose state is zero; Skipped when no active slot is free."""
        slot = self.active.take()
        if slot is None:
            return self._skipped(NO_ACTIVE_SLOT)
        self.active.zero(slot)
        return self._running(slot, 0, "started")

    def enter(self, rounded: int = 0) -> Run | Skipped:
        """Return a run whose slot is to be written: all of it, before anything else is done with it.

        `rounded`: how often the state that will be written there has been quantised.
        """
        slot = self.active.take()
        if slot is None:
            return self._skipped(NO_ACTIVE_SLOT)
        return self._running(slot, rounded, "entered")

    def resume(self, checkpoint: Checkpoint) -> Run | Skipped | Stale:
        """Return a run with a private copy of a checkpoint."""
        if checkpoint.number not in self._kept:
            return Stale("checkpoint")
        run = self.enter()
        if isinstance(run, Run):
            self.fill(run, checkpoint)
        return run

    def fill(self, run: Run, checkpoint: Checkpoint) -> Stale | None:
        """Write a checkpoint's state into a run's slot, over whatever is there."""
        kept, running = self._kept.get(checkpoint.number), self._runs.get(run.number)
        if kept is None or running is None:
            return Stale("run" if running is None else "checkpoint")
        if kept.standing.active:
            running.rounded = kept.standing.requantised
            copy(self.active.store, kept.slot.number, running.slot.number)
        else:
            self.decode(run, self.checkpoints, kept.slot, kept.standing.requantised)
        self.counters["resumed"] += 1
        return None

    def decode(
        self,
        run: Run,
        pool: CheckpointPool,
        slot: Private | Shared,
        requantised: int,
        index: int = 0,
    ) -> Stale | None:
        """Write one place of a slot of some pool of this seat into a run's, over whatever is there.

        `requantised`: of the bytes in that place.
        """
        running = self._runs.get(run.number)
        if running is None:
            return Stale("run")
        running.rounded = requantised + pool.lossy
        return pool.decode(slot, self.active, running.slot, index)

    def slot(self, run: Run) -> Private | Stale:
        """Return the slot with the run's state: the one to compute on when there is no turn."""
        running = self._runs.get(run.number)
        return Stale("run") if running is None else running.slot

    def turn(self, run: Run) -> Turn | Skipped | Stale:
        """Take the second slot: the next step reads `read` and must write all of `write`.

        Until `turned`, the run's state is what is in `read`. Skipped when no slot is free: step in
        place, without a checkpoint. Asked again before `turned`, the answer is the same.
        """
        running = self._runs.get(run.number)
        if running is None:
            return Stale("run")
        if running.target is None:
            running.target = self.active.take()
            if running.target is None:
                return self._skipped(NO_ACTIVE_SLOT)
        return Turn(running.slot.number, running.target.number)

    def turned(self, run: Run, tokens: int) -> Checkpoint | Stale:
        """The step is done: what it read is a checkpoint at `tokens`, the run goes on with the other.

        Raises ValueError without a turn.
        """
        _check_tokens(tokens)
        running = self._runs.get(run.number)
        if running is None:
            return Stale("run")
        if running.target is None:
            raise ValueError("this run is not in a turn")
        left, running.slot, running.target = running.slot, running.target, None
        return self._keep_active(left, tokens, running.rounded, "turned")

    def rounded(self, run: Run) -> int | Stale:
        """Return how often the run's state has been quantised."""
        running = self._runs.get(run.number)
        return Stale("run") if running is None else running.rounded

    # --- checkpoints

    def snapshot(self, run: Run, tokens: int) -> Checkpoint | Skipped | Stale:
        """Return a checkpoint of the run's state, which must be after `tokens` tokens."""
        _check_tokens(tokens)
        running = self._runs.get(run.number)
        if running is None:
            return Stale("run")
        found = self._encoded(running.slot, running.rounded)
        if isinstance(found, Skipped):
            return found
        return self._kept_as(self._idle(found, tokens, running.rounded), "snapshots")

    def donate(self, run: Run, tokens: int) -> Checkpoint | Stale:
        """End the run; its slot is a checkpoint at `tokens` tokens from now on. Nothing is copied."""
        _check_tokens(tokens)
        running = self._runs.pop(run.number, None)
        if running is None:
            return Stale("run")
        if running.target is not None:
            self.active.table.give(running.target)
        return self._keep_active(running.slot, tokens, running.rounded, "donated")

    def adopt(self, checkpoint: Checkpoint, *, last: bool = False) -> Run | Skipped | Stale:
        """Return a run that owns the active slot of a checkpoint from now on: `donate` undone.

        A copy in the pool is the checkpoint then; with `last` there is none, and the checkpoint ends.
        Skipped without room for it, when somebody has a hold on the slot, or it is in no active slot.
        """
        kept = self._kept.get(checkpoint.number)
        if kept is None:
            return Stale("checkpoint")
        rounded = kept.standing.requantised
        if not kept.standing.active or self.active.table.held(kept.slot):
            return self._skipped(SLOT_IN_USE if kept.standing.active else NO_ACTIVE_SLOT)
        if last:
            del self._kept[checkpoint.number]
        else:
            found = self._encoded(kept.slot, rounded)
            if isinstance(found, Skipped):
                return found
            self._kept[checkpoint.number] = self._idle(found, kept.standing.tokens, rounded)
        slot = self.active.table.reclaim(kept.slot)
        assert isinstance(slot, Private)
        return self._running(slot, rounded, "adopted")

    def settle(self, checkpoint: Checkpoint) -> Skipped | Stale | None:
        """Move a checkpoint out of its active slot; nothing to do when it is in the other pool."""
        kept = self._kept.get(checkpoint.number)
        if kept is None:
            return Stale("checkpoint")
        if not kept.standing.active:
            return None
        rounded = kept.standing.requantised
        found = self._encoded(kept.slot, rounded)
        if isinstance(found, Skipped):
            return found
        self.active.table.give(kept.slot)
        self._kept[checkpoint.number] = self._idle(found, kept.standing.tokens, rounded)
        self.counters["settled"] += 1
        return None

    def receive(self) -> Private | Skipped:
        """Return a free checkpoint slot that is to be written; then `received` or `refused`."""
        slot = self.checkpoints.take()
        if slot is None:
            return self._skipped(NO_CHECKPOINT_SLOT)
        self._receiving.add(slot)
        return slot

    def received(self, slot: Private, tokens: int, requantised: int) -> Checkpoint | Stale:
        """A slot from `receive` has been written: it is a checkpoint now."""
        _check_tokens(tokens)
        if slot not in self._receiving:
            return Stale("slot")
        self._receiving.discard(slot)
        shared = self.checkpoints.table.share(slot)
        assert isinstance(shared, Shared)
        return self._kept_as(self._idle(shared, tokens, requantised), "snapshots")

    def refused(self, slot: Private) -> Stale | None:
        """A slot from `receive` will not become a checkpoint."""
        if slot not in self._receiving:
            return Stale("slot")
        self._receiving.discard(slot)
        return self.checkpoints.table.give(slot)

    def standing(self, checkpoint: Checkpoint) -> Standing | Stale:
        """Return what a checkpoint is."""
        kept = self._kept.get(checkpoint.number)
        return Stale("checkpoint") if kept is None else kept.standing

    def place(self, checkpoint: Checkpoint) -> tuple[Store, int] | Stale:
        """Return the store and the number in it where a checkpoint's bytes are, to read."""
        kept = self._kept.get(checkpoint.number)
        if kept is None:
            return Stale("checkpoint")
        return self._pool(kept)[0], kept.slot.number

    def hold(self, checkpoint: Checkpoint) -> Hold | Stale:
        """Keep a checkpoint's bytes where they are until the hold is released, also when it ends."""
        kept = self._kept.get(checkpoint.number)
        return Stale("checkpoint") if kept is None else self._pool(kept)[1].hold(kept.slot)

    def clear(self, what: Run | Checkpoint) -> Stale | None:
        """Let go of every slot that a run or a checkpoint stands for."""
        if isinstance(what, Checkpoint):
            kept = self._kept.pop(what.number, None)
            if kept is None:
                return Stale("checkpoint")
            self._pool(kept)[1].give(kept.slot)
        else:
            running = self._runs.pop(what.number, None)
            if running is None:
                return Stale("run")
            for slot in (running.slot, running.target):
                if slot is not None:
                    self.active.table.give(slot)
        self.counters["cleared"] += 1
        return None

    def clear_all(self) -> None:
        """End every run, every checkpoint, and what is being received."""
        for number in list(self._runs):
            self.clear(Run(number))
        for number in list(self._kept):
            self.clear(Checkpoint(number))
        for slot in list(self._receiving):
            self.refused(slot)

    def check(self) -> None:
        """Raise AssertionError when slots and owners do not add up."""
        mine: list[Private | Shared] = [run.slot for run in self._runs.values()]
        mine += [run.target for run in self._runs.values() if run.target is not None]
        mine += [kept.slot for kept in self._kept.values() if kept.standing.active]
        others: list[Private | Shared] = [*self._receiving]
        others += [kept.slot for kept in self._kept.values() if not kept.standing.active]
        _check_owned(self.active.table, mine)
        _check_owned(self.checkpoints.table, others)

    def _running(self, slot: Private, rounded: int, how: str) -> Run:
        run = Run(next(_numbers))
        self._runs[run.number] = _Running(slot, rounded)
        self.counters[how] += 1
        return run

    def _encoded(self, source: Private | Shared, rounded: int) -> Shared | Skipped:
        """Return a checkpoint slot with what is in an active one."""
        if self.checkpoints.lossy and rounded > self.requantised_max:
            return self._skipped(TOO_OFTEN_QUANTISED)
        slot = self.checkpoints.take()
        if slot is None:
            return self._skipped(NO_CHECKPOINT_SLOT)
        self.checkpoints.encode(self.active, source, slot)
        shared = self.checkpoints.table.share(slot)
        assert isinstance(shared, Shared)
        return shared

    def _keep_active(self, slot: Private, tokens: int, rounded: int, how: str) -> Checkpoint:
        shared = self.active.table.share(slot)
        assert isinstance(shared, Shared)
        return self._kept_as(_Kept(shared, Standing(tokens, NATIVE, rounded, active=True)), how)

    def _kept_as(self, kept: _Kept, how: str) -> Checkpoint:
        checkpoint = Checkpoint(next(_numbers))
        self._kept[checkpoint.number] = kept
        self.counters[how] += 1
        return checkpoint

    def _idle(self, slot: Shared, tokens: int, requantised: int) -> _Kept:
        codec = self.checkpoints.codec.name
        return _Kept(slot, Standing(tokens, codec, requantised, active=False))

    def _pool(self, kept: _Kept) -> tuple[Store, SlotTable]:
        pool = self.active if kept.standing.active else self.checkpoints
        return pool.store, pool.table

    def _skipped(self, reason: str) -> Skipped:
        self.counters[f"skipped_{reason}"] += 1
        return Skipped(reason)


def _check_owned(table: SlotTable, slots: Sequence[Private | Shared]) -> None:
    assert all(table.valid(slot) for slot in slots), "an owner has lost its slot"
    assert len({slot.number for slot in slots}) == len(slots), "a slot has two owners"
    assert len(table) - table.lingering == len(slots), "a slot has no owner"


def _check_tokens(tokens: int) -> None:
    if tokens < 1:
        raise ValueError("a checkpoint contains at least one token")


def copy(store: Store, source: int, target: int) -> None:
    """Copy one slot of a store to another."""
    for tensor in store.tensors:
        tensor[:, target].copy_(tensor[:, source])
