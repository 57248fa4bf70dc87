"""The pool as one node uses it, from its opening to the end."""

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Protocol, TypeVar

from tiercache.core import events
from tiercache.core.cluster import commands as cm
from tiercache.core.cluster import events as ev
from tiercache.errors import ConfigError, Fault, StorageFault
from tiercache.runtime.log import LOG, Seldom, say
from tiercache.runtime.node import Node, Pooled
from tiercache.runtime.pool import errands
from tiercache.runtime.pool.following import Following
from tiercache.runtime.pool.opening import open_store
from tiercache.settings import Pool
from tiercache.state import Boundary, Extent
from tiercache.state.names import short
from tiercache.tiers.base import Arena
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_sets import Sought
from tiercache.tiers.remote_store import SealedStore

_Answer = TypeVar("_Answer")

ASKING, FETCHING, DEPOSITING, LOOKING, TIDYING = 2, 4, 1, 1, 1
"""Threads for each kind of call: what takes long delays its own kind only."""

RETRACTING_MAX = 8
"""Announcements that are being taken back, for so many questions at once. Who misses more of them lets them
be: the next one tries again."""


class Carries(Protocol):
    """Carries out flushes that the pool knows of and this node does not."""

    def __call__(self, flushes: Mapping[str, int]) -> None:
        """Have these carried out."""
        ...


