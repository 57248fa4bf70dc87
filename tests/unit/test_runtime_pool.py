"""A node and its pool, whatever the pool does: a pool in memory, a real machine, no engine process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec
import pytest
import xxhash

from tiercache.config import Settings, parse
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import MIB, Clustering, Limits, Retaining
from tiercache.errors import ConfigError, Fault, StorageFault
from tiercache.runtime.node import Node, Pooled
from tiercache.runtime.pool import errands, service
from tiercache.runtime.pool.opening import NAME, open_store, realm_of
from tiercache.runtime.pool.service import PoolService
from tiercache.settings import Pool
from tiercache.state import Extent
from tiercache.testing.sim.rig import TOKENS, Client, Rig, boundary, hybrid
from tiercache.testing.store_objects import SECRET
from tiercache.tiers.memory import MemoryArena
from tiercache.tiers.remote import Blob, Late, Name
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_store import SealedStore

REFRESH_S = 0.01
WAIT_S = 20.0


class MoodyPool(MemoryPool):
    """A pool that does what the test says. `late`: what it has not let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.late: threading.Event | None = None
        self.asked: list[str] = []
        self.closes = True

    def _fault(self, call: str) -> StorageFault | None:
        self.asked.append(call)
        if self.late is not None and call in {"get", "put"}:
            return Late("it takes its time", self.late)
        return StorageFault(Fault.IO, "away") if self.away else None

    def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        fault = self._fault("put")
        return [fault] * len(blobs) if fault else super().put(blobs, within_s)

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        fault = self._fault("get")
        return [fault] * len(blobs) if fault else super().get(blobs, within_s)

    def heads(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        fault = self._fault("heads")
        return [fault] * len(blobs) if fault else super().heads(blobs, within_s)

    def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
        if fault := self._fault("holds"):
            raise fault
        return super().holds(names, within_s)

    def close(self, within_s: float) -> StorageFault | None:
        return None if self.closes else StorageFault(Fault.IO, "it hangs")


class Place:
    """A node: a machine, an engine at it, memory with bytes in it, and its way to the pool."""

    def __init__(self, pool: MemoryPool, name: str, **changes: object) -> None:
        limits = Limits(
            (MIB,),
            clustering=Clustering(pool=True, pool_answer_s_max=WAIT_S, deposit_resumes_min=1),
            retaining=Retaining("dense", checkpoints_per_path_max=0),
        )
        self.rig = Rig(limits)
        self.engine = Client(self.rig, hybrid()).attach()
        self.arena = MemoryArena([MIB])
        self.store = SealedStore(pool, Realm("test", SECRET))
        settings = parse(
            {"pool": {"kind": "s3", "s3_bucket": "b", "refresh_s": 0.05, **changes}}, "test"
        ).pool
        self.settings = msgspec.structs.replace(settings, refresh_s=REFRESH_S)
        self.heard: list[ev.Event] = []
        self.carried: list[dict[str, int]] = []
        self.service = PoolService(
            self.settings, Realm("test", SECRET), name, self.arena, cast("Node", self)
        )
        self.service.carries = self._carry
        self._changed = asyncio.Event()

    @property
    def machine(self) -> object:
        """As a node's."""
        return self.rig.machine

    def hear(self, event: ev.Event) -> None:
        """As a node's."""
        self.heard.append(event)
        self.rig.tell(event)
        self.pump()

    def _carry(self, flushes: dict[str, int]) -> None:
        self.carried.append(dict(flushes))
        for namespace, number in flushes.items():
            self.hear(ev.ClearAsked(900, self.rig.number(), namespace, number))

    def pump(self) -> None:
        """Have all work done: what seals sums real bytes, what is the pool's goes there."""
        self._changed.set()
        work, self.rig.work = self.rig.work, []
        for command in work:
            match command:
                case cm.Seal(job, objects):
                    sums = [self._sum(extent, nbytes) for extent, nbytes in objects]
                    self.rig.tell(ev.Sealed(job, sums))
                case ccm.Locate() | ccm.Pull() | ccm.Deposit() | ccm.FlushPool():
                    self.service.execute(command)

    def _sum(self, extent: Extent, nbytes: int) -> bytes:
        return xxhash.xxh3_128_digest(self.arena.view(extent)[:nbytes])

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(WAIT_S):
            while not wanted():
                self._changed.clear()
                with_timer = asyncio.create_task(self._changed.wait())
                await asyncio.wait({with_timer}, timeout=REFRESH_S)
                with_timer.cancel()

    def save(self, *ends: int, tokens: list[int] | None = None) -> None:
        """Save what boundaries at these ends rest on: bytes that can be told again."""
        chain = self.engine.chain(tokens or TOKENS)
        for end in ends:
            grants = self.engine.reserve(f"save-{end}", self.engine.offers(chain, end))
            for grant in grants:
                if grant.extent is not None:
                    self.arena.view(grant.extent)[:] = bytes([grant.ticket % 251]) * 4096
            self.engine.commit(grants)
            self.pump()

    def stored(self) -> int:
        return self.rig.count("deposits", "stored")

    async def deposited(self, *ends: int) -> None:
        """Save boundaries, and resume each until the pool has it."""
        for end in ends:
            before = self.stored()
            self.save(end)
            assert self.resume(limit=end) == end
            self.pump()
            await self.until(lambda before=before: self.stored() > before)  # type: ignore[misc]

    def resume(self, limit: int | None = None) -> int:
        found = boundary(self.engine, limit=limit)
        self.pump()
        return found

    async def plan(self, request: str = "r") -> cm.Planned:
        """Ask where a request can resume; what others have is waited for."""
        asked = self.engine.planning(request, self.engine.chain(TOKENS))
        self.rig.tell(asked)
        self.pump()
        await self.until(lambda: (asked.session, asked.call) in self.rig.answers)
        found = self.rig.answers[asked.session, asked.call]
        assert isinstance(found, cm.Planned)
        digest = self.engine.chain(TOKENS).digest_at(found.boundary)
        self.engine.planned[request] = (found.boundary, digest)
        return found

    async def load(self, request: str = "r") -> cm.Loaded:
        asked = self.engine.loading(request, WAIT_S)
        self.rig.tell(asked)
        self.pump()
        await self.until(lambda: (asked.session, asked.call) in self.rig.answers)
        found = self.rig.answers[asked.session, asked.call]
        assert isinstance(found, cm.Loaded)
        return found

    def known(self) -> float:
        return self.rig.gauge("pool_boundaries")


@pytest.fixture
def pool() -> MoodyPool:
    return MoodyPool()


@asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, *places: Place) -> AsyncIterator[None]:
    """All these are in touch with their pool."""
    stores = {id(place.settings): place.store for place in places}
    monkeypatch.setattr(service, "open_store", lambda settings, _: stores[id(settings)])
    tasks = [asyncio.create_task(place.service.run()) for place in places]
    try:
        for place in places:
            await place.until(lambda place=place: place.service.state != "opening")  # type: ignore[misc]
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for place in places:
            await place.service.close(1.0)


