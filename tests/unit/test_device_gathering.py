"""States saved by ranks of one size enter the slots of ranks of another."""

from dataclasses import replace

import pytest
import torch

from tiercache.client import Blob
from tiercache.device import (
    CODECS,
    ActivePool,
    CheckpointPool,
    HostLane,
    Named,
    Seat,
    Skipped,
    Staging,
)
from tiercache.device.gathering import gather
from tiercache.device.kinds import Columns, Heads, conv_qkv, grouped, recurrent
from tiercache.device.slots import Hold
from tiercache.errors import LayoutError
from tiercache.state import Layout, Shard

torch.set_num_threads(1)

LAYOUT = Layout(
    (
        grouped(range(2), 4, 2, 16, "float32"),
        recurrent(Heads(range(2), 8, 4, 4)),
        conv_qkv(Columns(range(2), 3), (8, 2), (8, 4)),
    ),
    16,
)
SIZES = (1, 2, 4, 8)


def state(name: str) -> torch.Tensor:
    """The unsharded tensor: every element its own."""
    for part in LAYOUT.parts:
        for at, tensor in enumerate(part.tensors):
            if tensor.name == name:
                count = torch.Size(tensor.shape).numel()
                numbers = (torch.arange(count) + 1000 * at) % 251 - 125
                return numbers.view(tensor.shape).to(getattr(torch, tensor.dtype))
    raise AssertionError(name)


def fill(pool: ActivePool, number: int) -> None:
    """Put this rank's share of every state into a slot, by the engines' rules."""
    seat = pool.seat
    for layer in range(2):
        heads = state(f"{layer}.recurrent").chunk(seat.ranks, 0)[seat.rank]
        pool.state(f"{layer}.recurrent")[number] = heads
        pieces = [
            piece.chunk(seat.ranks, 0)[seat.rank]
            for piece in torch.split(state(f"{layer}.conv"), [16, 16, 32])
        ]
        pool.state(f"{layer}.conv")[number] = torch.cat(pieces)


def saved(ranks: int, codec: str) -> list[Blob]:
    """The objects that an engine of that size leaves behind, each with its units."""
    found = []
    for rank in range(ranks):
        seat = Seat(LAYOUT, ranks, rank)
        active, idle = ActivePool(seat, 1), CheckpointPool(seat, CODECS[codec], 1)
        source, target = active.take(), idle.take()
        assert source is not None
        assert target is not None
        fill(active, source.number)
        idle.encode(active, source, target)
        hold = idle.table.hold(target)
        assert isinstance(hold, Hold)
        named = Named(7, {part.name: idle.codec_in(part.name) for part in seat.parts}, rank % 2)
        copy = Staging(idle.store, HostLane(), 1 << 20).outward(target.number, named, hold)
        assert not isinstance(copy, Skipped)
        found += [
            Blob(b.part, b.end, b.data, 0, shard, b.codec, b.requantised)
            for b, shard in zip(copy.blobs(), seat.shards, strict=True)
        ]
    return found


@pytest.mark.parametrize("codec", ["native", "int8"])
@pytest.mark.parametrize("loaded", SIZES)
@pytest.mark.parametrize("size", SIZES)
def test_slots_are_those_of_a_run_of_that_size(size: int, loaded: int, codec: str) -> None:
    blobs = saved(size, codec)
    for rank in range(loaded):
        seat = Seat(LAYOUT, loaded, rank)
        idle = CheckpointPool(seat, CODECS[codec], 1)
        expected = CheckpointPool(seat, CODECS[codec], 1)
        active = ActivePool(seat, 1)
        source, target, direct = active.take(), idle.take(), expected.take()
        assert source is not None
        assert target is not None
        assert direct is not None
        fill(active, source.number)
        expected.encode(active, source, direct)
        ours = gather(LAYOUT, blobs, loaded, rank)
        assert {blob.requantised for blob in ours} <= {0, 1}
        Staging(idle.store, HostLane(), 1 << 20).inward(ours, target.number)
        for tensor, other in zip(idle.store.tensors, expected.store.tensors, strict=True):
            assert torch.equal(tensor, other)


def test_what_fits_already_is_not_copied() -> None:
    blobs = saved(2, "native")
    ours = gather(LAYOUT, blobs, 2, 1)
    assert [blob.data for blob in ours] == [blob.data for blob in blobs[2:]]
    assert all(any(blob is one for one in blobs) for blob in ours)


def test_blocks_of_tokens_are_joined_one_by_one() -> None:
    part = LAYOUT.part("kv")
    layout = Layout((part,), 16)
    halves = [
        Blob("kv", end, memoryview(bytes([end + s.start]) * part.nbytes(end - start, s)), start, s)
        for start, end in ((0, 16), (16, 20))
        for s in part.shards(2)
    ]
    found = gather(layout, halves, 1, 0)
    assert [(blob.start, blob.end, blob.shard) for blob in found] == [
        (0, 16, Shard(0, 4)), (16, 20, Shard(0, 4)),
    ]  # fmt: skip
    assert all(b.data.nbytes == part.nbytes(b.end - b.start, part.whole) for b in found)


def test_pieces_that_do_not_belong_together_are_refused() -> None:
    native, small = saved(2, "native"), saved(2, "int8")
    with pytest.raises(LayoutError, match="different codecs"):
        gather(LAYOUT, [native[0], small[2]], 1, 0)
    with pytest.raises(LayoutError, match="not covered"):
        gather(LAYOUT, native[:2], 1, 0)


def test_a_piece_of_the_right_units_and_the_wrong_size_is_refused() -> None:
    blob = saved(2, "native")[2]
    short = Blob(blob.part, blob.end, blob.data[:-1], 0, blob.shard)
    for shard in (blob.shard, None):
        with pytest.raises(LayoutError, match="bytes for units"):
            gather(LAYOUT, [replace(short, shard=shard)], 2, 1)
    with pytest.raises(LayoutError, match="bytes for units"):
        gather(LAYOUT, [replace(saved(2, "int8")[2], codec="native")], 2, 1)
