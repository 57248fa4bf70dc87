"""Three nodes: what one has no more, another one may have; and where one ends, another one goes on."""

import msgspec
import pytest

from tests.unit.sources import WAIT_S, answered, at, first, three, told
from tiercache.core import commands as cm
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import MIB
from tiercache.core.search import Search, Seat
from tiercache.errors import Fault
from tiercache.testing.sim.asking import loaded, plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, evict, hybrid, saved


@pytest.fixture
def nodes() -> Nodes:
    return three()


@pytest.fixture
def here(nodes: Nodes) -> Client:
    return at(nodes, "a")


# --- one has not what it told, another has


@pytest.mark.parametrize("fault", [None, Fault.IO])
def test_when_one_has_nothing_the_next_one_is_asked(
    nodes: Nodes, here: Client, fault: Fault | None
) -> None:
    for name in "bc":
        saved(at(nodes, name), 8)
        nodes.gossip(name)
    asked = plan(here)
    question = first(nodes)
    if fault is None:
        evict(nodes.rigs[question.peer])
    answered(nodes, question, fault)
    assert (here.session, asked.call) not in here.rig.answers
    second = first(nodes)
    assert second.peer != question.peer
    assert second.whole == 0
    answered(nodes, second)
    found = planned(here, asked)
    assert (found.boundary, found.ready) == (8, False)
    assert nodes.pull("a") == 4
    assert loaded(here).boundary == 8
    outcome = "failed" if fault else "not_found"
    assert here.rig.count("peer_asked", outcome) == here.rig.count("peer_asked", "found") == 1


def test_when_one_has_less_than_it_told_another_goes_on_and_sends_only_the_rest(
    nodes: Nodes, here: Client
) -> None:
    """Both of one prompt, in one plan: nothing is sent twice."""
    saved(at(nodes, "b"), 8)
    saved(at(nodes, "c"), 8, 12)
    for name in "bc":
        nodes.gossip(name)
    told(here, "b", 8, 16)
    asked = plan(here)
    question = first(nodes)
    assert (question.peer, question.limit) == ("b", 16)
    assert answered(nodes, question).boundary == 8
    second = first(nodes)
    assert (second.peer, second.limit, second.whole) == ("c", 12, 8)
    answer = answered(nodes, second)
    assert sorted((r.key.part, r.end) for r in answer.records) == [
        ("conv", 12), ("kv", 12), ("recurrent", 12)
    ]  # fmt: skip
    again = first(nodes)
    assert (again.peer, again.whole) == ("b", 12), "it told of more, and lacked perhaps only that"
    assert answered(nodes, again).boundary == 8
    assert planned(here, asked).boundary == 12
    assert {pull.peer for pull in here.rig.work if isinstance(pull, ccm.Pull)} == {"b", "c"}
    assert nodes.pull("a") == 7
    assert loaded(here).boundary == 12


def test_one_goes_on_where_another_ends_though_it_lacks_the_beginning(
    nodes: Nodes, here: Client
) -> None:
    """Node c has the end of the prompt only: it can say so once the beginning is on its way from b."""
    saved(at(nodes, "b"), 8)
    there = at(nodes, "c")
    offers = [offer for offer in there.offers(there.chain(TOKENS), 16) if offer.end > 8]
    there.save("end", offers)
    for name in "bc":
        nodes.gossip(name)
    asked = plan(here)
    question = first(nodes)
    assert question.peer == "c"
    assert answered(nodes, question) == ccm.Located(0, [])
    question = first(nodes)
    assert (question.peer, question.limit) == ("b", 8)
    assert answered(nodes, question).boundary == 8
    question = first(nodes)
    assert (question.peer, question.whole) == ("c", 8)
    assert answered(nodes, question).boundary == 16
    assert planned(here, asked).boundary == 16
    assert nodes.pull("a") == 8
    assert loaded(here).boundary == 16
    here.rig.machine.check()


def test_what_is_here_is_gone_on_from_by_one_that_has_only_the_end(
    nodes: Nodes, here: Client
) -> None:
    saved(here, 8)
    there = at(nodes, "c")
    there.save("end", [o for o in there.offers(there.chain(TOKENS), 16) if o.end > 8])
    nodes.gossip("c")
    asked = plan(here)
    (answer,) = nodes.locate("a")
    assert (answer.boundary, {record.end for record in answer.records}) == (16, {12, 16})
    assert planned(here, asked).boundary == 16
    nodes.pull("a")
    assert loaded(here).boundary == 16


