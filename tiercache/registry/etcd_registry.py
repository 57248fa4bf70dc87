"""The registry that a cluster uses: an etcd that the operator runs.

    /<cluster>/members/<name>                       a `Member`, under the node's lease
    /<cluster>/dropped/<name>/<boot>/<namespace>    the flush up to which it has dropped, under that lease
    /<cluster>/flushes/<namespace>                  the number of its last flush
    /<cluster>/shares/<tenant>                      a `TenantShare`

A watch only says that something changed. A view is always one reading of everything at one revision, so
there is no history to merge and nothing to miss.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tiercache.errors import ConfigError, UnavailableError
from tiercache.registry.base import (
    TENANT,
    Changed,
    Member,
    TenantShare,
    View,
    check_name,
    next_flush,
)
from tiercache.registry.etcd import Etcd, Reading

LOG = logging.getLogger("tiercache.registry")

_Value = TypeVar("_Value", Member, TenantShare)

KEEPS_PER_TTL = 3
"""A lease is kept this often in its time to live, so that a lost message or two does not end it."""

READS_APART_S = 0.02
"""Many changes at once, as when a cluster starts, are read together."""

SWAPS_MAX = 64
"""Attempts to change a pair while others change it."""

FLUSH = re.compile("[0-9]{1,18}")
"""The number of a flush, as text: anything else is none, whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Two clocks, in seconds: one that only goes forward, and one since 1970 that people set."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


SYSTEM = Clock()


