"""Two engines with ranks on two nodes each: faults, flushes, and what ends while it is under way."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.errors import Fault
from tiercache.state import Layout
from tiercache.state.care import Care
from tiercache.state.names import short
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, hybrid, saved
from tiercache.testing.sim.twin_engines import engine_of, strays
from tiercache.testing.sim.twinned import Twinned, save, twinned

WAIT_S = 0.05


@pytest.fixture
def twins() -> Twinned:
    return twinned()


def waiting(twins: Twinned) -> tuple[ev.PlanAsked, ccm.Agree, int]:
    """Have node b2 wait for what node a1 or a2 says; return the plan, the question and its call."""
    save(twins.one, 16)
    twins.gossip()
    asked = plan(twins.head)
    twins.locate("b1")
    (question,) = twins.head.rig.take(ccm.Agree)
    return asked, question, twins.nodes.assenting("b1", question)


def test_a_node_that_leaves_meanwhile_is_answered_no_more(twins: Twinned) -> None:
    _, question, call = waiting(twins)
    (asked,) = twins.rig("b2").take(ccm.Locate)
    twins.rig("b2").tell(cev.PeerLeft(-1))
    answer = twins.nodes.ask("b2", asked)
    assert answer is not None
    twins.nodes.answer("b2", asked.job, answer)
    assert twins.rig("b2").take(ccm.Locate) == []
    assert twins.rig("b2").take(ccm.Pull) == []
    assert twins.nodes.assented(question, call) is None


def test_nothing_is_answered_after_a_flush_of_one_of_the_two(twins: Twinned) -> None:
    _, question, call = waiting(twins)
    rig, space = twins.rig("b2"), twins.head.namespace.digest
    (asked,) = rig.take(ccm.Locate)
    rig.later(ev.ClearAsked(900, rig.number(), space.hex(), 7))
    rig.run()
    answer = twins.nodes.ask("b2", asked)
    assert answer is not None
    twins.nodes.answer("b2", asked.job, answer)
    assert rig.take(ccm.Locate) == [], "after it nobody else is asked"
    assert twins.nodes.assented(question, call) == []
    assert rig.take(ccm.Pull) == []


def test_one_that_is_isolated_meanwhile_answers_nothing(twins: Twinned) -> None:
    _, question, call = waiting(twins)
    twins.rig("b2").tell(cev.StandingHeld(twins.rig("b2").now))
    twins.locate("b2")
    assert twins.nodes.assented(question, call) == []


def test_a_request_that_stores_nothing_asks_no_third_node(twins: Twinned) -> None:
    save(twins.one, 16)
    save(twins.other[:2], 16)
    twins.gossip()
    asked = twins.head.planning("r", twins.head.chain(TOKENS))
    asked = msgspec.structs.replace(asked, care=Care(store=False))
    assert twins.head.rig.later(asked) is None
    assert twins.agree() == ([], [])


def test_no_room_for_a_question_is_an_answer_at_once() -> None:
    twins = twinned(b2=0)
    save(twins.one, 16)
    twins.gossip()
    asked = plan(twins.head)
    twins.locate("b1")
    assert twins.agree() == ([], [])
    assert planned(twins.head, asked).boundary == 0


def test_only_boundaries_that_the_head_has_are_looked_for(twins: Twinned) -> None:
    """Node a2 could resume at 12, too, where b1 has nothing: 8 is what it is asked for next."""
    save(twins.one, 8)
    save(twins.other[:2], 8, 16)
    saved(twins.one[2], 12)
    saved(twins.one[3], 12)
    twins.gossip()
    names = [16]
    for peer in ("a1", "a2"):
        told(twins.rig("b2"), twins.head, peer, 8, *names)
    asked = plan(twins.head)
    ends, questions = twins.agree()
    limits = [(q.peer, q.limit) for q in questions]
    assert ("a2", 16) in limits
    assert limits.index(("a2", 8)) > limits.index(("a2", 16))
    assert ends == [8]
    assert planned(twins.head, asked).boundary == 8
    assert {r.end for p in twins.rig("b2").take(ccm.Pull) for r, _ in p.objects} == {4, 8}


def told(rig: Rig, client: Client, peer: str, *ends: int) -> None:
    """Have a node told that another one could resume at these boundaries, true or not."""
    digests = client.chain(TOKENS).digests
    names = [short(client.namespace.digest, digests[end // 4]) for end in ends]
    since = rig.machine.cluster.version_of(peer)
    rig.tell(cev.PeerTold(peer, "1", 1, True, names, [], since))


@pytest.mark.parametrize("shift", range(100, 600, 100))
def test_the_head_is_not_asked_while_others_may_have_it(twins: Twinned, shift: int) -> None:
    """Whichever comes first for a prompt: what the head tells is of its own ranks."""
    tokens = list(range(shift, shift + 20))
    for rank in (*twins.one, *twins.other[:2]):
        saved(rank, 16, tokens=tokens)
    twins.gossip()
    plan(twins.head, tokens=tokens)
    ends, questions = twins.agree()
    assert ends == [16]
    assert "b1" not in {question.peer for question in questions}


def test_one_that_fails_is_not_taken_for_one_that_lacks_it(twins: Twinned) -> None:
    save(twins.one, 16)
    twins.gossip()
    plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Locate)
    twins.nodes.answer("b1", question.job, ccm.Located(0, []), Fault.IO)
    peer = twins.rig("b1").machine.cluster._reach.peers.get(question.peer)
    assert peer is not None
    assert not peer.lacked


def test_after_an_agreement_nobody_is_looked_for(twins: Twinned) -> None:
    """Cleared meanwhile, and the plan has waited already: it is answered."""
    save(twins.other[:2], 8)
    asked = plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Agree)
    save(twins.one, 16)
    twins.gossip()
    rig = twins.head.rig
    rig.later(ev.ClearAsked(900, rig.number(), "", 0))
    rig.tell(cev.AgreeEnded(question.job, [8], None))
    assert rig.take(ccm.Locate) == []
    assert planned(twins.head, asked).boundary == 0


def test_a_node_that_fails_is_passed_over(twins: Twinned) -> None:
    save(twins.one, 16)
    twins.gossip()
    asked = plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Locate)
    twins.nodes.answer("b1", question.job, ccm.Located(0, []), Fault.IO)
    twins.locate("b1")
    twins.agree()
    assert planned(twins.head, asked).boundary == (16 if question.peer == "a2" else 0)


def test_what_was_found_for_one_plan_is_there_for_the_next(twins: Twinned) -> None:
    save(twins.one, 16)
    twins.gossip()
    assert twins.resumed() == 16
    twins.nodes.pull("b1")
    twins.nodes.pull("b2")
    asked = plan(twins.head, "s")
    assert twins.agree() == ([16], [])
    assert planned(twins.head, asked).boundary == 16


def test_nothing_deeper_is_looked_for_than_the_head_may_use(twins: Twinned) -> None:
    save(twins.one, 8, 16)
    save(twins.other[:2], 8, 16)
    twins.gossip()
    plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Agree)
    assert question.ends == [8, 16]
    brief = msgspec.structs.replace(question, limit=8)
    call = twins.nodes.assenting("b1", brief)
    assert {asked.limit for asked in twins.locate("b2")} == {8}
    assert twins.nodes.assented(brief, call) == [8]


def test_a_node_of_the_engine_joins_what_two_others_have(twins: Twinned) -> None:
    """Node a2 has the end of the prompt, b2 has nothing, and a1 has all for everybody up to 8."""
    save(twins.other[:2], 8, 16)
    chain = twins.head.chain(TOKENS)
    for rank in twins.one[2:]:
        rank.save("end", [offer for offer in rank.offers(chain, 16) if offer.end > 8])
    save(strays(twins.nodes, "a1", twins.head.layout), 8)
    twins.gossip()
    asked = plan(twins.head)
    ends, questions = twins.agree()
    assert [(q.peer, q.limit, q.whole) for q in questions][-2:] == [("a1", 8, 0), ("a2", 16, 8)]
    assert ends == [16, 8]
    assert planned(twins.head, asked).boundary == 16
    assert twins.nodes.pull("b2") == 4 + 2 * 2 * 2


def test_one_rank_that_has_all_ends_nothing_for_another() -> None:
    """Both survey for one request; the second one still lacks what the next node has."""
    nodes = Nodes(a=Rig(clustered()), b=Rig(clustered()), c=Rig(clustered()))
    ours = [Client(nodes.rigs["a"], hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    for name in "bc":
        for rank in (0, 1):
            saved(Client(nodes.rigs[name], hybrid(2), ranks=2, rank=rank).attach(), 16)
        nodes.gossip(name)
    digests = ours[0].chain(TOKENS).digests[1:5]
    asked = [client.surveying("s", digests) for client in ours]
    assert [ours[0].rig.later(each) for each in asked] == [None, None]
    saved(ours[0], 16)
    (question,) = ours[0].rig.take(ccm.Locate)
    nodes.answer("a", question.job, ccm.Located(0, []), Fault.IO)
    assert (ours[0].session, asked[0].call) in ours[0].rig.answers
    nodes.locate("a")
    found = ours[1].rig.answers[ours[1].session, asked[1].call]
    assert isinstance(found, cm.Surveyed)
    assert found.held[1] == b"\0\0\0\1"


@pytest.mark.parametrize(("layout", "given"), [(hybrid(4), 0), (Layout(hybrid().parts[:1], 4), 1)])
def test_what_some_ranks_have_does_not_go_to_the_pool(layout: Layout, given: int) -> None:
    """Nobody would find it there, and all would ask for it. What all ranks have alike does go there."""
    limits = clustered(pool=True)
    nodes = Nodes(a=Rig(limits), b=Rig(limits))
    ranks = engine_of(nodes, ("a", "b"), layout, (4, 2)).ranks
    save(ranks, 8)
    nodes.rigs["a"].run()
    for request in ("r", "s", "t"):
        asked = plan(ranks[0], request)
        nodes.agree("a")
        assert planned(ranks[0], asked).boundary == 8
        ranks[0].release(request)
    assert len(nodes.rigs["a"].take(ccm.Deposit)) == given
