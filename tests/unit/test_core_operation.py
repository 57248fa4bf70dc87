"""What operators ask: pages, eviction, clearing, verification, figures."""

import time

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.operation import Selector
from tiercache.errors import Fault
from tiercache.testing.sim.rig import PAGE, Client, Rig, hybrid, small

TOKENS = list(range(20))
OTHERS = [5] * 20
ADMIN = 900


@pytest.fixture
def rig() -> Rig:
    return Rig(msgspec.structs.replace(small(nvme_pages=64), eager=True))


@pytest.fixture
def client(rig: Rig) -> Client:
    """A client that saved 6 objects, now in memory and on disk."""
    client = Client(rig, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    rig.run()
    return client


def page(rig: Rig, cursor: int = 0, count: int = 1000, prefix: str = "") -> cm.Rows:
    return rig.ask(ev.ListAsked(ADMIN, rig.number(), cursor, count, prefix), cm.Rows)


def evict(rig: Rig, tier: str = "", nbytes: int = 0, prefix: str = "") -> cm.Evicted:
    return rig.ask(ev.EvictAsked(ADMIN, rig.number(), prefix, tier, nbytes), cm.Evicted)


def clear(rig: Rig, namespace: str = "") -> cm.Evicted:
    call = rig.number()
    rig.later(ev.ClearAsked(ADMIN, call, namespace))
    rig.run()
    answer = rig.answers[ADMIN, call]
    assert isinstance(answer, cm.Evicted)
    return answer


# --- lists


def test_a_row_says_all_that_is_known(rig: Rig, client: Client) -> None:
    client.plan("q", client.chain(TOKENS))
    row = page(rig).rows[0]
    record = row.record
    assert row.key == str(record.key)
    assert (row.kind, row.status, row.leases, row.sights) == ("kv", "sealed", 1, 2)
    assert row.label == client.namespace.label()
    assert row.layout == client.layout.fingerprint
    assert row.host is not None
    assert row.nvme is not None
    assert (record.start, record.end, record.nbytes, record.writer) == (0, 4, 32, "engine")
    assert (record.sealed_at, len(record.checksum)) == (1e9 + rig.now, 16)


def test_what_is_not_sealed_yet_is_listed_as_that(rig: Rig) -> None:
    client = Client(rig, hybrid()).attach()
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 4))
    client.commit(grants[:1])
    assert [row.status for row in page(rig).rows] == ["sealing", "writing", "writing"]


def test_pages_hold_everything_once(rig: Rig, client: Client) -> None:
    keys: list[str] = []
    cursor = 0
    for _ in range(4):
        rows = page(rig, cursor, count=2)
        keys += [row.key for row in rows.rows]
        cursor = rows.cursor
        if not cursor:
            break
    assert len(set(keys)) == len(keys) == 6
    assert client.rig is rig


def test_a_page_goes_on_where_the_last_one_ended_whatever_went(rig: Rig, client: Client) -> None:
    first = page(rig, count=3)
    evict(rig, prefix=first.rows[2].key)
    client.save("q", client.offers(client.chain(OTHERS), 4, parts=["kv"]))
    second = page(rig, first.cursor)
    assert len(second.rows) == 4
    assert second.cursor == 0
    assert page(rig, cursor=10**9) == cm.Rows([], 0)


@pytest.mark.parametrize("count", [0, -5, 1])
def test_a_page_has_at_least_one_row(rig: Rig, client: Client, count: int) -> None:
    assert len(page(rig, count=count).rows) == 1
    assert client.rig is rig


