"""INT8 checkpoints on the device beside a real node."""

from collections.abc import Iterator

import pytest
import torch

from tests.integration.test_vllm_worker import (
    CHAIN,
    ENDED,
    LAYOUT,
    NAMESPACE,
    empty,
    ended,
    items,
    job,
    loading,
    saving,
)
from tests.unit.test_vllm_geometry import kimi
from tests.unit.test_vllm_pages import BLOCKS, tensors
from tiercache.client import Client, Options, Wanted
from tiercache.device import REQUANTISED_MAX
from tiercache.errors import LayoutError
from tiercache.state import Kind, Part, Shard, Tensor
from tiercache.testing.nodes import NodeProcess
from tiercache_vllm.geometry import geometry_of
from tiercache_vllm.hot import HotStates
from tiercache_vllm.settings import Settings
from tiercache_vllm.working import Worker

PART = LAYOUT.part("recurrent")
CPU = torch.device("cpu")
SLOT = 3 * 4 * (8 * 8 + 8 * 4)
"""Bytes of one checkpoint: three layers of four heads, values and scales."""


def states(seed: int, count: int = 1) -> torch.Tensor:
    """Return objects of random states as native bytes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 3 * 4 * 64, generator=generator)
    return values.view(torch.uint8).view(count, -1)


def test_a_state_comes_back_as_int8_holds_it() -> None:
    pool = HotStates(PART, PART.whole, SLOT, CPU)
    native = states(1)
    pool.keep([b"a"], native, 0)
    found = pool.restore(b"a")
    assert found is not None
    state, requantised = found
    assert requantised == 1
    before, after = native[0].view(torch.float32), state.view(torch.float32)
    assert 0 < (before - after).abs().max() < 0.02
    assert pool.restore(b"b") is None


def test_what_was_used_longest_ago_goes() -> None:
    pool = HotStates(PART, PART.whole, 2 * SLOT + 1, CPU)
    assert pool.slots == 2
    pool.keep([b"a", b"b"], states(1, 2), 0)
    assert pool.restore(b"a") is not None
    pool.keep([b"c", b"a"], states(2, 2), 0)
    assert [pool.restore(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    pool.clear()
    assert len(pool) == 0
    pool.keep([b"d"], states(3), 0)
    assert pool.restore(b"d") is not None


def test_a_pool_without_room_holds_nothing() -> None:
    pool = HotStates(PART, PART.whole, SLOT - 1, CPU)
    pool.keep([b"a"], states(1), 0)
    assert pool.restore(b"a") is None


def test_a_state_is_not_quantised_for_ever() -> None:
    pool = HotStates(PART, PART.whole, SLOT, CPU)
    pool.keep([b"a"], states(1), REQUANTISED_MAX)
    assert pool.restore(b"a") is None


def test_a_rank_holds_its_heads() -> None:
    assert HotStates(PART, Shard(0, 2), SLOT, CPU).slots == 2


def test_states_of_another_form_are_refused() -> None:
    odd = Tensor("0.recurrent", "float32", (4, 8), ("head", "value"), 0)
    part = Part("recurrent", Kind.RECURRENT, 1, 0, 4, (odd,))
    with pytest.raises(LayoutError, match="has no states"):
        HotStates(part, part.whole, SLOT, CPU)


def floats() -> dict[str, torch.Tensor]:
    """Return tensors whose recurrent states are numbers."""
    held = tensors()
    for layer in range(3):
        pages = held[str(layer)].view(torch.uint8).view(BLOCKS, -1)
        pages[:, 576:] = states(layer + 10, BLOCKS).view(BLOCKS, 3, -1)[:, 0]
    return held


@pytest.fixture
def worker(node: NodeProcess) -> Iterator[Worker]:
    settings = Settings(str(node.socket), device_checkpoint_bytes=8 * SLOT)
    options = Options(name="engine", deadline_s=5.0, retry_s=0.0)
    made = Worker(settings, geometry_of(kimi(1), 1), floats(), BLOCKS, options)
    yield made
    made.close()


def test_a_hot_state_is_not_fetched(worker: Worker, node: NodeProcess) -> None:
    worker.save(saving(job("w", items(256, 2, 3))))
    assert worker.flush(10.0)
    worker.report()
    worker.begin(loading(job("r", items(256, 5, 1))))
    assert ended(worker) == ENDED
    report = worker.report()
    assert report is not None
    assert (report.counts["hot_objects"], report.counts["loaded_objects"]) == (1, 3)
    worker.save(saving(job("r", items(128, 4))))
    assert worker.flush(10.0)
    with Client.attach(node.socket, NAMESPACE, LAYOUT, options=Options(deadline_s=5.0)) as client:
        wanted = [
            Wanted("recurrent", CHAIN.digest_at(128)),
            Wanted("recurrent", CHAIN.digest_at(256)),
        ]
        with client.fetch("look", wanted) as holding:
            derived, native = holding.blobs
    assert derived is not None
    assert native is not None
    assert (derived.requantised, native.requantised) == (1, 0)
    worker.forget({"r"})
    worker.save(saving(job("r", items(384, 1, 4, 5))))
    assert worker.flush(10.0)


def test_a_hot_state_does_not_outlive_sleep(worker: Worker) -> None:
    """What lies on the device beside the blocks goes with them."""
    worker.save(saving(job("w", items(256, 2, 3))))
    assert worker.flush(10.0)
    worker.sleep()
    worker.wake()
    worker.begin(loading(job("r", items(256, 5, 1))))
    assert ended(worker) == ENDED
    report = worker.report()
    assert report is not None
    assert (report.counts["hot_objects"], report.counts["loaded_objects"]) == (0, 4)


def test_a_state_that_was_loaded_is_hot(node: NodeProcess, worker: Worker) -> None:
    worker.save(saving(job("w", items(256, 2, 3))))
    assert worker.flush(10.0)
    settings = Settings(str(node.socket), device_checkpoint_bytes=8 * SLOT)
    options = Options(name="other", deadline_s=5.0, retry_s=0.0)
    other = Worker(settings, geometry_of(kimi(1), 1), empty(), BLOCKS, options)
    for name, hot in (("first", 0), ("second", 1)):
        other.begin(loading(job(name, items(256, 5, 1))))
        assert not ended(other).failed
        report = other.report()
        assert report is not None
        assert report.counts["hot_objects"] == hot
    other.close()


def test_a_model_without_states_has_no_pool(node: NodeProcess) -> None:
    latent = geometry_of([kimi(1)[2]], 1)
    settings = Settings(str(node.socket), device_checkpoint_bytes=SLOT)
    with pytest.raises(LayoutError, match="no recurrent states"):
        Worker(settings, latent, {"3": tensors()["3"]}, BLOCKS, Options())
