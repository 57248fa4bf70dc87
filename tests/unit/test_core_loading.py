"""Waiting for the slower tier: loads, fetches, deadlines, and who gets what when things go wrong."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Limits
from tiercache.errors import Fault
from tiercache.testing.sim.rig import (
    ADMIN,
    TOKENS,
    Client,
    Rig,
    evict,
    hybrid,
    on_disk,
    outcome_of,
    small,
    spans,
)


def limits(pages: int = 64, nvme_pages: int = 64) -> Limits:
    return msgspec.structs.replace(small(pages, nvme_pages), eager=True)


@pytest.fixture
def rig() -> Rig:
    return Rig(limits())


@pytest.fixture
def client(rig: Rig) -> Client:
    client = Client(rig, hybrid()).attach()
    on_disk(client, 8, 16)
    return client


def fills(rig: Rig) -> list[cm.Fill]:
    return [command for command in rig.work if isinstance(command, cm.Fill)]


# --- load


def test_a_plan_says_what_waiting_would_give(client: Client) -> None:
    planned = client.plan("r", client.chain(TOKENS))
    assert (planned.boundary, planned.ready, planned.ready_boundary) == (16, False, 0)
    assert planned.pieces == []
    assert len(fills(client.rig)) == 1  # Sent for at once, not at the first load.


def test_what_is_in_memory_already_is_said_too(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.plan("warm", client.chain(TOKENS[:9]))
    client.rig.run()
    planned = client.plan("r", chain)
    assert (planned.boundary, planned.ready, planned.ready_boundary) == (16, False, 8)


def test_a_load_is_answered_when_all_is_there(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    call = client.loading("r")
    assert client.rig.later(call) is None
    assert client.rig.gauge("waiting") == 1
    client.rig.run()
    loaded = client.rig.answers[client.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert (loaded.boundary, loaded.reason) == (16, "")
    assert spans(loaded.pieces) == [
        (0, 0, 4), (0, 4, 8), (0, 8, 12), (0, 12, 16), (1, 0, 16), (2, 0, 16)
    ]  # fmt: skip
    assert client.rig.count("lookups", "hit_nvme") == 1
    assert client.rig.count("hit_tokens", "nvme") == 16


def test_pieces_lead_to_where_the_bytes_are_now(client: Client) -> None:
    """They came back elsewhere: the first place is somebody else's."""
    chain = client.chain(TOKENS)
    client.plan("a", chain)
    client.rig.run()
    before = client.plan("a", chain).pieces
    client.release("a")
    evict(client.rig, "host")
    client.reserve("x", client.offers(client.chain([5] * 20), 8))
    client.plan("r", chain)
    (fill,) = fills(client.rig)
    targets = {(into.segment, into.offset) for _, _, into in fill.objects}
    client.rig.run()
    pieces = client.plan("r", chain).pieces
    assert {(piece.segment, piece.offset) for piece in pieces} == targets
    assert targets != {(piece.segment, piece.offset) for piece in before}


def test_a_load_of_what_is_ready_is_answered_at_once(client: Client) -> None:
    client.plan("warm", client.chain(TOKENS))
    client.rig.run()
    assert client.plan("r", client.chain(TOKENS)).ready
    assert client.rig.ask(client.loading("r"), cm.Loaded).boundary == 16


def test_two_loads_are_one_read(client: Client) -> None:
    other = Client(client.rig, hybrid())
    other.writer = "another engine"
    other.attach()
    calls = []
    for each in (client, other):
        each.plan("r", each.chain(TOKENS))
        call = each.loading("r")
        assert client.rig.later(call) is None
        calls.append((each.session, call.call))
    (fill,) = fills(client.rig)
    assert len(fill.objects) == 6
    client.rig.run()
    for name in calls:
        loaded = client.rig.answers[name]
        assert isinstance(loaded, cm.Loaded)
        assert loaded.boundary == 16
    assert client.rig.count("nvme_read_bytes") == sum(r.nbytes for r, _, _ in fill.objects)


