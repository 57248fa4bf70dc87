"""Strangers, slow readers and broken peers at a socket."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from tiercache.errors import PeerFault, TransportFault
from tiercache.testing.lenders import Lender, Target
from tiercache.testing.transport_pairs import AMPLE_S, SMALL, faults_of, until
from tiercache.transport import messages as said
from tiercache.transport.base import Asked, Limits
from tiercache.transport.handshake import Dialling, End, Listening
from tiercache.transport.messages import encode
from tiercache.transport.security import (
    Plain,
    SharedKey,
)
from tiercache.transport.serving import REPLIES_MAX
from tiercache.transport.stream import HEAD_BYTES, framed
from tiercache.transport.tcp import TcpListener, TcpTransport

LOOPBACK = "127.0.0.1:0"
KEY = SharedKey(bytes(range(32)))
CERTIFICATES = Path(__file__).parents[1] / "data" / "peers"
MIB = 1 << 20


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


def tcp(node: str = "a", limits: Limits = SMALL) -> TcpTransport:
    return TcpTransport(End(node, Plain(), limits))


async def stranger(listener: TcpListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = listener.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def frame_from(reader: asyncio.StreamReader) -> memoryview:
    nbytes = int.from_bytes(await reader.readexactly(4), "little")
    return memoryview(await reader.readexactly(nbytes))


async def greeted(listener: TcpListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stranger that has shaken hands."""
    reader, writer = await stranger(listener)
    dialling = Dialling(End("stranger", Plain(), SMALL), os.urandom(32))
    writer.write(framed(dialling.hello()))
    writer.write(framed(dialling.challenged(await frame_from(reader))))
    dialling.ready(await frame_from(reader))
    return reader, writer


async def ends(reader: asyncio.StreamReader) -> bytes:
    """Return the last words of the other end."""
    words = b""
    with suppress(ConnectionError):
        words = await reader.read()
    return words


A_FETCH = said.Fetch(1, 1000, 0, [Asked(b"k", 100, 0, 100)])
HELLO = Dialling(End("s", Plain(), SMALL), bytes(32)).hello()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100),
        b"\xff" * 100,
        (5000).to_bytes(4, "little"),
        framed(b""),
        framed(encode(A_FETCH)),
        framed(HELLO) + framed(HELLO),
        framed(HELLO) + framed(encode(said.Answer(b"no"))),
        framed(b"\x91" * 4000),
    ],
)
def test_a_stranger_who_cannot_speak_is_shown_out(sent: bytes) -> None:
    """And nobody else notices."""

    async def scenario() -> None:
        lender = Lender({b"k": 100})
        listener = await tcp().listen(LOOPBACK, lender)
        peer = await tcp("b").dial(listener.address, AMPLE_S)
        reader, writer = await stranger(listener)
        writer.write(sent)
        words = await ends(reader)
        assert words == b"" or b"refused" in words
        writer.close()
        target = Target(b"k", 100)
        assert await peer.fetch([target.want], AMPLE_S) == [None]
        assert target.right
        await peer.close()
        await listener.close()
        assert lender.loans == 0

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        (SMALL.frame_bytes_max + 1).to_bytes(4, "little"),
        framed(encode(said.Credit(1))),
        framed(encode(A_FETCH)) * 2,
        framed(encode(A_FETCH)) + framed(b"\xc1"),
        framed(HELLO),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_shown_out(sent: bytes) -> None:
    async def scenario() -> None:
        lender = Lender({b"k": 100})
        lender.held = []
        listener = await tcp().listen(LOOPBACK, lender)
        reader, writer = await greeted(listener)
        writer.write(sent)
        assert b"protocol" in await ends(reader)
        writer.close()
        await until(lambda: listener.connections == 0)
        lender.give()
        assert lender.loans == 0
        await listener.close()

    run(scenario)


def test_a_stranger_who_says_nothing_is_shown_out() -> None:
    async def scenario() -> None:
        limits = replace(SMALL, handshake_s_max=0.05, serve_s_max=0.1)
        listener = await tcp(limits=limits).listen(LOOPBACK, Lender())
        reader, writer = await stranger(listener)
        assert await ends(reader) == b""
        writer.close()
        await listener.close()

    run(scenario)


def test_a_peer_that_does_nothing_is_let_go() -> None:
    """Its next fetch is LOST, and may be tried again over a new connection."""

    async def scenario() -> None:
        limits = replace(SMALL, idle_s_max=0.1)
        listener = await tcp(limits=limits).listen(LOOPBACK, Lender({b"k": 1}))
        peer = await tcp("b").dial(listener.address, AMPLE_S)
        await until(lambda: peer.closed)
        assert faults_of(await peer.fetch([Target(b"k", 1).want], 1)) == [PeerFault.LOST]
        await listener.close()

    run(scenario)


def test_no_more_peers_than_there_is_room_for() -> None:
    async def scenario() -> None:
        listener = await tcp(limits=replace(SMALL, connections_max=2)).listen(LOOPBACK, Lender())
        peers = [await tcp("b").dial(listener.address, AMPLE_S) for _ in range(2)]
        with pytest.raises(TransportFault, match="2 peers are connected") as fault:
            await tcp("c").dial(listener.address, AMPLE_S)
        assert fault.value.fault is PeerFault.BUSY
        await peers[0].close()
        await until(lambda: listener.connections == 1)
        third = await tcp("c").dial(listener.address, AMPLE_S)
        for each in (peers[1], third):
            await each.close()
        await listener.close()

    run(scenario)


