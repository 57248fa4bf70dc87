"""A node that is slow, late, away, restarted, or refuses: values, in time."""

import logging
from pathlib import Path
from time import monotonic

import pytest

from tiercache.client import Client, Options, Wanted
from tiercache.client.handshake import Handshake
from tiercache.errors import RefusedError, UnavailableError
from tiercache.state import Chain
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import (
    BLOCK,
    CHAIN,
    LAYOUT,
    NAMESPACE,
    SHORT,
    blobs_for,
    store,
)
from tiercache.wire import messages as wire


def timed(limit_s: float, began: float) -> None:
    assert monotonic() - began < limit_s


def test_each_call_ends_at_its_deadline(node: ScriptedNode) -> None:
    options = Options(deadline_s=0.5)
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        node.mute = True
        began = monotonic()
        plan = client.plan("r", CHAIN)
        assert (plan.boundary, plan.reason) == (0, "deadline")
        timed(2.0, began)
        assert client.status == "detached: the node does not answer"
        began = monotonic()
        silent = "unavailable: the node does not answer"
        assert client.plan("r", CHAIN).reason == silent
        assert client.save("w", CHAIN, blobs_for(4)).declined == {"unavailable": 2}
        assert client.fetch("f", [Wanted("kv", b"d")]).reason == silent
        assert client.fetch("f", [Wanted("kv", b"d")]).blobs == (None,)
        assert client.flush(wait_s=0.1).reason == silent
        timed(0.4, began)


@pytest.mark.parametrize("call", ["plan", "load", "save", "fetch", "flush"])
def test_deadlines_of_each_call(node: ScriptedNode, call: str) -> None:
    options = Options(deadline_s=0.3)
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        node.script = lambda r: (
            wire.Planned(r.call, 8, False, 0, [], [], [], "") if isinstance(r, wire.Plan) else None
        )
        plan = client.plan("r", CHAIN)
        node.mute = True
        began = monotonic()
        match call:
            case "plan":
                assert client.plan("q", CHAIN).reason == "deadline"
            case "load":
                loaded = client.load(plan, wait_s=0.1)
                assert (loaded.boundary, loaded.reason, loaded.blobs) == (0, "deadline", ())
            case "save":
                assert client.save("w", CHAIN, blobs_for(4)).declined == {"deadline": 2}
            case "fetch":
                assert client.fetch("f", [Wanted("kv", b"d")]).reason == "deadline"
            case _:
                assert client.flush(wait_s=0.1).reason == "deadline"
        assert 0.29 < monotonic() - began < 2.0


def test_attaching_ends_at_its_deadline_and_is_not_repeated_at_once(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.mute = True
        began = monotonic()
        options = Options(deadline_s=0.3, retry_s=60)
        client = Client.attach(path, NAMESPACE, LAYOUT, options=options)
        timed(2.0, began)
        assert client.status == "detached: the node does not answer"
        began = monotonic()
        reason = client.plan("r", CHAIN).reason
        assert reason == "unavailable: detached: the node does not answer"
        timed(0.25, began)
        assert node.connections == 1
        client.close()


def test_a_late_reply_is_dropped_and_its_lease_released(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    node.mute = True
    assert client.plan("late", CHAIN).reason == "deadline"
    node.speak()
    with client.plan("next", CHAIN) as plan:
        assert plan.boundary == 8
        # Once on giving up, and once more for the reply that came after.
        assert node.wait(wire.Release, 2) == [wire.Release(["late"])] * 2
        assert node.shelf.leases == {"next"}


def test_a_late_reply_does_not_release_what_a_retry_holds(
    node: ScriptedNode, client: Client
) -> None:
    store(client, 8)
    node.mute = True
    assert client.plan("again", CHAIN).reason == "deadline"
    node.speak()
    plan = client.plan("again", CHAIN)
    client.flush()
    assert plan.boundary == 8
    assert node.shelf.leases == {"again"}
    assert len(node.wait(wire.Release)) == 1


def test_a_node_that_does_not_read_never_blocks_a_release(node: ScriptedNode) -> None:
    options = Options(deadline_s=1.0, retry_s=60)
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        plans = [client.plan("x" * 200 + str(n), CHAIN) for n in range(3000)]
        node.freeze()
        began = monotonic()
        for plan in plans:
            plan.release()
        timed(2.0, began)
        assert client.plan("r", CHAIN).reason in {
            "deadline",
            "unavailable: the node does not answer",
        }
        node.thaw()
        node.wait(wire.Release)
        assert client.flush(wait_s=5).reason == ""
        node.wait(wire.Release, 3000)


def test_too_many_unread_notices_end_the_attachment(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.client.session.NOTICES_MAX", 100)
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(retry_s=60))
    plans = [client.plan("x" * 200 + str(n), CHAIN) for n in range(3000)]
    node.freeze()
    for plan in plans:
        plan.release()
    assert client.status == "detached: the node does not read what it is sent"
    node.thaw()
    node.wait_until(lambda: not node.shelf.leases)
    client.close()


def test_the_goodbye_follows_what_a_node_had_not_read_yet(node: ScriptedNode) -> None:
    """Otherwise all that was leased stays set aside for as long as the engine lives."""
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=0.2))
    plan = client.plan("r", CHAIN)
    node.freeze()
    # More than a socket takes: some of it goes out, in the middle of a message.
    assert client.plan("large", Chain(range(60_000), BLOCK)).reason == "deadline"
    began = monotonic()
    client.close()
    timed(0.2, began)
    assert not plan.held
    node.thaw()
    node.wait(wire.Detach)
    node.wait_until(lambda: not node.shelf.leases)


