"""What a HiCache backend owes SGLang, call by call, over a real node and real host pools."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from tests.engines.sglang.shapes import Shape
from tests.engines.sglang.trees import Rank, Tree
from tiercache.testing.nodes import NodeProcess

PAGES = 6
TRAILING, ALL = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES


class Caller:
    """Calls the backend of a tree as SGLang's controller does, with pages it makes up."""

    def __init__(self, tree: Tree, name: str) -> None:
        self.tree = tree
        self.keys = [hashlib.sha256(f"{name} {at}".encode()).hexdigest() for at in range(PAGES)]
        self.kv = tree.controller.storage_host_pool
        self.states = tree.backend.registered_pools[PoolName.MAMBA]
        page = tree.shape.page
        self.rows = self.kv.alloc(PAGES * page)
        self.slots = self.states.alloc(PAGES)
        assert self.rows is not None
        assert self.slots is not None
        self.kv.kv_buffer.normal_()
        self.states.temporal_buffer.normal_()

    def put_pages(self, *pages: int) -> None:
        """Save KV pages."""
        for at in pages:
            rows = self.rows[at * self.tree.shape.page : (at + 1) * self.tree.shape.page]
            about = HiCacheStorageExtraInfo(prefix_keys=self.keys[:at])
            assert self.tree.backend.batch_set_v1([self.keys[at]], rows, about) == [True]

    def put_states(self, *pages: int) -> None:
        """Save the states at the ends of pages."""
        for at in pages:
            about = HiCacheStorageExtraInfo(prefix_keys=self.keys[:at])
            assert self.tree.backend.batch_set_v2([self.transfer(at)], about) == {"mamba": [True]}

    def transfer(self, at: int) -> PoolTransfer:
        """Return the transfer of one state."""
        return PoolTransfer(
            PoolName.MAMBA,
            host_indices=self.slots[at : at + 1],
            keys=[self.keys[at]],
            hit_policy=TRAILING,
        )

    def found(self, policy: PoolHitPolicy | None = TRAILING, trailing: int = 1) -> tuple[int, Any]:
        """Return the longest hit and every other one."""
        transfers = []
        if policy is not None:
            keys = ["__placeholder__"] * trailing
            transfers = [PoolTransfer(PoolName.MAMBA, keys=keys, hit_policy=policy)]
        result = self.tree.backend.batch_exists_v2(self.keys, transfers)
        return result.kv_hit_pages, result.restorable_prefix_pages


@pytest.fixture(scope="module")
def tree(module_node: NodeProcess) -> Iterator[Tree]:
    """A hybrid tree."""
    tree = Tree(Shape(), Rank(str(module_node.socket)))
    yield tree
    tree.close()


@pytest.fixture
def caller(tree: Tree, request: pytest.FixtureRequest) -> Iterator[Caller]:
    """A caller with pages of its own."""
    caller = Caller(tree, request.node.nodeid)
    yield caller
    caller.kv.free(caller.rows)
    caller.states.free(caller.slots)


@pytest.mark.parametrize(
    ("pages", "states", "policy", "trailing", "expected"),
    [
        ((0, 1, 2), (2,), TRAILING, 1, (3, [3])),
        ((0, 1, 2), (0, 1, 2), TRAILING, 1, (3, [1, 2, 3])),
        ((0, 1, 2), (3,), TRAILING, 1, (0, [])),
        ((0, 1, 2, 3), (0, 2), TRAILING, 1, (3, [1, 3])),
        ((0, 1), (1, 4), TRAILING, 1, (2, [2])),
        ((0, 1, 3, 4), (1, 4), TRAILING, 1, (2, [2])),
        ((1, 2), (2,), TRAILING, 1, (0, [])),
        ((0, 1, 2, 3, 4), (0, 1, 3, 4), TRAILING, 2, (5, [1, 2, 5])),
        ((0, 1, 2, 3), (0, 1, 3), ALL, 1, (2, [1, 2])),
        ((0, 1, 2, 3), (), ALL, 1, (0, [])),
        ((0, 1, 2), (), None, 1, (3, [1, 2, 3])),
        ((), (0, 1), TRAILING, 1, (0, [])),
    ],
    ids=[
        "aligned", "every one", "disjoint", "not contiguous", "earlier common", "hole in KV",
        "no first page", "window of two", "all pages", "all pages, none", "KV alone", "no KV",
    ],
)  # fmt: skip
def test_every_restorable_prefix_is_told(
    caller: Caller,
    pages: Sequence[int],
    states: Sequence[int],
    policy: PoolHitPolicy | None,
    trailing: int,
    expected: tuple[int, list[int]],
) -> None:
    caller.put_states(*states)
    caller.put_pages(*pages)
    assert caller.found(policy, trailing) == expected