def test_others_get_it_though_the_one_who_sent_for_it_aborts(client: Client) -> None:
    other = Client(client.rig, hybrid())
    other.writer = "another engine"
    other.attach()
    client.plan("r", client.chain(TOKENS))
    other.plan("r", other.chain(TOKENS))
    call = other.loading("r")
    client.rig.later(call)
    client.close()
    client.rig.run()
    loaded = client.rig.answers[other.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert loaded.boundary == 16


def test_a_load_ends_at_its_deadline(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    call = client.loading("r", wait_s=0.5)
    assert client.rig.later(call) is None
    assert client.rig.machine.wakeup() == client.rig.now + 0.5
    client.rig.wait(0.4)
    assert (client.session, call.call) not in client.rig.answers
    client.rig.wait(0.1)
    assert client.rig.answers[client.session, call.call] == cm.Loaded(0, [], "lost_or_late")
    assert client.rig.machine.wakeup() is None
    assert client.rig.count("lookups", "declined") == 1
    client.rig.run()  # It comes late: kept for the next one.
    client.release("r")
    assert client.plan("q", client.chain(TOKENS)).ready


def test_each_load_has_its_own_deadline(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    late, soon = client.loading("r", wait_s=2.0), client.loading("r", wait_s=1.0)
    assert client.rig.later(late) is client.rig.later(soon) is None
    assert client.rig.machine.wakeup() == client.rig.now + 1.0
    client.rig.wait(1.0)
    assert (client.session, soon.call) in client.rig.answers
    assert (client.session, late.call) not in client.rig.answers
    assert client.rig.machine.wakeup() == client.rig.now + 1.0
    client.rig.run()
    client.rig.wait(0.1)
    assert client.rig.machine.wakeup() is None


def test_a_tick_before_its_time_does_nothing(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    call = client.loading("r", wait_s=1.0)
    client.rig.later(call)
    client.rig.tell(ev.Tick())
    assert (client.session, call.call) not in client.rig.answers


def test_no_time_no_wait(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    assert client.rig.ask(client.loading("r", wait_s=0.0), cm.Loaded).boundary == 0


def test_only_so_many_calls_wait() -> None:
    rig = Rig(msgspec.structs.replace(limits(), waiting_max=1))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    client.plan("r", client.chain(TOKENS))
    assert rig.later(client.loading("r")) is None
    assert rig.ask(client.loading("r"), cm.Loaded).reason == "lost_or_late"


def test_what_was_not_planned_is_not_loaded(client: Client) -> None:
    assert client.rig.ask(client.loading("r"), cm.Loaded) == cm.Loaded(0, [], "not_planned")


def test_a_miss_loads_nothing(client: Client) -> None:
    client.plan("r", client.chain([7, 7, 7, 7, 7]))
    assert client.rig.ask(client.loading("r"), cm.Loaded) == cm.Loaded(0, [], "")


def test_a_request_released_while_it_loads_gets_nothing(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    call = client.loading("r")
    client.rig.later(call)
    client.release("r")
    client.rig.run()
    assert client.rig.answers[client.session, call.call] == cm.Loaded(0, [], "released")
    assert client.rig.gauge("leases") == 0
    assert client.rig.count("lookups", "aborted") == 1


def test_a_session_that_ends_waits_no_more(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    call = client.loading("r")
    client.rig.later(call)
    client.close()
    assert client.rig.gauge("waiting") == 0
    client.rig.run()
    assert (client.session, call.call) not in client.rig.answers


# --- faults


@pytest.mark.parametrize("fault", [Fault.DAMAGED, Fault.MISSING, Fault.IO])
def test_one_bad_object_gives_the_boundary_below(client: Client, fault: Fault) -> None:
    client.plan("r", client.chain(TOKENS))
    call = client.loading("r")
    client.rig.later(call)
    (fill,) = client.rig.take(cm.Fill)
    bad = [at for at, (record, _, _) in enumerate(fill.objects) if record.end == 12]
    faults = [fault if at in bad else None for at in range(len(fill.objects))]
    client.rig.tell(ev.Filled(fill.job, faults))
    loaded = client.rig.answers[client.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert (loaded.boundary, loaded.reason) == (0, "lost_or_late")  # State at 8 was not sent for.
    (forget,) = client.rig.take(cm.Forget)
    assert [key.digest for key in forget.keys] == [client.chain(TOKENS).digests[3]]
    assert client.rig.count("nvme_faults", fault.value) == 1
    assert client.rig.count("damaged", "nvme") == (fault is not Fault.IO)
    client.release("r")
    client.plan("q", client.chain(TOKENS))
    client.rig.run()
    assert client.plan("p", client.chain(TOKENS)).boundary == 8


def test_a_bad_object_is_a_miss_only_once_it_is_known(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    client.rig.run(Fault.DAMAGED)
    assert client.plan("q", client.chain(TOKENS)).reason == "unknown_prefix"
    assert client.rig.gauge("bytes", "host") == 0
    client.release("r")


def test_no_room_to_load_into_is_declined() -> None:
    rig = Rig(limits(pages=8))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    blocker = client.reserve("b", client.offers(client.chain([5] * 21), 20))
    assert [grant.outcome for grant in blocker] == ["granted"] * 7
    planned = client.plan("r", client.chain(TOKENS))
    assert (planned.boundary, planned.ready) == (16, False)
    call = client.loading("r")
    rig.later(call)
    rig.run()
    loaded = rig.answers[client.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert loaded.boundary == 0
    client.release("r")
    rig.tell(ev.Cancelled(client.session, [grant.ticket for grant in blocker]))
    client.plan("q", client.chain(TOKENS))
    rig.run()
    assert client.plan("p", client.chain(TOKENS)).ready


def test_making_room_for_one_part_does_not_drop_another() -> None:
    """The session's objects in memory must stay while room is made for those that are not."""
    rig = Rig(limits(pages=6))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    on_disk(client, 16)
    client.plan("warm", client.chain(TOKENS))
    rig.run()
    client.release("warm")
    evicted = rig.ask(ev.EvictAsked(ADMIN, rig.number(), "", "host", 1), cm.Evicted)
    assert evicted.objects == 1
    client.save("other", client.offers(client.chain([5] * 9), 4, parts=["kv"]))
    rig.run()
    assert rig.gauge("objects", "host") == 6
    client.plan("r", chain)
    call = client.loading("r")
    rig.later(call)
    rig.run()
    loaded = rig.answers[client.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert loaded.boundary == 16


def test_a_segment_that_is_read_is_not_dropped() -> None:
    rig = Rig(limits(pages=64, nvme_pages=8))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    client.plan("r", client.chain(TOKENS))
    (fill,) = rig.take(cm.Fill)
    read = {place.segment for _, place, _ in fill.objects}
    client.save("other", client.offers(client.chain([5] * 21), 20))
    rig.run()
    reclaimed = {number for c in rig.work if isinstance(c, cm.Reclaim) for number in c.segments}
    assert not read & reclaimed
    done = outcome_of(fill)
    assert done is not None
    rig.tell(done)
    assert client.plan("r", client.chain(TOKENS)).ready


def test_what_was_dropped_before_the_load_is_lost() -> None:
    rig = Rig(limits(pages=64, nvme_pages=8))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    client.plan("r", client.chain(TOKENS))
    rig.run(Fault.IO)
    answer = rig.ask(client.loading("r"), cm.Loaded)
    assert answer == cm.Loaded(0, [], "lost_or_late")


def test_a_rank_that_loads_what_another_planned(rig: Rig) -> None:
    layout = hybrid(2)
    one, two = (Client(rig, layout, ranks=2, rank=rank).attach() for rank in range(2))
    chain = one.chain(TOKENS)
    for each in (one, two):
        each.save("s", each.offers(chain, 16))
    rig.run()
    evict(rig, "host")
    one.all_ranks = True
    assert not one.plan("r", chain).ready
    two.planned = one.planned
    call = two.loading("r")
    rig.later(call)
    rig.run()
    loaded = rig.answers[two.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert loaded.boundary == 16
    assert {p.shard_start for p in loaded.pieces if p.part == 1} == {1}
    mine = rig.ask(one.loading("r"), cm.Loaded)
    assert {p.shard_start for p in mine.pieces if p.part == 1} == {0}
    assert rig.gauge("leases") == 8 + 8  # Each holds every rank's: the request was planned so.
    assert evict(rig, "host").objects == 0


def test_a_rank_that_loads_makes_room_with_what_it_does_not_need() -> None:
    """It leased nothing before, and its own state was used longest ago of all that is droppable."""
    rig = Rig(limits(pages=9))
    layout = hybrid(2)
    one, two = (Client(rig, layout, ranks=2, rank=rank).attach() for rank in range(2))
    chain = one.chain(TOKENS)
    for each in (one, two):
        each.save("s", each.offers(chain, 16))
    rig.run()
    rows = rig.ask(ev.ListAsked(ADMIN, rig.number(), 0, 100, ""), cm.Rows).rows
    (conv,) = (row.key for row in rows if row.key.split("/")[2:] == ["conv", "1-2", "native"])
    rig.ask(ev.EvictAsked(ADMIN, rig.number(), conv, "host", 0), cm.Evicted)
    one.plan("r", chain)
    junk = one.chain([5] * 12)
    one.save("junk", one.offers(junk, 8, parts=["kv"]))
    rig.run()
    assert rig.gauge("free_largest_bytes", "host") == 0
    two.planned = one.planned
    call = two.loading("r")
    rig.later(call)
    rig.run()
    loaded = rig.answers[two.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert loaded.boundary == 16
