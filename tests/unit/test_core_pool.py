"""A node and a pool: what goes there, and when."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.depositing import AHEAD_S
from tiercache.errors import Fault
from tiercache.state import Care
from tiercache.testing.sim.asking import EIGHT, loaded, plan
from tiercache.testing.sim.pair import clustered
from tiercache.testing.sim.pooling import at, outcomes, pooled, resumes, told
from tiercache.testing.sim.rig import TOKENS, Client, Rig, boundary, evict, hybrid, on_disk, saved


@pytest.fixture
def client() -> Client:
    """An engine at a node with a pool."""
    return at(pooled())


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


def test_no_more_goes_there_than_may_on_average() -> None:
    client = at(pooled(deposit_bytes_per_s=8))
    saved(client, 8)
    (deposit,) = resumes(client)
    client.rig.tell(cev.Deposited(deposit.job, None))
    nbytes = sum(record.nbytes for record, _ in deposit.objects)
    tokens = other(client, 1)
    for _ in range(2):
        assert boundary(client, tokens) == 8
    client.rig.wait(nbytes / 8 - AHEAD_S - 0.01)
    assert boundary(client, tokens) == 8
    assert client.rig.take(ccm.Deposit) == []
    assert outcomes(client) == {"stored": 1, "too_fast": 2}
    client.rig.wait(0.02)
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