def test_pools_are_told_one_by_one_so_that_beliefs_heal(caller: Caller) -> None:
    caller.put_pages(0, 1)
    transfer = PoolTransfer(PoolName.MAMBA, keys=["__placeholder__"], hit_policy=TRAILING)
    result = caller.tree.backend.batch_exists_v2(caller.keys, [transfer])
    assert result.extra_pool_hit_pages == {PoolName.KV: 2, PoolName.MAMBA: 0}


def test_pages_and_states_come_back_bit_by_bit(caller: Caller) -> None:
    caller.put_states(1)
    caller.put_pages(0, 1)
    page = caller.tree.shape.page
    pages = [caller.kv.get_data_page(int(caller.rows[at * page])).clone() for at in (0, 1)]
    state = caller.states.get_data_page(int(caller.slots[1])).clone()
    caller.kv.kv_buffer.zero_()
    caller.states.temporal_buffer.zero_()
    # The state's slots are free to be others than those it was saved from.
    transfer = PoolTransfer(
        PoolName.MAMBA, host_indices=caller.slots[:1], keys=[caller.keys[1]], hit_policy=TRAILING
    )
    got = caller.tree.backend.batch_get_v1(caller.keys[:3], caller.rows[: 3 * page])
    assert got == [True, True, False]
    assert caller.tree.backend.batch_get_v2([transfer]) == {PoolName.MAMBA: [True]}
    for at in (0, 1):
        assert torch.equal(caller.kv.get_data_page(int(caller.rows[at * page])), pages[at])
    assert torch.equal(caller.states.get_data_page(int(caller.slots[0])), state)


def test_what_does_not_fit_is_a_miss(caller: Caller) -> None:
    """Too few indices, keys that are no hashes, pools that nobody attached."""
    backend = caller.tree.backend
    errors = backend.figures.counts().get("errors:get", 0)
    assert backend.batch_get_v1(caller.keys[:2], caller.rows[:3]) == [False, False]
    assert backend.batch_get_v1(["key"], caller.rows[: caller.tree.shape.page]) == [False]
    strange = PoolTransfer(PoolName.SWA, host_indices=caller.slots[:1], keys=caller.keys[:1])
    assert backend.batch_get_v2([strange]) == {PoolName.SWA: [False]}
    assert backend.batch_set_v2([strange], HiCacheStorageExtraInfo([])) == {PoolName.SWA: [False]}
    assert backend.batch_exists_v2(["key"], []).kv_hit_pages == 0
    assert backend.batch_exists(caller.keys) == 0
    assert not backend.exists(caller.keys[0])
    assert backend.figures.counts()["errors:get"] == errors + 1
    assert backend.batch_exists_v2(caller.keys, [strange]).restorable_prefix_pages == []


def test_without_prefix_keys_nothing_is_saved(caller: Caller) -> None:
    backend = caller.tree.backend
    rows = caller.rows[: caller.tree.shape.page]
    assert backend.batch_set_v1(caller.keys[:1], rows, HiCacheStorageExtraInfo(None)) == [False]
    assert backend.batch_set_v1(caller.keys[:1], rows, None) == [False]
    assert backend.figures.counts()["no_position"] >= 2


def test_the_first_interface_serves_nothing(caller: Caller) -> None:
    backend, key = caller.tree.backend, caller.keys[0]
    assert backend.get(key) is None
    assert backend.batch_get([key]) == [None]
    assert (backend.set(key), backend.batch_set([key])) == (False, False)
