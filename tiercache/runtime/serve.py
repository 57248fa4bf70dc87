"""Starts a node, keeps it running until it is told to stop, and leaves nothing behind."""

import asyncio
import gc
import importlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from tiercache.config import Settings
from tiercache.core import commands
from tiercache.core.machine import Machine
from tiercache.runtime.cluster.calls import PEERS
from tiercache.runtime.disk import Disk
from tiercache.runtime.executor import Executor
from tiercache.runtime.listening import Listener, listen_http
from tiercache.runtime.log import LOG, say, set_up
from tiercache.runtime.node import Node, Readiness
from tiercache.runtime.others import cluster_of, pool_of
from tiercache.runtime.prefault import Prefault
from tiercache.runtime.recording import Recorder
from tiercache.runtime.routers import publisher_of
from tiercache.runtime.server import Server, Terms
from tiercache.runtime.startup import Decided, admits_others, allowed_uids, decide, limits_of
from tiercache.runtime.telemetry import NodeCollector, Numbers, Tally
from tiercache.runtime.translate import NodeFacts, Telling
from tiercache.tiers import crash
from tiercache.tiers.host import HostArena
from tiercache.wire.messages import PROTOCOL

if TYPE_CHECKING:
    import socket

DRAIN_S = 3.0
"""How long a node that stops goes on writing what is on its way to NVMe."""

CLOSE_S = 3.0
"""How long it then waits for threads that are in the middle of something."""

DRAIN_LOOK_S = 0.01
EXIT_STUCK = 75
"""A thread did not come back, from a disk that hangs for instance; all else was put in order."""

EXIT_BROKEN = 70
"""The node met a bug of its own; it is safe to start it again."""

GC_THRESHOLDS = (50_000, 20, 100)
"""The catalog holds many long-lived objects: looking through them for garbage is a pause."""


class Stop:
    """Why and when a node stops: a signal, or a bug. `listener`: whose socket is removed then."""

    def __init__(self) -> None:
        self.reason = ""
        self.code = 0
        self.error: BaseException | None = None
        self.listener: Listener | None = None
        self._asked = asyncio.Event()

    def signalled(self, number: int) -> None:
        """Stop in good order; at the second signal, now."""
        if self._asked.is_set():
            say(logging.WARNING, "stopped at once", signal=signal.Signals(number).name)
            if self.listener is not None:
                self.listener.stop()
            os._exit(128 + number)
        self.reason = signal.Signals(number).name
        self._asked.set()

    def broken(self, reason: str) -> None:
        """Stop because nothing that is decided from now on can be trusted."""
        self.code = EXIT_BROKEN
        self.reason = reason
        self._asked.set()

    def failed(self, error: BaseException) -> None:
        """Stop because the node must not run like this; `serve` raises `error`."""
        self.error = error
        self.broken(str(error))

    async def wait(self) -> None:
        """Return when the node should stop."""
        await self._asked.wait()


