"""One client among threads, forks and signals."""

import contextlib
import errno
import os
import signal
import socket
import threading
from pathlib import Path
from time import monotonic

import pytest

from tiercache.client import Client, Options, Saved
from tiercache.state import Chain
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import (
    BLOCK,
    CHAIN,
    LAYOUT,
    NAMESPACE,
    blobs_for,
    store,
)
from tiercache.wire import messages as wire


def test_eight_threads_share_a_client(node: ScriptedNode) -> None:
    options = Options(deadline_s=10)
    faults: list[BaseException] = []
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:

        def work(number: int) -> None:
            try:
                tokens = [number * 1000 + at for at in range(12)]
                chain = Chain(tokens, BLOCK)
                blobs = blobs_for(8)
                assert client.save(f"w{number}", chain, blobs).stored == 3
                for turn in range(40):
                    with client.plan(f"r{number}-{turn}", chain) as plan:
                        assert plan.boundary == 8
                        assert bytes(plan.blobs[0].data) == bytes(blobs[0].data)
                    assert client.flush().reason == ""
            except BaseException as fault:
                faults.append(fault)
                raise

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert faults == []
        client.flush()
        assert node.shelf.leases == set()
        assert len(node.wait(wire.Release)) == 8 * 40


def test_a_long_wait_of_one_thread_does_not_hold_up_another(node: ScriptedNode) -> None:
    options = Options(deadline_s=5)
    held: list[wire.Flush] = []
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        store(client, 8)
        node.mute = True
        results = []
        waiting = threading.Thread(target=lambda: results.append(client.flush(wait_s=30)))
        waiting.start()
        held += node.wait(wire.Flush)
        node.mute = False  # The flush stays kept; others are answered.
        with client.plan("r", CHAIN) as plan:
            assert plan.boundary == 8
        node.speak()
        waiting.join(30)
        assert results[0].reason == ""


def test_threads_that_wait_together_each_keep_their_own_deadline(node: ScriptedNode) -> None:
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=0.2)) as client:
        node.mute = True
        reasons: list[str] = []
        waits = [0.3, 0.0, 0.1]
        threads = [
            threading.Thread(target=lambda w=w: reasons.append(client.flush(wait_s=w).reason))
            for w in waits
        ]
        began = monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert monotonic() - began < 1.5
        assert reasons == ["deadline"] * 3


def test_closing_while_another_thread_waits(node: ScriptedNode) -> None:
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=20))
    node.mute = True
    reasons: list[str] = []
    waiting = threading.Thread(target=lambda: reasons.append(client.plan("r", CHAIN).reason))
    waiting.start()
    node.wait(wire.Plan)
    client.close()
    waiting.join(10)
    assert reasons == ["unavailable: closed"]


def test_the_node_hears_of_the_end_only_after_the_last_byte_was_written(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=20))
    session = client._attached(monotonic() + 1).session
    writing, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        writing.set()
        assert go_on.wait(20)

    monkeypatch.setattr(session.arena, "write", slow)
    results: list[Saved] = []
    saving = threading.Thread(target=lambda: results.append(client.save("w", CHAIN, blobs_for(4))))
    saving.start()
    assert writing.wait(20)
    client.close()
    assert len(node._sides) == 1
    assert not node.wait(wire.Detach, 0)
    go_on.set()
    saving.join(20)
    assert results == [Saved(0, 0, {"unavailable": 2})]
    node.wait(wire.Detach)
    node.wait_until(lambda: not node._sides)
    assert not node.wait(wire.Commit, 0)


def test_a_forked_child_attaches_by_itself(node: ScriptedNode) -> None:
    options = Options(deadline_s=10)
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        store(client, 8)
        plan = client.plan("parent", CHAIN)
        view = plan.blobs[0].data
        expected = bytes(view)
        child = os.fork()
        if child == 0:  # No test machinery here: only an exit code.
            code = 1
            with contextlib.suppress(BaseException):
                plan.release()
                theirs = client.plan("child", CHAIN)
                good = theirs.boundary == 8 and bytes(view) == expected
                code = 0 if good and not plan.held else 2
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        node.wait_until(lambda: len(node._sides) == 1)
        assert node.connections == 2
        assert plan.held
        assert client.plan("again", CHAIN).boundary == 8
        assert "parent" in node.shelf.leases
        assert client.flush().reason == ""


def test_a_fork_while_another_thread_is_in_a_call(node: ScriptedNode) -> None:
    options = Options(deadline_s=10)
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        store(client, 8)
        reasons: list[str] = []
        waiting = threading.Thread(target=lambda: reasons.append(client.flush().reason))
        plan = client.plan("parent", CHAIN)
        node.mute = True
        waiting.start()
        node.wait(wire.Flush)
        node.mute = False
        link = client._attached(monotonic() + 1)
        locked, go_on = threading.Event(), threading.Event()

        def lock() -> None:
            with link._lock, link.session._lock, client._attaching:
                locked.set()
                assert go_on.wait(20)

        locking = threading.Thread(target=lock)
        locking.start()
        assert locked.wait(20)
        child = os.fork()
        go_on.set()
        if child == 0:
            signal.alarm(20)
            code = 1
            with contextlib.suppress(BaseException):
                plan.release()
                code = 0 if client.plan("child", CHAIN).boundary == 8 else 2
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        node.speak()
        waiting.join(10)
        locking.join(10)
        assert reasons == [""]


