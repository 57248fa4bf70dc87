"""What goes to NVMe, when, and what a disk that fails does to it."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Limits
from tiercache.errors import Fault
from tiercache.testing.sim.rig import PAGE, Client, Rig, hybrid, outcome_of, small

TOKENS = list(range(20))
OTHERS = [5] * 20
ADMIN = 900


def eager(pages: int = 64, nvme_pages: int = 64) -> Limits:
    return msgspec.structs.replace(small(pages, nvme_pages), eager=True)


def attached(limits: Limits) -> Client:
    return Client(Rig(limits), hybrid()).attach()


def save(client: Client, request: str, tokens: list[int] = TOKENS, end: int = 16) -> None:
    client.save(request, client.offers(client.chain(tokens), end))


def stores(rig: Rig) -> list[cm.Store]:
    return [command for command in rig.work if isinstance(command, cm.Store)]


def seal(rig: Rig) -> None:
    for command in rig.take(cm.Seal):
        done = outcome_of(command)
        assert done is not None
        rig.tell(done)


# --- what has earned it


def test_a_first_sight_writes_nothing() -> None:
    client = attached(small(nvme_pages=64))
    client.plan("r", client.chain(TOKENS))
    save(client, "r")
    save(client, "r", end=18)
    client.plan("r", client.chain(TOKENS))
    client.release("r")
    assert client.rig.work == []


def test_a_second_sight_writes_it() -> None:
    client = attached(small(nvme_pages=64))
    client.plan("r", client.chain(TOKENS))
    save(client, "r")
    client.plan("q", client.chain(TOKENS))
    remember, store = client.rig.work
    assert isinstance(remember, cm.Remember)
    assert remember.label == client.namespace.label()
    assert isinstance(store, cm.Store)
    assert [record.end for record, _, _ in store.objects] == [4, 8, 12, 16, 16, 16]
    client.rig.run()
    client.plan("p", client.chain(TOKENS))
    assert client.rig.work == []  # Once.


def test_what_the_second_sight_saves_is_written_too() -> None:
    client = attached(small(nvme_pages=64))
    client.plan("r", client.chain(TOKENS))
    client.plan("q", client.chain(TOKENS))
    save(client, "q")
    (store,) = stores(client.rig)
    assert len(store.objects) == 6


def test_only_what_was_reached_twice_is_written() -> None:
    client = attached(small(nvme_pages=64))
    client.plan("r", client.chain(TOKENS))
    save(client, "r", end=8)
    save(client, "r", end=16)
    client.plan("q", client.chain([*TOKENS[:8], 9, 9, 9, 9]))
    (store,) = stores(client.rig)
    assert {record.end for record, _, _ in store.objects} == {4, 8}


def test_retries_and_ranks_are_one_sight() -> None:
    rig = Rig(small(nvme_pages=64))
    one, two = (Client(rig, hybrid(2), ranks=2, rank=rank).attach() for rank in range(2))
    chain = one.chain(TOKENS)
    for client in (one, two, one, two):
        client.plan("r", chain)
        client.save("r", client.offers(chain, 14))
    assert rig.work == []


def test_where_a_turn_ended_is_seen_by_saving_there() -> None:
    """Decoding goes beyond the prompt: the request that saves there has reached it."""
    client = attached(small(nvme_pages=64))
    client.plan("r", client.chain(TOKENS[:6]))
    save(client, "r", end=14)
    assert client.rig.work == []
    chain = client.chain(TOKENS)
    tails = client.plan("q", chain).candidates
    client.plan("q", chain, tails=tails)
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 6


def test_the_same_prompt_twice_earns_its_end_a_place() -> None:
    """Nobody can resume at a prompt's own end by planning it, but two requests have been there."""
    client = attached(small(nvme_pages=64))
    for request in ("r", "q"):
        client.plan(request, client.chain(TOKENS[:14]))
        save(client, request, end=14)
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 6


def test_eager_writes_at_once() -> None:
    client = attached(eager())
    save(client, "r")
    (store,) = stores(client.rig)
    assert len(store.objects) == 6
    assert client.rig.gauge("writeback_queue") == 6
    client.rig.run()
    assert client.rig.gauge("writeback_queue") == 0
    assert client.rig.gauge("objects", "nvme") == client.rig.gauge("objects", "host") == 6
    assert client.rig.count("writeback_bytes") == 6 * PAGE


def test_without_a_disk_nothing_is_written() -> None:
    client = attached(msgspec.structs.replace(small(), eager=True))
    save(client, "r")
    assert client.rig.work == []
    assert client.rig.gauge("writeback_queue") == 0


def test_what_an_engine_is_told_of_a_namespace_is_remembered_once() -> None:
    client = attached(eager())
    save(client, "r")
    save(client, "q", OTHERS)
    client.salt = "tenant"
    save(client, "s")
    labels = [command.label for command in client.rig.work if isinstance(command, cm.Remember)]
    assert [label.tenant for label in labels] == [
        "-",
        client.namespace.narrow(salt="tenant").tenant,
    ]