class Sidecar:
    """One node and all it owns. `start` and `stop` run once, on the loop's thread."""

    def __init__(self, settings: Settings, decided: Decided, stop: Stop) -> None:
        self._settings = settings
        self._decided = decided
        self._loop = loop = asyncio.get_running_loop()
        self._stop = stop
        self._started_at = time.monotonic()
        self._born = time.time()
        self._importing = ThreadPoolExecutor(1, thread_name_prefix="import")
        self._open = AsyncExitStack()
        self._tally = Tally()
        self._machine = Machine(limits_of(settings, decided))
        self._arena = HostArena(decided.segments)
        self._open.callback(self._arena.close)
        self._prefault: Prefault | None = None
        self._disk = Disk(settings.nvme)
        self._server = Server(
            loop, self._terms(), self._tally, self._telling, settings.limits.lease_s_max
        )
        self._node = Node(
            loop,
            self._machine,
            self._tally,
            reply=self._reply,
            replied=self._server.flush,
            broken=stop.broken,
        )
        self._executor = Executor(
            loop,
            self._arena,
            self._node.hear,
            write_bytes_per_s=settings.nvme.write_bytes_per_s,
            read_threads=settings.nvme.read_threads,
        )
        self._node.execute_with(self._executor)
        self._recorder: Recorder | None = None
        self._behind: list[asyncio.Task[None]] = []
        self.leaves_abruptly = False
        self._cluster = cluster_of(settings, decided, self._arena, self._node)
        self._pool = pool_of(settings, self._arena, self._node, self._cluster)
        if self._cluster is not None:
            self._server.ask_cluster = self._cluster.ask
        elif self._pool is not None:
            self._server.ask_cluster = self._pool.ask

    def start(self) -> None:
        """Accept clients at once; disk, memory and metrics follow. Raises ConfigError."""
        settings = self._settings
        http = listen_http(settings.metrics.bind)
        if http is not None:
            self._open.callback(http.close)
        shared = admits_others(settings)
        listener = self._stop.listener = Listener(Path(settings.node.socket), shared=shared)
        self._open.callback(listener.close)
        if settings.record.path:
            folder = Path(settings.record.path)
            self._recorder = Recorder(folder, settings.record.bytes_max, self._tally)
            self._node.record_with(self._recorder.hear)
        own, boot = self._machine.cluster.own, self._decided.boot
        publisher = publisher_of(settings, boot, own, self._tally)
        if publisher is not None:
            self._open.callback(publisher.close)
        self._server.start(listener.sock, self._node)
        self._say_started(http)
        crash.reach("runtime.listening")
        self._prefault = Prefault(self._arena)
        if settings.nvme.path:
            self._follow(self._disk.start(self._node, self._executor))
        if self._cluster is not None:
            self._follow(self._cluster.run())
        if self._pool is not None:
            self._follow(self._pool.run())
        if publisher is not None:
            self._follow(publisher.run())
        if http is not None:
            self._follow(self._serve_http(http))

    async def stop(self) -> bool:
        """Let nobody in, finish what is being written, let go of everything.

        False when some thread was still busy after `CLOSE_S`: then only leaving the process helps.
        """
        crash.reach("runtime.stopping")
        say(logging.INFO, "stopping", reason=self._stop.reason)
        self._server.stop_accepting()
        if self._stop.listener is not None:
            self._stop.listener.stop()
        for task in self._behind:
            task.cancel()
        await asyncio.gather(*self._behind, return_exceptions=True)
        self._executor.hurry()
        until = self._loop.time() + DRAIN_S
        # Each outcome makes the core give the next writes: only looking says when it has none left.
        while self._executor.busy() and not self._stop.code and self._loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        unwritten = self._executor.busy()
        self._server.close()
        self._node.close()
        clean = self._executor.close(CLOSE_S)
        if self._recorder is not None:
            clean = self._recorder.close(CLOSE_S) and clean
        if self._prefault is not None:
            clean = self._prefault.close(CLOSE_S) and clean
        if self._pool is not None:
            self.leaves_abruptly = not await self._pool.close(CLOSE_S)
        if clean:
            clean = await self._disk.close(CLOSE_S)
        self._importing.shutdown(wait=False)
        await self._open.aclose()
        say(logging.INFO, "stopped", reason=self._stop.reason, unwritten=unwritten, clean=clean)
        return clean

    def _follow(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        task.add_done_callback(self._followed)
        self._behind.append(task)

    def _followed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop.failed(error)

    async def _serve_http(self, sock: "socket.socket") -> None:
        # Imported beside the loop, after clients are let in: it takes longer than all the rest.
        http = await self._loop.run_in_executor(
            self._importing, importlib.import_module, "tiercache.runtime.http"
        )
        build = {"version": self._decided.version, "protocol": str(PROTOCOL)}
        collector = NodeCollector(self._counters, self._gauges, self._tally, build)
        self._open.push_async_callback(await http.serve_http(sock, collector, self._readiness))

    # --- other nodes

    def _reply(self, reply: commands.Reply) -> None:
        ours = self._cluster or self._pool
        if ours is not None and reply.session <= PEERS:
            ours.answered(reply)
        else:
            self._server.reply(reply)

    # --- what it says of itself

    def _terms(self) -> Terms:
        settings, decided, arena = self._settings, self._decided, self._arena
        return Terms(
            uids=allowed_uids(settings),
            sessions_max=settings.limits.sessions_max,
            frame_bytes_max=settings.limits.frame_bytes_max,
            batch_max=settings.limits.batch_max,
            boot=decided.boot,
            version=decided.version,
            segments=decided.segments,
            descriptors=lambda write: arena.fds(write=write),
        )

    def _prefaulted(self) -> int:
        return self._prefault.nbytes if self._prefault is not None else 0

    def _telling(self) -> Telling:
        facts = NodeFacts(
            version=self._decided.version,
            protocol=PROTOCOL,
            boot=self._decided.boot,
            pid=os.getpid(),
            socket=self._settings.node.socket,
            uptime_s=time.monotonic() - self._started_at,
            connections=self._server.connections,
            arena_bytes=self._decided.arena_bytes,
            arena_prefaulted_bytes=self._prefaulted(),
            nvme=self._disk.state,
        )
        return Telling(facts, self._tally.counters, self._own_gauges())

    def _readiness(self) -> Readiness:
        return Readiness(
            ready=self._server.listening,
            nvme=self._disk.state,
            nvme_found=self._disk.found,
            arena_bytes=self._decided.arena_bytes,
            prefaulted_bytes=self._prefaulted(),
        )

    def _counters(self) -> Numbers:
        return {**self._machine.counters, **self._tally.counters}

    def _gauges(self) -> Numbers:
        return {**self._machine.gauges(), **self._own_gauges()}

    def _own_gauges(self) -> dict[str, dict[str, float]]:
        nvme = self._settings.nvme
        own: dict[str, float] = {
            "ready": float(self._server.listening),
            "nvme_scanned": float(self._disk.state == "ready"),
            "nvme_failed": float(self._disk.state.startswith("failed")),
            "pool_unreachable": float(self._pool is not None and self._pool.unreachable),
            "open_connections": self._server.connections,
            "arena_bytes": self._decided.arena_bytes,
            "arena_prefaulted_bytes": self._prefaulted(),
            "writeback_limit_bytes_per_second": nvme.write_bytes_per_s if nvme.path else 0,
            "start_time_seconds": self._born,
        }
        return {name: {"": value} for name, value in own.items()}

    def _say_started(self, http: "socket.socket | None") -> None:
        settings, decided = self._settings, self._decided
        say(
            logging.INFO,
            "started",
            version=decided.version,
            boot=decided.boot,
            pid=os.getpid(),
            socket=settings.node.socket,
            memory_limit_bytes=decided.memory_limit_bytes,
            arena_bytes=decided.arena_bytes,
            segments=len(decided.segments),
            nvme_path=settings.nvme.path,
            nvme_cap_bytes=settings.nvme.cap_bytes if settings.nvme.path else 0,
            write_back=settings.nvme.write_back,
            sessions_max=settings.limits.sessions_max,
            descriptors=decided.descriptors,
            metrics=_address(http),
        )


def _address(http: "socket.socket | None") -> str:
    """Where metrics are served, the port that was free included."""
    if http is None:
        return ""
    host, port = http.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve(settings: Settings, *, ready: Callable[[], None] | None = None) -> int:
    """Run a node until a signal stops it; return the process's exit code.

    `ready` is called when clients can connect. Raises ConfigError when the node cannot start, or
    finds out while it starts that it must not run.
    """
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled, number)
    sidecar = Sidecar(settings, decide(settings), stop)
    with _failing_threads_stop(loop, stop):
        try:
            sidecar.start()
            gc.freeze()
            if ready is not None:
                ready()
            await stop.wait()
        finally:
            clean = await sidecar.stop()
    if stop.error is not None:
        raise stop.error
    if not clean:
        logging.shutdown()
        os._exit(stop.code or EXIT_STUCK)
    if sidecar.leaves_abruptly:
        logging.shutdown()
        os._exit(stop.code)
    return stop.code


def run(settings: Settings) -> int:
    """Run a node in this process until a signal stops it; return the exit code. See `serve`."""
    set_up(settings.node.log)
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


@contextmanager
def _failing_threads_stop(loop: asyncio.AbstractEventLoop, stop: Stop) -> Iterator[None]:
    """A thread that ends with an error leaves a job without an outcome: the node must stop."""

    def failed(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        LOG.critical(
            "thread failed",
            exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
            extra={"fields": {"thread": name}},
        )
        loop.call_soon_threadsafe(stop.broken, f"thread {name} failed")

    before, threading.excepthook = threading.excepthook, failed
    try:
        yield
    finally:
        threading.excepthook = before
