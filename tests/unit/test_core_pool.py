"""A node and a pool: what goes there and when, and what comes from there."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import Limits
from tiercache.errors import Fault
from tiercache.state import Care, Record
from tiercache.state.names import short
from tiercache.testing.sim.asking import EIGHT, loaded, plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import (
    TOKENS,
    Client,
    Rig,
    boundary,
    evict,
    hybrid,
    on_disk,
    saved,
    spans,
)


def pooled(pages: int = 64, nvme_pages: int = 0, **changes: float) -> Limits:
    """Return limits of a node that has a pool and no others. All goes to disk at once."""
    limits = clustered(pages, nvme_pages, peers_max=0, pool=True, **changes)
    return msgspec.structs.replace(limits, eager=True)


def at(limits: Limits, **how: int) -> Client:
    """Return an engine at a new node."""
    return Client(Rig(limits), hybrid(how.get("ranks", 1)), **how).attach()


@pytest.fixture
def client() -> Client:
    """An engine at a node with a pool."""
    return at(pooled())


def name_of(client: Client, tokens: int = 8) -> int:
    return short(client.namespace.digest, client.chain(TOKENS).digest_at(tokens))


def told(client: Client, *tokens: int, since: int = -1, version: int = 0) -> None:
    """The pool is known to hold these boundaries."""
    names = [name_of(client, each) for each in tokens]
    client.rig.tell(cev.PeerTold(POOL, "", version, False, names, [], since))


def resumes(client: Client, times: int = 2) -> list[ccm.Deposit]:
    """Resume again and again; return what the pool is given."""
    for _ in range(times):
        assert boundary(client) == 8
    return client.rig.take(ccm.Deposit)


def outcomes(client: Client) -> dict[str, int]:
    return {k: n for k, n in client.rig.machine.counters["deposits"].items() if n}


# --- what goes there


def test_a_boundary_goes_there_as_one_set_at_its_second_resume(client: Client) -> None:
    saved(client, 8)
    assert resumes(client, 1) == []
    (deposit,) = resumes(client, 1)
    digest = client.chain(TOKENS).digest_at(8)
    assert (deposit.boundary, deposit.digest, deposit.flush) == (8, digest, 0)
    assert deposit.namespace == client.namespace.digest
    assert [(r.key.part, r.start, r.end) for r, _ in deposit.objects] == [
        (client.layout.parts[part].name, start, end) for part, start, end in EIGHT
    ]
    assert client.rig.gauge("deposits_open") == 1
    assert resumes(client, 1) == [], "it is on its way"
    client.rig.tell(cev.Deposited(deposit.job, None))
    nbytes = sum(record.nbytes for record, _ in deposit.objects)
    assert outcomes(client) == {"stored": 1}
    assert client.rig.count("deposited_bytes") == nbytes
    told(client, 8)
    assert resumes(client) == [], "it is there"
    assert client.rig.gauge("deposits_open") == client.rig.gauge("deposits_paused") == 0
    assert client.rig.gauge("pool_boundaries") == 1


def test_its_objects_stay_until_the_pool_has_let_go_of_them(client: Client) -> None:
    saved(client, 8)
    (deposit,) = resumes(client)
    assert evict(client.rig).busy == 4
    client.rig.tell(ev.ClearAsked(900, client.rig.number(), client.namespace.digest.hex(), 1))
    assert client.rig.gauge("bytes", "host") > 0
    client.rig.tell(cev.Deposited(deposit.job, None))
    assert client.rig.gauge("bytes", "host") == 0


def test_a_node_without_a_pool_gives_nothing() -> None:
    client = at(clustered(pool=False, peers_max=0))
    saved(client, 8)
    assert resumes(client, 3) == []
    assert client.rig.machine.cluster.known_pool(0) is None
    assert client.rig.gauge("pool_sick") == client.rig.gauge("pool_boundaries") == 0


def test_what_nobody_resumes_stays_here(client: Client) -> None:
    assert client.plan("r", client.chain(TOKENS)).boundary == 0
    client.release("r")
    assert client.plan("s", client.chain(TOKENS)).boundary == 0
    assert client.rig.take(ccm.Deposit) == []


def test_a_boundary_inside_a_block_stays_here(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 6))
    tail = ev.Tail(6, chain.digest_at(6), chain.digests[1])
    for request in "abc":
        assert client.plan(request, chain, tails=[tail]).boundary == 6
        client.release(request)
    assert client.rig.take(ccm.Deposit) == []


def test_a_request_that_stores_nothing_counts_for_nothing(client: Client) -> None:
    saved(client, 8)
    for request in "abc":
        asked = client.planning(request, client.chain(TOKENS))
        asked = msgspec.structs.replace(asked, care=Care(store=False))
        assert client.rig.ask(asked, cm.Planned).boundary == 8
        client.release(request)
    assert client.rig.take(ccm.Deposit) == []


def test_what_has_an_end_of_its_own_stays_here(client: Client) -> None:
    chain = client.chain(TOKENS)
    offers = client.offers(chain, 8)
    event = ev.ReserveAsked(
        client.session, client.rig.number(), "s", "", "", offers, Care(ttl_ms=60_000)
    )
    client.commit(client.rig.ask(event, cm.Reserved).grants)
    client.rig.run()
    assert resumes(client) == []
    assert outcomes(client) == {"ends": 1}


def test_what_comes_from_nvme_goes_there_when_it_has_come() -> None:
    client = at(pooled(nvme_pages=64))
    on_disk(client, 8)
    client.rig.run()
    told_before = resumes(client, 1)
    evict(client.rig)
    found = client.plan("r", client.chain(TOKENS))
    assert (told_before, found.boundary, found.ready) == ([], 8, False)
    assert client.rig.take(ccm.Deposit) == []
    assert outcomes(client) == {}
    client.rig.run()
    assert loaded(client).boundary == 8
    (deposit,) = client.rig.take(ccm.Deposit)
    assert deposit.boundary == 8


def test_what_does_not_come_in_time_is_counted() -> None:
    client = at(pooled(nvme_pages=64))
    on_disk(client, 8)
    client.rig.run()
    resumes(client, 1)
    evict(client.rig)
    client.plan("r", client.chain(TOKENS))
    asked = client.loading("r", 0.0)
    answer = client.rig.later(asked)
    assert isinstance(answer, cm.Loaded)
    assert answer.boundary == 0
    assert client.rig.take(ccm.Deposit) == []


def test_another_rank_without_its_state_in_memory_keeps_it_here() -> None:
    """Rank 0 has loaded its own; what rank 1 needs is still on the disk."""
    rig = Rig(pooled(nvme_pages=64))
    clients = [Client(rig, hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    for client in clients:
        saved(client, 8)
    assert boundary(clients[0]) == 8
    rig.run()
    evict(rig)
    clients[0].plan("r", clients[0].chain(TOKENS))
    rig.run()
    assert loaded(clients[0]).boundary == 8
    assert rig.take(ccm.Deposit) == []
    assert outcomes(clients[0]) == {"absent": 1}


def test_a_set_that_is_cut_in_two_ways_stays_here() -> None:
    """Nobody would look for it."""
    client = at(pooled())
    client.codecs = ("native", "xor")
    chain = client.chain(TOKENS)
    offers = [
        msgspec.structs.replace(offer, codec="xor") if offer.end == 4 else offer
        for offer in client.offers(chain, 8)
    ]
    client.save("s", offers)
    assert resumes(client) == []
    assert outcomes(client) == {"mixed": 1}


def test_parts_may_have_codecs_of_their_own() -> None:
    client = at(pooled())
    client.codecs = ("native", "xor")
    offers = [
        msgspec.structs.replace(offer, codec="xor") if offer.part else offer
        for offer in client.offers(client.chain(TOKENS), 8)
    ]
    client.save("s", offers)
    assert len(resumes(client)) == 1


def test_two_shards_of_a_part_are_one_way_to_cut_it() -> None:
    rig = Rig(pooled())
    clients = [Client(rig, hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    for client in clients:
        saved(client, 8)
    for _ in range(2):
        assert boundary(clients[0]) == 8
    (deposit,) = rig.take(ccm.Deposit)
    assert len(deposit.objects) == 6, "of each block two halves, and two states that all ranks have"


def test_what_takes_too_much_of_the_memory_stays_here() -> None:
    for changes in ({"deposit_share_max": 0.01}, {"peer_objects_max": 3}):
        client = at(pooled(**changes))
        saved(client, 8)
        assert resumes(client) == []
        assert outcomes(client) == {"too_large": 1}


def other(client: Client, number: int) -> list[int]:
    """Return a prompt of its own, whose state is saved."""
    tokens = [number * 100 + each for each in TOKENS]
    saved(client, 8, tokens=tokens)
    return tokens


def test_nothing_waits_for_its_turn() -> None:
    for limits in (pooled(deposits_max=1), pooled(deposit_share_max=4 / 64)):
        client = at(limits)
        saved(client, 8)
        (deposit,) = resumes(client)
        tokens = other(client, 1)
        for _ in range(2):
            assert boundary(client, tokens) == 8
        assert client.rig.take(ccm.Deposit) == []
        assert outcomes(client) == {"busy": 1}
        client.rig.tell(cev.Deposited(deposit.job, None))
        assert boundary(client, tokens) == 8
        assert len(client.rig.take(ccm.Deposit)) == 1


def test_a_pool_that_fails_is_left_alone_for_a_while(client: Client) -> None:
    saved(client, 8)
    (deposit,) = resumes(client)
    client.rig.tell(cev.Deposited(deposit.job, Fault.NO_SPACE))
    assert client.rig.gauge("deposits_paused") == 1
    assert resumes(client, 1) == []
    assert outcomes(client) == {"no_space": 1, "busy": 1}
    client.rig.wait(1.0)
    (again,) = resumes(client, 1)
    client.rig.tell(cev.Deposited(again.job, None))
    assert client.rig.gauge("deposits_paused") == 0


def test_one_that_is_not_asked_is_not_given_anything_either(client: Client) -> None:
    told(client, 12)
    for _ in range(3):
        plan(client)
        (asked,) = client.rig.take(ccm.Locate)
        client.rig.tell(cev.LocateEnded(asked.job, 0, [], Fault.IO))
        client.release("r")
    assert client.rig.gauge("pool_sick") == 1
    saved(client, 8)
    assert resumes(client) == []
    assert client.rig.machine.cluster.known_pool(client.rig.now) == (1, "sick")
    assert outcomes(client) == {"busy": 1}


def test_what_is_cleared_begins_anew(client: Client) -> None:
    saved(client, 8)
    assert resumes(client, 1) == []
    client.rig.tell(ev.ClearAsked(900, client.rig.number(), client.namespace.digest.hex(), 1))
    saved(client, 8)
    assert resumes(client, 1) == []
    (deposit,) = resumes(client, 1)
    assert deposit.flush == 1


def test_as_many_resumes_as_may_be_are_remembered() -> None:
    client = at(pooled(resumes_max=1))
    saved(client, 8)
    tokens = other(client, 1)
    for _ in range(2):
        assert (boundary(client), boundary(client, tokens)) == (8, 8)
    assert client.rig.take(ccm.Deposit) == [], "each forgot the other"
    assert boundary(client, tokens) == 8
    assert len(client.rig.take(ccm.Deposit)) == 1


# --- what comes from there


def given(limits: Limits | None = None) -> list[Record]:
    """Return the records of a set that some node has put there."""
    giver = at(limits or pooled())
    saved(giver, 8)
    (deposit,) = resumes(giver)
    return [record for record, _ in deposit.objects]


def located(client: Client, records: list[Record], boundary: int = 8) -> None:
    """The pool says where a plan that waits could be resumed."""
    (asked,) = client.rig.take(ccm.Locate)
    assert (asked.peer, asked.boot) == (POOL, "")
    client.rig.tell(cev.LocateEnded(asked.job, boundary, records, None))


def test_what_the_pool_holds_is_planned_fetched_and_loaded(client: Client) -> None:
    told(client, 8)
    asked = plan(client)
    located(client, given())
    assert planned(client, asked).boundary == 8
    loading = client.loading("r")
    assert client.rig.later(loading) is None
    (pull,) = client.rig.take(ccm.Pull)
    assert (pull.peer, len(pull.objects), pull.flush) == (POOL, 4, 0)
    client.rig.tell(cev.Pulled(pull.job, [None] * 4))
    came = client.rig.answers[client.session, loading.call]
    assert isinstance(came, cm.Loaded)
    assert (came.boundary, spans(came.pieces)) == (8, EIGHT)
    assert client.rig.count("pool_asked", "found") == 1
    assert client.rig.count("pool_read_bytes") > 0
    assert client.rig.count("peer_asked", "found") == client.rig.count("peer_read_bytes") == 0
    client.release("r")
    assert resumes(client) == [], "it is there already"


def test_what_nobody_put_there_costs_no_question(client: Client) -> None:
    assert boundary(client) == 0
    told(client, 8)
    assert boundary(client, [each + 1 for each in TOKENS]) == 0
    assert client.rig.take(ccm.Locate) == []


def test_what_it_holds_no_more_is_not_asked_for(client: Client) -> None:
    told(client, 8)
    removed = cev.PeerTold(POOL, "", 1, False, [], [name_of(client)], 0)
    client.rig.tell(removed)
    assert boundary(client) == 0
    assert client.rig.machine.cluster.version_of(POOL) == 1
    client.rig.tell(cev.MembersSeen({}))
    assert client.rig.machine.cluster.version_of(POOL) == 1, "it neither joins nor leaves"


def test_what_the_fetch_asks_for_is_of_this_epoch(client: Client) -> None:
    client.rig.tell(cev.FlushesKnown({client.namespace.digest: 7}))
    assert client.rig.machine.cluster.flush_of(client.namespace.digest) == 7
    told(client, 8)
    plan(client)
    located(client, given())
    (pull,) = client.rig.take(ccm.Pull)
    assert pull.flush == 7


def test_a_plan_waits_for_the_pool_as_long_as_it_may() -> None:
    client = at(pooled(pool_answer_s_max=0.5, peer_answer_s_max=0.01))
    told(client, 8)
    asked = plan(client)
    client.rig.wait(0.4)
    assert (client.session, asked.call) not in client.rig.answers
    client.rig.wait(0.2)
    assert planned(client, asked).boundary == 0
    assert client.rig.count("pool_asked", "late") == 1


def test_what_does_not_come_is_a_miss(client: Client) -> None:
    told(client, 8)
    asked = plan(client)
    located(client, given())
    assert planned(client, asked).boundary == 8
    (pull,) = client.rig.take(ccm.Pull)
    faults = [None, Fault.DAMAGED, Fault.MISSING, Fault.IO]
    client.rig.tell(cev.Pulled(pull.job, faults))
    assert loaded(client).boundary == 0
    counts = client.rig.machine.counters["pool_faults"]
    assert (counts["damaged"], counts["missing"], counts["io"]) == (1, 1, 1)


def test_a_node_that_holds_as_much_is_asked_first() -> None:
    nodes = Nodes(a=Rig(clustered(pool=True)), b=Rig(clustered(pool=True)))
    here, there = (Client(nodes.rigs[name], hybrid()).attach() for name in "ab")
    told(here, 8)
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    (asked,) = here.rig.take(ccm.Locate)
    assert asked.peer == "b"
    assert here.rig.gauge("peers") == 1
    told(here, 12, since=0, version=1)
    plan(here, "s")
    (asked,) = here.rig.take(ccm.Locate)
    assert asked.peer == POOL, "it holds more"


def test_a_node_cannot_be_told_to_hand_over_to_it(client: Client) -> None:
    digests = list(client.chain(TOKENS).digests[1:])
    asked = ev.PushAsked(
        client.session, client.rig.number(), "r", "", "", digests, 20, ("native",), False, POOL,
        client.rig.now + 1,
    )  # fmt: skip
    answer = client.rig.ask(asked, cm.Pushed)
    assert answer.reason == "unknown_node"


def test_routers_are_told_of_it(client: Client) -> None:
    told(client, 8)
    asked = cev.WhereAsked(
        client.session, client.rig.number(), b"", "", "", list(client.chain(TOKENS).digests[1:]),
        4, 20, ("native",), False,
    )  # fmt: skip
    here, there = client.rig.ask(asked, ccm.Places).places
    assert (here.boundary, there.node, there.tier, there.boundary) == (0, POOL, "pool", 8)


# --- clears


def cleared(client: Client, namespace: str = "", flush: int = 0) -> ev.ClearAsked:
    asked = ev.ClearAsked(900, client.rig.number(), namespace, flush)
    client.rig.tell(asked)
    return asked


def answer(client: Client, asked: ev.ClearAsked) -> cm.Evicted | None:
    found = client.rig.answers.get((900, asked.call))
    assert found is None or isinstance(found, cm.Evicted)
    return found


def test_a_clear_reaches_the_pool_where_nobody_else_numbers_it(client: Client) -> None:
    saved(client, 8)
    asked = cleared(client)
    assert answer(client, asked) is None, "it is not true yet"
    (flush,) = client.rig.take(ccm.FlushPool)
    assert flush.flushes == {client.namespace.digest: 1}
    assert client.rig.machine.cluster.flush_of(client.namespace.digest) == 1
    client.rig.tell(cev.PoolFlushed(flush.job, None))
    assert answer(client, asked) == cm.Evicted(4, 80, 0)


def test_a_pool_that_was_not_told_is_named(client: Client) -> None:
    asked = cleared(client)
    (flush,) = client.rig.take(ccm.FlushPool)
    client.rig.tell(cev.PoolFlushed(flush.job, Fault.IO))
    found = answer(client, asked)
    assert found is not None
    assert found.failed == "pool"
    assert client.rig.count("pool_faults", "io") == 1


def test_an_answer_waits_for_the_disk_and_for_the_pool() -> None:
    for disk_first in (True, False):
        client = at(pooled(nvme_pages=64))
        asked = cleared(client)
        (flush,) = client.rig.take(ccm.FlushPool)
        (wipe,) = client.rig.take(cm.Wipe)
        outcomes: list[ev.Event] = [ev.Wiped(wipe.job, Fault.IO), cev.PoolFlushed(flush.job, None)]
        for outcome in outcomes if disk_first else outcomes[::-1]:
            assert answer(client, asked) is None
            client.rig.tell(outcome)
        found = answer(client, asked)
        assert found is not None
        assert found.failed == "nvme"


def test_what_nobody_attached_with_here_can_be_cleared_by_its_whole_name(client: Client) -> None:
    elsewhere = bytes(range(32))
    cleared(client, elsewhere.hex())
    (flush,) = client.rig.take(ccm.FlushPool)
    assert flush.flushes == {elsewhere: 1}
    for namespace in ("abc", "z" * 64, elsewhere.hex().upper()):
        asked = cleared(client, namespace)
        assert answer(client, asked) is not None
    assert client.rig.take(ccm.FlushPool) == []


def test_in_a_cluster_flushes_have_numbers_already() -> None:
    client = at(clustered(pool=True))
    for flush in (0, 3):
        asked = cleared(client, client.namespace.digest.hex(), flush)
        assert answer(client, asked) is not None
    assert client.rig.take(ccm.FlushPool) == []
    alone = at(pooled())
    asked = cleared(alone, alone.namespace.digest.hex(), 3)
    assert answer(alone, asked) is not None, "it comes from the pool"
    assert alone.rig.take(ccm.FlushPool) == []


def test_what_engines_serve_is_known(client: Client) -> None:
    assert client.rig.machine.cluster.served() == {client.namespace.digest: client.layout}
    assert Rig(pooled()).machine.cluster.served() == {}
