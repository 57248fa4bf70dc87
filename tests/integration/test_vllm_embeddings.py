"""Encoder embeddings through a real node."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tiercache.client import Client, Options
from tiercache.errors import LayoutError
from tiercache.state import Namespace
from tiercache.testing.nodes import NodeProcess, eventually
from tiercache_vllm.embeddings import LAYOUT, Saver, Shelf, packed, unpacked

ONE = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
NewShelf = Callable[..., Shelf]
NewSaver = Callable[..., Saver]


def client_of(node: NodeProcess, weights: str) -> Client:
    namespace = Namespace.of(LAYOUT, model="m", weights=weights, tokenizer="t")
    return Client(str(node.socket), namespace, LAYOUT, Options(deadline_s=5.0, retry_s=0.0))


@pytest.fixture
def new_shelf(node: NodeProcess) -> Iterator[NewShelf]:
    made: list[Shelf] = []

    def make(weights: str = "1", bytes_max: int = 1 << 20) -> Shelf:
        shelf = Shelf(client_of(node, weights), bytes_max=bytes_max, wait_s=1.0, threads=2)
        made.append(shelf)
        return shelf

    yield make
    for shelf in made:
        shelf.close()


@pytest.fixture
def new_saver(node: NodeProcess) -> Iterator[NewSaver]:
    made: list[Saver] = []

    def make(weights: str = "1", bytes_max: int = 1 << 20) -> Saver:
        saver = Saver(client_of(node, weights), bytes_max=bytes_max)
        made.append(saver)
        return saver

    yield make
    for saver in made:
        saver.close()


def known(shelf: Shelf, request: str, identifier: str) -> bytes | None:
    assert eventually(lambda: shelf.wants(request, identifier))
    return shelf.get(identifier)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back(dtype: torch.dtype) -> None:
    tensor = ONE.to(dtype)
    data = packed(tensor)
    assert data is not None
    found = unpacked(data)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(2, 3, dtype=torch.int8)]
)
def test_other_forms_are_not_kept(tensor: torch.Tensor) -> None:
    assert packed(tensor) is None


@pytest.mark.parametrize("spoil", [slice(0, 3), slice(0, -1), slice(1, None)])
def test_damaged_bytes_are_refused(spoil: slice) -> None:
    data = packed(ONE)
    assert data is not None
    with pytest.raises(LayoutError):
        unpacked(data[spoil])


def test_what_one_engine_saves_another_finds(new_shelf: NewShelf, new_saver: NewSaver) -> None:
    saver = new_saver()
    saver.save("image", ONE)
    assert saver.flush(10.0)
    shelf = new_shelf()
    shelf.idle()
    assert not shelf.wants("r", "image"), "asking never waits"
    shelf.idle()
    data = known(shelf, "r", "image")
    assert data is not None
    assert torch.equal(unpacked(data), ONE)
    assert known(shelf, "r", "another image") is None
    assert known(new_shelf("2"), "r", "image") is None, "another encoder"
    assert saver.counts["saved"] == 1


def test_what_is_here_stays_without_the_node(
    new_shelf: NewShelf, new_saver: NewSaver, node: NodeProcess
) -> None:
    saver = new_saver()
    saver.save("image", ONE)
    assert saver.flush(10.0)
    shelf = new_shelf()
    assert known(shelf, "r", "image") is not None
    node.kill()
    assert shelf.wants("other", "image")
    assert shelf.get("image") is not None
    assert known(shelf, "r", "another") is None
    saver.save("lost", ONE)
    assert saver.flush(10.0)
    assert saver.counts["saved"] == 1


def test_what_nobody_uses_is_let_go(new_shelf: NewShelf, new_saver: NewSaver) -> None:
    saver = new_saver()
    saver.save("image", ONE)
    assert saver.flush(10.0)
    shelf = new_shelf()
    for request in ("r", "s"):
        assert known(shelf, request, "image") is not None
    shelf.forget("r")
    assert shelf.get("image") is not None
    shelf.forget("s")
    assert shelf.get("image") is None
    shelf.forget("s")


def test_limits_hold(new_shelf: NewShelf, new_saver: NewSaver) -> None:
    full = new_saver(bytes_max=10)
    full.save("image", ONE)
    assert full.counts["dropped"] == 1
    saver = new_saver()
    saver.save("image", ONE)
    assert saver.flush(10.0)
    shelf = new_shelf(bytes_max=-1)
    assert shelf.wants("r", "image"), "it is not asked for, so it is encoded"
    assert shelf.get("image") is None
