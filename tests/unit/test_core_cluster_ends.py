"""Two nodes: flushes of both, limits, and what ends while it is under way."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import Known
from tiercache.core.limits import Protecting
from tiercache.errors import Fault
from tiercache.state import Layout
from tiercache.state.care import Care
from tiercache.state.keys import tenant_of
from tiercache.testing.sim.asking import ask, flush, loaded, plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import (
    TOKENS,
    Client,
    Rig,
    boundary,
    hybrid,
    saved,
    small,
)


def test_nothing_old_comes_from_a_node_that_has_not_flushed_yet(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    flush(nodes, "a", 5)
    asked = plan(here)
    assert nodes.locate("a") == [ccm.Located(0, [])]
    assert planned(here, asked).boundary == 0
    here.release("r")
    flush(nodes, "b", 5)
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    nodes.locate("a")
    assert nodes.pull("a") == 4


def test_an_answer_from_before_a_flush_is_void_after_it(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    (question,) = here.rig.take(ccm.Locate)
    answer = nodes.ask("a", question)
    assert answer is not None
    assert answer.boundary == 8
    flush(nodes, "a", 5)
    flush(nodes, "b", 5)
    nodes.answer("a", question.job, answer)
    assert planned(here, asked).boundary == 0
    assert here.rig.work == []


def test_an_earlier_start_has_flushed_for_this_one(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    flush(nodes, "a", 5)
    nodes.rigs["b"].tell(cev.FlushesKnown({there.namespace.digest: 5}))
    nodes.rigs["b"].tell(cev.FlushesKnown({there.namespace.digest: 4}))
    plan(here)
    nodes.locate("a")
    assert nodes.pull("a") == 4


def test_one_that_may_have_missed_a_flush_gives_nothing_out(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    chain, rig = there.chain(TOKENS), there.rig
    there.plan("held", chain)
    rig.tell(cev.StandingHeld(rig.now))
    calls: list[ev.Event] = [
        there.planning("r", chain),
        there.loading("held"),
        there.fetching("f", [there.wanted(chain, 1, 8)]),
    ]
    for call in calls:
        assert rig.ask(call, cm.Refused).text.startswith("isolated")
    assert rig.count("isolated") == 3
    assert ask(nodes, there) == ccm.Located(0, [])
    assert {g.outcome for g in there.reserve("s", there.offers(chain, 16))} <= {"granted", "held"}
    rig.tell(cev.StandingHeld(rig.now + 1))
    assert there.plan("r", chain).boundary == 8
    rig.wait(1)
    assert rig.ask(there.planning("again", chain), cm.Refused).kind == "refused"


def test_a_node_of_a_cluster_begins_isolated_and_one_without_never_is() -> None:
    rig = Rig(clustered())
    client = Client(rig, hybrid()).attach()
    assert rig.ask(client.planning("r", client.chain(TOKENS)), cm.Refused).kind == "refused"
    rig.tell(cev.MembersSeen({}))
    rig.tell(cev.StandingHeld(rig.now + 1))
    assert client.plan("r", client.chain(TOKENS)).boundary == 0
    alone = Client(Rig(small()), hybrid()).attach()
    alone.rig.now = 1e12
    assert alone.plan("r", alone.chain(TOKENS)).boundary == 0


# --- limits, ends and clears


def test_a_session_that_ends_is_answered_no_more(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    (question,) = here.rig.take(ccm.Locate)
    here.close()
    answer = nodes.ask("a", question)
    assert answer is not None
    nodes.answer("a", question.job, answer)
    here.rig.wait(1)
    assert (here.session, asked.call) not in here.rig.answers


@pytest.mark.parametrize("fault", [None, Fault.IO])
def test_a_namespace_cleared_while_its_objects_come_stays_clear(
    nodes: Nodes, here: Client, there: Client, fault: Fault | None
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    nodes.locate("a")
    assert planned(here, asked).boundary == 8
    here.rig.ask(ev.ClearAsked(900, here.rig.number(), ""), cm.Evicted)
    assert nodes.pull("a", fault) == (0 if fault else 4)
    assert here.rig.gauge("objects", "host") == 0
    assert loaded(here).boundary == 0


def test_a_namespace_cleared_before_the_answer_takes_nothing_in(
    nodes: Nodes, here: Client, there: Client
) -> None:
    limits = msgspec.structs.replace(clustered(), namespaces_max=1)
    nodes.rigs["a"] = rig = Rig(limits)
    nodes.meet("a")
    here = Client(rig, hybrid()).attach()
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    rig.ask(ev.ClearAsked(900, rig.number(), ""), cm.Evicted)
    nodes.locate("a")
    found = rig.answers[here.session, asked.call]
    assert isinstance(found, cm.Planned)


def test_room_is_made_for_what_comes_and_what_finds_none_is_left_out(nodes: Nodes) -> None:
    nodes.rigs["a"] = rig = Rig(clustered(pages=3))
    nodes.meet("a")
    here, there = Client(rig, hybrid()).attach(), Client(nodes.rigs["b"], hybrid()).attach()
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    nodes.locate("a")
    assert nodes.pull("a") == 3
    assert planned(here, asked).boundary == 0


def test_objects_come_in_batches(nodes: Nodes, there: Client) -> None:
    nodes.rigs["a"] = rig = Rig(clustered(pull_batch_bytes_max=40))
    nodes.meet("a")
    here = Client(rig, hybrid()).attach()
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    nodes.locate("a")
    assert len([c for c in rig.work if isinstance(c, ccm.Pull)]) > 1
    assert nodes.pull("a") == 4


def test_there_is_a_limit_to_what_is_under_way(nodes: Nodes, there: Client) -> None:
    nodes.rigs["a"] = rig = Rig(clustered(pulls_max=1))
    nodes.meet("a")
    here = Client(rig, hybrid()).attach()
    saved(there, 8)
    other = Client(nodes.rigs["b"], hybrid()).attach()
    saved(other, 8, tokens=[7] * 20)
    nodes.gossip("b")
    plan(here)
    assert here.plan("second", here.chain([7] * 20)).boundary == 0
    nodes.locate("a")
    plan(here, "third", [7] * 20)
    nodes.locate("a")
    assert nodes.pull("a") == 4, "those of the first only"


@pytest.mark.parametrize("limit", ["objects_max", "slots_max"])
def test_no_more_objects_and_slots_than_there_may_be(
    nodes: Nodes, there: Client, limit: str
) -> None:
    limits = msgspec.structs.replace(clustered(), **{limit: 2})
    nodes.rigs["a"] = rig = Rig(limits)
    nodes.meet("a")
    here = Client(rig, hybrid()).attach()
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    nodes.locate("a")
    assert 0 < nodes.pull("a") < 4
    assert planned(here, asked).boundary == 0


def test_an_object_that_is_being_saved_here_is_not_fetched(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    chain = here.chain(TOKENS)
    grants = here.reserve("w", here.offers(chain, 8, parts=["conv"]))
    asked = plan(here)
    nodes.locate("a")
    assert nodes.pull("a") == 3
    assert planned(here, asked).boundary == 0
    here.commit(grants)
    here.rig.run()
    assert boundary(here) == 8


def test_one_that_comes_is_not_offered_to_others_as_held_for_good(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    nodes.locate("a")
    grants = here.reserve("w", here.offers(here.chain(TOKENS), 8))
    assert {grant.outcome for grant in grants} == {"busy"}
    nodes.pull("a")
    grants = here.reserve("w", here.offers(here.chain(TOKENS), 8))
    assert {grant.outcome for grant in grants} == {"held"}


def test_a_second_rank_asks_nobody(nodes: Nodes) -> None:
    ranks = [Client(nodes.rigs["a"], hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    others = [Client(nodes.rigs["b"], hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    for other in others:
        saved(other, 8)
    nodes.gossip("b")
    ranks[0].all_ranks = True
    asked = plan(ranks[0])
    nodes.locate("a")
    assert nodes.pull("a") == 6
    assert planned(ranks[0], asked).boundary == 8
    assert ranks[1].plan("r", ranks[1].chain(TOKENS)).boundary == 8
    assert nodes.rigs["a"].take(ccm.Locate) == []


def test_a_node_knows_up_to_where_it_was_told(nodes: Nodes, there: Client) -> None:
    machine = nodes.rigs["a"].machine
    assert machine.cluster.version_of("b") == machine.cluster.version_of("unknown") == -1
    saved(there, 8, 16)
    nodes.gossip("b")
    assert machine.cluster.version_of("b") == 2


def test_a_summary_of_another_start_is_not_believed(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.boots["b"] = "2"
    nodes.gossip("b")
    assert boundary(here) == 0
    nodes.meet("a")
    nodes.gossip("b")
    plan(here)
    assert nodes.rigs["a"].gauge("peers") == 1
    nodes.boots = {"a": "1"}
    nodes.meet("a")
    assert nodes.rigs["a"].gauge("peers") == 0


def test_what_was_told_before_a_node_was_away_is_nothing_to_add_to(
    nodes: Nodes, here: Client, there: Client
) -> None:
    """The node left and came back between the question and the answer."""
    saved(there, 8)
    nodes.gossip("b")
    rig, version = here.rig, here.rig.machine.cluster.version_of("b")
    rig.tell(cev.MembersSeen({}))
    nodes.meet("a")
    rig.tell(cev.PeerTold("b", "1", version + 1, False, [99], [], version))
    assert rig.machine.cluster.version_of("b") == -1
    assert rig.machine.cluster.known(rig.now)["b"] == Known(0, "well")
    nodes.gossip("b", whole=False)
    assert rig.machine.cluster.known(rig.now)["b"] == Known(1, "well")
    rig.tell(cev.PeerTold("b", "1", version + 1, False, [99], [], version))
    assert rig.machine.cluster.known(rig.now)["b"] == Known(2, "well")


def test_how_a_node_does_is_known(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    rig = here.rig

    def health() -> str:
        return rig.machine.cluster.known(rig.now)["b"].health

    for request in "123":
        assert (health(), rig.gauge("peers_sick")) == ("well", 0)
        plan(here, request)
        nodes.locate("a", Fault.IO)
    assert (health(), rig.gauge("peers_sick")) == ("sick", 1)
    rig.wait(1.5)
    assert health() == "probed"
    assert there.rig.gauge("boundaries_told") == 1


def test_a_node_says_how_long_it_stands(nodes: Nodes) -> None:
    rig = nodes.rigs["a"]
    rig.tell(cev.StandingHeld(rig.now + 2))
    assert (rig.machine.cluster.standing_until, rig.gauge("isolated_now")) == (rig.now + 2, 0)
    rig.wait(3)
    rig.tell(ev.Tick())
    assert rig.gauge("isolated_now") == 1
    assert Rig(small()).gauge("boundaries_told") == 0


def offered(client: Client, care: Care) -> None:
    """Offer what a boundary at 8 rests on, by a request with wishes."""
    offers = client.offers(client.chain(TOKENS), 8)
    asked = ev.ReserveAsked(client.session, client.rig.number(), "s", "", "", offers, care)
    client.commit(client.rig.ask(asked, cm.Reserved).grants)
    client.rig.run()


def test_what_must_not_be_stored_is_nowhere(nodes: Nodes, here: Client, there: Client) -> None:
    offered(there, Care(store=False))
    nodes.gossip("b")
    assert boundary(here) == 0
    assert here.rig.work == []


def test_what_has_an_end_of_its_own_stays_where_it_is(
    nodes: Nodes, here: Client, there: Client
) -> None:
    """Elsewhere nobody would know when it ends."""
    offered(there, Care(ttl_ms=10_000))
    nodes.gossip("b")
    asked = plan(here)
    (answer,) = nodes.locate("a")
    assert answer.records == []
    assert planned(here, asked).boundary == 0
    assert here.rig.take(ccm.Pull) == []
    record = next(iter(there.rig.machine.items())).record
    lent = there.rig.tell(cev.LendAsked(-1, 77, [(record.key, record.nbytes)]))
    assert cm.Reply(-1, 77, ccm.Lent([None])) in lent


def test_a_tenant_fetches_no_more_than_its_share() -> None:
    limits = clustered(pages=64)
    mine = Protecting(shares=((tenant_of("mine"), 0.05, 1.0),))
    nodes = Nodes(a=Rig(msgspec.structs.replace(limits, protecting=mine)), b=Rig(limits))
    here, there = (Client(nodes.rigs[name], hybrid()).attach() for name in "ab")
    here.salt = there.salt = "mine"
    saved(there, 16)
    nodes.gossip("b")
    plan(here)
    nodes.locate("a")
    assert 0 < nodes.pull("a") <= 3, "three pages are its share"
    here.salt = there.salt = ""
    saved(there, 16)
    nodes.gossip("b")
    plan(here, "free")
    nodes.locate("a")
    assert nodes.pull("a") == 6


def test_a_plan_whose_namespace_made_room_while_it_waited_is_refused(
    nodes: Nodes, there: Client
) -> None:
    limits = msgspec.structs.replace(clustered(), namespaces_max=2)
    nodes.rigs["a"] = rig = Rig(limits)
    nodes.meet("a")
    here = Client(rig, hybrid()).attach()
    here.salt = there.salt = "tenant"
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    other = Client(rig, Layout(hybrid().parts[:1], 4)).attach()  # The tenant's was empty.
    nodes.locate("a")
    refused = rig.answers[here.session, asked.call]
    assert isinstance(refused, cm.Refused)
    assert (refused.kind, refused.text) == ("refused", "too many namespaces")
    assert boundary(other) == 0
