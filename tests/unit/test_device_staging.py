"""Copies between slots and the bytes of objects, and that nothing overtakes them."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tiercache.client import Blob, Saved, Scope
from tiercache.device import (
    CODECS,
    ActivePool,
    DirectOutlet,
    Fence,
    HostLane,
    Named,
    Restored,
    Run,
    Seat,
    Skipped,
    Stale,
    ThreadOutlet,
    lane_for,
)
from tiercache.device.lanes import Copy
from tiercache.device.staging import NO_HOST_MEMORY, Staging, readable
from tiercache.errors import LayoutError
from tiercache.state import Chain, Shard
from tiercache.testing.devices import (
    LAYOUT,
    PROMPT,
    LaterLane,
    SavingNode,
    kept,
    read,
    run_with,
    tier_of,
    write,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("codec", CODECS)
def test_a_slot_goes_out_and_comes_back(codec: str) -> None:
    node = SavingNode()
    tier = tier_of(codec, DirectOutlet(node))
    run = run_with(tier, 3)
    kept(tier, run, 7)
    assert tier.demote(PROMPT, 7) is None
    tier.poll()
    assert len(tier) == 0
    blobs = node.saved[7]
    names = {blob.part: (blob.codec, blob.requantised, blob.end) for blob in blobs}
    assert names == {"recurrent": (codec, 0, 7), "conv": ("native", 0, 7)}
    for blob in blobs:
        if blob.codec == "native":
            part = LAYOUT.part(blob.part)
            assert blob.data.nbytes == part.nbytes(0, part.whole)
    found = tier.restore(PROMPT, 7, blobs)
    assert isinstance(found, Restored)
    assert found.fence.done()
    assert read(tier, found.run) == 3
    lossy = codec != "native"
    assert tier.owner.rounded(found.run) == (1 if lossy else 0)
    again = tier.find(PROMPT, 99)
    assert again is not None
    assert again[0] == 7


def test_the_bytes_are_those_of_the_object() -> None:
    """Layer after layer, each contiguous, in the layout's order: what another process reads."""
    pool = ActivePool(Seat(LAYOUT), 3)
    slot = pool.take()
    assert slot is not None
    hold = pool.table.hold(slot)
    assert not isinstance(hold, Stale)
    for tensor in pool.store.tensors:
        live = tensor[:, slot.number]
        live.copy_(torch.arange(live.numel()).view(live.shape))
    staging = Staging(pool.store, HostLane(), 1 << 20)
    copy = staging.outward(slot.number, Named(7, {"recurrent": "native", "conv": "native"}), hold)
    assert not isinstance(copy, Skipped)
    recurrent_blob, conv_blob = copy.blobs()
    assert bytes(recurrent_blob.data) == np.arange(2 * 4 * 4 * 4, dtype=np.float32).tobytes()
    conv = torch.arange(2 * 24 * 3).to(torch.bfloat16).view(torch.uint8)
    assert bytes(conv_blob.data) == conv.numpy().tobytes()


def test_no_host_memory_is_a_skip_and_lets_go() -> None:
    tier = tier_of(host_bytes_max=10)
    kept(tier, run_with(tier, 3), 7)
    assert tier.demote(PROMPT, 7) == Skipped(NO_HOST_MEMORY)
    assert tier.counters[f"lost_{NO_HOST_MEMORY}"] == 1
    assert len(tier.owner.checkpoints.table) == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda blobs: blobs[:1], "neither native nor"),
        (lambda blobs: [*blobs, blobs[0]], "once each"),
        (lambda blobs: [Blob("recurrent", 7, blobs[0].data[:-1]), blobs[1]], "bytes for units"),
        (lambda blobs: [Blob("recurrent", 7, blobs[0].data, 0, Shard(0, 2)), blobs[1]], "0-2"),
        (
            lambda blobs: [Blob("recurrent", 7, blobs[0].data, codec="int8"), blobs[1]],
            "neither native nor",
        ),
    ],
)
def test_blobs_that_do_not_fit_are_refused_before_anything_is_written(
    change: object, why: str
) -> None:
    node = SavingNode()
    native = tier_of("native", DirectOutlet(node))
    kept(native, run_with(native, 3), 7)
    native.demote(PROMPT, 7)
    native.poll()
    assert callable(change)
    for tier in (tier_of("native"), tier_of("bf16")):
        with pytest.raises(LayoutError, match=why):
            tier.restore(PROMPT, 7, change(node.saved[7]))
        assert len(tier.owner.active.table) == len(tier.owner.checkpoints.table) == 0


