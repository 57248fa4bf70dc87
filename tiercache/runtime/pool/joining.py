"""How a node comes to a pool: beside a cluster, which numbers flushes, or with nothing but the pool."""

import asyncio
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from tiercache.config import Settings
from tiercache.core import commands
from tiercache.errors import ConfigError
from tiercache.runtime.cluster import documents
from tiercache.runtime.cluster.calls import Calls
from tiercache.runtime.cluster.carrying import Carrying
from tiercache.runtime.cluster.flushed import Flushed
from tiercache.runtime.cluster.operating import Answered
from tiercache.runtime.node import Node
from tiercache.runtime.pool.opening import realm_of
from tiercache.runtime.pool.service import PoolService
from tiercache.tiers.base import Arena
from tiercache.wire import clustering
from tiercache.wire import messages as wire

if TYPE_CHECKING:
    from tiercache.runtime.cluster.service import Service

ALONE = "this node is in no cluster, but shares a pool: clear without --cluster clears both"


class Joining:
    """The pool of one node. In a `cluster` the flushes that the pool knows of are carried out there,
    without one here. Raises ConfigError."""

    def __init__(
        self, settings: Settings, arena: Arena, node: Node, cluster: "Service | None"
    ) -> None:
        self._settings = settings.pool
        self._node = node
        realm = realm_of(settings.pool, settings.cluster.name)
        writer = settings.cluster.node or socket.gethostname()
        self._name = realm.cluster
        self._service = PoolService(settings.pool, realm, writer, arena, node)
        node.pool_with(self._service.execute)
        self._calls = Calls(node.hear)
        self._carrying: Carrying | None = None
        self._tasks: asyncio.TaskGroup | None = None
        if cluster is None:
            self._carrying = Carrying(self._calls, Flushed(settings.nvme.path), _nothing)
            self._service.carries = self._carry
        else:
            self._service.carries = cluster.carry
            cluster.tells_of(self.row)

    @property
    def unreachable(self) -> bool:
        """Whether the last look at the pool failed."""
        return self._service.state.startswith("unreachable")

    async def run(self) -> None:
        """Stay in touch with the pool until cancelled. Raises ConfigError."""
        if self._carrying is not None:
            self._node.hear(self._carrying.load())
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._service.run()
        except* ConfigError as faults:
            raise faults.exceptions[0] from None
        finally:
            self._tasks = None

    async def close(self, within_s: float) -> bool:
        """Let go of the pool; False when the process must end without Python's own farewell.

        It must when calls hang and hold memory, and with Mooncake, whose client would take its time.
        """
        return await self._service.close(within_s) and self._settings.kind != "mooncake"

    def answered(self, reply: commands.Reply) -> None:
        """The machine answers what this node asked itself, where there is no cluster."""
        self._calls.answered(reply)

    def ask(self, message: clustering.Request, done: Answered) -> None:
        """Answer an operator's question, where there is no cluster."""
        match message:
            case clustering.Members(call):
                found = documents.Members("", "", 0.0, [], {}, self.row())
                done(wire.Report(call, msgspec.json.encode(found)))
            case clustering.ClearAll(call) | clustering.ShareAll(call):
                done(wire.Failed(call, "refused", ALONE))

    def row(self) -> documents.PoolRow:
        """Return what is known of the pool, for operators."""
        known = self._node.machine.cluster.known_pool(asyncio.get_running_loop().time())
        assert known is not None
        return documents.PoolRow(
            self._settings.kind, self._name, known.boundaries, known.health, self._service.state
        )

    def _carry(self, flushes: Mapping[str, int]) -> None:
        if self._carrying is not None and self._tasks is not None:
            self._carrying.heard(flushes, _Nobody(), self._tasks)


class _Nobody:
    """Without a cluster nobody waits to hear of a flush."""

    async def dropped(self, namespace: str, flush: int) -> None:
        """See `Dropping.dropped`."""


def _nothing() -> None:
    pass
