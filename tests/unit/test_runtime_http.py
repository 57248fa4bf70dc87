"""What is served over HTTP, to how many, and that it ends."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tiercache.runtime.http import CONNECTIONS_MAX, serve_http
from tiercache.runtime.listening import listen_http
from tiercache.runtime.node import Readiness
from tiercache.runtime.telemetry import NodeCollector, Tally

WAIT_S = 10.0
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A port that serves, and how ready the node behind it is."""

    def __init__(self, sock: socket.socket) -> None:
        self.port: int = sock.getsockname()[1]
        self.ready = True

    def readiness(self) -> Readiness:
        return Readiness(self.ready, "scanning", 7, 8192, 4096)

    async def connect(self) -> Link:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body that `path` answers with."""
        reader, writer = await self.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        head, _, body = answer.decode().partition("\r\n\r\n")
        return int(head.split()[1]), body


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    sock = listen_http("127.0.0.1:0")
    assert sock is not None
    found = Served(sock)
    collector = NodeCollector(dict, dict, Tally(), {"version": "1"})
    end = await serve_http(sock, collector, found.readiness)
    yield found
    await end()
    with pytest.raises(ConnectionRefusedError):
        await found.connect()


async def test_metrics_health_and_ready(served: Served) -> None:
    status, body = await served.get("/metrics")
    assert status == 200
    assert "tiercache_leases 0.0" in body
    assert await served.get("/health") == (200, "alive\n")
    status, body = await served.get("/ready")
    assert status == 200
    assert body.splitlines() == [
        "ready: true",
        "nvme: scanning",
        "nvme_objects_found: 7",
        "arena_prefaulted_bytes: 4096 of 8192",
    ]


async def test_a_node_that_lets_nobody_in_is_not_ready_and_healthy(served: Served) -> None:
    served.ready = False
    assert (await served.get("/ready"))[0] == 503
    assert (await served.get("/health"))[0] == 200


async def test_idle_connections_make_room_for_the_next(served: Served) -> None:
    idle = []
    for _ in range(CONNECTIONS_MAX):
        idle.append(await served.connect())
        assert (await served.get("/health"))[0] == 200
    assert await asyncio.wait_for(idle[0][0].read(), WAIT_S) == b""
    for _, writer in idle:
        writer.close()
