"""What becomes of what was granted: commits, endings, flushes."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.errors import Fault
from tiercache.testing.sim.rig import (
    PAGE,
    TOKENS,
    Client,
    Rig,
    boundary,
    hybrid,
    outcome_of,
    outcomes,
    small,
)

OTHERS = [5] * 20


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


# --- commits


def test_a_commit_is_believed_once(client: Client) -> None:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    client.commit(grants)
    client.commit(grants)
    assert client.rig.count("commits_lost") == 6
    assert len(client.rig.take(cm.Seal)) == 1
    client.rig.tell(ev.Committed(client.session, []))
    assert client.rig.take(cm.Seal) == []


def test_what_comes_with_its_checksum_is_sealed_at_once(client: Client) -> None:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    tickets = [grant.ticket for grant in grants]
    sums = [b"%16d" % ticket for ticket in tickets]
    client.rig.tell(ev.Committed(client.session, tickets, sums))
    assert client.rig.work == []
    assert boundary(client) == 16
    assert client.rig.count("commits") == 6
    assert client.rig.ask(client.flushing(), cm.Flushed) == cm.Flushed(0, 0)
    rows = client.rig.ask(ev.ListAsked(900, 1, 0, 100, ""), cm.Rows).rows
    assert [row.record.checksum for row in rows] == sums


def test_some_come_with_their_checksums(client: Client) -> None:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    tickets = [grant.ticket for grant in grants]
    sums = [b"%16d" % ticket for ticket in tickets[:3]] + [b"", b"short", b"x" * 17]
    client.rig.tell(ev.Committed(client.session, tickets, sums))
    (seal,) = client.rig.take(cm.Seal)
    assert [extent for extent, _ in seal.objects] == [grant.extent for grant in grants[3:]]
    assert boundary(client) == 0
    done = outcome_of(seal)
    assert done is not None
    client.rig.tell(done)
    assert boundary(client) == 16


@pytest.mark.parametrize("count", [1, 5, 7])
def test_checksums_that_are_not_one_for_each_say_nothing(client: Client, count: int) -> None:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    tickets = [grant.ticket for grant in grants]
    client.rig.tell(ev.Committed(client.session, tickets, [b"%16d" % 1] * count))
    (seal,) = client.rig.take(cm.Seal)
    assert len(seal.objects) == 6


def test_a_checksum_does_not_bring_back_what_was_cleared(client: Client) -> None:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    tickets = [grant.ticket for grant in grants]
    client.rig.tell(ev.ClearAsked(900, 1, ""))
    client.rig.tell(ev.Committed(client.session, tickets, [b"%16d" % 1] * 6))
    assert client.rig.gauge("bytes", "host") == 0
    assert client.rig.count("commits_lost") == 6


def test_anothers_ticket_is_not_believed(rig: Rig, client: Client) -> None:
    other = Client(rig, hybrid()).attach()
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    other.commit(grants)
    rig.tell(ev.Cancelled(other.session, [grant.ticket for grant in grants]))
    assert rig.take(cm.Seal) == []
    client.commit(grants)
    rig.run()
    assert boundary(client) == 16


def test_a_commit_after_a_clear_is_lost(client: Client) -> None:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    client.rig.tell(ev.ClearAsked(900, 1, ""))
    assert client.rig.gauge("bytes", "host") == 6 * PAGE  # Its writer may be writing.
    client.commit(grants)
    assert client.rig.gauge("bytes", "host") == 0
    assert client.rig.ask(client.flushing(), cm.Flushed) == cm.Flushed(0, 6)
    assert client.rig.ask(client.flushing(), cm.Flushed) == cm.Flushed(0, 0)


def test_a_clear_while_it_is_sealed_loses_it(client: Client) -> None:
    client.commit(client.reserve("r", client.offers(client.chain(TOKENS), 16)))
    client.rig.tell(ev.ClearAsked(900, 1, ""))
    client.rig.run()
    assert client.rig.gauge("bytes", "host") == 0
    assert client.rig.ask(client.flushing(), cm.Flushed).lost == 6
    assert client.rig.count("commits") == 0


def test_a_clear_after_its_writer_ended_loses_it_quietly(client: Client) -> None:
    client.commit(client.reserve("r", client.offers(client.chain(TOKENS), 16)))
    client.close()
    client.rig.tell(ev.ClearAsked(900, 1, ""))
    client.rig.run()
    assert client.rig.gauge("bytes", "host") == 0


# --- who ends, and what they may still touch


def test_a_client_that_dies_gives_everything_back(client: Client) -> None:
    client.save("r", client.offers(client.chain(TOKENS), 16))
    client.plan("r", client.chain(TOKENS))
    client.reserve("q", client.offers(client.chain(OTHERS), 16))
    client.close()
    assert (client.rig.gauge("leases"), client.rig.gauge("reservations")) == (0, 0)
    assert client.rig.gauge("bytes", "host") == 6 * PAGE
    assert client.rig.gauge("quarantined_bytes") == 0


def test_a_client_that_may_live_on_keeps_what_it_may_touch(rig: Rig, client: Client) -> None:
    """Its connection is gone, but its process may be frozen in the middle of a copy."""
    client.save("r", client.offers(client.chain(TOKENS), 16))
    client.plan("r", client.chain(TOKENS))
    client.reserve("q", client.offers(client.chain(OTHERS), 16))
    client.close(acknowledged=False)
    assert rig.gauge("quarantined_bytes") == 12 * PAGE
    assert rig.gauge("sessions") == 0
    other = Client(rig, hybrid()).attach()
    wide = [other.offers(other.chain([n] * 20), 16) for n in range(30, 50)]
    for number, offers in enumerate(wide):
        other.save(f"w{number}", offers)
    assert rig.gauge("quarantined_bytes") == 12 * PAGE
    assert boundary(other) == 16
    # The keys it had reserved are free, at other places.
    assert outcomes(other.save("again", other.offers(other.chain(OTHERS), 16))) == {"granted": 6}
    rig.tell(ev.Gone(client.session))
    assert rig.gauge("quarantined_bytes") == 0
    rig.tell(ev.Gone(client.session))
    rig.tell(ev.Gone(12345))


def test_what_was_committed_before_the_end_is_kept(client: Client) -> None:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    client.commit(grants)
    client.close(acknowledged=False)
    client.rig.run()
    other = Client(client.rig, hybrid()).attach()
    assert boundary(other) == 16


def test_an_old_reservation_is_taken_back_when_somebody_asks(rig: Rig, client: Client) -> None:
    """Its owner is connected, but frozen: its key is free, its memory is not."""
    other = Client(rig, hybrid()).attach()
    offers = client.offers(client.chain(TOKENS), 16)
    first = client.reserve("r", offers)
    rig.now += rig.limits.lease_s_max - 1
    assert outcomes(other.reserve("q", offers)) == {"busy": 6}
    rig.now += 2
    second = other.reserve("q", offers)
    assert outcomes(second) == {"granted": 6}
    assert not {g.extent for g in first} & {g.extent for g in second}
    client.commit(first)  # It wakes, and is told that it came too late.
    assert rig.count("commits_lost") == 6
    other.commit(second)
    rig.run()
    assert boundary(other) == 16
    assert rig.gauge("bytes", "host") == 6 * PAGE


def test_what_is_being_sealed_is_not_taken_back(rig: Rig, client: Client) -> None:
    offers = client.offers(client.chain(TOKENS), 16)
    client.commit(client.reserve("r", offers))
    rig.now += 1000
    assert outcomes(client.reserve("q", offers)) == {"busy": 6}


# --- flushes


def test_a_flush_waits_for_what_was_committed(client: Client) -> None:
    assert client.rig.ask(client.flushing(), cm.Flushed) == cm.Flushed(0, 0)
    client.commit(client.reserve("r", client.offers(client.chain(TOKENS), 16)))
    call = client.flushing()
    assert client.rig.later(call) is None
    client.rig.run()
    assert client.rig.answers[client.session, call.call] == cm.Flushed(0, 0)


def test_a_flush_does_not_wait_for_others(rig: Rig, client: Client) -> None:
    other = Client(rig, hybrid()).attach()
    other.commit(other.reserve("r", other.offers(other.chain(TOKENS), 16)))
    assert rig.ask(client.flushing(), cm.Flushed) == cm.Flushed(0, 0)


def test_a_flush_ends_at_its_deadline(client: Client) -> None:
    client.commit(client.reserve("r", client.offers(client.chain(TOKENS), 16)))
    call = client.flushing(wait_s=1.0)
    client.rig.later(call)
    assert client.rig.machine.wakeup() == client.rig.now + 1.0
    client.rig.wait(1.0)
    assert client.rig.answers[client.session, call.call] == cm.Flushed(6, 0)
    client.rig.run()


def test_a_session_that_ends_flushes_no_more(client: Client) -> None:
    client.commit(client.reserve("r", client.offers(client.chain(TOKENS), 16)))
    call = client.flushing()
    client.rig.later(call)
    client.close()
    client.rig.run()
    assert (client.session, call.call) not in client.rig.answers
    assert client.rig.machine.wakeup() is None


def test_only_so_many_flushes_wait() -> None:
    rig = Rig(msgspec.structs.replace(small(), waiting_max=1))
    client = Client(rig, hybrid()).attach()
    client.commit(client.reserve("r", client.offers(client.chain(TOKENS), 16)))
    assert rig.later(client.flushing()) is None
    assert rig.ask(client.flushing(), cm.Flushed) == cm.Flushed(6, 0)


@pytest.mark.parametrize("fault", [None, Fault.IO, Fault.NO_SPACE])
def test_a_durable_flush_waits_until_it_is_stored(fault: Fault | None) -> None:
    rig = Rig(msgspec.structs.replace(small(nvme_pages=64), eager=True))
    client = Client(rig, hybrid()).attach()
    client.commit(client.reserve("r", client.offers(client.chain(TOKENS), 16)))
    call = client.flushing(durable=True)
    assert rig.later(call) is None
    for seal in rig.take(cm.Seal):
        done = outcome_of(seal)
        assert done is not None
        rig.tell(done)
    assert (client.session, call.call) not in rig.answers
    rig.run(fault)
    lost = 0 if fault is None else 6
    assert rig.answers[client.session, call.call] == cm.Flushed(0, lost)


def test_a_durable_flush_is_told_what_was_dropped_unstored() -> None:
    """The pool is too small to hold it until the disk is written again."""
    limits = msgspec.structs.replace(small(pages=6, nvme_pages=64), eager=True)
    rig = Rig(limits)
    client = Client(rig, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 4, parts=["kv"]))
    rig.run(Fault.NO_SPACE)
    client.save("r", client.offers(client.chain(TOKENS), 16, start=4, parts=["kv"]))
    call = client.flushing(durable=True, wait_s=60.0)
    assert rig.later(call) is None
    client.save("x", client.offers(client.chain(OTHERS), 20, parts=["kv"]))
    rig.wait(limits.nvme_pause_s)
    assert rig.count("writeback_dropped", "gone") == 2
    rig.run()
    assert rig.answers[client.session, call.call] == cm.Flushed(0, 2)


def test_a_durable_flush_without_a_disk_is_a_flush(client: Client) -> None:
    client.save("r", client.offers(client.chain(TOKENS), 16))
    assert client.rig.ask(client.flushing(durable=True), cm.Flushed) == cm.Flushed(0, 0)