def test_strangers_take_no_place_of_peers() -> None:
    """Of those who say nothing, the newest takes the place of the oldest."""

    async def scenario() -> None:
        limits = replace(SMALL, connections_max=3)
        listener = await tcp(limits=limits).listen(LOOPBACK, Lender({b"k": 1}))
        peers = [await tcp("b").dial(listener.address, AMPLE_S) for _ in range(2)]
        silent = [await stranger(listener) for _ in range(5)]
        for reader, _ in silent[:2]:
            assert await ends(reader) == b""
        peers.append(await tcp("b").dial(listener.address, AMPLE_S))
        for peer in peers:
            assert await peer.fetch([Target(b"k", 1).want], float("inf")) == [None]
            await peer.close()
        for _, writer in silent:
            writer.close()
        await listener.close()

    run(scenario)


def test_a_peer_that_does_not_read_costs_no_memory_and_is_let_go() -> None:
    """What it asked for stays lent while the loop has bytes of it, and no longer."""

    async def scenario() -> None:
        lender = Lender({b"k": 32 * MIB})
        limits = replace(SMALL, stall_s_max=0.3, window_bytes=64 * MIB)
        listener = await tcp(limits=limits).listen(LOOPBACK, lender)
        reader, writer = await stranger(listener)
        end = End("stranger", Plain(), limits)
        dialling = Dialling(end, os.urandom(32))
        writer.write(framed(dialling.hello()))
        writer.write(framed(dialling.challenged(await frame_from(reader))))
        dialling.ready(await frame_from(reader))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        wanted = [Asked(b"k", 32 * MIB, 0, 32 * MIB)] * 4
        writer.write(framed(encode(said.Fetch(1, 60_000, 0, wanted))))
        writer.write(framed(encode(said.Fetch(2, 60_000, 0, wanted))))
        (lending,) = listener.open
        await until(lambda: lending.waiting_bytes > 0)
        most = lending.waiting_bytes
        writer.write(framed(encode(said.Cancel(1))))
        writer.write(framed(encode(said.Cancel(2))))
        await until(lambda: lender.loans < 8)
        while listener.connections:
            if lending.waiting_bytes:
                assert lender.loans > 0
            most = max(most, lending.waiting_bytes)
            await asyncio.sleep(0)
        assert most <= 2 * limits.chunk_bytes_max
        assert lender.loans == 0
        writer.close()
        await listener.close()

    run(scenario)


def test_replies_that_are_not_read_stop_the_reading() -> None:
    """A flood of requests ends in the sender's own memory."""

    async def scenario() -> None:
        limits = replace(SMALL, stall_s_max=1.5)
        listener = await tcp(limits=limits).listen(LOOPBACK, Lender())
        _, writer = await greeted(listener)
        try:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            (lending,) = listener.open
            most, backlog, call = 0, 0, 0
            while listener.connections:
                for _ in range(1000):
                    call += 1
                    writer.write(framed(encode(said.Ping(call, 0))))
                with suppress(ConnectionError, TimeoutError):
                    await asyncio.wait_for(writer.drain(), 0.05)
                most, backlog = max(most, lending.waiting_bytes), max(backlog, lending.backlog)
            assert most <= 64 << 10
            assert 0 < backlog <= REPLIES_MAX + HEAD_BYTES // len(framed(encode(said.Ping(1, 0))))
        finally:
            writer.transport.abort()
            await listener.close()

    run(scenario)


def test_a_lender_drops_what_takes_too_long() -> None:
    async def scenario() -> None:
        lender = Lender({b"k": 100})
        lender.held = []
        limits = replace(SMALL, serve_s_max=0.05)
        listener = await tcp(limits=limits).listen(LOOPBACK, lender)
        peer = await tcp("b").dial(listener.address, AMPLE_S)
        (outcome,) = await peer.fetch([Target(b"k", 100).want], AMPLE_S)
        assert outcome is not None
        assert (outcome.fault, outcome.detail) == (PeerFault.LATE, "the peer gave up")
        lender.give()
        assert lender.loans == 0
        await peer.close()
        await listener.close()

    run(scenario)


async def _broken_lender(last: bytes) -> asyncio.Server:
    """A listener that shakes hands, waits for a request and says `last`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listening = Listening(End("broken", Plain(), SMALL), os.urandom(32))
        writer.write(framed(listening.greeted(await frame_from(reader))))
        ready, _ = listening.answered(await frame_from(reader))
        writer.write(framed(ready))
        await frame_from(reader)
        writer.write(last)
        await ends(reader)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


@pytest.mark.parametrize(
    "last",
    [
        b"\xff" * 100,
        framed(encode(said.Chunk(1, 0, 101, bytes(16)))) + bytes(101),
        framed(encode(said.Chunk(9, 0, 100, bytes(16)))) + bytes(100),
        framed(encode(said.Ready())),
        framed(b""),
    ],
)
def test_a_lender_that_breaks_the_protocol_is_left(last: bytes) -> None:
    async def scenario() -> None:
        server = await _broken_lender(last)
        port = server.sockets[0].getsockname()[1]
        peer = await tcp("b").dial(f"127.0.0.1:{port}", AMPLE_S)
        target = Target(b"k", 100)
        assert faults_of(await peer.fetch([target.want], AMPLE_S)) == [PeerFault.PROTOCOL]
        assert target.guarded
        assert peer.closed
        await peer.close()
        server.close()
        await server.wait_closed()

    run(scenario)
