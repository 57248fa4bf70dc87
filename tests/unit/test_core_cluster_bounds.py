"""Three nodes: how many are asked for one prompt, and for how long."""

import pytest

from tests.unit.sources import WAIT_S, answered, at, first, three, told
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.search import SOURCES_MAX
from tiercache.errors import Fault
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, hybrid, saved

OTHERS = "bcdefgh"


@pytest.fixture
def nodes() -> Nodes:
    return three()


@pytest.fixture
def here(nodes: Nodes) -> Client:
    return at(nodes, "a")


def test_no_more_nodes_are_asked_than_may_be() -> None:
    nodes = Nodes(**{name: Rig(clustered()) for name in "a" + OTHERS})
    here = Client(nodes.rigs["a"], hybrid()).attach()
    for name in OTHERS:
        told(here, name, 8)
    asked = plan(here)
    for _ in range(SOURCES_MAX):
        answered(nodes, first(nodes))
    assert planned(here, asked).boundary == 0
    assert here.rig.take(ccm.Locate) == []
    assert here.rig.count("peer_asked", "not_found") == SOURCES_MAX < len(OTHERS)


def test_all_of_them_have_the_time_of_one(nodes: Nodes, here: Client) -> None:
    """Who is late leaves some of it for the next one."""
    for name in "bc":
        saved(at(nodes, name), 8)
        nodes.gossip(name)
    asked, began = plan(here), here.rig.now
    question = first(nodes)
    assert question.wait_s == pytest.approx(WAIT_S * 2 / 3)
    here.rig.wait(0.04)
    second = first(nodes)
    assert second.wait_s == pytest.approx(WAIT_S - 0.04)
    late = nodes.ask("a", question)
    assert late is not None
    nodes.answer("a", question.job, late)
    assert here.rig.take(ccm.Pull) == [], "nobody waits for the first one any more"
    assert here.rig.machine.wakeup() == pytest.approx(began + WAIT_S)
    here.rig.wait(began + WAIT_S - here.rig.now)
    assert planned(here, asked).boundary == 0
    assert here.rig.count("peer_asked", "late") == 2


def test_an_answer_when_the_time_is_over_is_the_last(nodes: Nodes, here: Client) -> None:
    for name in "bc":
        told(here, name, 8)
    asked = plan(here)
    question = first(nodes)
    here.rig.now += WAIT_S
    answered(nodes, question)
    assert planned(here, asked).boundary == 0
    assert here.rig.take(ccm.Locate) == []


def test_a_request_looks_for_others_once(nodes: Nodes, here: Client) -> None:
    """And while it does, it is answered at once when it plans again."""
    told(here, "b", 8)
    told(here, "c", 8)
    asked = plan(here)
    assert here.plan("r", here.chain(TOKENS)).boundary == 0
    answered(nodes, first(nodes))
    answered(nodes, first(nodes))
    assert planned(here, asked).boundary == 0
    saved(at(nodes, "c"), 8)
    assert here.plan("r", here.chain(TOKENS)).boundary == 0
    assert here.rig.take(ccm.Locate) == []


def test_one_that_said_all_it_has_is_not_asked_again(nodes: Nodes, here: Client) -> None:
    """What is held here has grown by what it gave itself: there it has no more."""
    saved(at(nodes, "b"), 8)
    told(here, "b", 8, 16)
    asked = plan(here)
    answered(nodes, first(nodes))
    assert planned(here, asked).boundary == 8
    assert here.rig.take(ccm.Locate) == []


def test_a_session_that_ends_between_two_answers_withdraws_the_question(
    nodes: Nodes, here: Client
) -> None:
    for name in "bc":
        told(here, name, 8)
    asked = plan(here)
    answered(nodes, first(nodes))
    question = first(nodes)
    here.close()
    answered(nodes, question)
    assert (here.session, asked.call) not in here.rig.answers
    assert here.rig.count("peer_asked", "not_found") == 1


def test_after_a_clear_nobody_else_is_asked(nodes: Nodes, here: Client) -> None:
    """The plan has waited; what it knows of itself is its answer."""
    for name in "bc":
        saved(at(nodes, name), 8)
        nodes.gossip(name)
    asked = plan(here)
    question = first(nodes)
    here.rig.ask(ev.ClearAsked(900, here.rig.number(), ""), cm.Evicted)
    answered(nodes, question)
    assert planned(here, asked).boundary == 0
    assert here.rig.take(ccm.Locate) == []
    assert here.rig.take(ccm.Pull) == []


