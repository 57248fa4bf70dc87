"""Commits that bring their checksums: sealed at once, without a word from an executor."""

import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.errors import Fault
from tiercache.testing.sim.rig import Client, Rig, hybrid, small

TOKENS = list(range(20))
SUM = bytes(range(16))


@pytest.fixture
def client() -> Client:
    return Client(Rig(small(nvme_pages=64)), hybrid()).attach()


def granted(client: Client, end: int) -> list[int]:
    grants = client.reserve("r", client.offers(client.chain(TOKENS), end))
    assert {grant.outcome for grant in grants} == {"granted"}
    return [grant.ticket for grant in grants]


def test_what_comes_with_its_sum_can_be_resumed_at_once(client: Client) -> None:
    tickets = granted(client, 8)
    client.rig.tell(ev.Committed(client.session, tickets, [SUM] * len(tickets)))
    assert client.rig.take(cm.Seal) == []
    planned = client.plan("p", client.chain(TOKENS))
    assert (planned.boundary, planned.ready) == (8, True)
    rows = client.rig.ask(ev.ListAsked(900, client.rig.number(), 0, 100, ""), cm.Rows).rows
    assert {row.record.checksum for row in rows} == {SUM}
    assert {row.status for row in rows} == {"sealed"}
    assert client.rig.count("commits") == len(tickets)


def test_the_node_sums_what_comes_without(client: Client) -> None:
    tickets = granted(client, 4)
    checksums = [SUM, b"", SUM]
    client.rig.tell(ev.Committed(client.session, tickets, checksums))
    (seal,) = client.rig.take(cm.Seal)
    assert len(seal.objects) == 1
    assert client.plan("p", client.chain(TOKENS)).boundary == 0
    client.rig.tell(ev.Sealed(seal.job, [SUM]))
    assert client.plan("q", client.chain(TOKENS)).boundary == 4


def test_a_sum_of_another_length_is_not_believed(client: Client) -> None:
    tickets = granted(client, 4)
    client.rig.tell(ev.Committed(client.session, tickets, [b"short"] * len(tickets)))
    (seal,) = client.rig.take(cm.Seal)
    assert len(seal.objects) == len(tickets)


def test_what_was_cleared_before_its_commit_stays_lost(client: Client) -> None:
    tickets = granted(client, 4)
    client.rig.later(ev.ClearAsked(900, client.rig.number(), ""))
    client.rig.run()
    client.rig.tell(ev.Committed(client.session, tickets, [SUM] * len(tickets)))
    assert client.plan("p", client.chain(TOKENS)).boundary == 0
    assert client.rig.count("commits_lost") == len(tickets)
    client.release("p")
    assert client.rig.gauge("bytes", "host") == 0


def test_a_durable_flush_waits_for_what_was_sealed_at_once(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.plan("first", chain)
    client.plan("second", chain)  # Two requests reached the blocks: they earn NVMe.
    tickets = granted(client, 8)
    client.rig.tell(ev.Committed(client.session, tickets, [SUM] * len(tickets)))
    call = client.flushing(durable=True)
    assert client.rig.later(call) is None
    client.rig.run()
    assert client.rig.answers[client.session, call.call] == cm.Flushed(0, 0)
    assert client.rig.gauge("objects", "nvme") == len(tickets)


def test_a_durable_flush_says_what_still_waits_and_what_was_lost(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.plan("first", chain)
    client.plan("second", chain)
    tickets = granted(client, 8)
    client.rig.tell(ev.Committed(client.session, tickets, [SUM] * len(tickets)))
    late = client.flushing(durable=True, wait_s=1.0)
    assert client.rig.later(late) is None
    client.rig.wait(2.0)
    assert client.rig.answers[client.session, late.call] == cm.Flushed(len(tickets), 0)
    failed = client.flushing(durable=True, wait_s=10.0)
    assert client.rig.later(failed) is None
    (store,) = client.rig.take(cm.Store)
    client.rig.tell(ev.Stored(store.job, [Fault.IO] * len(store.objects)))
    assert client.rig.answers[client.session, failed.call] == cm.Flushed(0, len(tickets))
