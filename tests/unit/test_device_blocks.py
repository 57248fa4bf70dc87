"""Several checkpoints in one physical block."""

import pytest
import torch

from tiercache.device import (
    CODECS,
    ActivePool,
    Block,
    CheckpointPool,
    Ownership,
    Run,
    Seat,
    Skipped,
    Stale,
    StateBlocks,
)
from tiercache.device.kinds import Columns, Heads, conv_qkv, recurrent
from tiercache.device.slots import Private
from tiercache.state import Layout

torch.set_num_threads(1)

LAYOUT = Layout(
    (recurrent(Heads(range(2), 2, 4, 4)), conv_qkv(Columns(range(2), 3), (2, 4), (2, 4))), 16
)
MARKS = (32, 64, 96, 128)


def made(codec: str = "int8", blocks: int = 2) -> tuple[Ownership, StateBlocks]:
    seat = Seat(LAYOUT)
    active = ActivePool(seat, 4)
    owner = Ownership(active, CheckpointPool(seat, CODECS[codec], 1))
    pool = CheckpointPool(seat, CODECS[codec], blocks, per_block=len(MARKS))
    return owner, StateBlocks(owner, pool, MARKS)


def running(owner: Ownership) -> Run:
    run = owner.start()
    assert isinstance(run, Run)
    return run


def compute(owner: Ownership, run: Run, tokens: int) -> None:
    """The state after `tokens` tokens: a number that says so."""
    slot = owner.slot(run)
    assert isinstance(slot, Private)
    for tensor in owner.active.store.tensors:
        tensor[:, slot.number] = tokens


def computed(owner: Ownership, run: Run) -> int:
    slot = owner.slot(run)
    assert isinstance(slot, Private)
    (found,) = {
        int(value + 0.5)
        for tensor in owner.active.store.tensors
        for value in tensor[:, slot.number].double().flatten().tolist()
    }
    return found


def opened(blocks: StateBlocks, start: int) -> Block:
    block = blocks.open(start)
    assert isinstance(block, Block)
    return block


@pytest.mark.parametrize("codec", CODECS)
def test_each_mark_is_restorable_by_itself(codec: str) -> None:
    owner, blocks = made(codec)
    run, block = running(owner), opened(blocks, 128)
    for mark in MARKS:
        compute(owner, run, 128 + mark)
        assert blocks.snapshot(block, run, 128 + mark) is None
    owner.clear(run)
    for mark in reversed(MARKS):
        again = blocks.resume(block, 128 + mark)
        assert isinstance(again, Run)
        assert computed(owner, again) == 128 + mark
        owner.clear(again)


def test_a_position_without_a_snapshot_never_is() -> None:
    owner, blocks = made()
    run, block = running(owner), opened(blocks, 0)
    for tokens in (64, 128):
        compute(owner, run, tokens)
        blocks.snapshot(block, run, tokens)
    for tokens in range(130):
        found = blocks.resume(block, tokens)
        assert isinstance(found, Run) == (tokens in {64, 128})
        if isinstance(found, Run):
            owner.clear(found)
    depths = [blocks.deepest(block, limit) for limit in (31, 63, 64, 127, 128, 500)]
    assert depths == [0, 0, 64, 64, 128, 128]
    assert blocks.snapshot(block, run, 65) == Skipped("no_mark")
    assert blocks.snapshot(block, run, 160) == Skipped("no_mark")
    assert blocks.counters["skipped_no_mark"] == 2


def test_what_a_reader_was_offered_does_not_change() -> None:
    owner, blocks = made()
    run, block = running(owner), opened(blocks, 0)
    compute(owner, run, 32)
    blocks.snapshot(block, run, 32)
    compute(owner, run, 77)
    assert blocks.snapshot(block, run, 32) is None
    again = blocks.resume(block, 32)
    assert isinstance(again, Run)
    assert computed(owner, again) == 32


def test_a_block_is_one_taking_and_starts_empty_again() -> None:
    owner, blocks = made(blocks=1)
    run, block = running(owner), opened(blocks, 0)
    assert isinstance(blocks.open(128), Skipped)
    blocks.snapshot(block, run, 32)
    assert blocks.close(block) is None
    other = opened(blocks, 128)
    assert blocks.deepest(other, 1000) == 0
    assert isinstance(blocks.resume(other, 160), Skipped)
    for answer in (
        blocks.close(block),
        blocks.resume(block, 32),
        blocks.snapshot(block, run, 64),
    ):
        assert answer == Stale("block")
    assert blocks.deepest(block, 1000) == 0


def test_generations_are_counted_here_too() -> None:
    owner, blocks = made()
    owner.requantised_max = 0
    run, block = running(owner), opened(blocks, 0)
    compute(owner, run, 32)
    assert blocks.snapshot(block, run, 32) is None
    again = blocks.resume(block, 32)
    assert isinstance(again, Run)
    assert owner.rounded(again) == 1
    capped = StateBlocks(owner, blocks_pool(), MARKS, requantised_max=0)
    other = opened(capped, 0)
    assert isinstance(capped.snapshot(other, again, 32), Skipped)
    assert capped.snapshot(other, run, 32) is None


def blocks_pool() -> CheckpointPool:
    return CheckpointPool(Seat(LAYOUT), CODECS["int8"], 1, per_block=len(MARKS))


def test_ended_runs_and_full_pools() -> None:
    owner, blocks = made()
    block = opened(blocks, 0)
    run = running(owner)
    blocks.snapshot(block, run, 32)
    owner.clear(run)
    assert blocks.snapshot(block, run, 64) == Stale("run")
    for _ in range(4):
        running(owner)
    assert isinstance(blocks.resume(block, 32), Skipped)


@pytest.mark.parametrize("marks", [(), (0, 32), (64, 32), (32, 32)])
def test_marks_must_ascend(marks: tuple[int, ...]) -> None:
    owner, _ = made()
    with pytest.raises(ValueError, match="ascend"):
        StateBlocks(owner, blocks_pool(), marks)


def test_places_and_marks_must_agree() -> None:
    owner, blocks = made()
    with pytest.raises(ValueError, match="4 places, not 2"):
        StateBlocks(owner, blocks_pool(), (32, 64))
    with pytest.raises(ValueError, match="do not start at 64"):
        blocks.open(64)
    with pytest.raises(ValueError, match="one by one"):
        Ownership(owner.active, blocks_pool())
