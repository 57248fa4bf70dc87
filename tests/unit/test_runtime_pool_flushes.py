"""A node and its pool, when something is cleared: a pool in memory, a real machine, no engine process."""

import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.errors import Fault
from tiercache.runtime.pool import service
from tiercache.runtime.pool.service import PoolService
from tiercache.testing.places import MoodyPool, Place, in_touch, run
from tiercache.testing.sim.rig import TOKENS


@pytest.fixture
def pool() -> MoodyPool:
    return MoodyPool()


def test_a_clear_reaches_all_who_share_the_pool(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        namespace = a.engine.namespace.digest
        async with in_touch(monkeypatch, a, b):
            await a.deposited(8)
            b.save(12)
            await b.until(lambda: b.known() == 1)
            asked = ev.ClearAsked(900, a.rig.number(), namespace.hex())
            a.rig.tell(asked)
            a.pump()
            await a.until(lambda: (900, asked.call) in a.rig.answers)
            assert a.rig.answers[900, asked.call] == cm.Evicted(4, 80, 0)
            await b.until(lambda: b.rig.machine.cluster.flush_of(namespace) == 1)
            assert a.carried == b.carried == [{namespace.hex(): 1}]
            assert list(b.rig.machine.items()) == []
            assert (await b.plan()).boundary == 0
            late = Place(pool, "late")
            async with in_touch(monkeypatch, late):
                await late.until(lambda: late.rig.machine.cluster.flush_of(namespace) == 1)
                assert (await late.plan()).boundary == 0
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            assert (await b.plan("again")).boundary == 8

    run(work())


def test_a_node_that_missed_flushes_clears_once_more(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        namespace = a.engine.namespace.digest
        async with in_touch(monkeypatch, a):
            for _ in range(3):
                a.rig.tell(ev.ClearAsked(900, a.rig.number(), namespace.hex()))
                a.pump()
            await a.until(lambda: a.rig.gauge("deposits_open") == 0)
            await a.until(lambda: a.service._following.epoch_of(namespace) == 3)  # type: ignore[union-attr]
        monkeypatch.setattr(service.PoolService, "_refresh_all", _sleeps)
        async with in_touch(monkeypatch, b):
            b.save(8)
            asked = ev.ClearAsked(900, b.rig.number(), namespace.hex())
            b.rig.tell(asked)
            b.save(8)
            b.pump()
            await b.until(lambda: (900, asked.call) in b.rig.answers)
            assert b.carried == [{namespace.hex(): 4}]
            assert b.rig.machine.cluster.flush_of(namespace) == 4
            assert list(b.rig.machine.items()) == [], "what came between belongs to before"

    run(work())


async def _sleeps(of: PoolService, _: object) -> None:
    of.state = "ready"


def test_a_clear_that_the_pool_did_not_hear_of_is_told_later(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        namespace = a.engine.namespace.digest
        async with in_touch(monkeypatch, a, b):
            pool.away = True
            asked = ev.ClearAsked(900, a.rig.number(), namespace.hex())
            a.rig.tell(asked)
            a.pump()
            await a.until(lambda: (900, asked.call) in a.rig.answers)
            answer = a.rig.answers[900, asked.call]
            assert isinstance(answer, cm.Evicted)
            assert answer.failed == "pool"
            pool.away = False
            await b.until(lambda: b.rig.machine.cluster.flush_of(namespace) == 1)

    run(work())


def test_a_pool_that_forgot_a_flush_is_told_again(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a = Place(pool, "a")
        namespace = a.engine.namespace.digest
        async with in_touch(monkeypatch, a):
            asked = ev.ClearAsked(900, a.rig.number(), namespace.hex())
            a.rig.tell(asked)
            a.pump()
            await a.until(lambda: (900, asked.call) in a.rig.answers)
            pool.objects.clear()
            await a.until(lambda: bool(pool.objects))
            late = Place(pool, "late")
            async with in_touch(monkeypatch, late):
                await late.until(lambda: late.rig.machine.cluster.flush_of(namespace) == 1)

    run(work())


def test_nothing_is_used_of_an_epoch_that_the_pool_has_not_confirmed(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a = Place(pool, "a")
        async with in_touch(monkeypatch, a):
            await a.deposited(8)
            locate = ccm.Locate(
                99, POOL, "", "r", a.engine.namespace.digest,
                list(a.engine.chain(TOKENS).digests[1:]), 20, 0, 1, ("native",), False, 7,
            )  # fmt: skip
            heard: list[ev.Event] = []
            monkeypatch.setattr(a, "hear", heard.append)
            a.service.execute(locate)
            a.service.execute(ccm.Deposit(98, a.engine.namespace.digest, 8, bytes(32), 7, []))
            await a.until(lambda: len(heard) == 2)
            assert cev.LocateEnded(99, 0, [], None) in heard
            assert cev.Deposited(98, Fault.IO) in heard

    run(work())