def test_pages_are_bounded() -> None:
    limits = msgspec.structs.replace(small(), list_rows_max=2, list_scan_max=4)
    rig = Rig(limits)
    client = Client(rig, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    assert len(page(rig).rows) == 2
    nothing = page(rig, prefix="nothing like this")
    assert (nothing.rows, nothing.cursor) == ([], 4)  # Looked at four, found none, goes on.
    assert page(rig, nothing.cursor, prefix="nothing like this").cursor == 0


def test_objects_are_selected_by_the_start_of_their_key(rig: Rig, client: Client) -> None:
    client.salt = "tenant"
    client.save("s", client.offers(client.chain(TOKENS), 8))
    rows = page(rig).rows
    assert len(rows) == 10
    for row in rows:
        for end in (3, 12, 13, 14, 40, 77, 78, 80, len(row.key)):
            prefix = row.key[:end]
            expected = [each.key for each in rows if each.key.startswith(prefix)]
            assert [each.key for each in page(rig, prefix=prefix).rows] == expected
    for digest in [shelf.hex() for shelf in rig.machine._books.catalog.shelves]:
        expected = [each.key for each in rows if each.key.startswith(digest[:12])]
        for longer in (digest[:13], digest):  # A key's text has its first 12 digits only.
            assert [each.key for each in page(rig, prefix=longer).rows] == expected
        assert page(rig, prefix=f"{digest[:-1]}{'10'[digest[-1] == '1']}").rows == []
    name = rows[0].key[:12]
    for wrong in (f"{name}/xyz", f"{name}/ 12", f"{name.upper()}/", f"{name[:5]}/", "/", "//"):
        assert page(rig, prefix=wrong).rows == []


def test_selecting_among_many_is_quick(rig: Rig) -> None:
    client = Client(rig, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 4))
    item = next(iter(rig.machine._books.catalog))
    selector = Selector(f"{str(item.key)[:12]}/{'ab' * 32}/kv")
    started = time.perf_counter()
    assert not any(selector.matches(item) for _ in range(100_000))
    assert time.perf_counter() - started < 1.0


# --- evict


@pytest.mark.parametrize(
    ("tier", "left"),
    [("", (0, 0)), ("host", (0, 6)), ("nvme", (6, 0)), ("elsewhere", (6, 6))],
)
def test_eviction_by_tier(rig: Rig, client: Client, tier: str, left: tuple[int, int]) -> None:
    done = evict(rig, tier)
    assert (done.objects, done.busy) == (0 if left == (6, 6) else 6, 0)
    assert (rig.gauge("objects", "host"), rig.gauge("objects", "nvme")) == left
    forgotten = sum(len(forget.keys) for forget in rig.take(cm.Forget))
    assert forgotten == 6 - left[1]
    assert client.plan("q", client.chain(TOKENS)).boundary == (16 if any(left) else 0)


def test_one_tier_after_the_other(rig: Rig, client: Client) -> None:
    evict(rig, "host")
    done = evict(rig)
    assert (done.objects, done.nbytes) == (6, 4 * 32 + 2 * 8)
    assert rig.gauge("bytes", "host") == rig.gauge("bytes", "nvme") == 0
    assert client.rig is rig