def test_clients_without_a_name_are_not_taken_for_one_engine(node: ScriptedNode) -> None:
    for _ in range(2):
        Client.attach(node.path, NAMESPACE, LAYOUT, options=SHORT).close()
    first, second = node.wait(wire.Hello, 2)
    assert first.client != second.client


def test_a_restarted_node_is_attached_to_again(path: Path) -> None:
    client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
    assert client.status.startswith(f"detached: {path}: No such file")
    with ScriptedNode(path, LAYOUT, boot="first"):
        store(client, 8)
        assert (client.status, client.boot) == ("attached", "first")
        old = client.plan("old", CHAIN)
        kept = old.blobs[0].data
        expected = bytes(kept)
    assert not old.held
    assert client.status == "detached: the node closed the connection"
    assert client.boot == ""
    assert client.plan("r", CHAIN).reason.startswith("unavailable: detached: ")
    with ScriptedNode(path, LAYOUT, boot="second") as node:
        assert client.plan("r", CHAIN).reason == "nothing held"
        assert client.boot == "second"
        old.release()
        loaded = client.load(old)
        assert loaded is old
        client.flush()
        assert wire.Release(["old"]) not in node.wait(wire.Release, 0)
        assert bytes(kept) == expected
        client.close()


def test_a_plan_of_a_lost_attachment_cannot_be_loaded(node: ScriptedNode, client: Client) -> None:
    node.script = lambda r: (
        wire.Planned(r.call, 8, False, 0, [], [], [], "") if isinstance(r, wire.Plan) else None
    )
    plan = client.plan("r", CHAIN)
    node.drop_clients()
    assert client.plan("q", CHAIN).boundary == 8
    loaded = client.load(plan)
    assert (loaded.boundary, loaded.reason) == (0, "unavailable: the node that planned it is gone")


def test_a_connection_that_ends_during_a_call(node: ScriptedNode, client: Client) -> None:
    def hang_up(request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.Flush):
            node.drop_clients()
        return None

    node.script = hang_up
    assert client.flush().reason in {
        "unavailable: the node closed the connection",
        "unavailable: the connection broke: Connection reset by peer",
    }
    assert client.plan("r", CHAIN).reason == "nothing held"


def test_at_most_one_attempt_per_retry_s(path: Path) -> None:
    client = Client.attach(path, NAMESPACE, LAYOUT, options=Options(retry_s=60))
    with ScriptedNode(path, LAYOUT) as node:
        for _ in range(5):
            assert client.plan("r", CHAIN).reason.startswith("unavailable: detached: ")
        assert node.connections == 0
    client.close()


def test_required_raises(path: Path) -> None:
    options = Options(required=True, deadline_s=0.5)
    with pytest.raises(UnavailableError, match="No such file"):
        Client.attach(path, NAMESPACE, LAYOUT, options=options)
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: wire.Failed(r.call, "refused", "not you")
        with pytest.raises(RefusedError, match="not you"):
            Client.attach(path, NAMESPACE, LAYOUT, options=options)
        node.mute = True
        with pytest.raises(UnavailableError, match="deadline"):
            Client.attach(path, NAMESPACE, LAYOUT, options=options)


def test_a_refusal_stands_for_a_while_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedNode(path, LAYOUT) as node, caplog.at_level(logging.INFO, "tiercache.client"):
        node.script = lambda r: (
            wire.Failed(r.call, "refused", "no room") if isinstance(r, wire.Attach) else None
        )
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        for _ in range(3):
            assert client.plan("r", CHAIN).reason == "unavailable: refused: no room"
        assert client.status == "refused: no room"
        assert node.connections == 1
        assert [r.message for r in caplog.records] == [
            "running uncached: the node refused: no room"
        ]
        client.close()


def test_another_protocol_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        monkeypatch.setattr(
            Handshake, "hello", lambda self: self._side.send(wire.Hello(1, 99, "newer"))
        )
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status == "refused: the client speaks protocol 99, this node 1"
        assert node.received == []
        client.close()


def test_a_node_of_another_protocol_is_refused(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: wire.Welcome(r.call, 99, "b", "9.9", 1 << 20, 8)
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status == "refused: the node speaks protocol 99, this client 1"
        client.close()
