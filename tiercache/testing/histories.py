"""Random histories of runs and checkpoints against a model of what each must hold.

Freed slots are poisoned, so that whoever reads one sees it. Needs torch.
"""

import random
from collections.abc import Callable
from functools import partial

import torch

from tiercache.device import (
    CODECS,
    ActivePool,
    Checkpoint,
    CheckpointPool,
    Hold,
    Ownership,
    Run,
    Seat,
    Skipped,
    Stale,
    Turn,
)
from tiercache.device.slots import Private
from tiercache.device.stacks import Store
from tiercache.state import Kind, Layout, Part, Tensor

LAYOUT = Layout(
    (
        Part(
            "recurrent",
            Kind.RECURRENT,
            1,
            0,
            2,
            tuple(
                Tensor(f"{layer}.recurrent", "float32", (2, 2, 3), ("head", "value", "key"), 0)
                for layer in range(2)
            ),
        ),
        Part(
            "conv",
            Kind.CONV,
            1,
            0,
            1,
            (
                Tensor("0.conv", "bfloat16", (6, 3), ("channel", "column")),
                Tensor("1.ids", "int64", (2,), ("token",)),
            ),
        ),
    ),
    4,
)
POISON = 0xA5
ACTIVE, IDLE = 4, 3
"""Slots of each pool: few, so that histories run out of them."""


def poison(store: Store, number: int) -> None:
    """Set every byte of a freed slot."""
    store.fill(number, POISON)


def owner_of(codec: str = "native", active: int = ACTIVE, idle: int = IDLE) -> Ownership:
    """Pools whose every slot is poisoned until somebody takes it."""
    seat = Seat(LAYOUT)
    pools = (
        ActivePool(seat, active, freed=poison),
        CheckpointPool(seat, CODECS[codec], idle, freed=poison),
    )
    for pool in pools:
        for number in range(pool.store.slots):
            poison(pool.store, number)
    return Ownership(*pools)


def write(owner: Ownership, number: int, value: int) -> None:
    """Set every tensor of an active slot to `value`, as a step of the engine would."""
    for tensor in owner.active.store.tensors:
        tensor[:, number] = value


def read(owner: Ownership, number: int) -> set[int]:
    """Every value in an active slot, rounded: a quantised one may be off by a little."""
    return {
        round(value)
        for tensor in owner.active.store.tensors
        for value in tensor[:, number].double().flatten().tolist()
    }


def slot_of(owner: Ownership, run: Run) -> int:
    """Return the number of a run's slot."""
    slot = owner.slot(run)
    assert isinstance(slot, Private)
    return slot.number


def started(owner: Ownership, value: int = 0) -> Run:
    """Return a new run whose state is `value` everywhere."""
    run = owner.start()
    assert isinstance(run, Run)
    assert read(owner, slot_of(owner, run)) == {0}
    write(owner, slot_of(owner, run), value)
    return run