class EtcdRegistry:
    """See `Registry`. `ttl_s`: whole seconds after which a node that went silent is gone.

    `retry_s`: pause between attempts to become a member while etcd is away.
    """

    def __init__(
        self,
        etcd: Etcd,
        member: Member,
        *,
        cluster: str,
        ttl_s: int = 10,
        retry_s: float = 0.5,
        clock: Clock = SYSTEM,
    ) -> None:
        check_name(member.name, "node name")
        check_name(member.boot, "boot token")
        self._etcd = etcd
        self._member = member
        self._root = f"/{check_name(cluster, 'cluster name')}/"
        self._ttl_s = ttl_s
        self._retry_s = retry_s
        self._clock = clock
        self._lease = 0
        self._revision = 0
        self._away = False
        self._dropped: dict[str, int] = {}
        self.held_until = 0.0
        self.view = View()

    # --- being a member

    async def run(self, changed: Changed) -> None:
        """See `Registry`."""
        while True:
            try:
                await self._join(changed)
            except* UnavailableError as faults:
                if not self._away:  # Once for each absence.
                    LOG.warning("the registry is away: %s", faults.exceptions[0])
                self._away = True
            except* ConfigError as faults:
                raise faults.exceptions[0] from None
            # A group whose members fail while it is cancelled tells of them, and not of that.
            if _is_cancelled():
                raise asyncio.CancelledError
            await asyncio.sleep(self._retry_s)

    async def _join(self, changed: Changed) -> None:
        """Be a member until something fails; the lease is given back when this is cancelled."""
        try:
            asked = self._clock.monotonic()
            self._lease = await self._etcd.grant(self._ttl_s)
            key = f"{self._root}members/{self._member.name}"
            await self._etcd.put(key, _text(self._member), lease=self._lease)
            for namespace, flush in list(self._dropped.items()):
                await self._say_dropped(namespace, flush)
            self._revision = 0  # An etcd that lost what it knew counts anew.
            revision = await self._read(changed, asked + self._ttl_s, anew=True)
            if self._away:
                LOG.warning("the registry is back")
            self._away = False
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(revision + 1, changed))
                # Not a task beside it: a group that waits for tasks only takes the failure of one for a
                # cancellation of its own (CPython 3.11).
                await self._keep(changed)
        finally:
            if _is_cancelled():
                await self._leave()
            self._lease = 0

    async def _leave(self) -> None:
        try:
            if self._lease:
                await self._etcd.revoke(self._lease)
        except UnavailableError:
            LOG.info("left without a word: the others will see it in %s s", self._ttl_s)
        self.held_until = 0.0

    async def _keep(self, changed: Changed) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / KEEPS_PER_TTL)
            asked = self._clock.monotonic()
            if not await self._etcd.keep(self._lease):
                raise UnavailableError("unavailable: the lease has ended")
            # Whatever became of the watch: a member has heard of every flush before it says so.
            await self._read(changed, asked + self._ttl_s)

    async def _follow(self, revision: int, changed: Changed) -> None:
        async with self._etcd.watching(self._root, revision) as changes:
            async for _ in changes:
                await asyncio.sleep(READS_APART_S)
                await self._read(changed)

    async def _read(self, changed: Changed, until: float = 0.0, *, anew: bool = False) -> int:
        """Read all there is. The lease is held `until` then, and what was read is from after that."""
        reading = await self._etcd.read(self._root)
        view = self._view_of(reading)
        mine = view.members.get(self._member.name)
        if mine is not None and mine.boot != self._member.boot:
            self.held_until = 0.0
            raise ConfigError(
                f"another node of this cluster is called {self._member.name!r}: it runs at "
                f"{mine.address}; give each node its own name"
            )
        if reading.revision >= self._revision:  # Two readings may overtake one another.
            self._revision = reading.revision
            self.held_until = max(until, self.held_until)
            if view != self.view or anew:
                self.view = view
                changed(view)
        return reading.revision

    def _view_of(self, reading: Reading) -> View:
        members: dict[str, Member] = {}
        flushes: dict[str, int] = {}
        dropped: dict[tuple[str, str], dict[str, int]] = {}
        shares: dict[str, TenantShare] = {}
        for pair in reading.pairs:
            match pair.key.removeprefix(self._root).split("/"):
                case ["members", name] if (member := _member(pair.value, name)) is not None:
                    members[name] = member
                case ["shares", tenant] if (share := _share(pair.value, tenant)) is not None:
                    shares[tenant] = share
                case ["flushes", namespace] if FLUSH.fullmatch(pair.value):
                    flushes[namespace] = int(pair.value)
                case ["dropped", name, boot, namespace] if FLUSH.fullmatch(pair.value):
                    dropped.setdefault((name, boot), {})[namespace] = int(pair.value)
                case _:
                    LOG.debug("not ours, or of another version: %s", pair.key)
        # What a member's earlier start has dropped says nothing of what this one found on its disk.
        current = {name: dropped.get((name, member.boot), {}) for name, member in members.items()}
        return View(members=members, flushes=flushes, dropped=current, shares=shares)

    # --- flushes and shares

    async def flush(self, namespace: str) -> int:
        """See `Registry`."""
        key = f"{self._root}flushes/{check_name(namespace, 'namespace')}"

        def next_one(before: str) -> str:
            last = int(before) if FLUSH.fullmatch(before) else 0
            return str(next_flush(last, self._clock.wall()))

        return int(await self._swap(key, next_one) or 0)

    async def share(self, tenant: str, change: TenantShare | None) -> TenantShare | None:
        """See `Registry`."""
        key = f"{self._root}shares/{check_name(tenant, 'tenant')}"

        def changed(before: str) -> str | None:
            if change is None:
                return None
            return _text((_decoded(before, TenantShare) or TenantShare()).changed(change))

        return _decoded(await self._swap(key, changed) or "", TenantShare)

    async def _swap(self, key: str, changed: Callable[[str], str | None]) -> str | None:
        """Change a pair from what it is, "" when it is not there; return what it is now."""
        for _ in range(SWAPS_MAX):
            there = [pair for pair in (await self._etcd.read(key)).pairs if pair.key == key]
            before, revision = (there[0].value, there[0].revision) if there else ("", 0)
            value = changed(before)
            if await self._etcd.swap(key, value, revision=revision):
                return value
        raise UnavailableError(f"unavailable: {SWAPS_MAX} others changed {key} meanwhile")

    async def dropped(self, namespace: str, flush: int) -> None:
        """See `Registry`."""
        self._dropped[check_name(namespace, "namespace")] = flush
        if self._lease:
            await self._say_dropped(namespace, flush)

    async def _say_dropped(self, namespace: str, flush: int) -> None:
        key = f"{self._root}dropped/{self._member.name}/{self._member.boot}/{namespace}"
        await self._etcd.put(key, str(flush), lease=self._lease)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _text(value: Member | TenantShare) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(text: str, kind: type[_Value]) -> _Value | None:
    """Return the value; None for what is none of this version."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        return None


def _member(text: str, name: str) -> Member | None:
    member = _decoded(text, Member)
    return member if member is not None and member.name == name else None


def _share(text: str, tenant: str) -> TenantShare | None:
    """Return what is said of a tenant; None where that is nothing, or the tenant is none."""
    share = _decoded(text, TenantShare)
    return share if TENANT.fullmatch(tenant) and share != TenantShare() else None
