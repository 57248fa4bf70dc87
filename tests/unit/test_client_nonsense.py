"""A node that answers what cannot be, and limits: nothing is read or written astray."""

import gc
from pathlib import Path

import pytest
from msgspec.structs import replace

from tiercache.client import Blob, Client, Saved, Wanted
from tiercache.errors import ProtocolError
from tiercache.state import Piece
from tiercache.testing.descriptors import open_descriptors
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import (
    CHAIN,
    LAYOUT,
    NAMESPACE,
    SHORT,
    blobs_for,
    content,
    store,
)
from tiercache.wire import messages as wire


def plans_as(node: ScriptedNode, planned: wire.Planned) -> None:
    """Make the node answer every plan with this."""
    node.script = lambda request: (
        replace(planned, call=request.call) if isinstance(request, wire.Plan) else None
    )


@pytest.mark.parametrize("boundary", [12, -1])
def test_a_boundary_that_cannot_be_ends_the_attachment(
    node: ScriptedNode, client: Client, boundary: int
) -> None:
    plans_as(node, wire.Planned(0, boundary, True, 0, [], [], [], ""))
    assert client.plan("r", CHAIN).reason == (
        f"unavailable: the node planned {boundary} of 10 tokens"
    )
    assert client.status == f"detached: the node planned {boundary} of 10 tokens"
    node.script = lambda _: None
    assert client.plan("r", CHAIN).reason == "nothing held"


@pytest.mark.parametrize(
    "piece",
    [
        Piece(2, 0, 1, "native", 0, 4, 0, 0, 32),
        Piece(-1, 0, 1, "native", 0, 4, 0, 0, 32),
        Piece(0, 0, 1, "native", 0, 4, 1, 0, 32),
        Piece(0, 0, 1, "native", 0, 4, -1, 0, 32),
        Piece(0, 0, 1, "native", 0, 4, 0, (1 << 20) - 31, 32),
        Piece(0, 0, 1, "native", 0, 4, 0, -32, 32),
        Piece(0, 0, 1, "native", 0, 4, 0, 0, -1),
    ],
)
def test_a_place_that_cannot_be_is_never_a_view(
    node: ScriptedNode, client: Client, piece: Piece
) -> None:
    plans_as(node, wire.Planned(0, 4, True, 4, [piece], [], [], ""))
    plan = client.plan("r", CHAIN)
    with pytest.raises(ProtocolError, match="no "):
        _ = plan.blobs


@pytest.mark.parametrize(
    "grants",
    [
        [],
        [wire.Grant("granted", 1, 1, 0)],
        [wire.Grant("granted", 1, 0, (1 << 20) - 63)],
        [wire.Grant("granted", 1, 0, -1)],
    ],
)
def test_a_grant_that_cannot_be_is_never_written(
    node: ScriptedNode, client: Client, grants: list[wire.Grant]
) -> None:
    node.script = lambda request: (
        wire.Reserved(request.call, grants) if isinstance(request, wire.Reserve) else None
    )
    blob = Blob("state", 4, content(64, 1))
    assert client.save("w", CHAIN, [blob]) == Saved(0, 0, {"unavailable": 1})
    assert client.status.startswith("detached: ")
    assert bytes(node.memory[0][: 1 << 10]) == bytes(1 << 10)


def test_fetched_and_loaded_must_fit_what_was_asked(node: ScriptedNode, client: Client) -> None:
    def script(request: wire.Request) -> wire.Reply | None:
        match request:
            case wire.Fetch(call):
                return wire.Fetched(call, [])
            case wire.Plan(call):
                return wire.Planned(call, 8, False, 0, [], [], [], "")
            case wire.Load(call):
                return wire.Loaded(call, 9, [], "")
            case _:
                return None

    node.script = script
    holding = client.fetch("f", [Wanted("kv", b"d")])
    assert (holding.reason, holding.blobs) == ("unavailable: 0 pieces for 1 objects", (None,))
    loaded = client.load(client.plan("r", CHAIN))
    assert (loaded.boundary, loaded.reason) == (0, "unavailable: the node loaded 9 of 8 tokens")


def test_a_failed_call_says_why_and_keeps_the_connection(
    node: ScriptedNode, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    node.script = lambda r: wire.Failed(r.call, "invalid", "too many") if isinstance(
        r, wire.Plan
    ) else None  # fmt: skip
    for _ in range(3):
        assert client.plan("r", CHAIN).reason == "unavailable: too many"
    assert client.status == "attached"
    assert len(caplog.records) == 1


def test_what_does_not_fit_a_frame(node: ScriptedNode, client: Client) -> None:
    request = "r" * (1 << 20)
    assert client.plan(request, CHAIN).reason.startswith("too_large: Plan takes ")
    assert client.save(request, CHAIN, blobs_for(4)).declined == {"too_large": 2}
    client.flush()
    assert not node.wait(wire.Release, 0)


def test_wrong_descriptors_are_refused_and_closed(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: (
            wire.Attached(r.call, [1 << 20, 1 << 20]) if isinstance(r, wire.Attach) else None
        )
        before = open_descriptors()
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status == "refused: 2 descriptors came, 4 should"
        node.wait_until(lambda: not node._sides)
        assert open_descriptors() == before
        client.close()


def test_a_segment_larger_than_its_memory_is_refused(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: (
            wire.Attached(r.call, [2 << 20]) if isinstance(r, wire.Attach) else None
        )
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status.startswith("refused: a segment's size is wrong")
        client.close()


def test_descriptors_are_flat_over_reconnects(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        counts = []
        for _ in range(5):
            with Client.attach(path, NAMESPACE, LAYOUT, options=SHORT) as client:
                assert client.flush().reason == ""
            node.wait_until(lambda: not node._sides)
            del client
            gc.collect()
            counts.append(open_descriptors())
        assert len(set(counts)) == 1


def test_closing(node: ScriptedNode) -> None:
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=SHORT)
    store(client, 8)
    plan = client.plan("r", CHAIN)
    client.close()
    client.close()
    node.wait(wire.Detach)
    assert not plan.held
    plan.release()
    assert client.status == "detached: closed"
    assert client.plan("r", CHAIN).reason == "unavailable: closed"
    assert client.load(plan) is plan


def test_a_layout_too_large_for_the_node_is_refused(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.frame_bytes_max = 300
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status.startswith("refused: the layout is too large for this node: Attach ")
        client.close()


def test_descriptors_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.client.handshake.DESCRIPTORS_MAX", 1)
    with ScriptedNode(path, LAYOUT) as node:
        before = open_descriptors()
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status == "refused: the node sent more than 1 descriptors"
        node.wait_until(lambda: not node._sides)
        assert open_descriptors() == before
        client.close()