def test_read_only_memory_is_read_without_a_copy() -> None:
    data = bytes(range(200))
    view = readable(memoryview(data)[3:100])
    assert view.tolist() == list(range(3, 100))
    writable = bytearray(data)
    live = readable(memoryview(writable))
    writable[5] = 77
    assert live[5] == 77
    assert readable(memoryview(b"")).numel() == 0


# --- the fence


def test_a_slot_is_not_used_again_while_it_is_copied_out() -> None:
    lane = LaterLane()
    node = SavingNode()
    tier = tier_of("native", DirectOutlet(node), lane, slots=(3, 1))
    run = run_with(tier, 3)
    kept(tier, run, 7)
    write(tier, run, 4)
    assert tier.keep(run, PROMPT, 8) == Skipped("no_checkpoint_slot")
    tier.poll()
    assert not node.saved
    assert tier.owner.checkpoints.take() is None
    lane.go_on()
    tier.poll()
    assert set(np.frombuffer(node.saved[7][0].data, np.float32)) == {3.0}
    kept(tier, run, 8)


def test_a_run_that_ends_while_its_state_arrives_frees_nothing_early() -> None:
    """The copy into its slot is late; the slot must not be another's by then."""
    lane = LaterLane()
    node = SavingNode()
    giver = tier_of("native", DirectOutlet(node))
    kept(giver, run_with(giver, 3), 7)
    giver.demote(PROMPT, 7)
    giver.poll()
    tier = tier_of("int8", DirectOutlet(node), lane, slots=(1, 2))
    found = tier.restore(PROMPT, 7, node.saved[7])
    assert isinstance(found, Restored)
    assert not found.fence.done()
    tier.owner.clear(found.run)
    tier.poll()
    assert isinstance(tier.start(), Skipped)
    lane.go_on()
    tier.poll()
    assert isinstance(tier.start(), Run)


def test_host_memory_comes_back_when_the_node_has_it() -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(SavingNode):
        def save(self, request: str, chain: Chain, blobs: Sequence[Blob], *, scope: Scope) -> Saved:
            started.set()
            go_on.wait()
            return super().save(request, chain, blobs, scope=scope)

    node = Slow()
    outlet = ThreadOutlet(node, queue_max=1)
    tier = tier_of("native", outlet, slots=(3, 3))
    run = run_with(tier, 3)
    room = tier.host_bytes_left
    for tokens in (7, 8, 9):
        kept(tier, run, tokens)
    tier.demote(PROMPT, 7)
    tier.poll()
    started.wait()
    assert tier.host_bytes_left < room
    assert len(tier.owner.checkpoints.table) == 2
    tier.demote(PROMPT, 8)
    tier.poll()
    tier.demote(PROMPT, 9)
    tier.poll()
    assert tier.counters["lost_declined"] == 1
    go_on.set()
    outlet.close()
    tier.poll()
    assert tier.host_bytes_left == room
    assert sorted(node.saved) == [7, 8]
    assert outlet.outcomes["stored"] == 4


