"""One connection: answers leave together, slow readers are bounded, descriptors arrive."""

import os
import socket
from collections.abc import Iterator

import pytest

from tiercache.errors import ProtocolError
from tiercache.runtime.peercred import Peer
from tiercache.runtime.session import RECEIVE_BYTES, Session, SlowReaderError, refuse
from tiercache.testing.descriptors import open_descriptors
from tiercache.wire import ClientSide
from tiercache.wire import messages as wire

FRAME_BYTES_MAX = 1 << 20
HELLO = wire.Hello(1, wire.PROTOCOL, "test")
WELCOME = wire.Welcome(1, wire.PROTOCOL, "boot", "0", FRAME_BYTES_MAX, 100)


class Pair:
    """A session and the client at its other end."""

    def __init__(self, pending_bytes_max: int = 1 << 20) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX)
        ours.setblocking(False)
        self.theirs.settimeout(10)
        self.session = Session(
            1,
            ours,
            Peer(0, 0, 0),
            bytearray(RECEIVE_BYTES),
            frame_bytes_max=FRAME_BYTES_MAX,
            pending_bytes_max=pending_bytes_max,
        )
        self.side = ClientSide(FRAME_BYTES_MAX)

    def say(self, *messages: wire.FromClient) -> list[wire.FromClient]:
        """Send messages; return what the session heard."""
        self.theirs.sendall(b"".join(self.side.send(message) for message in messages))
        assert self.session.receive()
        return [*self.heard()]

    def heard(self) -> Iterator[wire.FromClient]:
        while (message := self.session.next()) is not None:
            yield message

    def shake_hands(self) -> None:
        assert self.say(HELLO) == [HELLO]
        self.session.answer(WELCOME)
        assert self.session.flush()
        assert self.read() == WELCOME

    def read(self) -> wire.Reply:
        """Wait for the next reply."""
        while (reply := self.side.next()) is None:
            self.side.receive(self.theirs.recv(65536))
        return reply

    def calls(self) -> list[int]:
        """Return the calls of the replies that have arrived."""
        found = []
        while (reply := self.side.next()) is not None:
            found.append(reply.call)
        return found

    def close(self) -> None:
        self.session.close()
        self.theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    made.shake_hands()
    yield made
    made.close()


def test_all_that_arrived_is_heard_in_order(pair: Pair) -> None:
    said: list[wire.FromClient] = [wire.Flush(2, False, 0), wire.Commit([1]), wire.Stats(3)]
    assert pair.say(*said) == said
    assert pair.session.receive(), "nothing more has come, and that is no end"


def test_answers_leave_together_and_in_order(pair: Pair) -> None:
    pair.say(*[wire.Flush(call, False, 0) for call in range(2, 102)])
    for call in range(101, 1, -1):
        pair.session.answer(wire.Flushed(call, call, 0))
    assert pair.session.flush()
    arrived = pair.theirs.recv(1 << 20)
    pair.side.receive(arrived)
    assert pair.calls() == list(range(101, 1, -1))


def test_the_end_of_the_stream_is_told(pair: Pair) -> None:
    pair.theirs.close()
    assert not pair.session.receive()


def test_a_slow_reader_is_bounded() -> None:
    pair = Pair(pending_bytes_max=100_000)
    pair.shake_hands()
    pair.say(*[wire.Stats(call) for call in range(2, 4)])
    pair.session.answer(wire.Report(2, b"x" * 90_000))
    with pytest.raises(SlowReaderError):
        pair.session.answer(wire.Report(3, b"x" * 20_000))
    pair.close()


def test_what_the_socket_does_not_take_waits_and_nothing_is_lost() -> None:
    pair = Pair(pending_bytes_max=64 << 20)
    pair.shake_hands()
    bodies = [bytes([call]) * 700_000 for call in range(2, 12)]
    pair.say(*[wire.Stats(call) for call in range(2, 12)])
    for call, body in enumerate(bodies, 2):
        pair.session.answer(wire.Report(call, body))
    assert not pair.session.flush()
    got: list[wire.Reply] = []
    while len(got) < len(bodies):
        pair.side.receive(pair.theirs.recv(65536))
        got += iter(pair.side.next, None)
        pair.session.flush()
    assert got == [wire.Report(call, body) for call, body in enumerate(bodies, 2)]
    assert pair.session.flush()
    pair.close()


