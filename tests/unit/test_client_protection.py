"""What a client says of how its objects should be kept, and pins."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tiercache.client import AsyncClient, Client, Hint, Pinned, Saved, Scope
from tiercache.state import Care, GivenChain
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import BLOCK, CHAIN, LAYOUT, NAMESPACE, SHORT, blobs_for
from tiercache.wire import guarding
from tiercache.wire import messages as wire

WISHES = Scope(ttl_s=1.5, priority=-1, hint=Hint.TOOL_CALL_PENDING)


def test_wishes_ride_on_plan_and_save(node: ScriptedNode, client: Client) -> None:
    client.plan("r", CHAIN, scope=WISHES)
    client.save("r", CHAIN, blobs_for(8), scope=WISHES)
    client.plan("s", CHAIN)
    wished = Care(1500, -1, Hint.TOOL_CALL_PENDING, True)
    (plan, plain), (reserve,) = node.wait(wire.Plan, 2), node.wait(wire.Reserve)
    assert (plan.care, plain.care, reserve.care) == (wished, Care(), wished)


def test_nothing_of_a_request_that_says_so_leaves_the_process(
    node: ScriptedNode, client: Client
) -> None:
    secret = Scope(do_not_store=True)
    plan = client.plan("r", CHAIN, scope=secret)
    assert client.save("r", CHAIN, blobs_for(8), scope=secret) == Saved(0, 0, {"do_not_store": 3})
    plan.release()
    client.flush()
    assert not node.wait(wire.Reserve, 0)
    assert node.wait(wire.Plan)[0].care == Care(store=False)


@pytest.mark.parametrize(
    "wishes",
    [
        {"ttl_s": -0.1},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"ttl_s": 1e9},
        {"priority": 3},
        {"priority": -3},
    ],
)
def test_wishes_outside_their_bounds_are_refused(wishes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"ttl_s|priority"):
        Scope(**wishes)


def test_a_short_ttl_is_not_none() -> None:
    assert Scope(ttl_s=1e-6).care.ttl_ms == 1


def test_what_went_for_ones_own_share_is_told(node: ScriptedNode, client: Client) -> None:
    real = node.shelf.answer

    def evicting(request: wire.Request) -> wire.Reply | None:
        if not isinstance(request, wire.Reserve):
            return None
        reply = real(request)
        assert isinstance(reply, wire.Reserved)
        first, *others = reply.grants
        own = wire.Grant(first.outcome, first.ticket, first.segment, first.offset, 2)
        return wire.Reserved(request.call, [own, *others])

    node.script = evicting
    assert client.save("r", CHAIN, blobs_for(8)) == Saved(3, 0, {}, evicted=2)


def pinning(node: ScriptedNode, outcome: str = "pinned") -> None:
    """Have the node answer pins."""

    def script(request: wire.Request) -> wire.Reply | None:
        match request:
            case guarding.Pin(call, age_ms=age_ms):
                return guarding.Pinned(call, outcome, 7, 3, 4096, age_ms)
            case guarding.Unpin(call, number):
                return guarding.Pinned(call, "unpinned", number, 3, 4096, 0)
            case _:
                return None

    node.script = script


def test_a_boundary_is_pinned_and_unpinned(node: ScriptedNode, client: Client) -> None:
    pinning(node)
    scope = Scope(lora="l", salt="s")
    pinned = client.pin(CHAIN, boundary=10, scope=scope, age_s=2.5)
    assert pinned == Pinned("pinned", 7, 3, 4096, 2.5)
    assert client.pin(CHAIN, boundary=8).outcome == "pinned"
    assert client.pin(GivenChain(CHAIN.blocks(), BLOCK)).outcome == "pinned"
    assert client.unpin(pinned) == Pinned("unpinned", 7, 3, 4096)
    inside, edge, given = node.wait(guarding.Pin, 3)
    digests = b"".join(CHAIN.digests[1:3])
    assert inside == guarding.Pin(inside.call, "l", "s", digests, 10, CHAIN.digest_at(10), 2500)
    assert (edge.chain, edge.tail, edge.age_ms) == (digests, b"", 60_000)
    assert (given.chain, given.tokens, given.tail) == (digests, 8, b"")
    assert node.wait(guarding.Unpin)[0].number == 7


def test_why_a_pin_is_refused_is_told(node: ScriptedNode, client: Client) -> None:
    pinning(node, "over_budget")
    assert client.pin(CHAIN).outcome == "over_budget"


def test_wrong_pins_are_refused_before_anything_is_sent(node: ScriptedNode, client: Client) -> None:
    for boundary in (0, -1, len(CHAIN) + 1):
        with pytest.raises(ValueError, match="outside the chain"):
            client.pin(CHAIN, boundary=boundary)
    for age_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="for some time"):
            client.pin(CHAIN, age_s=age_s)
    assert not node.wait(guarding.Pin, 0)


def test_a_node_that_is_away_is_no_error(node: ScriptedNode, client: Client) -> None:
    node.stop()
    assert client.pin(CHAIN).outcome == "unavailable"
    assert client.unpin(Pinned("pinned", 7)).outcome == "unavailable"


def test_the_asyncio_client_pins_too(
    node: ScriptedNode, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    pinning(node)

    async def scenario() -> None:
        async with await AsyncClient.attach(node.path, NAMESPACE, LAYOUT, options=SHORT) as client:
            pinned = await client.pin(CHAIN)
            assert pinned.outcome == "pinned"
            assert (await client.unpin(pinned)).outcome == "unpinned"
            await asyncio.wait_for(client.save("r", CHAIN, blobs_for(8), scope=WISHES), 10)

    run(scenario())
    assert node.wait(wire.Reserve)[0].care.priority == -1
