"""A request is handed over: one node has its state, the other one takes it and goes on."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.errors import Fault
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, boundary, hybrid, saved


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(a=Rig(clustered()), b=Rig(clustered()))


@pytest.fixture
def prefill(nodes: Nodes) -> Client:
    return Client(nodes.rigs["a"], hybrid()).attach()


@pytest.fixture
def decode(nodes: Nodes) -> Client:
    return Client(nodes.rigs["b"], hybrid()).attach()


def pushing(client: Client, to: str = "b", **changes: object) -> ev.PushAsked:
    chain = client.chain(TOKENS)
    fields: dict[str, object] = {
        "session": client.session, "call": client.rig.number(), "request": "r", "lora": client.lora,
        "salt": client.salt, "digests": list(chain.digests[1:]), "limit": 20,
        "codecs": client.codecs, "reshard": False, "to": to, "deadline": client.rig.now + 1,
    }  # fmt: skip
    return msgspec.convert({**fields, **changes}, ev.PushAsked)


def push(client: Client, to: str = "b", **changes: object) -> ev.PushAsked:
    """Push; it is not answered at once."""
    asked = pushing(client, to, **changes)
    client.rig.tell(asked)
    return asked


def answer(client: Client, asked: ev.PushAsked) -> cm.Pushed | None:
    found = client.rig.answers.get((client.session, asked.call))
    assert found is None or isinstance(found, cm.Pushed)
    return found


def hand_over(nodes: Nodes, client: Client) -> cm.Pushed:
    """Do all that a push takes."""
    asked = push(client)
    ((command, call),) = nodes.announce("a")
    nodes.locate("b")
    nodes.pull("b")
    nodes.taken("a", command, call)
    found = answer(client, asked)
    assert found is not None
    return found


def test_what_one_node_has_another_one_goes_on_with(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    saved(prefill, 8)
    assert hand_over(nodes, prefill) == cm.Pushed(8, "")
    assert boundary(decode) == 8
    assert decode.rig.work == []
    assert prefill.rig.count("pushes", "taken") == 1
    assert nodes.rigs["a"].gauge("handing_over") == nodes.rigs["b"].gauge("handing_over") == 0


def test_blocks_go_over_while_the_prompt_is_still_computed(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    chain = prefill.chain(TOKENS)
    prefill.save("r", prefill.offers(chain, 8, parts=["kv"]))
    assert hand_over(nodes, prefill) == cm.Pushed(0, "not_taken")
    assert decode.rig.gauge("objects", "host") == 2
    assert boundary(decode) == 0
    prefill.save("r", prefill.offers(chain, 16, start=8))
    assert hand_over(nodes, prefill) == cm.Pushed(16, "")
    assert decode.rig.count("peer_read_bytes") == prefill.rig.count("peer_lent_bytes") == 144
    assert boundary(decode) == 16


def test_what_is_there_already_does_not_go_again(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    saved(prefill, 8)
    hand_over(nodes, prefill)
    asked = push(prefill)
    ((command, call),) = nodes.announce("a")
    (found,) = nodes.locate("b")
    assert {record.key.part for record in found.records} == {"recurrent", "conv"}
    assert nodes.rigs["b"].take(ccm.Pull) == []
    assert nodes.taken("a", command, call) == 8
    assert answer(prefill, asked) == cm.Pushed(8, "")


def test_the_one_that_takes_it_needs_no_summary(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    """A plan may name where its request comes from."""
    saved(prefill, 8)
    chain = decode.chain(TOKENS)
    asked = msgspec.structs.replace(decode.planning("r", chain), source="a")
    assert decode.rig.later(asked) is None
    nodes.locate("b")
    assert nodes.pull("b") == 4
    found = decode.rig.answers[decode.session, asked.call]
    assert isinstance(found, cm.Planned)
    assert found.boundary == 8


@pytest.mark.parametrize("source", ["nobody", "b"])
def test_a_source_that_is_not_there_is_not_waited_for(
    nodes: Nodes, decode: Client, source: str
) -> None:
    asked = msgspec.structs.replace(decode.planning("r", decode.chain(TOKENS)), source=source)
    assert decode.rig.ask(asked, cm.Planned).boundary == 0


def test_a_source_that_has_no_more_is_not_asked(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    saved(decode, 20)
    planning = decode.planning("r", decode.chain(TOKENS), limit=20)
    asked = msgspec.structs.replace(planning, source="a")
    assert decode.rig.ask(asked, cm.Planned).boundary == 20


# --- one that does not take it


def test_nobody_of_that_name_is_there(nodes: Nodes, prefill: Client) -> None:
    saved(prefill, 8)
    assert answer(prefill, push(prefill, "nobody")) == cm.Pushed(0, "unknown_node")


def test_a_node_that_serves_no_such_namespace_takes_nothing(nodes: Nodes, prefill: Client) -> None:
    saved(prefill, 8)
    asked = push(prefill)
    ((command, call),) = nodes.announce("a")
    assert nodes.taken("a", command, call) == 0
    assert answer(prefill, asked) == cm.Pushed(0, "not_taken")


def test_a_node_that_cannot_be_reached_is_named_so_and_left_alone(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    for _ in range(3):
        asked = push(prefill)
        (command,) = prefill.rig.take(ccm.Announce)
        prefill.rig.tell(cev.AnnounceEnded(command.job, 0, Fault.IO))
        assert answer(prefill, asked) == cm.Pushed(0, "unavailable")
    assert answer(prefill, push(prefill)) == cm.Pushed(0, "busy")


def test_a_push_ends_at_its_deadline(nodes: Nodes, prefill: Client, decode: Client) -> None:
    saved(prefill, 8)
    asked = push(prefill)
    ((command, call),) = nodes.announce("a")
    prefill.rig.wait(1)
    assert answer(prefill, asked) == cm.Pushed(0, "deadline")
    nodes.locate("b")
    nodes.pull("b")
    assert nodes.taken("a", command, call) == 8
    assert boundary(decode) == 8, "late, but not in vain"


def test_a_taking_ends_at_its_deadline_wherever_it_is(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    saved(prefill, 8)
    push(prefill)
    ((command, call),) = nodes.announce("a")
    decode.rig.wait(1)
    assert nodes.taken("a", command, call) == 0, "while it asks"
    nodes.locate("b")
    assert nodes.pull("b") == 0
    push(prefill)
    ((command, call),) = nodes.announce("a")
    nodes.locate("b")
    decode.rig.wait(1)
    assert nodes.taken("a", command, call) == 0, "while it fetches"
    assert nodes.pull("b") == 4
    assert boundary(decode) == 8


def test_each_ends_at_its_own_deadline(nodes: Nodes, prefill: Client, decode: Client) -> None:
    saved(prefill, 8)
    now = prefill.rig.now
    asked = [push(prefill, deadline=now + seconds) for seconds in (1, 2)]
    told = nodes.announce("a")
    for rig in nodes.rigs.values():
        rig.wait(1)
    assert [nodes.taken("a", *each) for each in told] == [0, None]
    assert answer(prefill, asked[0]) == cm.Pushed(0, "deadline")
    assert answer(prefill, asked[1]) is None
    nodes.locate("b")
    third = push(prefill, deadline=now + 1.5)
    told.extend(nodes.announce("a"))
    nodes.locate("b")
    for rig in nodes.rigs.values():
        rig.wait(0.6)
    assert answer(prefill, third) == cm.Pushed(0, "deadline")
    assert [nodes.taken("a", *each) for each in told[1:]] == [None, 0]
    assert nodes.pull("b") == 4
    assert nodes.taken("a", *told[1]) == 8


def test_what_comes_in_batches_is_taken_when_all_of_it_has_come(
    nodes: Nodes, prefill: Client
) -> None:
    nodes.rigs["b"] = rig = Rig(clustered(pull_batch_bytes_max=40))
    nodes.meet("b")
    Client(rig, hybrid()).attach()
    saved(prefill, 8)
    push(prefill)
    ((command, call),) = nodes.announce("a")
    nodes.locate("b")
    pulls = rig.take(ccm.Pull)
    assert len(pulls) > 1
    for pull in pulls:
        assert nodes.taken("a", command, call) is None
        rig.tell(cev.Pulled(pull.job, [None] * len(pull.objects)))
    assert nodes.taken("a", command, call) == 8


def test_what_arrives_too_late_to_be_asked_for_is_not_taken(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    saved(prefill, 8)
    push(prefill, deadline=prefill.rig.now)
    ((command, call),) = nodes.announce("a")
    assert nodes.taken("a", command, call) == 0


@pytest.mark.parametrize("fault", [Fault.IO, Fault.DAMAGED])
def test_what_does_not_come_is_not_taken(
    nodes: Nodes, prefill: Client, decode: Client, fault: Fault
) -> None:
    saved(prefill, 8)
    push(prefill)
    ((command, call),) = nodes.announce("a")
    if fault is Fault.IO:
        nodes.locate("b", fault)
    else:
        nodes.locate("b")
        nodes.pull("b", fault)
    assert nodes.taken("a", command, call) == 0
    assert boundary(decode) == 0


def test_a_namespace_cleared_meanwhile_takes_nothing_in(
    nodes: Nodes, prefill: Client, decode: Client
) -> None:
    saved(prefill, 8)
    push(prefill)
    ((command, call),) = nodes.announce("a")
    decode.rig.ask(ev.ClearAsked(900, decode.rig.number(), ""), cm.Evicted)
    nodes.locate("b")
    assert nodes.rigs["b"].take(ccm.Pull) == []
    assert nodes.taken("a", command, call) == 0


def test_a_namespace_that_is_gone_meanwhile_takes_nothing_in(nodes: Nodes, prefill: Client) -> None:
    limits = msgspec.structs.replace(clustered(), namespaces_max=1)
    nodes.rigs["b"] = rig = Rig(limits)
    nodes.meet("b")
    decode = Client(rig, hybrid()).attach()
    saved(prefill, 8)
    push(prefill)
    ((command, call),) = nodes.announce("a")
    decode.close()
    other = Client(rig, hybrid(2)).attach()
    nodes.locate("b")
    assert nodes.taken("a", command, call) == 0
    assert boundary(other) == 0


def test_a_session_that_ends_is_not_answered(nodes: Nodes, prefill: Client, decode: Client) -> None:
    saved(prefill, 8)
    asked = push(prefill)
    ((command, call),) = nodes.announce("a")
    prefill.close()
    nodes.locate("b")
    nodes.pull("b")
    nodes.taken("a", command, call)
    assert answer(prefill, asked) is None


def test_there_is_a_limit_to_what_is_handed_over_at_once(nodes: Nodes) -> None:
    nodes.rigs["a"] = Rig(clustered(pulls_max=1))
    nodes.meet("a")
    prefill = Client(nodes.rigs["a"], hybrid()).attach()
    saved(prefill, 8)
    push(prefill)
    assert answer(prefill, push(prefill)) == cm.Pushed(0, "busy")


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": []},
        {"digests": [bytes(31)]},
        {"digests": [bytes(32)], "limit": 5},
        {"limit": -1},
        {"codecs": ()},
        {"digests": [bytes(32)] * 70_000, "limit": 1},
    ],
)
def test_nonsense_is_refused(prefill: Client, changes: dict[str, object]) -> None:
    asked = msgspec.structs.replace(pushing(prefill), **changes)
    assert prefill.rig.ask(asked, cm.Refused).kind == "invalid"


@pytest.mark.parametrize("digests", [[bytes(31)], []])
def test_nonsense_of_another_node_is_not_taken(
    nodes: Nodes, decode: Client, digests: list[bytes]
) -> None:
    rig = nodes.rigs["b"]
    space = decode.namespace.digest
    told = cev.Announced(
        -1, 7, "a", "r", space, digests, 4, 1, ("native",), False, 0, rig.now + 1
    )  # fmt: skip
    rig.tell(told)
    assert rig.answers[-1, 7] == ccm.Taken(0)
