"""Runs and checkpoints: nobody sees another's state, and each case by itself."""

import pytest
import torch

from tiercache.device import CODECS, Checkpoint, Hold, Run, Skipped, Stale, Standing, Turn
from tiercache.device.ownership import (
    NO_ACTIVE_SLOT,
    NO_CHECKPOINT_SLOT,
    SLOT_IN_USE,
    TOO_OFTEN_QUANTISED,
)
from tiercache.device.slots import Private, Shared
from tiercache.testing.histories import owner_of, read, slot_of, started, write

torch.set_num_threads(1)


def test_a_run_starts_from_zero_whatever_was_there() -> None:
    owner = owner_of()
    started(owner, 7)


@pytest.mark.parametrize("codec", CODECS)
def test_ten_requests_on_one_checkpoint_never_see_each_other(codec: str) -> None:
    owner = owner_of(codec, active=11)
    first = started(owner, 5)
    checkpoint = owner.snapshot(first, 10)
    assert isinstance(checkpoint, Checkpoint)
    write(owner, slot_of(owner, first), 6)
    runs = [owner.resume(checkpoint) for _ in range(10)]
    for index, run in enumerate(runs):
        assert isinstance(run, Run)
        assert read(owner, slot_of(owner, run)) == {5}
        write(owner, slot_of(owner, run), 20 + index)
    assert read(owner, slot_of(owner, first)) == {6}
    for index, run in enumerate(runs):
        assert isinstance(run, Run)
        assert read(owner, slot_of(owner, run)) == {20 + index}
    assert isinstance(owner.resume(checkpoint), Skipped)
    owner.clear_all()
    assert len(owner.active.table) == len(owner.checkpoints.table) == 0


def test_donation_changes_the_owner_and_copies_nothing() -> None:
    owner = owner_of()
    run = started(owner, 9)
    was = slot_of(owner, run)
    checkpoint = owner.donate(run, 8)
    assert isinstance(checkpoint, Checkpoint)
    assert owner.place(checkpoint) == (owner.active.store, was)
    assert owner.standing(checkpoint) == Standing(8, "native", 0, active=True)
    assert len(owner.active.table) == 1
    for answer in (owner.slot(run), owner.snapshot(run, 8), owner.donate(run, 8), owner.turn(run)):
        assert answer == Stale("run")


def test_a_donated_checkpoint_settles_into_the_pool() -> None:
    owner = owner_of("int8")
    run = started(owner, 9)
    checkpoint = owner.donate(run, 8)
    assert isinstance(checkpoint, Checkpoint)
    assert owner.settle(checkpoint) is None
    assert owner.settle(checkpoint) is None
    assert owner.standing(checkpoint) == Standing(8, "int8", 0, active=False)
    assert (len(owner.active.table), len(owner.checkpoints.table)) == (0, 1)
    again = owner.resume(checkpoint)
    assert isinstance(again, Run)
    assert read(owner, slot_of(owner, again)) == {9}


def test_the_second_slot_exists_only_at_a_boundary() -> None:
    owner = owner_of()
    run = started(owner, 3)
    assert len(owner.active.table) == 1
    turn = owner.turn(run)
    assert isinstance(turn, Turn)
    assert owner.turn(run) == turn
    assert len(owner.active.table) == 2
    assert turn.read == slot_of(owner, run) != turn.write
    write(owner, turn.write, 4)
    checkpoint = owner.turned(run, 12)
    assert isinstance(checkpoint, Checkpoint)
    assert slot_of(owner, run) == turn.write
    assert owner.place(checkpoint) == (owner.active.store, turn.read)
    assert read(owner, turn.read) == {3}
    owner.clear(checkpoint)
    assert len(owner.active.table) == 1
    with pytest.raises(ValueError, match="not in a turn"):
        owner.turned(run, 13)


@pytest.mark.parametrize("end", ["clear", "donate"])
def test_a_run_that_ends_in_a_turn_frees_both_slots(end: str) -> None:
    owner = owner_of()
    run = started(owner)
    owner.turn(run)
    if end == "clear":
        assert owner.clear(run) is None
        assert len(owner.active.table) == 0
    else:
        owner.donate(run, 1)
        assert len(owner.active.table) == 1
    owner.check()


def test_without_a_free_slot_a_checkpoint_is_skipped_and_counted() -> None:
    owner = owner_of(active=1, idle=1)
    run = started(owner, 2)
    assert isinstance(owner.snapshot(run, 1), Checkpoint)
    assert owner.snapshot(run, 2) == Skipped(NO_CHECKPOINT_SLOT)
    assert owner.turn(run) == Skipped(NO_ACTIVE_SLOT)
    assert owner.start() == Skipped(NO_ACTIVE_SLOT)
    assert read(owner, slot_of(owner, run)) == {2}
    assert owner.counters[f"skipped_{NO_ACTIVE_SLOT}"] == 2
    assert owner.counters[f"skipped_{NO_CHECKPOINT_SLOT}"] == 1


def test_a_slot_in_use_by_a_copy_is_not_used_again_until_it_is_done() -> None:
    owner = owner_of(active=1, idle=1)
    run = started(owner, 2)
    checkpoint = owner.snapshot(run, 1)
    assert isinstance(checkpoint, Checkpoint)
    place, hold = owner.place(checkpoint), owner.hold(checkpoint)
    assert not isinstance(place, Stale)
    assert isinstance(hold, Hold)
    assert owner.clear(checkpoint) is None
    assert owner.clear(checkpoint) == Stale("checkpoint")
    store, number = place
    assert set(store.tensors[0][:, number].flatten().tolist()) == {2.0}
    assert owner.snapshot(run, 2) == Skipped(NO_CHECKPOINT_SLOT)
    owner.check()
    hold.release()
    hold.release()
    assert set(store.tensors[0][:, number].flatten().tolist()) != {2.0}
    assert isinstance(owner.snapshot(run, 2), Checkpoint)