def test_a_clear_does_not_begin_the_time_anew(nodes: Nodes, here: Client) -> None:
    for name in "bc":
        told(here, name, 8)
    asked = plan(here)
    question = first(nodes)
    here.rig.ask(ev.ClearAsked(900, here.rig.number(), ""), cm.Evicted)
    here.rig.wait(0.04)
    here.rig.take(ccm.Locate)
    here.rig.wait(WAIT_S - 0.04)
    assert planned(here, asked).boundary == 0
    assert question.wait_s == pytest.approx(WAIT_S * 2 / 3)


def test_no_room_for_another_question_is_the_end(nodes: Nodes) -> None:
    """What the first node sends takes all the room there is for what is under way."""
    nodes.rigs["a"] = rig = Rig(clustered(pulls_max=1))
    nodes.meet("a")
    here, other = Client(rig, hybrid()).attach(), Client(rig, hybrid()).attach()
    for name in "bc":
        told(here, name, 8)
    first_asked, second_asked = plan(here), other.surveying("s", other.chain(TOKENS).digests[1:])
    assert isinstance(rig.later(second_asked), cm.Surveyed), "no room"
    answered(nodes, first(nodes))
    third = other.surveying("t", other.chain(TOKENS).digests[1:])
    assert isinstance(rig.later(third), cm.Surveyed)
    answered(nodes, first(nodes))
    assert planned(here, first_asked).boundary == 0


@pytest.mark.parametrize("link", [True, False])
def test_who_is_late_for_lack_of_time_is_not_ill(*, link: bool) -> None:
    """Two were late; a third one had what they had left. `link`: the way there says it first."""
    nodes = Nodes(**{name: Rig(clustered(peer_failures_max=1)) for name in "abcd"})
    here = Client(nodes.rigs["a"], hybrid()).attach()
    for name in "bcd":
        told(here, name, 8)
    asked, late, began = plan(here), [], here.rig.now
    for _ in "bcd":
        question = first(nodes)
        late.append(question.peer)
        here.rig.now += question.wait_s + 1e-9
        if link:
            here.rig.tell(cev.LocateEnded(question.job, 0, [], Fault.IO))
        else:
            here.rig.tell(ev.Tick())
    assert planned(here, asked).boundary == 0
    assert here.rig.now == pytest.approx(began + WAIT_S)
    known = here.rig.machine.cluster.known(here.rig.now)
    assert [known[name].health for name in late] == ["sick", "well", "well"]
    assert here.rig.count("peer_asked", "late") == 3, "whoever noticed it first"
    reach = here.rig.machine.cluster._reach
    peers = [reach.peers.get(name) for name in late]
    assert [peer.breaker.under_way for peer in peers if peer] == [0, 0, 0]


def test_who_fails_at_once_is_ill_however_little_time_there_was(nodes: Nodes) -> None:
    nodes.rigs["a"] = rig = Rig(clustered(peer_failures_max=1))
    nodes.meet("a")
    here = Client(rig, hybrid()).attach()
    for name in "bc":
        told(here, name, 8)
    asked = plan(here)
    question = first(nodes)
    rig.now += 0.045
    answered(nodes, question)
    question = first(nodes)
    assert question.wait_s == pytest.approx(0.005)
    answered(nodes, question, Fault.IO)
    assert planned(here, asked).boundary == 0
    assert rig.machine.cluster.known(rig.now)[question.peer].health == "sick"


def test_a_survey_that_asked_nobody_asks_when_it_comes_again(nodes: Nodes, here: Client) -> None:
    """An engine surveys a request that waits in its queue more than once."""
    digests = here.chain(TOKENS).digests[1:]
    assert here.survey("s", digests) == [b""] * 3
    here.rig.wait(1.0)
    saved(at(nodes, "b"), 8)
    nodes.gossip("b")
    asked = here.surveying("s", digests)
    assert here.rig.later(asked) is None
    answered(nodes, first(nodes))
    found = here.rig.answers[here.session, asked.call]
    assert isinstance(found, cm.Surveyed)
    assert found.held == [b"\1\1", b"\0\1", b"\0\1"]
