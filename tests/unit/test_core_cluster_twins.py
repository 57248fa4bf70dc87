"""Two engines of one model, each with ranks on two nodes of its own: what one has computed the other
resumes, each node with the shards of its own ranks."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import LACKED_MAX, POOL
from tiercache.core.search import SEATED_SHARE
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.pooling import told
from tiercache.testing.sim.rig import TOKENS, Client, Rig, evict, hybrid, saved
from tiercache.testing.sim.seated import RANKS
from tiercache.testing.sim.twinned import Twinned, on, save, twinned

WAIT_S = 0.05


@pytest.fixture
def twins() -> Twinned:
    return twinned()


def shards(twins: Twinned, name: str) -> set[tuple[int, int]]:
    """Return the shards of states that a node holds or has on its way."""
    return {
        (item.slot.shard.start, item.slot.shard.stop)
        for item in twins.rig(name).machine.items()
        if item.slot.part == "recurrent"
    }


def test_what_one_engine_computed_the_other_resumes(twins: Twinned) -> None:
    """Each of its nodes fetches the shards of its own ranks, from the node that has those."""
    save(twins.one, 16)
    twins.gossip()
    asked = plan(twins.head)
    questions = twins.locate("b1")
    assert {(q.ranks, q.first, q.stop) for q in questions} == {(4, 0, 2)}
    ends, questions = twins.agree()
    assert {(q.ranks, q.first, q.stop) for q in questions} == {(4, 2, 4)}
    assert ends == [16]
    assert planned(twins.head, asked).boundary == 16
    assert (shards(twins, "b1"), shards(twins, "b2")) == ({(0, 1), (1, 2)}, {(2, 3), (3, 4)})
    assert twins.nodes.pull("b1") == twins.nodes.pull("b2") == 4 + 2 * 2
    chain = twins.head.chain(TOKENS)
    for rank in twins.other:
        wanted = [rank.wanted(chain, part, 16) for part in (0, 1, 2)]
        found = rank.rig.ask(rank.fetching("get", wanted), cm.Fetched)
        assert None not in found.pieces
    twins.head.release("r")
    assert twins.rig("b1").take(ccm.Locate) == twins.rig("b2").take(ccm.Locate) == []


def test_nothing_is_agreed_on_that_some_rank_cannot_have(twins: Twinned) -> None:
    """Node a2 has dropped what its ranks had: for those of b2 nobody has it."""
    save(twins.one, 16)
    twins.gossip()
    evict(twins.rig("a2"))
    assert twins.resumed() == 0
    assert twins.head.rig.count("misses", "elsewhere") == 1


def test_what_one_node_has_itself_the_other_fetches(twins: Twinned) -> None:
    save(twins.one, 16)
    save(twins.other, 16)
    evict(twins.rig("b2"))
    twins.gossip()
    asked = plan(twins.head)
    ends, questions = twins.agree()
    assert ends == [16]
    assert questions[-1].peer == "a2"
    assert planned(twins.head, asked).boundary == 16


def test_what_the_head_lacks_and_the_other_node_has_is_fetched(twins: Twinned) -> None:
    save(twins.one, 16)
    save(twins.other, 16)
    evict(twins.rig("b1"))
    twins.gossip()
    asked = plan(twins.head)
    assert twins.locate("b1")[-1].peer == "a1"
    assert twins.agree() == ([16], [])
    assert planned(twins.head, asked).boundary == 16


def test_nodes_of_the_same_engine_are_asked_last(twins: Twinned) -> None:
    """They hold shards of their own ranks; but another engine may have left all of it there."""
    save(twins.one, 16)
    save(twins.other, 16)
    evict(twins.rig("b1"))
    evict(twins.rig("a1"))
    for rank in (0, 1):
        stray = Client(twins.rig("b2"), hybrid(4), ranks=RANKS, rank=rank).attach()
        saved(stray, 16)
    for name in ("a2", "b2"):
        twins.nodes.gossip(name)
    asked = plan(twins.head)
    assert [question.peer for question in twins.locate("b1")] == ["a2", "b2"]
    twins.agree()
    assert planned(twins.head, asked).boundary == 16


def test_one_that_had_nothing_for_these_ranks_is_asked_after_others(twins: Twinned) -> None:
    save(twins.one, 16)
    twins.gossip()
    asked = plan(twins.head)
    before = [q.peer for q in twins.locate("b1")]
    twins.agree()
    assert planned(twins.head, asked).boundary == 16
    evict_all(twins)
    asked = plan(twins.head, "again")
    assert [q.peer for q in twins.locate("b1")] == ["a1"]
    _, questions = twins.agree()
    assert [q.peer for q in questions] == ["a2"]
    assert planned(twins.head, asked).boundary == 16
    assert before[-1] == "a1"


def evict_all(twins: Twinned) -> None:
    """Have engine B's nodes forget what they fetched."""
    twins.head.release("r")
    for name in ("b1", "b2"):
        twins.nodes.pull(name)
        twins.rig(name).tell(cev.PeerLeft(-1))
        evict(twins.rig(name))


def test_no_more_of_what_nodes_lacked_is_remembered_than_may_be(twins: Twinned) -> None:
    peer = twins.rig("b1").machine.cluster._reach.peers.get("a1")
    assert peer is not None
    for number in range(LACKED_MAX + 1):
        peer.lacks((b"", number, 0, 1), nothing=True)
    assert len(peer.lacked) == LACKED_MAX
    assert (b"", 0, 0, 1) not in peer.lacked
    peer.lacks((b"", 5, 0, 1), nothing=False)
    peer.lacks((b"", 5, 0, 1), nothing=False)
    assert len(peer.lacked) == LACKED_MAX - 1


