"""`/metrics`, `/health` and `/ready` over HTTP; nothing else is served. Imports aiohttp.

Nothing that goes wrong here can hurt the cache: a failed request is a 500 and a log line.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from tiercache.runtime.node import Readiness

CONNECTIONS_MAX = 32
"""Whoever comes then takes the place of the oldest: idle ones cannot keep the probes out."""

KEEPALIVE_S = 75.0
SHUTDOWN_S = 0.5

Answer = Callable[[web.Request], Awaitable[web.Response]]


async def serve_http(
    sock: socket.socket, collector: Collector, readiness: Callable[[], Readiness]
) -> Callable[[], Awaitable[None]]:
    """Serve on a socket that listens already. Calling what is returned ends it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def ready(_: web.Request) -> web.Response:
        state = readiness()
        lines = (
            f"ready: {str(state.ready).lower()}",
            f"nvme: {state.nvme}",
            f"nvme_objects_found: {state.nvme_found}",
            f"arena_prefaulted_bytes: {state.prefaulted_bytes} of {state.arena_bytes}",
        )
        return web.Response(text="\n".join(lines) + "\n", status=200 if state.ready else 503)

    app = web.Application(client_max_size=4096)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    runner = web.AppRunner(
        app, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=SHUTDOWN_S
    )
    await runner.setup()
    server = runner.server
    if server is None:
        raise AssertionError("an application that was set up has a server")

    def admit() -> asyncio.Protocol:
        open_now = server.connections
        if len(open_now) >= CONNECTIONS_MAX:
            open_now[0].force_close()
        return server()

    listening = await asyncio.get_running_loop().create_server(admit, sock=sock)

    async def end() -> None:
        listening.close()
        await runner.cleanup()

    return end