def test_a_survey_goes_on_too(nodes: Nodes, here: Client) -> None:
    """From the middle of a prompt: how much of it is held counts from its beginning."""
    saved(at(nodes, "b"), 12)
    there = at(nodes, "c")
    there.save("end", [o for o in there.offers(there.chain(TOKENS), 16) if o.end > 12])
    for name in "bc":
        nodes.gossip(name)
    asked = here.surveying("s", here.chain(TOKENS).digests[3:])
    assert here.rig.later(asked) is None
    for peer, whole in (("c", 0), ("b", 0), ("c", 12)):
        question = first(nodes)
        assert (question.peer, question.whole) == (peer, whole)
        answered(nodes, question)
    found = here.rig.answers[here.session, asked.call]
    assert isinstance(found, cm.Surveyed)
    assert (found.held, found.start) == ([b"\1\1", b"\1\1", b"\1\1"], 8)
    assert nodes.pull("a") == 6


def test_how_much_the_asker_has_counts_from_the_beginning_of_the_prompt(nodes: Nodes) -> None:
    """Also where its path begins later: one block too many would be missing there."""
    there = at(nodes, "c")
    there.save("end", [o for o in there.offers(there.chain(TOKENS), 20) if o.end > 16])
    digests = list(there.chain(TOKENS).digests[3:])
    question = ccm.Locate(
        1, "c", "1", "r", there.namespace.digest, digests, 12, 12, 1, ("native",), False, 0
    )
    assert nodes.ask("a", question) == ccm.Located(0, [])
    answer = nodes.ask("a", msgspec.structs.replace(question, whole=16))
    assert answer is not None
    assert answer.boundary == 12
    nothing = msgspec.structs.replace(question, whole=16, digests=[bytes(32)], limit=4)
    assert nodes.ask("a", nothing) == ccm.Located(0, [])