class Histories:
    """A model of the pools: which value every run and checkpoint must have. Steps check as they go."""

    def __init__(self, codec: str) -> None:
        self.owner = owner_of(codec)
        self.runs: dict[Run, int] = {}
        self.turning: set[Run] = set()
        self.kept: dict[Checkpoint, int] = {}
        self.ended: list[Run | Checkpoint] = []
        self.copies: list[tuple[Hold, Store, int, list[torch.Tensor]]] = []
        self.value = 0

    def fresh(self) -> int:
        """Return a value that no state has had for long."""
        self.value = self.value % 120 + 1
        return self.value

    def start(self) -> Run | None:
        """A request begins; None when there is no slot."""
        run = self.owner.start()
        if isinstance(run, Skipped):
            assert len(self.owner.active.table) == ACTIVE
            return None
        assert read(self.owner, slot_of(self.owner, run)) == {0}
        self.runs[run] = self.fresh()
        write(self.owner, slot_of(self.owner, run), self.runs[run])
        return run

    def step(self, run: Run) -> None:
        """The engine computes: in place, or from one slot into the other at a turn."""
        self.sees(run)
        self.runs[run] = self.fresh()
        if run in self.turning:
            turn = self.owner.turn(run)
            assert isinstance(turn, Turn)
            before = read(self.owner, turn.read)
            write(self.owner, turn.write, self.runs[run])
            checkpoint = self.owner.turned(run, 1)
            assert isinstance(checkpoint, Checkpoint)
            self.turning.discard(run)
            (self.kept[checkpoint],) = before
        else:
            write(self.owner, slot_of(self.owner, run), self.runs[run])

    def turn(self, run: Run) -> None:
        """Ask for a second slot."""
        self.sees(run)
        turn = self.owner.turn(run)
        if isinstance(turn, Turn):
            if run not in self.turning:
                poison(
                    self.owner.active.store, turn.write
                )  # Whatever a step does not write is seen.
            self.turning.add(run)
            assert turn.read == slot_of(self.owner, run) != turn.write
        self.sees(run)

    def resume(self, checkpoint: Checkpoint) -> Run | None:
        """A request begins from a checkpoint; None when there is no slot."""
        run = self.owner.resume(checkpoint)
        if not isinstance(run, Run):
            assert isinstance(run, Skipped)
            return None
        self.runs[run] = self.kept[checkpoint]
        self.sees(run)
        return run

    def snapshot(self, run: Run) -> Checkpoint | None:
        """Copy a run's state; None when there is no slot."""
        found = self.owner.snapshot(run, 1)
        if not isinstance(found, Checkpoint):
            assert isinstance(found, Skipped)
            return None
        self.kept[found] = self.runs[run]
        return found

    def donate(self, run: Run) -> Checkpoint:
        """A run ends and its state stays."""
        found = self.owner.donate(run, 1)
        assert isinstance(found, Checkpoint)
        self.kept[found] = self.runs.pop(run)
        self.turning.discard(run)
        self.ended.append(run)
        return found

    def adopt(self, checkpoint: Checkpoint, *, last: bool = False) -> Run | None:
        """A run takes a checkpoint's slot over; None when it cannot, and then nothing has changed."""
        place = self.owner.place(checkpoint)
        found = self.owner.adopt(checkpoint, last=last)
        if not isinstance(found, Run):
            assert isinstance(found, Skipped)
            assert self.owner.place(checkpoint) == place
            return None
        assert place == (self.owner.active.store, slot_of(self.owner, found))
        self.runs[found] = self.kept[checkpoint]
        self.sees(found)
        if last:
            del self.kept[checkpoint]
            self.ended.append(checkpoint)
        else:
            assert self.owner.place(checkpoint) != place
        return found

    def settle(self, checkpoint: Checkpoint) -> None:
        """Move a checkpoint to its pool."""
        assert self.owner.settle(checkpoint) != Stale("checkpoint")

    def evict(self, checkpoint: Checkpoint) -> None:
        """A checkpoint ends."""
        assert self.owner.clear(checkpoint) is None
        del self.kept[checkpoint]
        self.ended.append(checkpoint)

    def abort(self, run: Run) -> None:
        """A run ends."""
        assert self.owner.clear(run) is None
        del self.runs[run]
        self.turning.discard(run)
        self.ended.append(run)

    def copy_out(self, checkpoint: Checkpoint) -> None:
        """A copy to the host begins; it reads whenever it likes, until it lets go."""
        place, hold = self.owner.place(checkpoint), self.owner.hold(checkpoint)
        assert not isinstance(place, Stale)
        assert isinstance(hold, Hold)
        store, number = place
        self.copies.append((hold, store, number, [t[:, number].clone() for t in store.tensors]))

    def finish_copy(self) -> None:
        """The oldest copy under way is done."""
        if self.copies:
            hold, store, number, expected = self.copies.pop(0)
            for tensor, then in zip(store.tensors, expected, strict=True):
                assert torch.equal(tensor[:, number], then), "a slot changed under a copy"
            hold.release()

    def clear_all(self) -> None:
        """Everything ends but the copies."""
        self.owner.clear_all()
        self.ended += [*self.runs, *self.kept]
        self.runs.clear()
        self.kept.clear()
        self.turning.clear()

    def sees(self, run: Run) -> None:
        """Check a run's state."""
        found = read(self.owner, slot_of(self.owner, run))
        assert found == {self.runs[run]}, f"a run reads {found}, not {self.runs[run]}"

    def check(self) -> None:
        """Check every state, the books, and that ended handles are stale."""
        self.owner.check()
        for run in self.runs:
            self.sees(run)
        for old in self.ended[-3:]:
            assert self.owner.clear(old) == Stale("run" if isinstance(old, Run) else "checkpoint")

    def finish(self) -> None:
        """End everything, and check that nothing is left."""
        while self.copies:
            self.finish_copy()
        self.clear_all()
        self.owner.check()
        assert len(self.owner.active.table) == len(self.owner.checkpoints.table) == 0


def play(model: Histories, source: random.Random, steps: int) -> None:
    """One random history."""
    on_run: list[Callable[[Run], object]] = [
        model.step, model.step, model.turn, model.snapshot, model.snapshot, model.donate, model.abort,
    ]  # fmt: skip
    on_kept: list[Callable[[Checkpoint], object]] = [
        model.resume, model.resume, model.settle, model.evict, model.copy_out, model.adopt,
        partial(model.adopt, last=True),
    ]  # fmt: skip
    for _ in range(steps):
        chance = source.random()
        if chance < 0.15 or not model.runs:
            model.start()
        elif chance < 0.55:
            source.choice(on_run)(source.choice(list(model.runs)))
        elif chance < 0.9 and model.kept:
            source.choice(on_kept)(source.choice(list(model.kept)))
        elif chance < 0.99:
            model.finish_copy()
        else:
            model.clear_all()
        model.check()
    model.finish()