def test_another_way_to_split_will_do_where_the_engine_says_so(twins: Twinned) -> None:
    """Engine A has two ranks, B has four: what one rank of A holds two of B need."""
    nodes = twins.nodes
    save(on(nodes, "a1", "a2", ranks=2), 16)
    twins.gossip()
    for reshard, deepest in ((False, 0), (True, 16)):
        asked = twins.head.planning(f"r{reshard}", twins.head.chain(TOKENS))
        asked = msgspec.structs.replace(asked, reshard=reshard)
        assert twins.head.rig.later(asked) is None
        twins.locate("b1")
        twins.agree()
        assert planned(twins.head, asked).boundary == deepest
    assert shards(twins, "b1") == {(0, 2)}
    assert shards(twins, "b2") == {(2, 4)}


def test_an_older_node_sends_all_shards_and_those_of_the_ranks_here_are_taken(
    twins: Twinned,
) -> None:
    """It does not know of seats: what it has for all ranks will do."""
    for rank in range(RANKS):
        saved(Client(twins.rig("a1"), hybrid(4), ranks=RANKS, rank=rank).attach(), 16)
    twins.gossip()
    asked = plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Locate)
    older = msgspec.structs.replace(question, first=0, stop=0)
    answer = twins.nodes.ask("b1", older)
    assert answer is not None
    assert len(answer.records) == 4 + 2 * RANKS
    twins.nodes.answer("b1", question.job, answer)
    assert shards(twins, "b1") == {(0, 1), (1, 2)}
    assert twins.head.rig.count("peer_asked", "found") == 1
    twins.agree()
    assert planned(twins.head, asked).boundary == 16


@pytest.mark.parametrize("seat", [(2, 2), (3, 2), (-1, 2), (0, 5), (1, 0)])
def test_ranks_that_there_are_not_have_nothing(twins: Twinned, seat: tuple[int, int]) -> None:
    save(twins.one, 16)
    twins.gossip()
    plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Locate)
    wrong = msgspec.structs.replace(question, peer="a1", first=seat[0], stop=seat[1])
    assert twins.nodes.ask("b1", wrong) == ccm.Located(0, [])


# --- the time it takes


def test_a_plan_waits_no_longer_than_others_do(twins: Twinned) -> None:
    """For its own ranks' node, then for the other one: both in the time of one question."""
    save(twins.one, 16)
    twins.gossip()
    asked, began, rig = plan(twins.head), twins.head.rig.now, twins.head.rig
    while rig.machine.wakeup() is not None and not rig.take(ccm.Agree):
        due = rig.machine.wakeup()
        assert due is not None
        rig.wait(due - rig.now + 1e-6)
        rig.take(ccm.Locate)
    assert rig.now <= began + SEATED_SHARE * WAIT_S + 1e-3
    assert rig.machine.wakeup() == pytest.approx(began + WAIT_S)
    rig.wait(WAIT_S)
    assert planned(twins.head, asked).boundary == 0


def test_a_plan_whose_own_node_lacks_nothing_gives_the_other_all_the_time(twins: Twinned) -> None:
    save(twins.other, 16)
    plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Agree)
    assert question.wait_s == pytest.approx(WAIT_S)


def test_an_answer_comes_when_the_time_is_up_whoever_is_late(twins: Twinned) -> None:
    """What is here by then is answered."""
    save(twins.one, 16)
    save(twins.other, 8)
    saved(twins.other[0], 16)
    saved(twins.other[1], 16)
    twins.gossip()
    asked = plan(twins.head)
    (question,) = twins.head.rig.take(ccm.Agree)
    brief = msgspec.structs.replace(question, wait_s=0.02)
    call = twins.nodes.assenting("b1", brief)
    rig = twins.rig("b2")
    until = rig.now + 0.02
    while twins.nodes.assented(brief, call) is None:
        due = rig.machine.wakeup()
        assert due is not None
        assert due <= until + 1e-6
        rig.wait(due - rig.now + 1e-6)
    assert twins.nodes.assented(brief, call) == [8]
    assert rig.now <= until + 1e-3
    assert (twins.head.session, asked.call) not in twins.head.rig.answers


@pytest.mark.parametrize("wait_s", [0.0, -1.0])
def test_one_that_does_not_say_how_long_it_waits_is_answered_at_once(
    twins: Twinned, wait_s: float
) -> None:
    """As an older node does not."""
    save(twins.one, 16)
    twins.gossip()
    plan(twins.head)
    twins.locate("b1")
    (question,) = twins.head.rig.take(ccm.Agree)
    assert twins.nodes.assent("b1", msgspec.structs.replace(question, wait_s=wait_s)) == []


def test_a_pool_has_its_own_time_and_the_agreement_the_rest() -> None:
    """The plan of an engine on two nodes waits no longer than another one that asks the pool."""
    limits = clustered(pool=True, pool_answer_s_max=0.2)
    nodes = Nodes(a=Rig(limits), b=Rig(limits))
    ranks = on(nodes, "a", "b")
    head, rig = ranks[0], nodes.rigs["a"]
    save(ranks, 8)
    told(head, 16)
    asked, began = plan(head), rig.now
    (question,) = rig.take(ccm.Locate)
    assert question.peer == POOL
    assert question.wait_s == pytest.approx(SEATED_SHARE * 0.2)
    rig.wait(SEATED_SHARE * 0.2 + 1e-6)
    (agree,) = rig.take(ccm.Agree)
    assert agree.wait_s == pytest.approx(SEATED_SHARE * WAIT_S)
    nodes.assent("a", agree)
    rig.wait(agree.wait_s)
    assert planned(head, asked).boundary == 0
    assert rig.now < began + 0.2