def test_memory_alone_is_gone_for_good(rig: Rig) -> None:
    plain = Rig(small())
    client = Client(plain, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    assert evict(plain, "nvme").objects == 0
    assert evict(plain, "host").objects == 6
    assert page(plain).rows == []
    assert plain.count("evictions", "host") == 6
    assert rig is not plain


def test_eviction_stops_when_it_freed_enough(rig: Rig, client: Client) -> None:
    assert evict(rig, "host", nbytes=1).objects == 1
    assert evict(rig, "host", nbytes=40).objects in {2, 3}
    assert evict(rig, "host", nbytes=-1).objects == 0
    assert client.rig is rig


def test_what_is_used_stays_and_is_counted(rig: Rig, client: Client) -> None:
    client.plan("q", client.chain(TOKENS[:9]))  # Nothing at 8: no lease.
    client.plan("p", client.chain(TOKENS))
    client.reserve("o", client.offers(client.chain(OTHERS), 4))
    client.save("s", client.offers(client.chain(OTHERS), 8, start=4, parts=["kv"]))
    assert evict(rig).busy == 6 + 3 + 1
    client.release("p")
    assert evict(rig) == cm.Evicted(6, 2 * (4 * 32 + 2 * 8), 4)


def test_an_empty_segment_is_given_back(rig: Rig, client: Client) -> None:
    evict(rig, "nvme")
    reclaimed = [number for each in rig.take(cm.Reclaim) for number in each.segments]
    assert reclaimed == [1, 2]
    client.save("q", client.offers(client.chain(OTHERS), 4))
    (store,) = rig.take(cm.Store)
    assert {place.segment for _, _, place in store.objects} == {3}


# --- clear


def test_a_clear_is_answered_when_it_is_true(rig: Rig, client: Client) -> None:
    call = rig.number()
    assert rig.later(ev.ClearAsked(ADMIN, call, "")) is None
    assert client.plan("q", client.chain(TOKENS)).reason == "unknown_prefix"  # At once.
    wipe = next(command for command in rig.work if isinstance(command, cm.Wipe))
    assert len(wipe.keys) == 6
    rig.run()
    assert rig.answers[ADMIN, call] == cm.Evicted(6, 144, 0)
    assert rig.gauge("bytes", "host") == rig.gauge("bytes", "nvme") == 0


@pytest.mark.parametrize(("cleared", "wiped"), [("", 6), ("0" * 64, 0)])
def test_what_was_dropped_on_its_way_to_the_disk_is_cleared_too(
    rig: Rig, cleared: str, wiped: int
) -> None:
    """It would be found there by the next start."""
    client = Client(rig, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    stores = rig.take(cm.Store)
    rig.tell(ev.ClearAsked(ADMIN, rig.number(), ""))  # Leaves nothing in the catalog.
    rig.take(cm.Wipe)
    rig.tell(ev.ClearAsked(ADMIN, rig.number(), cleared))
    (wipe,) = rig.take(cm.Wipe)
    assert len(wipe.keys) == wiped
    for store in stores:
        rig.tell(ev.Stored(store.job, [None] * len(store.objects)))


def test_a_clear_that_fails_names_the_tier(rig: Rig, client: Client) -> None:
    call = rig.number()
    rig.later(ev.ClearAsked(ADMIN, call, ""))
    (wipe,) = rig.take(cm.Wipe)
    rig.tell(ev.Wiped(wipe.job, Fault.IO))
    answer = rig.answers[ADMIN, call]
    assert isinstance(answer, cm.Evicted)
    assert answer.failed == "nvme"
    assert rig.count("nvme_faults", "io") == 1
    assert client.rig is rig


def test_one_namespace_is_cleared(rig: Rig, client: Client) -> None:
    client.salt = "tenant"
    client.save("s", client.offers(client.chain(TOKENS), 16))
    rig.run()
    assert clear(rig, "nothing starts like this").objects == 0
    assert clear(rig, client.namespace.digest.hex()[:20]).objects == 6
    assert client.plan("q", client.chain(TOKENS)).boundary == 16
    client.salt = ""
    assert client.plan("q", client.chain(TOKENS)).boundary == 0


def test_what_is_leased_while_it_is_cleared_stays_readable(rig: Rig, client: Client) -> None:
    planned = client.plan("q", client.chain(TOKENS))
    assert clear(rig).busy == 6
    assert rig.gauge("bytes", "host") == 6 * PAGE
    client.save("x", client.offers(client.chain(OTHERS), 16))
    rig.run()
    taken = {(piece.segment, piece.offset) for piece in planned.pieces}
    rows = page(rig).rows
    assert not taken & {(row.host.segment, row.host.offset) for row in rows if row.host}
    client.release("q")
    assert rig.gauge("bytes", "host") == 6 * PAGE
    assert rig.machine._books.doomed == set()


def test_a_clear_forgets_sights_and_plans(rig: Rig, client: Client) -> None:
    client.plan("q", client.chain(TOKENS))
    clear(rig)
    assert rig.gauge("sights") == 0
    assert rig.ask(client.loading("q"), cm.Loaded).reason == "not_planned"
    client.plan("p", client.chain(TOKENS))
    assert rig.gauge("sights") == 5


def test_a_clear_leaves_the_plans_of_other_namespaces(rig: Rig, client: Client) -> None:
    client.salt = "tenant"
    client.plan("q", client.chain(TOKENS))
    clear(rig, client.namespace.digest.hex())
    assert rig.ask(client.loading("q"), cm.Loaded).reason == ""


def test_a_clear_while_objects_come_back(rig: Rig, client: Client) -> None:
    evict(rig, "host")
    client.plan("q", client.chain(TOKENS))
    call = client.loading("q")
    rig.later(call)
    (fill,) = rig.take(cm.Fill)
    clear(rig)
    rig.tell(ev.Filled(fill.job, [None] * 6))
    assert rig.answers[client.session, call.call] == cm.Loaded(0, [], "released")
    client.release("q")
    assert rig.gauge("bytes", "host") == 0