def test_an_outward_copy_cannot_be_read_too_early_or_too_late() -> None:
    lane = LaterLane()
    pool = ActivePool(Seat(LAYOUT), 1)
    slot = pool.take()
    assert slot is not None
    hold = pool.table.hold(slot)
    assert not isinstance(hold, Stale)
    staging = Staging(pool.store, lane, 1 << 20)
    named = Named(7, {"recurrent": "native", "conv": "native"})
    copy = staging.outward(slot.number, named, hold)
    assert not isinstance(copy, Skipped)
    with pytest.raises(ValueError, match="not there yet"):
        copy.blobs()
    assert not copy.done()
    lane.go_on()
    assert copy.done()
    (kept_blob, _), (again, _) = copy.blobs(), copy.blobs()
    assert kept_blob.data.readonly
    with pytest.raises(TypeError, match="read-only"):
        kept_blob.data[0] = 1
    array, tensor = np.frombuffer(again.data, np.uint8), readable(again.data)
    held, content = readable(kept_blob.data), bytes(again.data)
    copy.close()
    copy.close()
    assert staging.host_bytes_left == 1 << 20
    with pytest.raises(ValueError, match="released"):
        bytes(again.data)
    assert bytes(array) == bytes(tensor.numpy()) == content  # Made before: theirs, and unchanged.
    assert held.numel()
    with pytest.raises(ValueError, match="not any more"):
        copy.blobs()


def test_the_lane_fits_the_device() -> None:
    assert isinstance(lane_for(torch.device("cpu")), HostLane)


class Broken(SavingNode):
    """A client that is misused: that is a mistake of ours, and no fault of the node."""

    def save(self, request: str, chain: Chain, blobs: Sequence[Blob], *, scope: Scope) -> Saved:
        raise LayoutError("mistaken")


def test_a_mistake_in_saving_loses_no_memory_and_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = tier_of("native", DirectOutlet(Broken()))
    room = direct.host_bytes_left
    kept(direct, run_with(direct, 3), 7)
    direct.demote(PROMPT, 7)
    with pytest.raises(LayoutError, match="mistaken"):
        direct.poll()
    assert direct.host_bytes_left == room
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(str(args.exc_value)))
    outlet = ThreadOutlet(Broken(), queue_max=4)
    tier = tier_of("native", outlet)
    run = run_with(tier, 3)
    kept(tier, run, 7)
    tier.demote(PROMPT, 7)
    tier.poll()
    outlet.close()
    assert seen == ["mistaken"]
    kept(tier, run, 8)
    tier.demote(PROMPT, 8)
    tier.poll()
    assert tier.counters["lost_declined"] == 1
    assert tier.host_bytes_left == room


class Slow(SavingNode):
    """A mistake that is made when told."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def save(self, request: str, chain: Chain, blobs: Sequence[Blob], *, scope: Scope) -> Saved:
        self.go_on.wait()
        raise LayoutError("mistaken")


def test_what_waits_behind_a_mistake_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    node = Slow()
    outlet = ThreadOutlet(node, queue_max=1)
    tier = tier_of("native", outlet)
    room = tier.host_bytes_left
    run = run_with(tier, 3)
    for tokens in (7, 8):
        kept(tier, run, tokens)
        tier.demote(PROMPT, tokens)
        tier.poll()
        while tokens == 7 and not outlet._waiting.empty():
            threading.Event().wait(0.001)
    assert tier.host_bytes_left < room
    node.go_on.set()
    outlet.close()
    outlet.close()
    tier.poll()
    assert tier.host_bytes_left == room


class BrokenLane(HostLane):
    """A lane that cannot copy."""

    def run(self, copies: Sequence[Copy]) -> Fence:
        raise RuntimeError("no copy")


def test_a_copy_that_cannot_begin_keeps_no_slot() -> None:
    tier = tier_of("native", lane=BrokenLane())
    room = tier.host_bytes_left
    run = run_with(tier, 3)
    kept(tier, run, 7)
    with pytest.raises(RuntimeError, match="no copy"):
        tier.demote(PROMPT, 7)
    assert len(tier.owner.checkpoints.table) == 0
    assert tier.host_bytes_left == room
    with pytest.raises(RuntimeError, match="no copy"):
        tier.export(run, 7)
    tier.owner.clear(run)
    assert len(tier.owner.active.table) == 0
