"""The least that a Python sidecar can take: typed msgspec messages, echoed by uvloop.

It decodes a `Fetch` and answers a `Fetched` of as many pieces; there is no catalog, no lease and no
check. `python -m tests.bench.echo SOCKET` serves; `Echo` starts that and talks to it.
"""

import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import msgspec
import uvloop

from tests.bench.nodes import ROOT
from tests.bench.peers.peer import Servers
from tiercache.state import Piece
from tiercache.wire import messages as wire
from tiercache.wire.frames import HEADER_BYTES, Frames, frame

FRAME_BYTES_MAX = 1 << 20
_decode_fetch = msgspec.msgpack.Decoder(wire.Fetch).decode
_decode_fetched = msgspec.msgpack.Decoder(wire.Fetched).decode
_encode = msgspec.msgpack.Encoder().encode
_PIECE = Piece(0, 0, 1, "native", 0, 64, 0, 1 << 20, 1 << 16)


class _Answering(asyncio.Protocol):
    def __init__(self) -> None:
        self._frames = Frames(FRAME_BYTES_MAX)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        while (body := self._frames.next()) is not None:
            asked = _decode_fetch(body)
            reply = wire.Fetched(asked.call, [_PIECE] * len(asked.wanted))
            self._transport.write(frame(_encode(reply)))


class Echo:
    """A blocking client of an echo server of its own."""

    def __init__(self) -> None:
        self._servers = Servers("echo")
        path = str(self._servers.folder / "echo.sock")
        self._servers.run(sys.executable, "-m", "tests.bench.echo", path, PYTHONPATH=str(ROOT))
        self._servers.wait_for(path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._call = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._servers.stop()

    def fetch(self, wanted: Sequence[wire.Wanted]) -> int:
        """Ask, and return how many pieces came."""
        self._call += 1
        asked = wire.Fetch(self._call, "request", "", "", list(wanted), 0)
        self._socket.sendall(frame(_encode(asked)))
        got = self._socket.recv(FRAME_BYTES_MAX)
        while len(got) < HEADER_BYTES or len(got) < _length(got):
            got += self._socket.recv(FRAME_BYTES_MAX)
        return len(_decode_fetched(memoryview(got)[HEADER_BYTES:]).pieces)


def _length(got: bytes) -> int:
    return HEADER_BYTES + int.from_bytes(got[:HEADER_BYTES], "little")


async def _serve(path: Path) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(_Answering, path)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1])))
