"""A client hands a request over to another node, and takes one over."""

import asyncio

import pytest

from tiercache.client import AsyncClient, Client, Pushed, Scope
from tiercache.state import Chain
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import BLOCK, CHAIN, LAYOUT, NAMESPACE
from tiercache.wire import messages as wire
from tiercache.wire import sharing

SCOPE = Scope("l", "s", ("native", "int8"), reshard=True)


def answers(node: ScriptedNode, boundary: int, reason: str = "") -> None:
    """Have the node answer pushes."""
    node.script = lambda request: (
        sharing.Pushed(request.call, boundary, reason)
        if isinstance(request, sharing.Push)
        else None
    )


def test_the_other_node_is_named_and_what_it_took_is_told(
    node: ScriptedNode, client: Client
) -> None:
    answers(node, BLOCK)
    assert client.push("r", CHAIN, "b", scope=SCOPE, wait_s=2.5) == Pushed(BLOCK, "")
    (asked,) = node.wait(sharing.Push)
    whole = len(CHAIN) // BLOCK * BLOCK
    assert asked == sharing.Push(
        asked.call, "r", "l", "s", CHAIN.blocks(), whole, ["native", "int8"], True, "b", 2500
    )


def test_why_nothing_was_taken_is_told(node: ScriptedNode, client: Client) -> None:
    answers(node, 0, "unknown_node")
    assert client.push("r", CHAIN, "b") == Pushed(0, "unknown_node")


@pytest.mark.parametrize("boundary", [-1, len(CHAIN) + 1])
def test_more_than_there_is_was_not_taken(
    node: ScriptedNode, client: Client, boundary: int
) -> None:
    answers(node, boundary)
    pushed = client.push("r", CHAIN, "b")
    assert pushed.boundary == 0
    assert pushed.reason.startswith("unavailable: the node says")


def test_a_node_without_a_name_is_refused_before_anything_is_sent(
    node: ScriptedNode, client: Client
) -> None:
    with pytest.raises(ValueError, match="a name"):
        client.push("r", CHAIN, "")
    with pytest.raises(ValueError, match=r"."):
        client.push("r", Chain([1], BLOCK + 1), "b")
    assert not node.wait(sharing.Push, 0)


def test_a_node_that_is_away_is_a_value(node: ScriptedNode, client: Client) -> None:
    client.flush()
    node.stop()
    pushed = client.push("r", CHAIN, "b")
    assert pushed.boundary == 0
    assert pushed.reason.startswith("unavailable")


def test_a_plan_says_where_its_request_comes_from(node: ScriptedNode, client: Client) -> None:
    client.plan("r", CHAIN, scope=Scope(source="a"))
    client.plan("s", CHAIN)
    assert [asked.source for asked in node.wait(wire.Plan, 2)] == ["a", ""]


def test_the_asyncio_client_does_the_same(node: ScriptedNode) -> None:
    answers(node, BLOCK)

    async def scenario() -> None:
        async with await AsyncClient.attach(node.path, NAMESPACE, LAYOUT) as client:
            assert await client.push("r", CHAIN, "b", wait_s=0) == Pushed(BLOCK, "")

    asyncio.run(scenario())
    assert node.wait(sharing.Push)[0].wait_ms == 0
