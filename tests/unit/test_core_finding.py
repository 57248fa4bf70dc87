"""A warm start: what an earlier one left is found while clients are served."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.errors import Fault
from tiercache.state import Extent, Record
from tiercache.testing.sim.rig import PAGE, Client, Rig, hybrid, small

TOKENS = list(range(20))
ADMIN = 900
LIMITS = msgspec.structs.replace(small(nvme_pages=64), eager=True)
Stored = list[tuple[Record, Extent]]


@pytest.fixture
def left() -> Stored:
    """What an earlier start stored."""
    client = Client(Rig(LIMITS), hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    (store,) = client.rig.take(cm.Store)
    return [(record, place) for record, _, place in store.objects]


@pytest.fixture
def rig() -> Rig:
    return Rig(LIMITS, opened=False)


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


def opened(rig: Rig, segments: int = 2) -> None:
    rig.tell(ev.NvmeOpened(dict.fromkeys(range(1, segments + 1), 4 * PAGE), []))


def boundary(client: Client) -> int:
    request = f"ask-{client.rig.number()}"
    planned = client.plan(request, client.chain(TOKENS))
    client.release(request)
    return planned.boundary


def test_what_was_stored_is_found_again(rig: Rig, client: Client, left: Stored) -> None:
    assert boundary(client) == 0
    opened(rig)
    rig.tell(ev.Found(left[:3]))
    assert boundary(client) == 0
    rig.tell(ev.Found(left[3:]))
    assert boundary(client) == 16  # Before the scan has ended.
    rig.tell(ev.ScanEnded())
    rig.run()
    assert client.plan("r", client.chain(TOKENS)).ready
    assert rig.take(cm.Store) == []  # The same content is not written again.


def test_it_is_found_before_anybody_attaches(rig: Rig, left: Stored) -> None:
    opened(rig)
    rig.tell(ev.Found(left))
    rows = rig.ask(ev.ListAsked(ADMIN, 1, 0, 100, ""), cm.Rows).rows
    assert [(row.kind, row.label, row.layout) for row in rows] == [("", None, "")] * 6
    client = Client(rig, hybrid()).attach()
    assert boundary(client) == 16


def test_what_a_namespace_is_called_is_known_again(rig: Rig, left: Stored) -> None:
    client = Client(rig, hybrid())
    rig.tell(ev.NvmeOpened({1: 4 * PAGE, 2: 4 * PAGE}, [(client.namespace.label(), hybrid())]))
    rig.tell(ev.Found(left))
    rows = rig.ask(ev.ListAsked(ADMIN, 1, 0, 100, ""), cm.Rows).rows
    assert {row.label for row in rows} == {client.namespace.label()}
    assert [row.kind for row in rows] == ["kv"] * 4 + ["recurrent", "conv"]


def test_nothing_is_written_before_the_disk_is_open(rig: Rig, client: Client) -> None:
    client.save("r", client.offers(client.chain(TOKENS), 16))
    assert rig.work == []
    assert rig.gauge("writeback_queue") == 6
    opened(rig)
    (store,) = rig.take(cm.Store)
    assert {place.segment for _, _, place in store.objects} == {3, 4}


def test_found_twice_is_found_once(rig: Rig, client: Client, left: Stored) -> None:
    opened(rig)
    rig.tell(ev.Found([*left, *left]))
    rig.tell(ev.Found(left))
    assert rig.gauge("objects", "nvme") == 6
    assert rig.take(cm.Forget) == []
    assert boundary(client) == 16


def test_what_was_saved_anew_counts(rig: Rig, client: Client, left: Stored) -> None:
    """The old copy is forgotten, before the new one is written."""
    client.save("r", client.offers(client.chain(TOKENS), 16))
    opened(rig)
    (store,) = rig.take(cm.Store)
    rig.tell(ev.Found(left))
    assert rig.take(cm.Forget) == []  # It was told to write it anew already.
    rig.tell(ev.Stored(store.job, [None] * 6))
    rig.tell(ev.Found(left))
    assert rig.take(cm.Forget) == []
    assert rig.gauge("objects", "nvme") == 6
    assert {place.segment for _, place in left} == {1, 2}
    found = rig.ask(ev.ListAsked(ADMIN, 1, 0, 100, ""), cm.Rows).rows
    assert {row.nvme.segment for row in found if row.nvme is not None} == {3, 4}


def test_what_could_not_be_written_anew_is_forgotten(
    rig: Rig, client: Client, left: Stored
) -> None:
    """Else the old copy would be found at the next start, whatever became of it here."""
    client.save("r", client.offers(client.chain(TOKENS), 16))
    opened(rig)
    (store,) = rig.take(cm.Store)
    rig.tell(ev.Found(left))
    rig.tell(ev.Stored(store.job, [Fault.NO_SPACE] * 6))
    forgotten = [key for forget in rig.take(cm.Forget) for key in forget.keys]
    assert forgotten == [record.key for record, _ in left]


def test_what_is_being_written_by_a_client_counts(rig: Rig, client: Client, left: Stored) -> None:
    client.reserve("r", client.offers(client.chain(TOKENS), 16))
    opened(rig)
    rig.tell(ev.Found(left))
    (forget,) = rig.take(cm.Forget)
    assert forget.keys == [record.key for record, _ in left]
    assert rig.gauge("objects", "nvme") == 0


def test_an_entry_that_cannot_be_is_forgotten(rig: Rig, client: Client, left: Stored) -> None:
    opened(rig, segments=1)
    rig.tell(ev.Found(left))
    rig.tell(ev.ScanEnded())
    (forget,) = rig.take(cm.Forget)
    assert forget.keys == [record.key for record, place in left if place.segment == 2]
    assert boundary(client) == 0


def test_an_entry_in_a_segment_of_this_start_is_old(rig: Rig, client: Client, left: Stored) -> None:
    """Its number was used again: what is there now is something else."""
    opened(rig, segments=0)
    client.save("r", client.offers(client.chain([9] * 20), 16))
    rig.run()
    rig.tell(ev.Found(left))
    assert len(rig.take(cm.Forget)[0].keys) == 6
    assert boundary(client) == 0


@pytest.mark.parametrize("nbytes", [0, -1, PAGE + 1])
def test_an_entry_with_a_size_that_cannot_be(
    rig: Rig, client: Client, left: Stored, nbytes: int
) -> None:
    opened(rig)
    record, place = left[0]
    wrong = Record(record.key, 0, 4, nbytes, record.checksum, "", 0.0)
    rig.tell(ev.Found([(wrong, place)]))
    assert rig.take(cm.Forget)[0].keys == [record.key]
    assert boundary(client) == 0


def test_entries_that_disagree_about_a_digest(rig: Rig, client: Client, left: Stored) -> None:
    opened(rig)
    (kv, where), (state, there) = left[3], left[4]
    assert kv.key.digest == state.key.digest
    moved = Record(state.key, 0, 12, state.nbytes, state.checksum, "", 0.0)
    rig.tell(ev.Found([(kv, where), (moved, there)]))
    assert rig.take(cm.Forget)[0].keys == [state.key]
    assert boundary(client) == 0


# --- clears


def test_a_clear_before_the_disk_is_open_holds(rig: Rig, client: Client, left: Stored) -> None:
    client.save("r", client.offers(client.chain([9] * 20), 16))
    assert rig.later(ev.ClearAsked(ADMIN, 1, "")) is None
    assert rig.work == []
    opened(rig)
    rig.tell(ev.Found(left))
    (forget,) = rig.take(cm.Forget)
    assert len(forget.keys) == 6
    assert boundary(client) == 0
    assert (ADMIN, 1) not in rig.answers
    rig.tell(ev.ScanEnded())
    (wipe,) = rig.take(cm.Wipe)
    rig.tell(ev.Wiped(wipe.job, None))
    assert rig.answers[ADMIN, 1] == cm.Evicted(6, 144, 0)


def test_a_clear_during_the_scan_holds(rig: Rig, client: Client, left: Stored) -> None:
    opened(rig)
    rig.tell(ev.Found(left[:3]))
    assert rig.later(ev.ClearAsked(ADMIN, 1, "")) is None
    assert len(rig.take(cm.Forget)[0].keys) == 3
    rig.tell(ev.Found(left))
    assert len(rig.take(cm.Forget)[0].keys) == 6
    client.save("q", client.offers(client.chain(TOKENS), 16))
    assert boundary(client) == 16  # What is saved after a clear stays.
    rig.tell(ev.Found(left))
    rig.tell(ev.ScanEnded())
    rig.run()
    answer = rig.answers[ADMIN, 1]
    assert isinstance(answer, cm.Evicted)
    assert (answer.objects, answer.failed) == (3, "")
    assert boundary(client) == 16
    assert rig.gauge("objects", "nvme") == 6


def test_another_namespace_is_not_cleared(rig: Rig, client: Client, left: Stored) -> None:
    rig.later(ev.ClearAsked(ADMIN, 1, "no namespace starts like this"))
    opened(rig)
    rig.tell(ev.Found(left))
    assert boundary(client) == 16


def test_a_clear_that_the_disk_did_not_take_in_says_so(rig: Rig, left: Stored) -> None:
    opened(rig)
    rig.tell(ev.Found(left))
    rig.later(ev.ClearAsked(ADMIN, 1, ""))
    rig.tell(ev.TierFailed(Fault.IO))
    rig.tell(ev.ScanEnded())
    rig.run()
    assert rig.answers[ADMIN, 1] == cm.Evicted(6, 144, 0, "nvme")


@pytest.mark.parametrize("found", [False, True])
def test_a_disk_that_fails_is_read_as_far_as_it_was_found(
    rig: Rig, client: Client, left: Stored, *, found: bool
) -> None:
    client.save("q", client.offers(client.chain([9] * 20), 16))
    flush = client.flushing(durable=True)
    assert rig.later(flush) is None
    rig.later(ev.ClearAsked(ADMIN, 1, "nothing"))
    if found:
        opened(rig)
        rig.take(cm.Store)
        rig.tell(ev.Found(left))
    else:
        client.save("p", client.offers(client.chain([8] * 20), 16))
    rig.tell(ev.NvmeFailed(Fault.IO))
    assert rig.answers[ADMIN, 1] == cm.Evicted(0, 0, 0, "nvme")
    if not found:
        assert rig.answers[client.session, flush.call] == cm.Flushed(0, 6)
        assert rig.count("writeback_dropped", "io") == 12
    client.save("s", client.offers(client.chain([7] * 20), 16))
    assert rig.take(cm.Store) == []
    assert boundary(client) == (16 if found else 0)
    assert rig.count("nvme_faults", "io") == 1
    cleared = rig.ask(ev.ClearAsked(ADMIN, 2, ""), cm.Evicted)
    assert cleared.failed == "nvme"
    assert len(rig.take(cm.Forget)) == found
