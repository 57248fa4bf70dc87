"""What lies in a slot, for every family of models, and what the codecs make of it."""

import numpy as np
import pytest
import torch

from tiercache.client import Blob
from tiercache.device import (
    CODECS,
    ActivePool,
    Checkpoint,
    CheckpointPool,
    HostLane,
    Named,
    Ownership,
    Run,
    Seat,
    Skipped,
    Space,
    Staging,
    Stale,
    codec_named,
)
from tiercache.device.kinds import Columns, Heads, conv_qkv, recurrent
from tiercache.device.slots import Hold, Numbers, Private
from tiercache.errors import LayoutError
from tiercache.state import Kind, Layout, Part, Tensor
from tiercache.testing.families import FAMILIES, build
from tiercache_transformers import hf
from tiercache_transformers.layout import Form, form_of
from tiercache_transformers.state import take_states

torch.set_num_threads(1)

KIMI = Layout(
    (
        recurrent(Heads(range(20), 32, 16, 8)),
        conv_qkv(Columns(range(20), 3), (32, 8), (32, 16)),
    ),
    64,
)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 32), (4, 8), (8, 4)])
def test_slots_have_the_shapes_that_kernels_index(ranks: int, heads: int) -> None:
    seat = Seat(KIMI, ranks, ranks - 1)
    active, idle = ActivePool(seat, 5), CheckpointPool(seat, CODECS["int8"], 7)
    shapes = [(tuple(t.shape), t.dtype) for t in active.store.tensors]
    assert shapes == [
        ((20, 5, heads, 16, 8), torch.float32),
        ((20, 5, heads * 32, 3), torch.bfloat16),
    ]
    assert [(tuple(t.shape), t.dtype) for t in idle.store.tensors] == [
        ((20, 7, heads, 16, 8), torch.int8),
        ((20, 7, heads, 1, 8), torch.float32),
        ((20, 7, heads * 32, 3), torch.bfloat16),
    ]
    native = sum(part.nbytes(0, shard) for part, shard in zip(seat.parts, seat.shards, strict=True))
    assert active.store.slot_nbytes == native
    assert (idle.codec_in("recurrent"), idle.codec_in("conv")) == ("int8", "native")
    assert active.state("3.recurrent").shape == (5, heads, 16, 8)
    assert active.state("3.recurrent").data_ptr() == active.store.tensors[0][3].data_ptr()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Form, list[Blob]]:
    """The states of a running model of each family."""
    model = build(request.param)
    cache = hf.new_cache(model)
    hf.forward(model, list(range(3, 14)), cache)
    form = form_of(model)
    return form, take_states(cache, form, 11)


@pytest.mark.parametrize("codec", CODECS)
def test_every_state_of_every_family_goes_through_the_pools(
    family: tuple[Form, list[Blob]], codec: str
) -> None:
    form, states = family
    seat = Seat(form.layout)
    owner = Ownership(ActivePool(seat, 2), CheckpointPool(seat, codec_named(codec), 1))
    run = owner.enter()
    assert isinstance(run, Run)
    staging = Staging(owner.active.store, HostLane(), 1 << 24)
    staging.inward(states, slot_of(owner, run).number)
    checkpoint = owner.snapshot(run, 11)
    assert isinstance(checkpoint, Checkpoint)
    owner.clear(run)
    again = owner.resume(checkpoint)
    assert isinstance(again, Run)
    for blob, found in zip(states, taken(owner, staging, again), strict=True):
        exact = blob.part != "recurrent" or codec == "native"
        if exact:
            assert bytes(found.data) == bytes(blob.data)
            continue
        before, after = np.frombuffer(blob.data, np.float32), np.frombuffer(found.data, np.float32)
        error = float(np.abs(before - after).max() / np.abs(before).max())
        assert 0 < error < 0.02


def slot_of(owner: Ownership, run: Run) -> Private:
    slot = owner.slot(run)
    assert isinstance(slot, Private)
    return slot


def taken(owner: Ownership, staging: Staging, run: Run) -> list[Blob]:
    slot = slot_of(owner, run)
    hold = owner.active.table.hold(slot)
    assert isinstance(hold, Hold)
    names = {part.name: "native" for part in owner.active.seat.parts}
    copy = staging.outward(slot.number, Named(11, names), hold)
    assert not isinstance(copy, Skipped)
    copy.wait()
    return copy.blobs()


def test_only_valid_slots_are_read_and_written() -> None:
    seat = Seat(KIMI)
    active, idle = ActivePool(seat, 2), CheckpointPool(seat, CODECS["int8"], 2)
    source, target = active.take(), idle.take()
    assert source is not None
    assert target is not None
    assert idle.encode(active, source, target) is None
    assert idle.decode(target, active, source) is None
    active.table.give(source)
    for answer in (
        idle.encode(active, source, target),
        idle.decode(target, active, source),
        active.zero(source),
        active.table.share(source),
        active.table.give(source),
        active.table.hold(source),
    ):
        assert answer == Stale("slot")
    with pytest.raises(ValueError, match="1 places, not 1"):
        idle.place(target, 1)


def test_what_cannot_be_a_pool_is_refused() -> None:
    attention = Layout(
        (Part("kv", Kind.KV, None, 64, 1, (Tensor("k", "int8", (1,), ("dim",)),)),), 64
    )
    for make, error, why in (
        (lambda: ActivePool(Seat(attention), 1), LayoutError, "no snapshot parts"),
        (lambda: ActivePool(Seat(KIMI), 0), ValueError, "at least one slot"),
        (lambda: ActivePool(Seat(KIMI, 3), 1), LayoutError, "do not split over 3"),
        (lambda: codec_named("int4"), LayoutError, "no codec 'int4'"),
        (
            lambda: CheckpointPool(Seat(KIMI), CODECS["int8"], 1, per_block=0),
            ValueError,
            "at least",
        ),
        (
            lambda: CheckpointPool(
                Seat(KIMI), CODECS["int8"], Space(Numbers(1), 1, None, 7), per_block=2
            ),
            LayoutError,
            "do not split into 2",
        ),
        (lambda: ActivePool(Seat(KIMI), 1).state("x"), LayoutError, "no tensor 'x'"),
        (lambda: ActivePool(Seat(KIMI), 1).store.part("kv"), LayoutError, "not 'kv'"),
    ):
        with pytest.raises(error, match=why):
            make()


def test_states_that_a_codec_would_mix_are_refused() -> None:
    """Two dtypes of one shape would share the pool of numbers, layers in another order."""
    tensors = tuple(
        Tensor(f"{layer}.recurrent", dtype, (2, 4, 4), ("head", "value", "key"), 0)
        for layer, dtype in enumerate(("float32", "bfloat16"))
    )
    layout = Layout((Part("recurrent", Kind.RECURRENT, 1, 0, 2, tensors),), 64)
    CheckpointPool(Seat(layout), CODECS["native"], 1)
    with pytest.raises(LayoutError, match="mixes states"):
        CheckpointPool(Seat(layout), CODECS["int8"], 1)