class Sabotage:
    """A socket that is interrupted, or fails, where it is told to."""

    def __init__(self, sock: socket.socket, where: str, fault: BaseException) -> None:
        self._sock, self._where, self._fault = sock, where, fault

    def __getattr__(self, name: str) -> object:
        if name == self._where:
            raise self._fault
        return getattr(self._sock, name)


@pytest.mark.parametrize(
    ("where", "why"),
    [("send", "interrupted while sending"), ("recv_into", "interrupted while receiving")],
)
def test_an_interrupt_that_may_have_lost_bytes_ends_the_attachment(
    node: ScriptedNode, client: Client, where: str, why: str
) -> None:
    link = client._attached(monotonic() + 1)
    link._sock = Sabotage(link._sock, where, KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        client.plan("r", CHAIN)
    assert client.status == f"detached: {why}"
    assert client.plan("r", CHAIN).reason == "nothing held"
    assert node.connections == 2


def test_closing_in_a_signal_handler_while_sending(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs after some bytes went out, and before that was noted."""
    link = client._attached(monotonic() + 1)
    sent = link.session.sent

    def interrupted(nbytes: int) -> None:
        monkeypatch.setattr(link.session, "sent", sent)
        client.close()
        sent(nbytes)

    monkeypatch.setattr(link.session, "sent", interrupted)
    assert client.plan("r", CHAIN).reason == "unavailable: closed"
    node.wait(wire.Detach)
    assert [type(message) for message in node.received][-2:] == [wire.Plan, wire.Detach]


def test_releasing_in_a_signal_handler_while_releasing(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(client, 8)
    first, second = (client.plan(name, CHAIN) for name in ("first", "second"))
    session = client._attached(monotonic() + 1).session
    let_go = session._let_go

    def interrupted(request: str) -> None:
        monkeypatch.setattr(session, "_let_go", let_go)
        second.release()
        let_go(request)

    monkeypatch.setattr(session, "_let_go", interrupted)
    first.release()
    node.wait(wire.Release, 2)
    assert node.shelf.leases == set()


@pytest.mark.parametrize("where", ["send", "recv_into"])
def test_a_broken_connection_is_a_value(node: ScriptedNode, client: Client, where: str) -> None:
    link = client._attached(monotonic() + 1)
    fault = OSError(errno.ENOBUFS, "No buffer space available")
    link._sock = Sabotage(link._sock, where, fault)  # type: ignore[assignment]
    reason = client.plan("r", CHAIN).reason
    assert reason == "unavailable: the connection broke: No buffer space available"
    assert client.plan("r", CHAIN).reason == "nothing held"
    assert node.connections == 2


def test_a_spurious_wake_up_is_nothing(node: ScriptedNode) -> None:
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=0.1)) as client:
        link = client._attached(monotonic() + 1)
        sock = link._sock
        link._sock = Sabotage(sock, "recv_into", BlockingIOError())  # type: ignore[assignment]
        assert client.plan("r", CHAIN).reason == "deadline"
        link._sock = sock


def test_closing_during_an_attempt(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.mute = True
        client = Client(path, NAMESPACE, LAYOUT, Options(deadline_s=20))
        reasons: list[str] = []
        calling = threading.Thread(target=lambda: reasons.append(client.plan("r", CHAIN).reason))
        calling.start()
        node.wait(wire.Hello)
        client.close()
        node.speak()
        calling.join(20)
        assert reasons == ["unavailable: closed"]
        node.wait_until(lambda: not node._sides)


def test_waiting_for_another_threads_attempt_ends_at_the_deadline(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.mute = True
        client = Client(path, NAMESPACE, LAYOUT, Options(deadline_s=0.2, retry_s=60))
        reasons: list[str] = []
        threads = [
            threading.Thread(target=lambda w=w: reasons.append(client.flush(wait_s=w).reason))
            for w in (0.5, 0.0)
        ]
        threads[0].start()
        node.wait(wire.Hello)
        threads[1].start()
        for thread in threads:
            thread.join(20)
        assert reasons == ["deadline", "deadline"]
        assert node.connections == 1
        client.close()


def test_an_interrupt_while_waiting_gives_the_call_up(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(client, 8)
    link = client._attached(monotonic() + 1)

    def interrupted(_: int) -> list[tuple[int, int]]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(link, "_readable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.plan("r", CHAIN)
    with client.plan("next", CHAIN) as plan:
        assert plan.boundary == 8
        node.wait(wire.Release, 1)
        assert node.shelf.leases == {"next"}