def test_descriptors_ride_on_their_message(pair: Pair) -> None:
    reading, writing = os.pipe()
    attach = wire.Flush(2, False, 0)
    pair.say(attach, wire.Flush(3, False, 0))
    pair.session.answer(wire.Flushed(3, 0, 0))
    pair.session.answer(wire.Flushed(2, 0, 0), [reading, writing])
    assert pair.session.flush()
    calls: list[int] = []
    descriptors: list[int] = []
    while len(calls) < 2:
        arrived, some, _, _ = socket.recv_fds(pair.theirs, 1 << 20, 4)
        descriptors += some
        pair.side.receive(arrived)
        calls += pair.calls()
    assert calls == [3, 2]
    os.write(descriptors[1], b"through")
    assert os.read(descriptors[0], 99) == b"through"
    for descriptor in (reading, writing, *descriptors):
        os.close(descriptor)


def test_descriptors_that_a_client_sends_are_dropped(pair: Pair) -> None:
    before = open_descriptors()
    reading, writing = os.pipe()
    socket.send_fds(pair.theirs, [pair.side.send(wire.Stats(2))], [reading, writing])
    os.close(reading)
    os.close(writing)
    assert pair.session.receive()
    assert [*pair.heard()] == [wire.Stats(2)]
    assert open_descriptors() == before


def test_an_answer_beyond_the_frame_is_refused_in_its_place(pair: Pair) -> None:
    pair.say(wire.Stats(2))
    pair.session.answer(wire.Report(2, b"x" * (FRAME_BYTES_MAX + 1)))
    assert pair.session.flush()
    reply = pair.read()
    assert isinstance(reply, wire.Failed)
    assert (reply.call, reply.kind) == (2, "invalid")
    assert "ask for less" in reply.text


def test_hostile_bytes_are_answered_once() -> None:
    pair = Pair()
    pair.theirs.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert pair.session.receive()
    with pytest.raises(ProtocolError):
        pair.session.next()
    pair.session.farewell()
    pair.side.send(HELLO)
    reply = pair.read()
    assert isinstance(reply, wire.Failed)
    assert reply.kind == "protocol"
    pair.close()


def test_last_words_to_nobody_are_no_error() -> None:
    pair = Pair()
    pair.theirs.sendall(b"\xff" * 100)
    assert pair.session.receive()
    pair.theirs.close()
    with pytest.raises(ProtocolError):
        pair.session.next()
    pair.session.farewell()
    pair.close()


def test_who_is_not_let_in_is_told_why() -> None:
    pair = Pair()
    other, theirs = socket.socketpair(socket.AF_UNIX)
    refuse(other, "because")
    theirs.settimeout(10)
    pair.side.send(HELLO)
    pair.side.receive(theirs.recv(65536))
    assert pair.side.next() == wire.Failed(0, "refused", "because")
    assert theirs.recv(1) == b""
    theirs.close()
    pair.close()


def test_a_client_that_hung_up_is_heard_to_its_end(pair: Pair) -> None:
    """Its goodbye may lie behind the question whose answer finds nobody."""
    assert pair.say(wire.Stats(2), wire.Stats(3)) == [wire.Stats(2), wire.Stats(3)]
    pair.theirs.sendall(pair.side.send(wire.Detach()))
    pair.theirs.shutdown(socket.SHUT_RDWR)
    for call in (2, 3):
        pair.session.answer(wire.Report(call, b"{}"))
        assert pair.session.flush()
    assert pair.session.receive()
    assert [*pair.heard()] == [wire.Detach()]
    assert not pair.session.receive()