def run(work: Awaitable[None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await work

    asyncio.run(within())


def test_what_one_node_put_there_another_one_loads(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with running(monkeypatch, a, b):
            await a.deposited(8, 16)
            await b.until(lambda: b.known() == 2)
            assert (await b.plan()).boundary == 16
            came = await b.load()
            assert came.boundary == 16
            given = {
                (item.slot.part, item.end): bytes(a.arena.view(item.host)[: item.nbytes])
                for item in a.rig.machine.items()
                if item.host is not None
            }
            taken = {
                (item.slot.part, item.end): bytes(b.arena.view(item.host)[: item.nbytes])
                for item in b.rig.machine.items()
                if item.host is not None
            }
            assert taken == {name: given[name] for name in taken}
            assert len(taken) == len(came.pieces)

    run(work())


def test_what_is_not_there_costs_no_call(pool: MoodyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        a = Place(pool, "a", transfer_s_max=5.0)
        async with running(monkeypatch, a):
            assert (await a.plan()).boundary == 0
            assert not [event for event in a.heard if isinstance(event, cev.LocateEnded)]

    run(work())


def lose(pool: MoodyPool, place: Place, part: str, end: int) -> None:
    """Remove one object from the pool, behind everybody's back."""
    (item,) = (
        item for item in place.rig.machine.items() if (item.slot.part, item.end) == (part, end)
    )
    space, epoch = item.key.namespace, place.rig.machine.cluster.flush_of(item.key.namespace)
    name = place.store.at(space, epoch)._name(item.key)
    del pool.objects[name.path]


def test_a_set_that_lost_a_part_is_a_shorter_boundary(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with running(monkeypatch, a, b):
            await a.deposited(8, 16)
            await b.until(lambda: b.known() == 2)
            lose(pool, a, a.engine.layout.parts[1].name, 16)
            assert (await b.plan()).boundary == 8
            assert (await b.load()).boundary == 8
            await b.until(lambda: b.known() == 1)

    run(work())


def test_where_each_look_costs_a_request_large_sets_are_believed_until_they_come(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(errands.LOOKED_MAX, "memory", 1)

    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with running(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            lose(pool, a, a.engine.layout.parts[1].name, 8)
            assert (await b.plan()).boundary == 8
            assert (await b.load()).boundary == 0
            assert b.rig.count("pool_faults", "missing") == 1

    run(work())


def test_damaged_bytes_are_a_miss(pool: MoodyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with running(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            for path, whole in pool.objects.items():
                if b"\x00" not in whole[1024:]:  # Neither a page nor a manifest.
                    pool.objects[path] = whole[:-1] + bytes([whole[-1] ^ 1])
            assert (await b.plan()).boundary in {0, 8}
            assert (await b.load()).boundary == 0
            assert b.rig.count("pool_faults", "damaged") + b.rig.count("pool_asked", "found") > 0

    run(work())


def test_a_pool_that_is_away_is_a_miss_and_comes_back(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with running(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            pool.away = True
            await b.until(lambda: b.service.state.startswith("unreachable"))
            assert (await b.plan("one")).boundary == 0
            assert b.rig.count("pool_asked", "failed") == 1
            pool.away = False
            await b.until(lambda: b.service.state == "ready")
            assert (await b.plan("two")).boundary == 8
            assert (await b.load("two")).boundary == 8

    run(work())


def test_a_pool_that_lost_everything_is_told_again_by_who_resumes(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with running(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            pool.objects.clear()
            await a.until(lambda: a.known() == 0)
            await b.until(lambda: b.known() == 0)
            assert a.resume() == 8
            await b.until(lambda: b.known() == 1)

    run(work())


def test_a_name_that_another_writer_undid_is_said_again(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with running(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            key = a.service._following._followed[a.engine.namespace.digest].pages._keys  # type: ignore[union-attr]
            for each in key:
                pool.objects.pop(a.store._name(each).path, None)
            before = len(pool.objects)
            await a.until(lambda: len(pool.objects) > before)
            await b.until(lambda: b.known() == 1)

    run(work())


# --- memory


def late_pull(pool: MoodyPool, place: Place) -> list[Fault | None]:
    record = next(iter(place.rig.machine.items())).record
    asked = ccm.Pull(1, POOL, "", [(record, Extent(0, 0, 4096))], 0)
    return errands.fetch(place.store, place.arena, asked, 1.0)


def test_a_fetch_that_is_late_ends_when_the_pool_has_let_go(pool: MoodyPool) -> None:
    async def work() -> None:
        a = Place(pool, "a")
        a.save(8)
        pool.late = threading.Event()
        fetching = asyncio.create_task(asyncio.to_thread(late_pull, pool, a))
        done, _ = await asyncio.wait({fetching}, timeout=0.2)
        assert not done, "it may still write there"
        pool.late.set()
        assert await fetching == [Fault.IO]

    run(work())


def test_a_deposit_that_is_late_ends_when_the_pool_has_let_go(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a = Place(pool, "a")
        async with running(monkeypatch, a):
            await a.until(lambda: a.service.state == "ready")
            a.save(8)
            pool.late = threading.Event()
            assert a.resume() == 8
            await a.until(lambda: "put" in pool.asked)
            assert a.rig.gauge("deposits_open") == 1
            evicted = a.rig.ask(ev.EvictAsked(900, a.rig.number(), "", "", 0), cm.Evicted)
            assert (evicted.objects, evicted.busy) == (0, 4)
            pool.late.set()
            await a.until(lambda: a.rig.gauge("deposits_open") == 0)
            assert a.rig.count("deposits", "io") == 1

    run(work())


def test_a_pool_that_does_not_let_go_at_the_end_is_no_clean_end(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a = Place(pool, "a")
        async with running(monkeypatch, a):
            pool.closes = False
            assert not await a.service.close(0.1)
            assert await a.service.close(0.1), "once is enough"
        assert await Place(pool, "b").service.close(0.1), "one that was never opened"

    run(work())


# --- flushes


def test_a_clear_reaches_all_who_share_the_pool(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        namespace = a.engine.namespace.digest
        async with running(monkeypatch, a, b):
            await a.deposited(8)
            b.save(12)
            await b.until(lambda: b.known() == 1)
            asked = ev.ClearAsked(900, a.rig.number(), namespace.hex())
            a.rig.tell(asked)
            a.pump()
            await a.until(lambda: (900, asked.call) in a.rig.answers)
            assert a.rig.answers[900, asked.call] == cm.Evicted(4, 80, 0)
            await b.until(lambda: b.rig.machine.cluster.flush_of(namespace) == 1)
            assert b.carried == [{namespace.hex(): 1}]
            assert list(b.rig.machine.items()) == []
            assert (await b.plan()).boundary == 0
            late = Place(pool, "late")
            async with running(monkeypatch, late):
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
        async with running(monkeypatch, a):
            for _ in range(3):
                a.rig.tell(ev.ClearAsked(900, a.rig.number(), namespace.hex()))
                a.pump()
            await a.until(lambda: a.rig.gauge("deposits_open") == 0)
            await a.until(lambda: a.service._following.epoch_of(namespace) == 3)  # type: ignore[union-attr]
        monkeypatch.setattr(service.PoolService, "_refresh_all", _sleeps)
        async with running(monkeypatch, b):
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
        async with running(monkeypatch, a, b):
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


def test_nothing_is_used_of_an_epoch_that_the_pool_has_not_confirmed(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a = Place(pool, "a")
        async with running(monkeypatch, a):
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


# --- the end, and the beginning


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        (
            ccm.Locate(1, POOL, "", "r", bytes(32), [], 0, 0, 1, ("native",), False, 0),
            cev.LocateEnded(1, 0, [], Fault.IO),
        ),
        (ccm.Pull(2, POOL, "", [], 0), cev.Pulled(2, [])),
        (ccm.Deposit(3, bytes(32), 8, bytes(32), 0, []), cev.Deposited(3, Fault.IO)),
        (ccm.FlushPool(4, {}), cev.PoolFlushed(4, Fault.IO)),
    ],
)
def test_before_the_beginning_and_after_the_end_all_fails_at_once(
    pool: MoodyPool, command: Pooled, outcome: ev.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a = Place(pool, "a")
        heard: list[ev.Event] = []
        monkeypatch.setattr(a, "hear", heard.append)
        a.service.execute(command)
        assert heard == [], "not while the core decides"
        await a.until(lambda: heard == [outcome])

    run(work())


def test_ways_to_cut_a_state() -> None:
    layout = hybrid(4)
    locate = ccm.Locate(
        1, POOL, "", "r", bytes(32), [], 0, 0, 2, ("native", "xor", "native"), False, 0
    )
    one = list(errands.cuts_of(layout, locate))
    assert len(one) == len(set(one)) == 2 ** len(layout.parts)
    any_ranks = list(errands.cuts_of(layout, msgspec.structs.replace(locate, reshard=True)))
    assert any_ranks[: len(one)] == one
    assert len(any_ranks) > len(one)


def test_whose_objects_these_are(tmp_path: Path) -> None:
    settings = Settings().pool
    assert realm_of(settings, "") == Realm(NAME)
    assert realm_of(settings, "prod") == Realm("prod")
    secret = tmp_path / "secret"
    secret.write_bytes(b"sixteen bytes, or more\n")
    named = msgspec.structs.replace(settings, name="own", secret_file=str(secret))
    assert realm_of(named, "prod") == Realm("own", b"sixteen bytes, or more")
    secret.write_bytes(b"short")
    with pytest.raises(ConfigError, match="at least 16"):
        realm_of(named, "prod")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "s3"}, "s3_bucket"),
        ({"kind": "mooncake"}, "mooncake_master"),
        ({"s3_access_key_file": "/a"}, "both"),
        ({"kind": "tape"}, "kind"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse({"pool": changes}, "test")


def test_keys_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\xff\xfe")
    settings = Pool(
        kind="s3", s3_bucket="b", s3_access_key_file=str(path), s3_secret_key_file=str(path)
    )
    with pytest.raises(ConfigError, match="no text"):
        open_store(settings, Realm("test"))
