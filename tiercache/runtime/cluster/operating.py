"""What operators ask of a whole cluster through this node."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from tiercache.core.machine import Machine
from tiercache.errors import ConfigError, UnavailableError
from tiercache.registry.base import TENANT, Registry, TenantShare
from tiercache.runtime.cluster import documents
from tiercache.runtime.cluster.flushed import is_digest
from tiercache.runtime.translate import WAIT_MS_MAX
from tiercache.wire import clustering
from tiercache.wire import messages as wire

CLEARS_MAX = 16
"""Clears of the whole cluster that may wait at a time."""

SHARES_MAX = 16
"""Shares that may be on their way to etcd at a time."""

LOOK_S = 0.02
"""How often one looks who is behind."""

Answered = Callable[[wire.Report | wire.Failed], None]


class Operating:
    """Answers `ClearAll`, `Members` and `ShareAll`, while `open`."""

    def __init__(self, cluster: str, name: str, ttl_s: int, machine: Machine) -> None:
        self._cluster = cluster
        self._name = name
        self._ttl_s = ttl_s
        self._machine = machine
        self._registry: Registry | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._clears = 0
        self._shares = 0
        self.pool: Callable[[], documents.PoolRow] | None = None

    def open(self, registry: Registry, tasks: asyncio.TaskGroup) -> None:
        """From now on there is a registry; what takes time is a task of `tasks`."""
        self._registry = registry
        self._tasks = tasks

    def close(self) -> None:
        """Nothing is begun any more."""
        self._registry = self._tasks = None

    def ask(self, message: clustering.Request, done: Answered) -> None:
        """Answer a question, now or later."""
        registry, tasks = self._registry, self._tasks
        if registry is None or tasks is None:
            done(wire.Failed(message.call, "refused", "this node is not in its cluster now"))
            return
        match message:
            case clustering.Members(call):
                done(wire.Report(call, msgspec.json.encode(self._members(registry))))
            case clustering.ClearAll(call, namespace) if not is_digest(namespace):
                done(wire.Failed(call, "invalid", f"{namespace} is no namespace's whole digest"))
            case clustering.ShareAll():
                self._share(registry, tasks, message, done)
            case clustering.ClearAll(call) if self._clears >= CLEARS_MAX:
                done(wire.Failed(call, "refused", f"{CLEARS_MAX} clears wait already: try again"))
            case clustering.ClearAll():
                self._clears += 1
                tasks.create_task(self._clear(registry, message, done))

    def _members(self, registry: Registry) -> documents.Members:
        now, view = time.monotonic(), registry.view
        told = int(self._machine.gauges()["boundaries_told"][""])
        return documents.Members(
            self._cluster,
            self._name,
            max(0.0, self._machine.cluster.standing_until - now),
            documents.rows(view, self._name, told, self._machine.cluster.known(now)),
            documents.behind(view),
            self.pool() if self.pool is not None else None,
        )

    def _share(
        self,
        registry: Registry,
        tasks: asyncio.TaskGroup,
        asked: clustering.ShareAll,
        done: Answered,
    ) -> None:
        values = [value for value in (asked.host, asked.nvme) if value is not None]
        view, most = registry.view, self._machine.limits.protecting.shares_max
        if not TENANT.fullmatch(asked.tenant):
            text = "a tenant is - or eight hexadecimal digits"  # What was said may be a salt.
            done(wire.Failed(asked.call, "invalid", text))
        elif not all(0 <= value <= 1 for value in values):
            done(wire.Failed(asked.call, "invalid", "a share lies between 0 and 1"))
        elif (
            values
            and asked.tenant not in view.shares
            and len(view.shares) + self._shares >= most  # Those on their way may all be new.
        ):
            done(wire.Failed(asked.call, "refused", f"{most} tenants have shares already"))
        elif self._shares >= SHARES_MAX:
            done(
                wire.Failed(asked.call, "refused", f"{SHARES_MAX} shares are being set: try again")
            )
        else:
            self._shares += 1
            change = TenantShare(host=asked.host, nvme=asked.nvme) if values else None
            tasks.create_task(self._set(registry, asked, change, done))

    async def _set(
        self,
        registry: Registry,
        asked: clustering.ShareAll,
        change: TenantShare | None,
        done: Answered,
    ) -> None:
        try:
            share = await registry.share(asked.tenant, change) or TenantShare()
        except (UnavailableError, ConfigError) as fault:
            done(wire.Failed(asked.call, "refused", f"it may not have been set: {fault}"))
        else:
            found = documents.Shared(asked.tenant, share.host, share.nvme)
            done(wire.Report(asked.call, msgspec.json.encode(found)))
        finally:
            self._shares -= 1

    async def _clear(self, registry: Registry, asked: clustering.ClearAll, done: Answered) -> None:
        within_s = min(max(asked.wait_ms, 0), WAIT_MS_MAX) / 1000
        try:
            number, names = await self._flush(registry, asked.namespace, within_s)
        except (UnavailableError, ConfigError) as fault:
            done(wire.Failed(asked.call, "refused", f"nothing was begun: {fault}"))
        else:
            cleared = documents.Cleared(number, names, self._ttl_s)
            done(wire.Report(asked.call, msgspec.json.encode(cleared)))
        finally:
            self._clears -= 1

    async def _flush(
        self, registry: Registry, namespace: str, within_s: float
    ) -> tuple[int, tuple[str, ...]]:
        """Begin a flush and wait for it; return its number, and who has not said that it is carried out.

        A node that is named gives out nothing that is shared once the registry's time to live has passed
        without a word from it; then it is a member no more, and not waited for.
        """
        until = time.monotonic() + within_s
        number = await registry.flush(namespace)
        while names := self._behind(registry, namespace, number):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return number, names
            await asyncio.sleep(min(LOOK_S, left_s))
        return number, ()

    def _behind(self, registry: Registry, namespace: str, number: int) -> tuple[str, ...]:
        view = registry.view
        if view.flushes.get(namespace, 0) < number or self._name not in view.members:
            return (self._name,)  # What it sees is from before.
        return view.behind(namespace, number)
