"""Looking along a path, clearing, and objects that lie in several pieces."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tiercache.client import AsyncClient, Blob, Cleared, Client, Saved, Scope, Wanted
from tiercache.errors import LayoutError
from tiercache.state import GivenChain
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import BLOCK, CHAIN, LAYOUT, NAMESPACE, SHORT, content, store
from tiercache.wire import messages as wire
from tiercache.wire import surveying

PATH = CHAIN.blocks()
Run = Callable[[Coroutine[Any, Any, None]], None]


def test_what_is_held_along_a_path(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    scope = Scope("l", "s", ("native", "int8"))
    survey = client.survey("s", PATH, scope=scope, hold_s=2.5)
    assert (survey.found, survey.reason, survey.held) == ((b"\1\1", b"\0\1"), "", True)
    (asked,) = node.wait(surveying.Survey)
    assert (asked.lora, asked.salt, asked.codecs) == ("l", "s", ["native", "int8"])
    assert (asked.chain, asked.hold_ms) == (PATH, 2500)
    client.release(survey)
    survey.release()
    assert [notice.requests for notice in node.wait(wire.Release)] == [["s"]]
    assert not survey.held


def test_a_survey_that_nobody_keeps_is_released(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    client.survey("s", PATH)
    client.flush()
    assert [notice.requests for notice in node.wait(wire.Release)] == [["s"]]


@pytest.mark.parametrize(
    "held", [[], [b"\1"], [b"\1", b""], [b"\1" * 3, b"\0" * 3], [b"\1", b"\1", b"\1"]]
)
def test_a_survey_must_fit_what_was_asked(
    node: ScriptedNode, client: Client, held: list[bytes]
) -> None:
    node.script = lambda request: (
        surveying.Surveyed(request.call, held, 0) if isinstance(request, surveying.Survey) else None
    )
    survey = client.survey("s", PATH)
    assert (survey.found, survey.held) == ((), False)
    assert survey.reason == "unavailable: the survey does not fit the layout"
    assert client.status.startswith("detached")


@pytest.mark.parametrize("digests", [b"", PATH[:-1]], ids=["none", "part"])
def test_a_path_is_whole_digests(client: Client, digests: bytes) -> None:
    with pytest.raises(ValueError, match="a path is digests"):
        client.survey("s", digests)
    with pytest.raises(ValueError, match="a path is digests"):
        client.survey("s", PATH, before=b"no digest")


def test_a_silent_node_answers_no_survey_and_is_released_late(
    node: ScriptedNode, client: Client
) -> None:
    node.freeze()
    survey = client.survey("s", PATH)
    assert (survey.found, survey.reason, survey.held) == ((), "deadline", False)
    assert client.clear(wait_s=0.0) == Cleared(0, 0, reason="unavailable: the node does not answer")
    node.thaw()
    assert node.wait(wire.Release)


def test_the_whole_namespace_is_cleared(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    assert client.clear() == Cleared(3, 0)
    (asked,) = node.wait(wire.Clear)
    assert asked.namespace == NAMESPACE.digest.hex()
    assert client.survey("s", PATH).found == (b"", b"")


def test_a_report_that_is_none(node: ScriptedNode, client: Client) -> None:
    node.script = lambda request: (
        wire.Report(request.call, b"{") if isinstance(request, wire.Clear) else None
    )
    assert client.clear().reason.startswith("unavailable: what the node says of the clear")


def test_an_object_may_lie_in_pieces(client: Client) -> None:
    whole = bytes(content(64, 3))
    pieces = [memoryview(whole[at:end]) for at, end in ((0, 1), (1, 40), (40, 40), (40, 64))]
    blob = Blob("state", 4, pieces[0], more=tuple(pieces[1:]))
    assert client.save("w", CHAIN, [blob]) == Saved(1, 0, {})
    with client.fetch("f", [Wanted("state", CHAIN.digest_at(4))]) as held:
        (found,) = held.blobs
        assert found is not None
        assert bytes(found.data) == whole
    with pytest.raises(LayoutError, match="65 bytes"):
        client.save("w", CHAIN, [Blob("state", 4, memoryview(whole), more=(pieces[0],))])


def test_an_engines_own_digests_will_do(node: ScriptedNode, client: Client) -> None:
    path = bytes(range(64))
    chain = GivenChain(path, BLOCK, first=3)
    blobs = [Blob("kv", 16, content(32, 1), 12), Blob("state", 20, content(64, 2))]
    assert client.save("w", chain, blobs) == Saved(2, 0, {})
    (reserve,) = node.wait(wire.Reserve)
    assert [(o.start, o.end, o.digest) for o in reserve.offers] == [
        (12, 16, path[:32]),
        (0, 20, path[32:]),
    ]
    assert client.survey("s", path).found == (b"\1", b"\0")


def test_the_same_over_asyncio(node: ScriptedNode, run: Run) -> None:
    async def scenario() -> None:
        async with await AsyncClient.attach(node.path, NAMESPACE, LAYOUT, options=SHORT) as client:
            blob = Blob("kv", 4, content(16, 1), more=(content(16, 2),))
            assert (await client.save("w", CHAIN, [blob])).stored == 1
            survey = await client.survey("s", PATH)
            assert survey.found == (b"\1", b"\0")
            await client.release(survey)
            assert await client.clear() == Cleared(1, 0)
            await asyncio.sleep(0)

    run(scenario())
