"""A scripted node for tests of those who ask: it answers with what a test says."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from tiercache.core import commands
from tiercache.wire import messages as wire
from tiercache.wire.connection import ServerSide

FRAME_BYTES_MAX = 1 << 20

Say = Callable[[wire.Request], wire.Reply | bytes | None]


class AnsweringNode:
    """A node that answers with what the test put into `say`, and keeps what it heard.

    An answer of None is silence, b"" hangs up, other bytes are sent as they are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[wire.Request] = []
        self.say: dict[type, Say] = {wire.Hello: self._welcome}
        self.protocol = wire.PROTOCOL
        self.frame_bytes_max = FRAME_BYTES_MAX
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def reports(self, kind: type, *bodies: commands.ReplyBody | dict[str, object]) -> None:
        """Answer questions of that kind with these documents, the last one again and again."""
        left = list(bodies)

        def say(request: wire.Request) -> wire.Reply:
            body = left.pop(0) if len(left) > 1 else left[0]
            return wire.Report(request.call, msgspec.json.encode(body))

        self.say[kind] = say

    def fails(self, kind: type, how: str, text: str) -> None:
        """Refuse questions of that kind."""
        self.say[kind] = lambda request: wire.Failed(request.call, how, text)

    def asked(self, kind: type) -> list[wire.Request]:
        """Return what was heard of that kind."""
        return [request for request in self.heard if isinstance(request, kind)]

    def close(self) -> None:
        """End it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _welcome(self, request: wire.Request) -> wire.Reply:
        return wire.Welcome(request.call, self.protocol, "boot", "0", self.frame_bytes_max, 8)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link:
                self._talk(link, ServerSide(FRAME_BYTES_MAX))

    def _talk(self, link: socket.socket, side: ServerSide) -> None:
        while chunk := link.recv(65_536):
            side.receive(chunk)
            while (message := side.next()) is not None:
                assert isinstance(message, wire.Request)
                self.heard.append(message)
                answer = self.say[type(message)](message)
                if answer == b"":
                    return
                if answer is not None:
                    link.sendall(answer if isinstance(answer, bytes) else side.send(answer))
