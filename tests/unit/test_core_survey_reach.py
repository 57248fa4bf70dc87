"""Surveys that reach other nodes: what a peer holds is part of the answer, and is on its way."""

from dataclasses import replace

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster import reach
from tiercache.errors import Fault
from tiercache.state import Key, Kind, Layout, Record, Shard
from tiercache.testing.sim.asking import flush, plan
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import BLOCK, TOKENS, Client, Rig, hybrid, part, saved, small

END = 16
NOTHING = [b"", b"", b""]


def path(client: Client) -> list[bytes]:
    return list(client.chain(TOKENS[:END]).digests[1:])


def waiting(client: Client, request: str = "s", skip: int = 0) -> ev.SurveyAsked:
    """Survey what comes after `skip` blocks; it waits for another node."""
    asked = client.surveying(request, path(client)[skip:])
    assert client.rig.later(asked) is None
    return asked


def found(client: Client, asked: ev.SurveyAsked) -> list[bytes]:
    """Return the answer, which has come by now."""
    answer = client.rig.answers[client.session, asked.call]
    assert isinstance(answer, cm.Surveyed)
    return answer.held


def fetched(client: Client, *ends: int) -> int:
    """Fetch the states at these ends and all blocks up to them, by name; return how many came."""
    chain = client.chain(TOKENS)
    wanted = [client.wanted(chain, part, end) for end in ends for part in (1, 2)]
    wanted += [client.wanted(chain, 0, end) for end in range(4, max(ends) + 1, 4)]
    answer = client.rig.ask(client.fetching("get", wanted), cm.Fetched)
    return sum(piece is not None for piece in answer.pieces)