# --- the disk's room


def test_batches_are_bounded() -> None:
    limits = msgspec.structs.replace(
        eager(),
        write_back_batch_bytes_max=2 * PAGE,
        write_back_in_flight_bytes_max=4 * PAGE,
    )
    client = attached(limits)
    save(client, "r")
    assert [len(store.objects) for store in stores(client.rig)] == [2, 2]
    first = stores(client.rig)[0]
    client.rig.work.remove(first)
    client.rig.tell(ev.Stored(first.job, [None, None]))
    assert [len(store.objects) for store in stores(client.rig)] == [2, 2]
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 6


def test_the_queue_is_bounded() -> None:
    limits = msgspec.structs.replace(eager(), write_back_objects_max=4)
    client = attached(limits)
    save(client, "r")
    assert client.rig.count("writeback_dropped", "queue_full") == 2
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 4
    client.plan("q", client.chain(TOKENS))  # The next sight finds what is missing.
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 6


def test_the_segment_used_longest_ago_makes_room() -> None:
    client = attached(eager(nvme_pages=8))
    save(client, "r")
    client.rig.run()
    save(client, "q", OTHERS, end=8)
    done = client.rig.run()
    (reclaim,) = [command for command in done if isinstance(command, cm.Reclaim)]
    assert reclaim.segments == [1]
    assert len(reclaim.keys) == 4
    kinds = [type(command) for command in done]
    assert kinds.index(cm.Reclaim) < kinds.index(cm.Store, kinds.index(cm.Reclaim))
    assert client.rig.count("evictions", "nvme") == 4
    assert client.rig.gauge("bytes", "host") == 10 * PAGE  # Memory keeps what the disk dropped.


def test_an_object_larger_than_the_disk_is_not_written() -> None:
    limits = msgspec.structs.replace(eager(nvme_pages=4), nvme_bytes=PAGE - 1)
    client = attached(limits)
    save(client, "r")
    assert client.rig.count("writeback_dropped", "no_room") == 6
    assert client.rig.work == []


def test_a_disk_in_use_is_waited_for() -> None:
    client = attached(eager(nvme_pages=4))
    save(client, "r")
    (store,) = stores(client.rig)
    assert len(store.objects) == 4
    client.rig.run()
    assert client.rig.gauge("writeback_queue") == 0
    assert client.rig.count("evictions", "nvme") == 4


def test_what_left_memory_before_it_was_written_is_dropped() -> None:
    client = attached(eager(pages=6))
    save(client, "a", end=4)
    client.rig.run(Fault.NO_SPACE)
    save(client, "r", OTHERS, end=4)
    assert client.rig.gauge("writeback_queue") == 3
    save(client, "q", [7] * 20, end=4)
    client.rig.wait(client.rig.limits.nvme_pause_s)
    assert client.rig.count("writeback_dropped", "gone") == 0
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 6


# --- faults


def test_a_full_disk_stops_writes_and_they_resume_by_themselves() -> None:
    client = attached(eager())
    save(client, "r")
    (store,) = client.rig.take(cm.Store)
    client.rig.tell(ev.Stored(store.job, [Fault.NO_SPACE] * 6))
    assert client.rig.count("writeback_dropped", "no_space") == 6
    assert client.rig.count("nvme_faults", "no_space") == 6
    assert client.rig.gauge("nvme_paused") == 1.0
    save(client, "q", OTHERS)
    assert stores(client.rig) == []
    assert client.rig.machine.wakeup() == client.rig.now + client.rig.limits.nvme_pause_s
    assert client.plan("p", client.chain(TOKENS)).boundary == 16  # Reads go on.
    client.rig.wait(client.rig.limits.nvme_pause_s - 0.1)
    assert stores(client.rig) == []
    client.rig.wait(0.1)
    assert len(stores(client.rig)) == 1
    client.rig.run()
    assert client.rig.gauge("nvme_paused") == 0.0
    assert client.rig.gauge("objects", "nvme") == 12  # What failed was seen again meanwhile.


def test_a_device_that_fails_loses_only_its_copy() -> None:
    client = attached(eager())
    save(client, "r")
    (store,) = client.rig.take(cm.Store)
    client.rig.tell(ev.Stored(store.job, [None, Fault.IO, None, None, None, None]))
    assert client.rig.gauge("objects", "nvme") == 5
    assert client.rig.gauge("objects", "host") == 6
    assert client.rig.count("writeback_dropped", "io") == 1


def test_a_segment_in_which_nothing_was_written_is_given_back() -> None:
    client = attached(eager())
    save(client, "r", end=4)
    (store,) = client.rig.take(cm.Store)
    client.rig.tell(ev.Stored(store.job, [Fault.IO] * 3))
    (reclaim,) = client.rig.take(cm.Reclaim)
    assert (reclaim.segments, reclaim.keys) == ([1], [])


