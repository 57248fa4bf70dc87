"""Nodes and a pool in one process: real machines and a pool in memory, which does what a test says."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import msgspec
import pytest
import xxhash

from tiercache.config import parse
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.limits import MIB, Clustering, Limits, Retaining
from tiercache.errors import Fault, StorageFault
from tiercache.runtime.node import Node
from tiercache.runtime.pool import service
from tiercache.runtime.pool.service import PoolService
from tiercache.state import Extent
from tiercache.testing.sim.rig import TOKENS, Client, Rig, boundary, hybrid
from tiercache.testing.store_objects import SECRET
from tiercache.tiers.memory import MemoryArena
from tiercache.tiers.remote import Blob, Late, Name
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_store import SealedStore

REFRESH_S = 0.01
WAIT_S = 20.0


class MoodyPool(MemoryPool):
    """A pool that does what the test says. `late`: what it has not let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.late: threading.Event | None = None
        self.asked: list[str] = []
        self.closes = True

    def _fault(self, call: str) -> StorageFault | None:
        self.asked.append(call)
        if self.late is not None and call in {"get", "put"}:
            return Late("it takes its time", self.late)
        return StorageFault(Fault.IO, "away") if self.away else None

    def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.put`."""
        fault = self._fault("put")
        return [fault] * len(blobs) if fault else super().put(blobs, within_s)

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.get`."""
        fault = self._fault("get")
        return [fault] * len(blobs) if fault else super().get(blobs, within_s)

    def heads(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.heads`."""
        fault = self._fault("heads")
        return [fault] * len(blobs) if fault else super().heads(blobs, within_s)

    def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
        """See `Pool.holds`."""
        if fault := self._fault("holds"):
            raise fault
        return super().holds(names, within_s)

    def close(self, within_s: float) -> StorageFault | None:
        """See `Pool.close`."""
        return None if self.closes else StorageFault(Fault.IO, "it hangs")


class Place:
    """A node: a machine, an engine at it, memory with bytes in it, and its way to the pool."""

    def __init__(self, pool: MemoryPool, name: str, *, units: int = 1, **changes: object) -> None:
        limits = Limits(
            (MIB,),
            clustering=Clustering(pool=True, pool_answer_s_max=WAIT_S, deposit_resumes_min=1),
            retaining=Retaining("dense", checkpoints_per_path_max=0),
        )
        self.rig = Rig(limits)
        self.engine = Client(self.rig, hybrid(units)).attach()
        self.arena = MemoryArena([MIB])
        self.store = SealedStore(pool, Realm("test", SECRET))
        settings = parse(
            {"pool": {"kind": "s3", "s3_bucket": "b", "refresh_s": 0.05, **changes}}, "test"
        ).pool
        self.settings = msgspec.structs.replace(settings, refresh_s=REFRESH_S)
        self.heard: list[ev.Event] = []
        self.carried: list[dict[str, int]] = []
        self.service = PoolService(
            self.settings, Realm("test", SECRET), name, self.arena, cast("Node", self)
        )
        self.service.carries = self._carry
        self._changed = asyncio.Event()

    @property
    def machine(self) -> object:
        """As a node's."""
        return self.rig.machine

    def hear(self, event: ev.Event) -> None:
        """As a node's."""
        self.heard.append(event)
        self.rig.tell(event)
        self.pump()

    def _carry(self, flushes: Mapping[str, int]) -> None:
        self.carried.append(dict(flushes))
        for namespace, number in flushes.items():
            self.hear(ev.ClearAsked(900, self.rig.number(), namespace, number))

    def pump(self) -> None:
        """Have all work done: what seals sums real bytes, what is the pool's goes there."""
        self._changed.set()
        work, self.rig.work = self.rig.work, []
        for command in work:
            match command:
                case cm.Seal(job, objects):
                    sums = [self._sum(extent, nbytes) for extent, nbytes in objects]
                    self.rig.tell(ev.Sealed(job, sums))
                case ccm.Locate() | ccm.Pull() | ccm.Deposit() | ccm.FlushPool():
                    self.service.execute(command)

    def _sum(self, extent: Extent, nbytes: int) -> bytes:
        return xxhash.xxh3_128_digest(self.arena.view(extent)[:nbytes])

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(WAIT_S):
            while not wanted():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), REFRESH_S)

    def save(self, *ends: int, tokens: list[int] | None = None) -> None:
        """Save what boundaries at these ends rest on: bytes that can be told again."""
        chain = self.engine.chain(tokens or TOKENS)
        for end in ends:
            grants = self.engine.reserve(f"save-{end}", self.engine.offers(chain, end))
            for grant in grants:
                if grant.extent is not None:
                    self.arena.view(grant.extent)[:] = bytes([grant.ticket % 251]) * 4096
            self.engine.commit(grants)
            self.pump()

    def stored(self) -> int:
        """Return how many deposits went well."""
        return self.rig.count("deposits", "stored")

    async def deposited(self, *ends: int) -> None:
        """Save boundaries, and resume each until the pool has it."""
        for end in ends:
            before = self.stored()
            self.save(end)
            assert self.resume(limit=end) == end
            self.pump()
            await self.until(partial(self._has_more_than, before))

    def _has_more_than(self, before: int) -> bool:
        return self.stored() > before

    def resume(self, limit: int | None = None) -> int:
        """Resume as a request of its own; return where."""
        found = boundary(self.engine, limit=limit)
        self.pump()
        return found

    async def plan(self, request: str = "r") -> cm.Planned:
        """Ask where a request can resume; what others have is waited for."""
        asked = self.engine.planning(request, self.engine.chain(TOKENS))
        self.rig.tell(asked)
        self.pump()
        await self.until(lambda: (asked.session, asked.call) in self.rig.answers)
        found = self.rig.answers[asked.session, asked.call]
        assert isinstance(found, cm.Planned)
        digest = self.engine.chain(TOKENS).digest_at(found.boundary)
        self.engine.planned[request] = (found.boundary, digest)
        return found

    async def load(self, request: str = "r") -> cm.Loaded:
        """Load what was planned."""
        asked = self.engine.loading(request, WAIT_S)
        self.rig.tell(asked)
        self.pump()
        await self.until(lambda: (asked.session, asked.call) in self.rig.answers)
        found = self.rig.answers[asked.session, asked.call]
        assert isinstance(found, cm.Loaded)
        return found

    def opened(self) -> bool:
        """Whether it has looked at its pool."""
        return self.service.state != "opening"

    def known(self) -> float:
        """Return how many boundaries it knows to be there."""
        return self.rig.gauge("pool_boundaries")


@asynccontextmanager
async def in_touch(monkeypatch: pytest.MonkeyPatch, *places: Place) -> AsyncIterator[None]:
    """All these are in touch with their pool."""
    stores = {id(place.settings): place.store for place in places}
    monkeypatch.setattr(service, "open_store", lambda settings, _: stores[id(settings)])
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(place.service.run()) for place in places]
        try:
            for place in places:
                await place.until(place.opened)
            yield
        finally:
            for task in running:
                task.cancel()
    for place in places:
        await place.service.close(1.0)


def path_of(place: Place, part: str, end: int) -> str:
    """Return what the pool calls an object."""
    (item,) = (
        item for item in place.rig.machine.items() if (item.slot.part, item.end) == (part, end)
    )
    namespace = item.key.namespace
    epoch = place.rig.machine.cluster.flush_of(namespace)
    return place.store.at(namespace, epoch)._name(item.key).path


def run(work: Awaitable[None]) -> None:
    """Run a scenario to its end. Raises TimeoutError when it takes longer than anybody waits."""

    async def within() -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await work

    asyncio.run(within())