def test_two_ranks_that_survey_wait_for_both_answers(nodes: Nodes) -> None:
    ours = [Client(nodes.rigs["a"], hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    for name in "bc":
        for rank in (0, 1):
            client = Client(nodes.rigs[name], hybrid(2), ranks=2, rank=rank).attach()
            saved(client, 8)
        nodes.gossip(name)
    asked = [client.surveying("s", client.chain(TOKENS).digests[1:]) for client in ours]
    assert [client.rig.later(each) for client, each in zip(ours, asked, strict=True)] == [None] * 2
    answered(nodes, first(nodes), Fault.IO)
    answered(nodes, first(nodes))
    for client, each in zip(ours, asked, strict=True):
        found = client.rig.answers[client.session, each.call]
        assert isinstance(found, cm.Surveyed)
        assert found.held[1] == b"\0\1"
    assert nodes.rigs["a"].take(ccm.Locate) == []


# --- what else counts


def test_the_one_a_request_comes_from_is_asked_first_and_once(nodes: Nodes, here: Client) -> None:
    saved(at(nodes, "c"), 8)
    nodes.gossip("c")
    asked = here.planning("r", here.chain(TOKENS))
    asked = msgspec.structs.replace(asked, source="b")
    assert here.rig.later(asked) is None
    question = first(nodes)
    assert (question.peer, question.limit) == ("b", 16)
    answered(nodes, question)
    assert first(nodes).peer == "c"


def test_the_one_a_request_comes_from_is_not_asked_when_the_time_is_over(
    nodes: Nodes, here: Client
) -> None:
    """It was not named when the request planned first."""
    told(here, "c", 8)
    asked = plan(here)
    here.rig.wait(WAIT_S)
    assert planned(here, asked).boundary == 0
    here.rig.take(ccm.Locate)
    again = msgspec.structs.replace(here.planning("r", here.chain(TOKENS)), source="b")
    assert here.rig.ask(again, cm.Planned).boundary == 0
    assert here.rig.take(ccm.Locate) == []


def test_where_nothing_deeper_is_of_use_the_one_it_comes_from_is_not_asked(
    nodes: Nodes, here: Client
) -> None:
    saved(here, 16)
    asked = msgspec.structs.replace(here.planning("r", here.chain(TOKENS)), source="b")
    assert here.rig.ask(asked, cm.Planned).boundary == 16
    assert here.rig.take(ccm.Locate) == []


def test_what_a_survey_was_given_counts_from_the_beginning_too(nodes: Nodes, here: Client) -> None:
    """Node b has said all it has, and it is on its way: it is not asked for more."""
    saved(at(nodes, "b"), 12)
    told(here, "b", 16)
    asked = here.surveying("s", here.chain(TOKENS).digests[3:])
    assert here.rig.later(asked) is None
    question = first(nodes)
    there = nodes.ask("a", question)
    assert there is not None
    assert there.boundary == 4
    nodes.answer("a", question.job, there)
    assert here.rig.take(ccm.Locate) == []
    assert (here.session, asked.call) in here.rig.answers


@pytest.mark.parametrize("said", [8, 1 << 50])
def test_what_one_sends_too_slowly_another_may_send_faster(
    nodes: Nodes, here: Client, said: int
) -> None:
    """Also if it says that it spares more than was asked for."""
    for name in "bc":
        saved(at(nodes, name), 8)
        nodes.gossip(name)
    asked = plan(here)
    question = first(nodes)
    machine = here.rig.machine
    slow = machine.cluster._reach.peers.get(question.peer)
    assert slow is not None
    slow.pace.started(64 * MIB, here.rig.now)
    slow.pace.ended(64 * MIB, 64 * MIB, here.rig.now + 1e6)
    machine._books.catalog.shelves[here.namespace.digest].prefill_tokens_per_s = 1e6
    there = nodes.ask("a", question)
    assert there is not None
    nodes.answer("a", question.job, ccm.Located(said, there.records))
    assert here.rig.count("peer_asked", "slower") == 1
    second = first(nodes)
    assert second.peer != question.peer
    answered(nodes, second)
    assert planned(here, asked).boundary == 8


def test_the_pool_goes_on_where_a_node_ends_and_has_its_own_time() -> None:
    limits = clustered(pool=True, pool_answer_s_max=0.2)
    nodes = Nodes(a=Rig(limits), b=Rig(clustered()))
    here, there = Client(nodes.rigs["a"], hybrid()).attach(), at(nodes, "b")
    saved(there, 8)
    nodes.gossip("b")
    told(here, "b", 8, 16)
    told(here, POOL, 16, version=0)
    asked = plan(here)
    question = first(nodes)
    assert question.peer == "b"
    assert question.wait_s == pytest.approx(WAIT_S)
    here.rig.wait(0.03)
    answered(nodes, question)
    second = first(nodes)
    assert (second.peer, second.whole) == (POOL, 8)
    assert second.wait_s == pytest.approx(0.2 - 0.03)
    other = at(nodes, "b")
    saved(other, 16)
    nodes.gossip("b")
    records = nodes.ask("a", msgspec.structs.replace(second, peer="b"))
    assert records is not None
    here.rig.tell(cev.LocateEnded(second.job, 16, records.records, None))
    assert planned(here, asked).boundary == 16
    assert {(p.peer, len(p.objects)) for p in here.rig.take(ccm.Pull)} == {("b", 4), (POOL, 4)}


def test_after_the_pool_a_node_has_no_longer_than_ever() -> None:
    """Of its time the pool leaves some, as a node may still be asked for less."""
    limits = clustered(pool=True, pool_answer_s_max=0.2)
    nodes = Nodes(a=Rig(limits), b=Rig(clustered()))
    here = Client(nodes.rigs["a"], hybrid()).attach()
    told(here, POOL, 16, version=0)
    told(here, "b", 8)
    asked = plan(here)
    question = first(nodes)
    assert question.peer == POOL
    assert question.wait_s == pytest.approx(0.2 * 2 / 3)
    here.rig.wait(0.135)
    second = first(nodes)
    assert second.peer == "b"
    assert second.wait_s == pytest.approx(WAIT_S)
    here.rig.wait(WAIT_S + 0.001)
    assert planned(here, asked).boundary == 0


# --- the search itself


def test_a_search_for_ranks_here_ends_when_who_asked_must_know() -> None:
    search = Search(10.0, Seat(4, 0, 2), until=10.02)
    assert search.has_time(10.01, 0.05)
    assert not search.has_time(10.02, 0.05)
    search.asks("b", 0, 0.05)
    assert search.waits(10.01, 0.05, 0.0) == 10.02
