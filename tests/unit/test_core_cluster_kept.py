"""What a prompt could go on from stays in place while others are asked, and what they send finds other
room: in a full memory the beginning of an old conversation is what would go first."""

import pytest

from tiercache.core import commands as cm
from tiercache.core.cluster import commands as ccm
from tiercache.errors import Fault
from tiercache.testing.sim.asking import loaded, plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, evict, hybrid, saved
from tiercache.testing.sim.twinned import Twinned, on, save

OTHER = list(range(1000, 1020))
FULL = 12


@pytest.fixture
def nodes() -> Nodes:
    """Node a with room for twelve objects, and node b."""
    return Nodes(a=Rig(clustered(pages=FULL)), b=Rig(clustered()))


@pytest.fixture
def here(nodes: Nodes) -> Client:
    """It has the prompt up to 8, used longest ago, and another one: there is no room left."""
    client = Client(nodes.rigs["a"], hybrid()).attach()
    saved(client, 8)
    saved(client, 8, 16, tokens=OTHER)
    assert client.rig.gauge("objects", "host") == FULL
    there = Client(nodes.rigs["b"], hybrid()).attach()
    saved(there, 8, 16)
    nodes.gossip("b")
    return client


def test_a_plan_goes_on_from_what_is_here_though_memory_is_full(nodes: Nodes, here: Client) -> None:
    asked = plan(here)
    (answer,) = nodes.locate("a")
    assert len(answer.records) == 4
    assert planned(here, asked).boundary == 16
    assert nodes.pull("a") == 4
    assert loaded(here).boundary == 16


def test_blocks_that_no_boundary_rests_on_are_kept_too(nodes: Nodes, here: Client) -> None:
    """The other node was told that it need not send them."""
    rig = nodes.rigs["a"] = Rig(clustered(pages=8))
    nodes.meet("a")
    nodes.gossip("b")
    here = Client(rig, hybrid()).attach()
    chain = here.chain(TOKENS)
    here.save("s", here.offers(chain, 8, parts=["kv"]))
    saved(here, 12, tokens=OTHER)
    here.save("t", here.offers(here.chain(OTHER), 8, start=7, parts=["conv"]))
    asked = plan(here)
    (question,) = rig.take(ccm.Locate)
    assert question.whole == 8
    answer = nodes.ask("a", question)
    assert answer is not None
    nodes.answer("a", question.job, answer)
    assert planned(here, asked).boundary == 16


def test_a_survey_goes_on_from_what_is_here_though_memory_is_full(
    nodes: Nodes, here: Client
) -> None:
    asked = here.surveying("s", here.chain(TOKENS).digests[1:])
    assert here.rig.later(asked) is None
    nodes.locate("a")
    found = here.rig.answers[here.session, asked.call]
    assert isinstance(found, cm.Surveyed)
    assert found.held == [b"\1\1\1\1", b"\0\1\0\1", b"\0\1\0\1"]


def test_each_rank_that_surveys_keeps_its_own(nodes: Nodes) -> None:
    """The second one waits for the same answer as the first one."""
    rig = nodes.rigs["a"] = Rig(clustered(pages=FULL))
    nodes.meet("a")
    ours, theirs = (
        [Client(nodes.rigs[name], hybrid(2), ranks=2, rank=at).attach() for at in (0, 1)]
        for name in "ab"
    )
    save(ours, 8)
    save(theirs, 8, 16)
    saved(ours[0], 8, tokens=OTHER)
    nodes.gossip("b")
    asked = [client.surveying("s", client.chain(TOKENS).digests[1:]) for client in ours]
    assert [rig.later(each) for each in asked] == [None, None]
    assert evict(rig).objects == 4
    nodes.locate("a")
    for client, each in zip(ours, asked, strict=True):
        found = rig.answers[client.session, each.call]
        assert isinstance(found, cm.Surveyed)
        assert found.held == [b"\1\1\1\1", b"\0\1\0\1", b"\0\1\0\1"]


def test_a_node_with_other_ranks_goes_on_from_what_it_has_though_memory_is_full() -> None:
    rigs = {name: Rig(clustered()) for name in ("a1", "a2", "b1")}
    nodes = Nodes(**rigs, b2=Rig(clustered(pages=FULL)))
    twins = Twinned(nodes, on(nodes, "a1", "a2"), on(nodes, "b1", "b2"))
    save(twins.one, 8, 16)
    save(twins.other, 8)
    for rank in twins.other[2:]:
        saved(rank, 8, tokens=OTHER)
    assert twins.rig("b2").gauge("objects", "host") == FULL
    twins.gossip()
    assert twins.resumed() == 16


@pytest.mark.parametrize("parts", [{"kv"}, {"kv", "recurrent", "conv"}])
def test_what_one_sent_stays_while_the_next_one_is_asked(parts: set[str]) -> None:
    """It has come, and no plan has leased it yet; a boundary at 8 or not."""
    nodes = Nodes(a=Rig(clustered()), b=Rig(clustered()), c=Rig(clustered()))
    here, there = (Client(nodes.rigs[name], hybrid()).attach() for name in "ab")
    saved(there, 8)
    end = Client(nodes.rigs["c"], hybrid()).attach()
    end.save("end", [o for o in end.offers(end.chain(TOKENS), 16) if o.end > 8])
    for name in "bc":
        nodes.gossip(name)
    asked = plan(here)
    for peer in "cbc":
        (question,) = here.rig.take(ccm.Locate)
        assert question.peer == peer
        if question.whole:
            assert nodes.pull("a") == 1 + len(parts)
            assert evict(here.rig).objects == 0
        answer = nodes.ask("a", question)
        assert answer is not None
        records = [record for record in answer.records if peer == "c" or record.key.part in parts]
        nodes.answer("a", question.job, ccm.Located(answer.boundary, records))
    assert planned(here, asked).boundary == 16
    nodes.pull("a")
    assert loaded(here).boundary == 16


@pytest.mark.parametrize("end", ["agreed", "late", "closed"])
def test_what_nodes_agree_on_stays_until_they_have(end: str) -> None:
    """Others need the room meanwhile."""
    nodes = Nodes(b1=Rig(clustered()), b2=Rig(clustered()))
    twins = Twinned(nodes, [], on(nodes, "b1", "b2"))
    save(twins.other, 8, 16)
    asked, rig = plan(twins.head), twins.rig("b1")
    twins.other[1].close()  # Another session: the plan waits on.
    assert evict(rig).objects == 4, "the states at 8"
    if end == "agreed":
        twins.agree()
        assert planned(twins.head, asked).boundary == 16
        twins.head.release("r")
    elif end == "late":
        rig.wait(0.06)
        assert planned(twins.head, asked).boundary == 0
    else:
        twins.head.close()
    assert evict(rig).objects == 4 + 4
    assert rig.gauge("objects", "host") == 0


# --- it ends with the question


@pytest.mark.parametrize("end", ["answered", "failed", "late", "closed"])
def test_nothing_is_kept_when_the_question_is_over(nodes: Nodes, here: Client, end: str) -> None:
    asked = here.surveying("s", here.chain(TOKENS).digests[1:], hold_s=0.0)
    assert here.rig.later(asked) is None
    assert evict(here.rig).objects == FULL - 4
    match end:
        case "answered" | "failed":
            nodes.locate("a", Fault.IO if end == "failed" else None)
            nodes.pull("a")
        case "late":
            here.rig.wait(0.06)
        case _:
            here.close()
    assert evict(here.rig).objects == (8 if end == "answered" else 4)
    assert here.rig.gauge("objects", "host") == 0
