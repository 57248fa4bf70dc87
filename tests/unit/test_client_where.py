"""A client asks where a prompt could be resumed."""

import asyncio

import pytest

from tiercache.client import AsyncClient, Client, Place, Places, Scope
from tiercache.state import Chain
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import BLOCK, CHAIN, LAYOUT, NAMESPACE
from tiercache.wire import sharing

SCOPE = Scope("l", "s", ("native", "int8"), reshard=True)
HERE = sharing.Place("", BLOCK, "nvme", 80, 16, 0.5, 2.0, "")
THERE = sharing.Place("b", 2 * BLOCK, "peer", 160, 160, -1, -1, "well")


def answers(node: ScriptedNode, *places: sharing.Place, reason: str = "") -> None:
    """Have the node answer where prompts lie."""
    node.script = lambda request: (
        sharing.Places(request.call, list(places), reason, BLOCK)
        if isinstance(request, sharing.Where)
        else None
    )


def test_the_prompt_is_asked_about_and_the_answer_told(node: ScriptedNode, client: Client) -> None:
    answers(node, HERE, THERE)
    found = client.where(CHAIN, scope=SCOPE)
    assert found == Places(
        (
            Place("", BLOCK, "nvme", 80, 16, 0.5, 2.0, ""),
            Place("b", 2 * BLOCK, "peer", 160, 160, -1, -1, "well"),
        )
    )
    (asked,) = node.wait(sharing.Where)
    assert asked == sharing.Where(
        asked.call, b"", "l", "s", CHAIN.blocks(), BLOCK, len(CHAIN) - 1, ["native", "int8"], True
    )
    client.where(CHAIN, limit=len(CHAIN))
    assert node.wait(sharing.Where, 2)[1].limit == len(CHAIN)
    client.where(Chain([], BLOCK))
    assert node.wait(sharing.Where, 3)[2].limit == 0


def test_an_asyncio_client_asks_the_same(node: ScriptedNode) -> None:
    answers(node, sharing.Place("", 0, "", 0, 0, 0, -1, ""), reason="unknown_prefix")

    async def ask() -> Places:
        async with await AsyncClient.attach(node.path, NAMESPACE, LAYOUT) as client:
            return await client.where(CHAIN)

    nothing = Place("", 0, "", 0, 0, 0, -1, "")
    assert asyncio.run(ask()) == Places((nothing,), "unknown_prefix")


@pytest.mark.parametrize(
    "places",
    [
        (),
        (sharing.Place("", len(CHAIN), "host", 0, 0, 0, 0, ""),),
        (HERE, sharing.Place("b", -1, "peer", 0, 0, 0, 0, "")),
    ],
)
def test_what_cannot_be_is_not_believed(
    node: ScriptedNode, client: Client, places: tuple[sharing.Place, ...]
) -> None:
    answers(node, *places)
    found = client.where(CHAIN)
    assert found.places == ()
    assert found.reason.startswith("unavailable: what the node says")


def test_wrong_arguments_are_refused_before_anything_is_sent(
    node: ScriptedNode, client: Client
) -> None:
    with pytest.raises(ValueError, match="blocks of"):
        client.where(Chain([1], BLOCK + 1))
    for limit in (-1, len(CHAIN) + 1):
        with pytest.raises(ValueError, match="limit"):
            client.where(CHAIN, limit=limit)
    assert not node.wait(sharing.Where, 0)


def test_a_node_that_is_away_is_a_value(node: ScriptedNode, client: Client) -> None:
    client.flush()
    node.stop()
    found = client.where(CHAIN)
    assert found.places == ()
    assert found.reason.startswith("unavailable")
