"""What SGLang saves and the node's NVMe tier: earned by a second request, and there after a restart."""

from collections.abc import Callable, Iterator

import pytest

from tests.engines.sglang.shapes import Shape
from tests.engines.sglang.trees import Rank, Restored, Tree, wait_until
from tiercache.testing.nodes import NodeProcess

TOKENS = 32
ALL = Restored(TOKENS, TOKENS, TOKENS, True, True)


@pytest.fixture
def tree(node: NodeProcess) -> Iterator[Tree]:
    """A hybrid tree."""
    tree = Tree(Shape(), Rank(str(node.socket)))
    yield tree
    tree.close()


def asked_and_computed(tree: Tree, seed: int) -> None:
    """Do what a first request does: look up, compute, save."""
    assert tree.prefetch(seed, TOKENS) == 0
    tree.compute(seed, TOKENS)
    tree.settle()
    assert tree.stops(seed, TOKENS) == [TOKENS // tree.shape.page]
    tree.forget()


def test_a_second_request_earns_a_place_on_disk(node: NodeProcess, tree: Tree) -> None:
    """The first one writes nothing there, although SGLang offers its state only once."""
    asked_and_computed(tree, 1)
    assert node.gauge("objects", "host") == TOKENS // 4 + 2
    assert node.gauge("writeback_queue") == 0
    assert node.gauge("objects", "nvme") == 0
    tree.prefetch(1, TOKENS + 16)  # Another prompt that begins like it.
    node.wait_until(lambda: node.gauge("objects", "nvme") == TOKENS // 4 + 2)


def test_what_hits_in_sglangs_own_memory_earns_its_place(node: NodeProcess, tree: Tree) -> None:
    """Nobody reads it from the node, but a look-up names what comes before it, its last node left out."""
    for stop in (16, TOKENS):
        tree.compute(1, stop)
        tree.settle()
    assert node.gauge("objects", "nvme") == 0
    tree.prefetch(1, TOKENS + 16, beyond=TOKENS)
    node.wait_until(lambda: node.gauge("objects", "nvme") == 16 // 4 + 2)


def resumed(tree: Tree) -> Callable[[], bool]:
    """Return whether the first prompt can be restored by now."""

    def now() -> bool:
        tree.forget()
        return tree.restore(1, TOKENS) == ALL

    return now


def test_a_restarted_node_serves_from_disk(node: NodeProcess, tree: Tree) -> None:
    asked_and_computed(tree, 1)
    tree.prefetch(1, TOKENS + 16)
    node.wait_until(lambda: node.gauge("objects", "nvme") == TOKENS // 4 + 2)
    node.stop()
    node.start()
    node.wait_scanned()
    assert node.gauge("objects", "host") == 0
    wait_until(resumed(tree), "restored from disk")
    assert node.counter("lookups", "hit_nvme") >= 1


def test_a_clear_reaches_the_disk(node: NodeProcess, tree: Tree) -> None:
    asked_and_computed(tree, 1)
    tree.prefetch(1, TOKENS + 16)
    node.wait_until(lambda: node.gauge("objects", "nvme") == TOKENS // 4 + 2)
    assert tree.cache.clear_storage_backend()
    node.kill()
    node.start()
    node.wait_scanned()
    assert node.gauge("objects", "nvme") == 0
