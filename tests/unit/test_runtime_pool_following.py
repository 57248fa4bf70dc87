"""What a node knows of a pool, when looks at it, errands and changes of mind meet."""

import asyncio
import threading
from collections.abc import Awaitable, Sequence

import pytest

from tiercache.core import events as ev
from tiercache.core.cluster import events as cev
from tiercache.errors import Fault, StorageFault
from tiercache.runtime.pool import errands
from tiercache.runtime.pool.following import LEFT_MAX, Following, Look
from tiercache.runtime.pool.service import PoolService
from tiercache.state import Boundary
from tiercache.state.names import short
from tiercache.testing.places import WAIT_S, MoodyPool, Place, in_touch
from tiercache.testing.store_objects import OTHER, SECRET
from tiercache.tiers.remote import Name
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_sets import Sought
from tiercache.tiers.remote_store import SealedStore

NAMESPACE = bytes(32)
SOUGHT = Sought(Boundary(8, b"d" * 32), "c" * 32)
NAME = short(NAMESPACE, SOUGHT.boundary.digest)


class Told:
    """A node's view of a pool, and what it told the core."""

    def __init__(self, pool: MemoryPool, names_max: int = 10, told_max: int = 10) -> None:
        self.names: set[int] = set()
        store = SealedStore(pool, Realm("test", SECRET))
        self.following = Following(store, "a", names_max, told_max, self._hear)

    def _hear(self, event: cev.PeerTold) -> None:
        self.names = self.names - set(event.removed) | set(event.added)


def test_a_look_that_ends_too_late_tells_nothing() -> None:
    """Nobody would ever take back what was told of a namespace that is not followed any more."""
    told = Told(MemoryPool())
    following = told.following
    found = following.follow(NAMESPACE, 0)
    look = following.look(NAMESPACE, found, WAIT_S)
    following.leave(set())
    following.looked(NAMESPACE, found, look._replace(names={1, 2}, version=9))
    assert told.names == set()
    again = following.follow(NAMESPACE, 0)
    following.looked(NAMESPACE, found, look._replace(names={1, 2}, version=9))
    assert told.names == set()
    following.looked(NAMESPACE, again, look._replace(names={1, 2}, version=9))
    assert told.names == {1, 2}
    following.leave(set())
    assert told.names == set()


def test_what_is_announced_while_one_looks_stays_known() -> None:
    class Meanwhile(MemoryPool):
        def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
            there = super().holds(names, within_s)
            told.following.announced(NAMESPACE, 0, Sought(*SOUGHT))
            return there

    told = Told(Meanwhile(), names_max=1)
    found = told.following.follow(NAMESPACE, 0)
    told.following.announced(NAMESPACE, 0, SOUGHT)
    look = told.following.look(NAMESPACE, found, WAIT_S)
    assert look.gone == {NAME}
    told.following.looked(NAMESPACE, found, look)
    assert told.names == {NAME}


def test_what_is_gone_is_told_at_once() -> None:
    told = Told(MemoryPool())
    found = told.following.follow(NAMESPACE, 0)
    told.following.announced(NAMESPACE, 0, SOUGHT)
    assert told.names == {NAME}
    told.following.looked(NAMESPACE, found, told.following.look(NAMESPACE, found, WAIT_S))
    assert told.names == set()


def test_what_the_core_has_no_room_for_is_told_when_it_has() -> None:
    told = Told(MemoryPool(), told_max=5)
    following, first, second = told.following, set(range(4)), set(range(10, 14))
    for namespace, names in ((NAMESPACE, first), (OTHER, second)):
        found = following.follow(namespace, 0)
        following.looked(namespace, found, Look(0, names, 1))
    assert (len(told.names), told.names & first) == (5, first)
    assert following.names(OTHER, 0) == told.names - first
    following.leave({OTHER})
    assert len(told.names) == 1
    following.looked(OTHER, following.follow(OTHER, 0), Look(0, second, 1))
    assert told.names == second
    following.leave(set())
    assert told.names == set()


def test_what_is_left_of_flushes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = StorageFault(Fault.IO, "away")
    monkeypatch.setattr(MemoryPool, "remove_before", lambda *_: fault)
    following = Told(MemoryPool()).following
    for number in range(LEFT_MAX + 3):
        following._forget(number.to_bytes(32), 1, WAIT_S)
    assert len(following._left) == LEFT_MAX
    monkeypatch.undo()
    for _ in range(LEFT_MAX):
        following.tidy(WAIT_S)
    assert following.is_tidy


# --- in a node


def run(work: Awaitable[None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await work

    asyncio.run(within())


async def cleared(place: Place) -> None:
    asked = ev.ClearAsked(900, place.rig.number(), place.engine.namespace.digest.hex())
    place.rig.tell(asked)
    place.pump()
    await place.until(lambda: (900, asked.call) in place.rig.answers)


def test_what_a_clear_had_no_time_to_remove_goes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, refused = MoodyPool(), [StorageFault(Fault.IO, "no time")] * 2

    def remove_before(space: str, epoch: int, within_s: float) -> StorageFault | None:
        return refused.pop() if refused else MoodyPool.remove_before(pool, space, epoch, within_s)

    async def work() -> None:
        a = Place(pool, "a")
        async with in_touch(monkeypatch, a):
            await a.deposited(8)
            monkeypatch.setattr(pool, "remove_before", remove_before)
            space = a.store._realm.space(a.engine.namespace.digest)
            old = f"{space}/{0:016x}/"
            assert any(path.startswith(old) for path in pool.objects)
            await cleared(a)
            await a.until(lambda: not any(path.startswith(old) for path in list(pool.objects)))

    run(work())


def test_what_is_taken_back_keeps_no_clear_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sets the pool has lost, and however slow it is then."""
    go_on, begun = threading.Event(), threading.Event()

    def retract(*_: object) -> None:
        begun.set()
        assert go_on.wait(3 * WAIT_S)

    async def work() -> None:
        pool = MoodyPool()
        a, b = Place(pool, "a"), Place(pool, "b")
        try:
            async with in_touch(monkeypatch, a, b):
                await a.deposited(8)
                await b.until(lambda: b.known() == 1)
                monkeypatch.setattr(errands, "retract", retract)
                monkeypatch.setattr(errands, "find", nothing)
                assert (await b.plan()).boundary == 0
                await b.until(begun.is_set)
                await cleared(b)
                go_on.set()
        finally:
            go_on.set()

    def nothing(*_: object) -> errands.Found:
        return errands.Found(0, [], [SOUGHT])

    run(work())


def test_a_namespace_that_always_fails_does_not_keep_the_others_from_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        a = Place(MoodyPool(), "a")
        looked: list[bytes] = []

        async def refresh(_: PoolService, following: Following, namespace: bytes) -> None:
            del following
            looked.append(namespace)
            if namespace == NAMESPACE:
                raise StorageFault(Fault.IO, "always")

        served = dict.fromkeys((NAMESPACE, OTHER, a.engine.namespace.digest))
        monkeypatch.setattr(PoolService, "_refresh", refresh)
        monkeypatch.setattr(a.rig.machine.cluster, "served", lambda: served)
        async with in_touch(monkeypatch, a):
            await a.until(lambda: set(looked) == set(served) and looked.count(NAMESPACE) > 1)
            assert a.service.state == "unreachable: io: always"

    run(work())
