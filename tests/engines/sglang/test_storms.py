"""A node that is killed, frozen and cleared while pages are read and written: nothing wrong comes back."""

import hashlib
import threading
from collections.abc import Callable
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from tests.engines.sglang.prompts import NewTree
from tests.engines.sglang.trees import Tree, wait_until
from tiercache.testing.nodes import NodeProcess

PAGES = 24
STOPS = (7, 15, 23)
ROUNDS = 3
CALL_S = 0.5
"""What one call may take with these deadlines, however the node is."""


class Traffic:
    """Two threads: one saves the same path over and over, one looks it up, reads it and compares."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.keys = [hashlib.sha256(f"storm {at}".encode()).hexdigest() for at in range(PAGES)]
        self.kv = tree.controller.storage_host_pool
        self.states = tree.backend.registered_pools[PoolName.MAMBA]
        self.page = tree.shape.page
        self.own, self.back = self.kv.alloc(PAGES * self.page), self.kv.alloc(PAGES * self.page)
        self.slots, self.slots_back = (self.states.alloc(len(STOPS)) for _ in range(2))
        self.kv.kv_buffer.normal_()
        self.states.temporal_buffer.normal_()
        self.expected = [self._page(self.own, at).clone() for at in range(PAGES)]
        self.expected_states = [self._state(self.slots, at).clone() for at in range(len(STOPS))]
        self.read = self.read_states = self.saved = 0
        self.wrong: list[str] = []
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(act,)) for act in (self._save, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def _page(self, rows: torch.Tensor, at: int) -> torch.Tensor:
        page: torch.Tensor = self.kv.get_data_page(int(rows[at * self.page]))
        return page

    def _state(self, slots: torch.Tensor, at: int) -> torch.Tensor:
        state: torch.Tensor = self.states.get_data_page(int(slots[at]))
        return state

    def _run(self, act: Callable[[], None]) -> None:
        while not self._end.is_set():
            act()

    def _transfer(self, slots: torch.Tensor, at: int) -> PoolTransfer:
        return PoolTransfer(
            PoolName.MAMBA,
            host_indices=slots[at : at + 1],
            keys=[self.keys[STOPS[at]]],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    def _save(self) -> None:
        backend = self.tree.backend
        for at, stop in enumerate(STOPS):
            first = stop - 7
            before = HiCacheStorageExtraInfo(prefix_keys=self.keys[:stop])
            backend.batch_set_v2([self._transfer(self.slots, at)], before)
            rows = self.own[first * self.page : (stop + 1) * self.page]
            before = HiCacheStorageExtraInfo(prefix_keys=self.keys[:first])
            self.saved += sum(backend.batch_set_v1(self.keys[first : stop + 1], rows, before))

    def _read(self) -> None:
        backend = self.tree.backend
        trailing = PoolTransfer(
            PoolName.MAMBA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        found: Any = backend.batch_exists_v2(self.keys, [trailing])
        for pages in found.restorable_prefix_pages:
            if pages - 1 not in STOPS:
                self.wrong.append(f"a boundary that was never saved: {pages}")
        if not found.kv_hit_pages:
            return
        pages = found.kv_hit_pages
        self.kv.kv_buffer[:, self.back] = 0  # Of keys and of values.
        got = backend.batch_get_v1(self.keys[:pages], self.back[: pages * self.page])
        for at in (at for at, came in enumerate(got) if came):
            if not torch.equal(self._page(self.back, at), self.expected[at]):
                self.wrong.append(f"page {at}")
            self.read += 1
        for at in range(len(STOPS)):
            (came,) = backend.batch_get_v2([self._transfer(self.slots_back, at)]).values()
            if came == [True]:
                if not torch.equal(self._state(self.slots_back, at), self.expected_states[at]):
                    self.wrong.append(f"state {at}")
                self.read_states += 1

    def goes_on(self) -> None:
        """Wait until pages and states were saved and read once more."""
        read, states, saved = self.read, self.read_states, self.saved
        wait_until(
            lambda: self.read > read and self.read_states > states and self.saved > saved,
            f"traffic after {read} pages, {states} states, {saved} saves",
        )

    def close(self) -> None:
        """End it."""
        self._end.set()
        for thread in self._threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"


@pytest.mark.timeout(400)
def test_nothing_wrong_comes_back_in_a_storm(node: NodeProcess, new_tree: NewTree) -> None:
    tree = new_tree(node, deadline_s=0.4, wait_s=0.1)
    traffic = Traffic(tree)
    try:
        for _ in range(ROUNDS):
            traffic.goes_on()
            node.kill()
            node.start()
            traffic.goes_on()
            node.send(SIGSTOP)
            node.send(SIGCONT)
            traffic.goes_on()
            tree.backend.clear()
            traffic.goes_on()
            node.send(SIGSTOP)
            tree.prefetch(1, 32)
            node.send(SIGCONT)
    finally:
        traffic.close()
    assert traffic.wrong == []
    counts = tree.backend.figures.counts()
    assert [name for name in counts if name.startswith("errors")] == []
    assert traffic.read > 0