def test_what_another_node_holds_is_told_kept_and_comes(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = waiting(here)
    (answer,) = nodes.locate("a")
    assert (answer.boundary, len(answer.records)) == (8, 4)
    assert found(here, asked) == [b"\1\1", b"\0\1", b"\0\1"]
    chain = here.chain(TOKENS)
    fetch = here.fetching("get", [here.wanted(chain, 0, 4), here.wanted(chain, 1, 8)])
    assert here.rig.later(fetch) is None, "it is on its way"
    assert nodes.pull("a") == 4
    came = here.rig.answers[here.session, fetch.call]
    assert isinstance(came, cm.Fetched)
    assert None not in came.pieces
    assert fetched(here, 8) == 4
    assert here.survey("t", path(here)) == [b"\1\1", b"\0\1", b"\0\1"], "it is here now"
    assert here.rig.take(ccm.Locate) == []


def test_a_path_that_begins_inside_a_prompt_is_looked_for_from_there(
    nodes: Nodes, here: Client, there: Client
) -> None:
    """The engine has its first blocks itself, under whatever key."""
    saved(there, 16)
    nodes.gossip("b")
    asked = waiting(here, skip=2)
    (answer,) = nodes.locate("a")
    assert answer.boundary == 8, "of what was asked for"
    assert sorted((r.key.part, r.end) for r in answer.records) == [
        ("conv", 16), ("kv", 12), ("kv", 16), ("recurrent", 16)
    ]  # fmt: skip
    assert found(here, asked) == [b"\1\1", b"\0\1", b"\0\1"]
    assert nodes.pull("a") == 4


@pytest.mark.parametrize("shift", [4, -12, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_records_that_do_not_agree_on_where_the_path_stands_are_not_believed(
    nodes: Nodes, here: Client, there: Client, shift: int, which: int
) -> None:
    saved(there, 16)
    nodes.gossip("b")
    asked = waiting(here, skip=2)
    (question,) = here_asked(nodes)
    answer = nodes.ask("a", question)
    assert answer is not None
    wrong = list(answer.records)
    wrong[which] = moved(wrong[which], shift)
    nodes.answer("a", question.job, ccm.Located(8, wrong))
    assert found(here, asked)[1] in {b"", b"\0"}, "no state"
    assert here.rig.count("peer_asked", "failed") == 1


@pytest.mark.parametrize("shift", [4, -4, -12, 2])
@pytest.mark.parametrize("which", range(4))
def test_one_wrong_record_does_not_decide_where_a_path_stands(
    nodes: Nodes, here: Client, there: Client, shift: int, which: int
) -> None:
    """Whichever comes first: only that one is left out, and the rest can be gone on from."""
    saved(there, 16)
    nodes.gossip("b")
    waiting(here, skip=2)
    (question,) = here_asked(nodes)
    answer = nodes.ask("a", question)
    assert answer is not None
    records = [answer.records[which], *answer.records[:which], *answer.records[which + 1 :]]
    records[0] = moved(records[0], shift)
    nodes.answer("a", question.job, ccm.Located(8, records))
    (pull,) = here.rig.take(ccm.Pull)
    assert {record.end for record, _ in pull.objects} <= {12, 16}
    assert len(pull.objects) == 3
    assert here.rig.count("peer_asked", "failed") == 1


@pytest.mark.parametrize(
    ("ends", "start"),
    [
        ([8, 12], 4),
        ([8, 16], 4),
        ([16, 12], 4),
        ([0], 0),
        ([6], 0),
        ([2, 6], 0),
        ([], 0),
        ([12, 6, 6], 8),
    ],
)
def test_where_most_say(here: Client, ends: list[int], start: int) -> None:
    """Each record is of the block that ends at 4, 8 and so on of the path, and says that it ends there."""
    digests = path(here)
    records = [
        Record(Key(bytes(32), "kv", Shard(0, 1), "native", digest), 0, end, 1, bytes(16), "w", 0.0)
        for digest, end in zip(digests, ends, strict=False)
    ]
    assert reach._start(records, digests, 4) == start


def test_what_is_held_says_where_a_path_stands(nodes: Nodes, here: Client, there: Client) -> None:
    """And a node that says otherwise is not believed, even if all it says agrees."""
    here.save("kv", here.offers(here.chain(TOKENS), 12, parts=["kv"]))
    saved(there, 16)
    nodes.gossip("b")
    asked = waiting(here, skip=2)
    (question,) = here_asked(nodes)
    answer = nodes.ask("a", question)
    assert answer is not None
    shifted = [moved(record, 4) for record in answer.records]
    nodes.answer("a", question.job, ccm.Located(8, shifted))
    assert found(here, asked) == [b"\1", b"\0", b"\0"]
    assert started(here, asked) == 8


def moved(record: Record, by: int) -> Record:
    fields = {name: getattr(record, name) for name in record.__slots__}
    start = record.start if record.key.part != "kv" else max(0, record.start + by)
    return Record(**{**fields, "start": start, "end": record.end + by})


def started(client: Client, asked: ev.SurveyAsked) -> int:
    answer = client.rig.answers[client.session, asked.call]
    assert isinstance(answer, cm.Surveyed)
    return answer.start


def test_where_a_path_stands_is_told(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 16)
    nodes.gossip("b")
    asked = waiting(here, skip=2)
    nodes.locate("a")
    assert started(here, asked) == 8
    nothing = here.surveying("n", [bytes(32)])
    assert here.rig.ask(nothing, cm.Surveyed).start == -1


def test_only_what_is_deeper_is_asked_for(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    saved(here, 8)
    assert here.survey("s", path(here)) == [b"\1\1", b"\0\1", b"\0\1"]
    assert here.rig.take(ccm.Locate) == []


def test_what_is_here_is_not_sent_again(nodes: Nodes, here: Client, there: Client) -> None:
    saved(here, 8)
    saved(there, 16)
    nodes.gossip("b")
    asked = waiting(here)
    (question,) = here.rig.take(ccm.Locate)
    assert (question.whole, question.limit) == (8, 16)
    answer = nodes.ask("a", question)
    assert answer is not None
    assert sorted((r.key.part, r.end) for r in answer.records) == [
        ("conv", 16), ("kv", 12), ("kv", 16), ("recurrent", 16)
    ]  # fmt: skip
    nodes.answer("a", question.job, answer)
    assert found(here, asked) == [b"\1\1\1\1", b"\0\1\0\1", b"\0\1\0\1"]


def test_what_is_here_of_a_path_inside_a_prompt_is_not_sent_again(
    nodes: Nodes, here: Client, there: Client
) -> None:
    here.save("kv", here.offers(here.chain(TOKENS), 12, parts=["kv"]))
    saved(there, 16)
    nodes.gossip("b")
    waiting(here, skip=1)
    (question,) = here.rig.take(ccm.Locate)
    assert question.whole == 12, "tokens of the prompt, those before the path included"


def test_two_ranks_ask_once_and_both_hear(nodes: Nodes) -> None:
    """And what the other rank lacks is sent, although the one that asked has it."""
    parts = (
        part("kv", Kind.KV, None, BLOCK, 2),
        part("recurrent", Kind.RECURRENT, 1, 0, 2),
        part("conv", Kind.CONV, 1, 0, 2),
    )
    layout = Layout(parts, BLOCK)
    ours = [Client(nodes.rigs["a"], layout, ranks=2, rank=rank).attach() for rank in (0, 1)]
    theirs = [Client(nodes.rigs["b"], layout, ranks=2, rank=rank).attach() for rank in (0, 1)]
    for client in theirs:
        saved(client, 8)
    ours[0].save("kv", ours[0].offers(ours[0].chain(TOKENS), 8, parts=["kv"]))
    nodes.gossip("b")
    asked = [waiting(client) for client in ours]
    (question,) = here_asked(nodes)
    assert question.ranks == 2
    assert question.whole == 0
    nodes.rigs["a"].work.append(question)
    nodes.locate("a")
    assert [found(*pair) for pair in zip(ours, asked, strict=True)] == [
        [b"\1\1", b"\0\1", b"\0\1"]
    ] * 2
    nodes.pull("a")
    for client in ours:
        assert fetched(client, 8) == 4


def here_asked(nodes: Nodes) -> list[ccm.Locate]:
    return nodes.rigs["a"].take(ccm.Locate)


def test_the_same_request_asks_once(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    first = waiting(here)
    nodes.locate("a", Fault.IO)
    assert found(here, first) == NOTHING
    assert here.survey("s", path(here)) == NOTHING, "SGLang asks again and again for one that waits"
    assert here_asked(nodes) == []
    waiting(here, "another request")


def test_no_more_requests_are_remembered_than_may() -> None:
    limits = msgspec.structs.replace(clustered(), surveys_max=1)
    nodes = Nodes(a=Rig(limits), b=Rig(clustered()))
    here, there = (Client(nodes.rigs[name], hybrid()).attach() for name in "ab")
    saved(there, 8)
    nodes.gossip("b")
    for request in ("s", "t", "s"):
        waiting(here, request)
        nodes.locate("a", Fault.IO)


def test_a_survey_waits_no_longer_than_it_may(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    saved(here, 4)
    nodes.gossip("b")
    asked = waiting(here)
    (question,) = here_asked(nodes)
    assert here.rig.machine.wakeup() == here.rig.now + 0.05
    here.rig.wait(0.06)
    assert found(here, asked) == [b"\1", b"\1", b"\1"]
    assert here.rig.count("peer_asked", "late") == 1
    answer = nodes.ask("a", question)
    assert answer is not None
    nodes.answer("a", question.job, answer)
    assert here.rig.take(ccm.Pull) == [], "nobody waits for it any more"


def test_a_session_that_is_gone_hears_nothing(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    other = Client(nodes.rigs["a"], hybrid()).attach()
    asked, second = waiting(here), waiting(other)
    here.rig.tell(ev.Closed(here.session, acknowledged=True))
    nodes.locate("a")
    assert (here.session, asked.call) not in here.rig.answers
    assert found(other, second)[0] == b"\1\1"


def test_the_last_session_that_is_gone_withdraws_the_question(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    waiting(here)
    here.rig.tell(ev.Closed(here.session, acknowledged=True))
    (question,) = here_asked(nodes)
    nodes.answer("a", question.job, ccm.Located(0, []))
    assert here.rig.count("peer_asked", "not_found") == 0


def test_an_answer_from_before_a_flush_is_void(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = waiting(here)
    (question,) = here_asked(nodes)
    answer = nodes.ask("a", question)
    assert answer is not None
    flush(nodes, "a", 5)
    nodes.answer("a", question.job, answer)
    assert found(here, asked) == NOTHING


def test_a_namespace_that_cannot_be_opened_again_refuses(nodes: Nodes) -> None:
    limits = msgspec.structs.replace(clustered(), namespaces_max=2)
    nodes = Nodes(a=Rig(limits), b=Rig(clustered()))
    here, there = (Client(nodes.rigs[name], hybrid()).attach() for name in "ab")
    here.salt = there.salt = "tenant"
    saved(there, 8)
    nodes.gossip("b")
    asked = waiting(here)
    another = Client(nodes.rigs["a"], hybrid())
    another.namespace = replace(another.namespace, model="another")
    another.attach()  # The shelf of the tenant is empty, and makes room.
    nodes.locate("a", Fault.IO)
    answer = here.rig.answers[here.session, asked.call]
    assert isinstance(answer, cm.Refused)


def test_a_node_alone_asks_nobody() -> None:
    client = Client(Rig(small()), hybrid()).attach()
    assert client.survey("s", path(client)) == NOTHING


def test_a_node_that_lies_about_the_boundary_is_not_believed(
    nodes: Nodes, here: Client, there: Client
) -> None:
    """What it says to be deeper than what was asked for is no part of it."""
    saved(there, 8)
    nodes.gossip("b")
    asked = waiting(here)
    (question,) = here_asked(nodes)
    saved(there, 16)
    answer = nodes.ask("a", msgspec.structs.replace(question, digests=path(here), limit=16))
    assert answer is not None
    assert answer.boundary == 16
    nodes.answer("a", question.job, answer)
    assert found(here, asked) == [b"\1\1", b"\0\0", b"\0\0"]
    assert here.rig.count("peer_asked", "failed") == 1


@pytest.mark.parametrize("fault", [None, Fault.MISSING])
def test_a_survey_and_what_comes_of_it_leave_nothing_behind(
    nodes: Nodes, here: Client, there: Client, fault: Fault | None
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    waiting(here)
    nodes.locate("a")
    nodes.pull("a", fault)
    assert fetched(here, 8) == (0 if fault else 4)
    here.release("s", "get")
    here.rig.machine.check()
    assert here.rig.gauge("leases") == 0


def test_plans_are_asked_as_before(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    here.rig.tell(cev.MembersSeen({}))
    here.rig.wait(0.06)
    assert here.rig.count("peer_asked", "late") == 1


@pytest.mark.parametrize("call", ["plan", "survey"])
def test_a_node_that_became_isolated_while_a_call_waited_gives_nothing_out(call: str) -> None:
    """It may have missed a flush since it asked."""
    nodes = Nodes(a=Rig(clustered()), b=Rig(clustered()))
    here, there = (Client(rig, hybrid()).attach() for rig in nodes.rigs.values())
    saved(there, 16)
    nodes.gossip("b")
    chain = here.chain(TOKENS)
    asked = here.planning("r", chain) if call == "plan" else here.surveying("r", chain.digests[1:])
    assert here.rig.later(asked) is None
    here.rig.tell(cev.StandingHeld(here.rig.now))
    nodes.locate("a")
    assert isinstance(here.rig.answers[here.session, asked.call], cm.Refused)