def test_after_a_fault_the_next_segment_is_written() -> None:
    client = attached(eager())
    save(client, "r", end=4)
    (store,) = client.rig.take(cm.Store)
    client.rig.tell(ev.Stored(store.job, [None, Fault.IO, None]))
    save(client, "q", OTHERS, end=4)
    client.rig.wait(client.rig.limits.nvme_pause_s)
    (again,) = client.rig.take(cm.Store)
    assert {place.segment for _, _, place in again.objects} == {2}


def test_a_background_fault_is_counted() -> None:
    client = attached(eager())
    client.rig.tell(ev.TierFailed(Fault.IO))
    assert client.rig.count("nvme_faults", "io") == 1


# --- dropped while it was being written


def test_what_was_cleared_while_it_was_written_does_not_stay() -> None:
    client = attached(eager())
    save(client, "r")
    (store,) = client.rig.take(cm.Store)
    client.rig.tell(ev.ClearAsked(ADMIN, 1, ""))
    assert client.rig.gauge("bytes", "host") == 6 * PAGE  # It is still being read.
    client.rig.tell(ev.Stored(store.job, [None] * 6))
    assert client.rig.gauge("bytes", "host") == 0
    forgotten = [key for forget in client.rig.take(cm.Forget) for key in forget.keys]
    assert forgotten == [record.key for record, _, _ in store.objects]


def test_what_was_saved_anew_meanwhile_is_not_forgotten() -> None:
    """The first write ends after the second was told to begin: only one of them counts."""
    client = attached(eager())
    save(client, "r", end=4)
    (first,) = client.rig.take(cm.Store)
    client.rig.tell(ev.ClearAsked(ADMIN, 1, ""))
    save(client, "q", end=4)
    (second,) = client.rig.take(cm.Store)
    client.rig.tell(ev.Stored(first.job, [None] * 3))
    assert client.rig.take(cm.Forget) == []
    client.rig.tell(ev.Stored(second.job, [None] * 3))
    assert client.rig.gauge("objects", "nvme") == 3


def test_what_was_saved_anew_and_waits_is_forgotten_before_it_is_written() -> None:
    limits = msgspec.structs.replace(eager(), write_back_in_flight_bytes_max=1)
    client = attached(limits)
    save(client, "r", end=4)
    (first,) = client.rig.take(cm.Store)
    client.rig.tell(ev.ClearAsked(ADMIN, 1, ""))
    save(client, "q", end=4)
    assert stores(client.rig) == []
    client.rig.tell(ev.Stored(first.job, [None] * 3))
    kinds = [type(command) for command in client.rig.work]
    assert kinds.index(cm.Forget) < kinds.index(cm.Store)
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 3


def test_a_damaged_copy_on_disk_is_written_again_when_it_is_seen_again() -> None:
    client = attached(eager())
    save(client, "r", end=4)
    client.rig.run()
    client.rig.tell(ev.VerifyAsked(ADMIN, 1, 0, 100))
    (check,) = client.rig.take(cm.Check)
    faults = [Fault.DAMAGED if tier == "nvme" else None for _, tier, _ in check.objects]
    client.rig.tell(ev.Checked(check.job, faults))
    assert client.rig.gauge("objects", "nvme") == 0
    client.plan("q", client.chain(TOKENS))
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 3


def test_a_copy_found_damaged_while_it_is_read_keeps_its_place() -> None:
    """The read still writes there: the place must not be given to anybody else."""
    client = attached(eager())
    save(client, "r", end=4)
    client.rig.run()
    client.rig.ask(ev.EvictAsked(ADMIN, 1, "", "host", 0), cm.Evicted)
    client.plan("q", client.chain(TOKENS))
    (fill,) = client.rig.take(cm.Fill)
    client.rig.tell(ev.VerifyAsked(ADMIN, 2, 0, 100))
    (check,) = client.rig.take(cm.Check)
    client.rig.tell(ev.Checked(check.job, [Fault.DAMAGED] * 3))
    others = client.reserve("x", client.offers(client.chain(OTHERS), 16))
    targets = {target for _, _, target in fill.objects}
    assert not targets & {grant.extent for grant in others}
    client.rig.tell(ev.Filled(fill.job, [None] * 3))
    assert client.rig.gauge("bytes", "nvme") == 0
    client.release("q")


# --- a cap that was lowered


@pytest.mark.parametrize("busy", [False, True])
def test_a_lowered_cap_is_kept_as_soon_as_it_can_be(*, busy: bool) -> None:
    before = attached(eager())
    save(before, "r")
    (store,) = before.rig.take(cm.Store)
    found = [(record, place) for record, _, place in store.objects]
    rig = Rig(eager(nvme_pages=4), opened=False)
    rig.tell(ev.NvmeOpened({1: 4 * PAGE, 2: 4 * PAGE}, []))
    rig.tell(ev.Found(found))
    client = Client(rig, hybrid()).attach()
    if busy:
        client.plan("q", client.chain(TOKENS))
    rig.tell(ev.ScanEnded())
    reclaimed = [number for each in rig.take(cm.Reclaim) for number in each.segments]
    assert reclaimed == ([] if busy else [1])
    rig.run()
    log = rig.machine._books.log
    assert log.segments_bytes == 4 * PAGE
