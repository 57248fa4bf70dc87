"""A client that says anything, for tests of what a node makes of it."""

import itertools
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tiercache.runtime.translate import NodeFacts
from tiercache.state import Layout, Namespace
from tiercache.wire import ClientSide
from tiercache.wire import messages as wire

FRAME_BYTES_MAX = 16 * 1024 * 1024
DESCRIPTORS_MAX = 253


class Figures(msgspec.Struct, frozen=True):
    """What a node answers to `Stats`."""

    node: NodeFacts
    counters: dict[str, dict[str, int]]
    gauges: dict[str, dict[str, float]]


class Speaker:
    """A blocking connection that says `Hello` and then what it is told. One thread at a time.

    `descriptors` are those that came with a reply; they are closed with the speaker.
    """

    def __init__(self, path: Path, *, timeout_s: float = 20.0, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout_s)
        self.sock.connect(str(path))
        self.descriptors: list[int] = []
        self.boot = ""
        self._calls = itertools.count(1)
        self._side = ClientSide(FRAME_BYTES_MAX)
        if hello:
            welcome = self.ask(wire.Hello(self.call(), wire.PROTOCOL, f"speaker-{os.getpid()}"))
            assert isinstance(welcome, wire.Welcome), welcome
            self.boot = welcome.boot

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up without a word."""
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def call(self) -> int:
        """Return a call number that was not used."""
        return next(self._calls)

    def tell(self, *messages: wire.FromClient) -> None:
        """Say something without waiting."""
        self.sock.sendall(b"".join(self._side.send(message) for message in messages))

    def ask(self, request: wire.Request) -> wire.Reply:
        """Say something and return the next reply. ConnectionError when the node hangs up."""
        self.tell(request)
        return self.read()

    def read(self) -> wire.Reply:
        """Return the next reply. ConnectionError when the node hangs up."""
        while (reply := self._side.next()) is None:
            arrived, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 18, DESCRIPTORS_MAX)
            self.descriptors += descriptors
            if not arrived:
                raise ConnectionResetError("the node hung up")
            self._side.receive(arrived)
        return reply

    def attach(self, namespace: Namespace, layout: Layout, *, write: bool = True) -> wire.Reply:
        """Attach as the only rank."""
        return self.ask(wire.Attach(self.call(), namespace, layout, 1, 0, write))

    def figures(self) -> Figures:
        """Return what the node counts, and what it says of itself."""
        report = self.ask(wire.Stats(self.call()))
        assert isinstance(report, wire.Report), report
        return msgspec.json.decode(report.body, type=Figures)

    def until_hung_up(self) -> bytes:
        """Return what still comes until the node closes the connection; TimeoutError if never."""
        arrived = b""
        try:
            while more := self.sock.recv(1 << 18):
                arrived += more
        except ConnectionResetError:
            return arrived  # It closed without reading all that was said to it.
        return arrived