def test_a_late_completion_does_nothing_to_the_next_owner() -> None:
    owner = owner_of(idle=1)
    late = owner.receive()
    assert isinstance(late, Private)
    owner.refused(late)
    run = started(owner, 4)
    checkpoint = owner.snapshot(run, 3)
    assert isinstance(checkpoint, Checkpoint)
    assert owner.received(late, 9, 0) == Stale("slot")
    assert owner.refused(late) == Stale("slot")
    assert owner.checkpoints.encode(owner.active, late, late) == Stale("slot")
    assert owner.active.zero(late) == Stale("slot")
    assert owner.standing(checkpoint) == Standing(3, "native", 0, active=False)


def test_quantisation_is_counted_and_capped() -> None:
    owner = owner_of("int8")
    owner.requantised_max = 2
    run = started(owner, 5)
    for generation in range(3):
        checkpoint = owner.snapshot(run, 1 + generation)
        assert isinstance(checkpoint, Checkpoint)
        assert owner.standing(checkpoint) == Standing(1 + generation, "int8", generation, False)
        owner.clear(run)
        again = owner.resume(checkpoint)
        assert isinstance(again, Run)
        assert owner.rounded(again) == generation + 1
        owner.clear(checkpoint)
        run = again
    assert owner.snapshot(run, 9) == Skipped(TOO_OFTEN_QUANTISED)
    donated = owner.donate(run, 9)
    assert isinstance(donated, Checkpoint)
    assert owner.standing(donated) == Standing(9, "native", 3, active=True)
    assert owner.settle(donated) == Skipped(TOO_OFTEN_QUANTISED)
    exact = owner.resume(donated)
    assert isinstance(exact, Run)
    assert owner.rounded(exact) == 3


def test_without_compression_nothing_is_ever_too_often_quantised() -> None:
    owner = owner_of("native")
    owner.requantised_max = 0
    run = owner.enter(rounded=5)
    assert isinstance(run, Run)
    write(owner, slot_of(owner, run), 1)
    assert isinstance(owner.snapshot(run, 1), Checkpoint)


def test_a_checkpoint_of_nothing_is_a_mistake() -> None:
    owner = owner_of()
    run = started(owner)
    for call in (owner.snapshot, owner.donate, owner.turned):
        with pytest.raises(ValueError, match="at least one token"):
            call(run, 0)
    assert len(owner.active.table) == 1


def test_a_run_takes_over_what_was_donated() -> None:
    owner = owner_of("int8", idle=1)
    checkpoint = owner.donate(started(owner, 9), 8)
    assert isinstance(checkpoint, Checkpoint)
    place = owner.place(checkpoint)
    hold = owner.hold(checkpoint)
    assert isinstance(hold, Hold)
    assert owner.adopt(checkpoint) == owner.adopt(checkpoint, last=True) == Skipped(SLOT_IN_USE)
    hold.release()
    run = owner.adopt(checkpoint)
    assert isinstance(run, Run)
    assert place == (owner.active.store, slot_of(owner, run))
    assert (read(owner, slot_of(owner, run)), owner.rounded(run)) == ({9}, 0)
    assert owner.standing(checkpoint) == Standing(8, "int8", 0, active=False)
    assert owner.adopt(checkpoint) == Skipped(NO_ACTIVE_SLOT)
    write(owner, slot_of(owner, run), 5)
    other = owner.donate(run, 9)
    assert isinstance(other, Checkpoint)
    assert owner.adopt(other) == Skipped(NO_CHECKPOINT_SLOT)
    last = owner.adopt(other, last=True)
    assert isinstance(last, Run)
    assert read(owner, slot_of(owner, last)) == {5}
    assert owner.adopt(other) == owner.standing(other) == Stale("checkpoint")
    assert (len(owner.active.table), len(owner.checkpoints.table)) == (1, 1)
    owner.check()


def test_a_slot_that_was_taken_back_is_stale_to_its_readers() -> None:
    owner = owner_of()
    slot = owner.active.take()
    assert slot is not None
    shared = owner.active.table.share(slot)
    assert isinstance(shared, Shared)
    private = owner.active.table.reclaim(shared)
    assert isinstance(private, Private)
    assert owner.active.table.reclaim(shared) == owner.active.table.give(shared) == Stale("slot")
    assert not owner.active.table.held(private)
    assert owner.active.table.give(private) is None
    assert not owner.active.table.held(private)


def test_handles_of_another_owner_are_stale() -> None:
    ours, theirs = owner_of("native"), owner_of("native")
    run, other = ours.start(), theirs.start()
    assert isinstance(run, Run)
    assert isinstance(other, Run)
    checkpoint = theirs.snapshot(other, 7)
    assert isinstance(checkpoint, Checkpoint)
    assert isinstance(ours.snapshot(run, 7), Checkpoint)
    assert ours.slot(other) == Stale("run")
    assert ours.clear(other) == Stale("run")
    assert ours.resume(checkpoint) == Stale("checkpoint")
    ours.check()