class PoolService:
    """Keeps this node and the pool in touch, and does what the core wants of it.

    Everything here runs on the loop's thread; what blocks is done in threads. `carries` has flushes carried
    out. A pool that is dead, slow or mad costs misses.
    """

    def __init__(
        self,
        settings: Pool,
        realm: Realm,
        writer: str,
        arena: Arena,
        node: Node,
    ) -> None:
        self._settings = settings
        self._realm = realm
        self._writer = writer
        self._arena = arena
        self._node = node
        self._threads = {
            "ask": ThreadPoolExecutor(ASKING, "pool-ask"),
            "fetch": ThreadPoolExecutor(FETCHING, "pool-fetch"),
            "deposit": ThreadPoolExecutor(DEPOSITING, "pool-deposit"),
            "look": ThreadPoolExecutor(LOOKING, "pool-look"),
            "tidy": ThreadPoolExecutor(TIDYING, "pool-tidy"),
        }
        self._store: SealedStore | None = None
        self._following: Following | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._seldom = Seldom()
        self._retracting = 0
        self._tidying: asyncio.Task[None] | None = None
        self._first = b""  # Where the next round of looks begins.
        self.state = "opening"
        self.carries: Carries = _nobody

    async def run(self) -> None:
        """Open the pool and stay in touch with it. Raises ConfigError when it cannot be used at all."""
        store = await self._in_thread("look", open_store, self._settings, self._realm)
        self._store = store
        for segment, size in enumerate(self._arena.segments):
            store.register(self._arena.view(Extent(segment, 0, size)))
        told_max = self._node.machine.limits.clustering.peer_names_max
        self._following = Following(
            store, self._writer, self._settings.boundaries_max, told_max, self._node.hear
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    await self._refresh_all(self._following)
                    await asyncio.sleep(self._settings.refresh_s)
        finally:
            self._tasks = None

    async def close(self, within_s: float) -> bool:
        """Let go of the pool; False when it has not let go of this node's memory in time."""
        self._tasks = None
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        store, self._store = self._store, None
        if store is None:
            return True
        closing = ThreadPoolExecutor(1, "pool-close")
        fault = await asyncio.get_running_loop().run_in_executor(closing, store.close, within_s)
        closing.shutdown(wait=False)
        return fault is None

    # --- what it is known to hold

    async def _refresh_all(self, following: Following) -> None:
        served = list(self._node.machine.cluster.served())
        following.leave(set(served))
        failed: StorageFault | None = None
        at = served.index(self._first) if self._first in served else 0
        for namespace, after in pairwise([*served[at:], *served[:at], b""]):
            try:
                await self._refresh(following, namespace)
            except StorageFault as fault:
                failed = fault
                if fault.fault is Fault.IO:
                    # The others would wait for as long; they come first the next time.
                    self._first = after
                    break
        if not following.is_tidy and (self._tidying is None or self._tidying.done()):
            assert self._tasks is not None
            self._tidying = self._tasks.create_task(self._tidy(following))
        if failed is None:
            self.state = "ready"
            return
        self.state = f"unreachable: {failed}"
        held = self._seldom.due("unreachable", time.monotonic())
        if held is not None:
            say(logging.WARNING, "pool unreachable", reason=str(failed), held_back=held)

    async def _tidy(self, following: Following) -> None:
        with contextlib.suppress(StorageFault):  # The next round tries again.
            await self._in_thread("tidy", following.tidy, self._settings.transfer_s_max)

    async def _refresh(self, following: Following, namespace: bytes) -> None:
        within_s = self._settings.transfer_s_max
        epoch = self._node.machine.cluster.flush_of(namespace)
        if following.epoch_of(namespace) != epoch:
            # Nothing of an epoch is used before the pool has said that it is the last one.
            flush = await self._in_thread("look", following.marked, namespace, within_s)
            if flush > epoch:
                following.forget(namespace)
                self.carries({namespace.hex(): flush})
                return
            if epoch:
                await self._in_thread("look", following.mark, namespace, epoch, within_s)
        found = following.follow(namespace, epoch)
        look = await self._in_thread("look", following.look, namespace, found, within_s)
        if look.names is None:
            following.forget(namespace)
            self.carries({namespace.hex(): look.flush})
        elif self._node.machine.cluster.flush_of(namespace) == epoch:
            following.looked(namespace, found, look)

    # --- what the core wants

    def execute(self, command: Pooled) -> None:
        """Start what the core wants of the pool."""
        if self._tasks is None or self._following is None or self._store is None:
            asyncio.get_running_loop().call_soon(self._node.hear, _failed(command))
            return
        store, following = self._store, self._following
        match command:
            case cm.Locate():
                work = self._locate(store, following, command)
            case cm.Pull():
                work = self._pull(store, following, command)
            case cm.Deposit():
                work = self._deposit(store, following, command)
            case cm.FlushPool():
                work = self._flush(following, command)
        self._tasks.create_task(work)

    async def _locate(self, store: SealedStore, following: Following, command: cm.Locate) -> None:
        namespace = command.namespace
        layout = self._node.machine.cluster.served().get(namespace)
        if following.epoch_of(namespace) != command.flush or layout is None:
            self._node.hear(ev.LocateEnded(command.job, 0, [], None))
            return
        known = following.names(namespace, command.flush)
        until = time.monotonic() + min(self._settings.answer_s_max, command.wait_s)

        def find() -> errands.Found:
            return errands.find(store, command, layout, known, until - time.monotonic())

        try:
            found = await self._in_thread("ask", find)
        except StorageFault as fault:
            self._node.hear(ev.LocateEnded(command.job, 0, [], fault.fault))
            return
        digests = {each.boundary.digest for each in found.missed}
        names = [short(namespace, digest) for digest in digests]
        following.missed(namespace, command.flush, names)
        self._node.hear(ev.LocateEnded(command.job, found.boundary, found.records, None))
        if found.missed and self._retracting < RETRACTING_MAX:
            within_s = self._settings.transfer_s_max
            self._retracting += 1
            try:
                with contextlib.suppress(StorageFault):  # The next one who misses it tries again.
                    await self._in_thread(
                        "tidy", errands.retract, store, command, found.missed, within_s
                    )
            finally:
                self._retracting -= 1

    async def _pull(self, store: SealedStore, following: Following, command: cm.Pull) -> None:
        until = time.monotonic() + self._settings.transfer_s_max

        def fetch() -> list[Fault | None]:
            return errands.fetch(store, self._arena, command, until - time.monotonic())

        try:
            faults = await self._in_thread("fetch", fetch)
        except StorageFault as fault:
            faults = [fault.fault] * len(command.objects)
        damaged = faults.count(Fault.DAMAGED)
        if damaged:
            held = self._seldom.due("damaged", time.monotonic())
            if held is not None:
                say(logging.ERROR, "damaged bytes from the pool", objects=damaged, held_back=held)
        if damaged or Fault.MISSING in faults:
            deepest = max((record for record, _ in command.objects), key=lambda each: each.end)
            namespace, digest = deepest.key.namespace, deepest.key.digest
            following.missed(namespace, command.flush, [short(namespace, digest)])
        self._node.hear(ev.Pulled(command.job, faults))

    async def _deposit(self, store: SealedStore, following: Following, command: cm.Deposit) -> None:
        if following.epoch_of(command.namespace) != command.flush:
            with contextlib.suppress(
                StorageFault
            ):  # After a start, or a clear: it was not looked yet.
                await self._refresh(following, command.namespace)
        if following.epoch_of(command.namespace) != command.flush:
            self._node.hear(ev.Deposited(command.job, Fault.IO))  # Nobody would look for it there.
            return

        until = time.monotonic() + self._settings.deposit_s_max

        def deposit() -> tuple[StorageFault | None, str]:
            left_s = until - time.monotonic()
            return errands.deposit(store, self._arena, command, self._writer, left_s)

        try:
            fault, cut = await self._in_thread("deposit", deposit)
        except StorageFault as error:
            fault, cut = error, ""
        if fault is None:
            sought = Sought(Boundary(command.boundary, command.digest), cut)
            following.announced(command.namespace, command.flush, sought)
            with contextlib.suppress(StorageFault):  # Said with the next look at the pool, then.
                await self._refresh(following, command.namespace)
        elif (held := self._seldom.due("deposit", time.monotonic())) is not None:
            say(logging.WARNING, "nothing went to the pool", reason=str(fault), held_back=held)
        self._node.hear(ev.Deposited(command.job, fault.fault if fault is not None else None))

    async def _flush(self, following: Following, command: cm.FlushPool) -> None:
        begun = {namespace.hex(): number for namespace, number in command.flushes.items()}
        fault: Fault | None = None
        for namespace, number in command.flushes.items():
            following.forget(namespace)
            begin = partial(following.begin, namespace, number, self._settings.transfer_s_max)
            try:
                begun[namespace.hex()] = await self._in_thread("look", begin)
            except StorageFault as error:
                fault = error.fault  # Each look at the pool tries again to tell it.
        # Once more, and kept: others may have had flushes meanwhile, and this node may end before the pool
        # is told.
        self.carries(begun)
        self._node.hear(ev.PoolFlushed(command.job, fault))

    async def _in_thread(self, kind: str, work: Callable[..., _Answer], *given: object) -> _Answer:
        """Return what `work` returns; raises ConfigError and StorageFault.

        Somebody else's library is at work there, and may raise anything: that is a pool that fails.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads[kind], partial(work, *given))
        except (ConfigError, StorageFault):
            raise
        except Exception as error:
            if self._seldom.due("raised", time.monotonic()) is not None:
                # Without its text, in which there may be what was sent: a key, or a URL that holds one.
                frames = "".join(traceback.format_tb(error.__traceback__))
                LOG.error("the pool's library failed: %s\n%s", type(error).__name__, frames)
            raise StorageFault(Fault.IO, f"{type(error).__name__}") from error


def _nobody(flushes: Mapping[str, int]) -> None:
    raise AssertionError(f"nobody carries out {flushes}")


def _failed(command: Pooled) -> events.Event:
    match command:
        case cm.Locate(job=job):
            return ev.LocateEnded(job, 0, [], Fault.IO)
        case cm.Pull(job=job, objects=objects):
            return ev.Pulled(job, [Fault.IO] * len(objects))
        case cm.Deposit(job=job):
            return ev.Deposited(job, Fault.IO)
        case cm.FlushPool(job=job):
            return ev.PoolFlushed(job, Fault.IO)
