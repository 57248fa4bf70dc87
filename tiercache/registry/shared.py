"""A registry inside one process: the reference, and what simulations use."""

import asyncio
from collections.abc import Callable

from tiercache.errors import ConfigError, UnavailableError
from tiercache.registry.base import (
    Changed,
    Member,
    TenantShare,
    View,
    check_name,
    next_flush,
)


class Board:
    """What the registries of one process share. `clock` is monotonic seconds; `ttl_s` is how long a
    member that no longer says so is believed to be there."""

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self.clock = clock
        self.ttl_s = ttl_s
        self._members: dict[str, tuple[Member, float]] = {}
        self._flushes: dict[str, int] = {}
        self._dropped: dict[str, dict[str, int]] = {}
        self._shares: dict[str, TenantShare] = {}
        self.changed = asyncio.Event()  # Set at the next change, and then another one.

    def put(self, member: Member, dropped: dict[str, int]) -> float:
        """List a member, or list it on; return until when."""
        until = self.clock() + self.ttl_s
        known = self._members.get(member.name)
        self._members[member.name] = (member, until)
        if known is None or known[0] != member or self._dropped.get(member.name) != dropped:
            self._dropped[member.name] = dict(dropped)
            self.touch()
        return until

    def remove(self, name: str) -> None:
        """Take a member off."""
        if self._members.pop(name, None) is not None:
            self._dropped.pop(name, None)
            self.touch()

    def flush(self, namespace: str) -> int:
        """Begin one more flush."""
        last = self._flushes.get(namespace, 0)
        self._flushes[namespace] = next_flush(last, self.clock())
        self.touch()
        return self._flushes[namespace]

    def share(self, tenant: str, change: TenantShare | None) -> TenantShare | None:
        """Change what a tenant may take; return what is said of it now."""
        before = self._shares.pop(tenant, TenantShare())
        if change is not None:
            self._shares[tenant] = before.changed(change)
        self.touch()
        return self._shares.get(tenant)

    def touch(self) -> None:
        """Tell whoever waits that something changed, time included."""
        self.changed.set()
        self.changed = asyncio.Event()

    def read(self) -> View:
        """Return what is listed now."""
        now = self.clock()
        for name in [name for name, (_, until) in self._members.items() if until <= now]:
            self.remove(name)
        return View(
            members={name: member for name, (member, _) in self._members.items()},
            flushes=dict(self._flushes),
            dropped={name: dict(flushes) for name, flushes in self._dropped.items()},
            shares=dict(self._shares),
        )


class SharedRegistry:
    """See `Registry`. Says that it is there whenever the board changes; a clock that moves has to be
    told with `Board.touch`. While `away`, the node does not reach the board."""

    def __init__(self, board: Board, member: Member) -> None:
        check_name(member.name, "node name")
        self.away = False
        self._board = board
        self._member = member
        self._dropped: dict[str, int] = {}
        self._joined = False
        self.held_until = 0.0
        self.view = View()

    async def run(self, changed: Changed) -> None:
        """See `Registry`."""
        board = self._board
        try:
            while True:
                change = board.changed
                lapsed = self.held_until <= board.clock()
                if not self.away and ((view := self._read()) != self.view or lapsed):
                    self.view = view
                    changed(view)
                await change.wait()
        finally:
            self._joined = False
            if not self.away and not self._is_replaced(board.read()):
                board.remove(self._member.name)

    def _read(self) -> View:
        board = self._board
        if self._joined and self._is_replaced(board.read()):
            raise ConfigError(f"another node is called {self._member.name!r}")
        self.held_until = board.put(self._member, self._dropped)
        self._joined = True
        return board.read()

    def _is_replaced(self, view: View) -> bool:
        listed = view.members.get(self._member.name)
        return listed is not None and listed.boot != self._member.boot

    async def flush(self, namespace: str) -> int:
        """See `Registry`."""
        check_name(namespace, "namespace")
        self._reach()
        return self._board.flush(namespace)

    async def dropped(self, namespace: str, flush: int) -> None:
        """See `Registry`."""
        self._dropped[check_name(namespace, "namespace")] = flush
        if self._joined:
            self._reach()
            self._board.put(self._member, self._dropped)

    async def share(self, tenant: str, change: TenantShare | None) -> TenantShare | None:
        """See `Registry`."""
        check_name(tenant, "tenant")
        self._reach()
        return self._board.share(tenant, change)

    def _reach(self) -> None:
        if self.away:
            raise UnavailableError("unavailable: the registry is away")
