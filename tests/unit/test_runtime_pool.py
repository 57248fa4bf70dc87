"""A node and its pool, whatever the pool does: a pool in memory, a real machine, no engine process."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tiercache.config import Settings, parse
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.errors import ConfigError, Fault, StorageFault
from tiercache.runtime.log import KeyValues
from tiercache.runtime.node import Pooled
from tiercache.runtime.pool import errands
from tiercache.runtime.pool.opening import NAME, open_store, realm_of
from tiercache.settings import Pool
from tiercache.state import Extent
from tiercache.testing.places import MoodyPool, Place, in_touch, path_of, run
from tiercache.testing.sim.rig import Client, hybrid
from tiercache.tiers.remote import Blob
from tiercache.tiers.remote_sealed import Realm


@pytest.fixture
def pool() -> MoodyPool:
    return MoodyPool()


def test_what_one_node_put_there_another_one_loads(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with in_touch(monkeypatch, a, b):
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
        async with in_touch(monkeypatch, a):
            assert (await a.plan()).boundary == 0
            assert not [event for event in a.heard if isinstance(event, cev.LocateEnded)]

    run(work())


def test_a_set_that_lost_a_part_is_a_shorter_boundary(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with in_touch(monkeypatch, a, b):
            await a.deposited(8, 16)
            await b.until(lambda: b.known() == 2)
            del pool.objects[path_of(a, a.engine.layout.parts[1].name, 16)]
            assert (await b.plan()).boundary == 8
            assert (await b.load()).boundary == 8
            await b.until(lambda: b.known() == 1)

    run(work())


def test_what_was_lost_is_put_there_again_by_who_has_it(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with in_touch(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            path = path_of(a, a.engine.layout.parts[1].name, 8)
            del pool.objects[path]
            assert (await b.plan()).boundary == 0
            await a.until(lambda: a.known() == 0)
            assert a.resume() == 8
            await a.until(lambda: a.stored() == 2)
            assert path in pool.objects

    run(work())


def test_a_library_that_raises_is_a_pool_that_fails(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = "https://key:hidden@host"

    def raises(*_: object) -> None:
        raise RuntimeError(said)

    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with in_touch(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            for call in ("get", "put", "holds", "heads"):
                monkeypatch.setattr(pool, call, raises)
            assert (await b.plan()).boundary == 0
            assert b.rig.count("pool_asked", "failed") == 1
            a.save(12)
            assert a.resume(limit=12) == 12
            await a.until(lambda: a.rig.count("deposits", "io") == 1)
            await b.until(lambda: b.service.state == "unreachable: io: RuntimeError")

    run(work())
    assert "the pool's library failed: RuntimeError" in caplog.text
    assert said not in caplog.text


def test_why_nothing_goes_there_is_said(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(blobs: Sequence[Blob], within_s: float) -> list[StorageFault]:
        assert within_s > 0
        return [StorageFault(Fault.IO, "names can be taken twice")] * len(blobs)

    async def work() -> None:
        a = Place(pool, "a")
        async with in_touch(monkeypatch, a):
            monkeypatch.setattr(pool, "put", refuses)
            a.save(8)
            assert a.resume(limit=8) == 8
            await a.until(lambda: a.rig.count("deposits", "io") > 0)

    run(work())
    (line,) = map(KeyValues().format, caplog.records)
    assert 'event="nothing went to the pool" reason="io: names can be taken twice"' in line


def test_an_engine_that_is_split_otherwise_takes_what_others_put_there(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a", units=2), Place(pool, "b", units=2)
        half = Client(b.rig, b.engine.layout, ranks=2, rank=0).attach()
        half.reshard = True
        b.engine = half
        async with in_touch(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            assert (await b.plan()).boundary == 8
            assert (await b.load()).boundary == 8

    run(work())


def test_where_each_look_costs_a_request_large_sets_are_believed_until_they_come(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(errands.LOOKED_MAX, "memory", 1)

    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with in_touch(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            del pool.objects[path_of(a, a.engine.layout.parts[1].name, 8)]
            assert (await b.plan()).boundary == 8
            assert (await b.load()).boundary == 0
            assert b.rig.count("pool_faults", "missing") == 1

    run(work())


def test_damaged_bytes_are_a_miss(pool: MoodyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with in_touch(monkeypatch, a, b):
            await a.deposited(8)
            await b.until(lambda: b.known() == 1)
            path = path_of(a, a.engine.layout.parts[1].name, 8)
            whole = pool.objects[path]
            pool.objects[path] = whole[:-1] + bytes([whole[-1] ^ 1])
            assert (await b.plan()).boundary == 8
            assert (await b.load()).boundary == 0
            assert b.rig.count("pool_faults", "damaged") == 1
            assert path not in pool.objects, "it has room again"

    run(work())


def test_a_pool_that_is_away_is_a_miss_and_comes_back(
    pool: MoodyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        a, b = Place(pool, "a"), Place(pool, "b")
        async with in_touch(monkeypatch, a, b):
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
        async with in_touch(monkeypatch, a, b):
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
        async with in_touch(monkeypatch, a, b):
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
        async with asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(asyncio.to_thread(late_pull, pool, a))
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
        async with in_touch(monkeypatch, a):
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
        async with in_touch(monkeypatch, a):
            pool.closes = False
            assert not await a.service.close(0.1)
            assert await a.service.close(0.1), "once is enough"
        assert await Place(pool, "b").service.close(0.1), "one that was never opened"

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
