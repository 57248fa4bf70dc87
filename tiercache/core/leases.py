"""Who may still be reading or writing what. Every lease and reservation has an owner."""

from collections.abc import Iterable

from tiercache.core.catalog import Item


class Lease:
    """The objects one request of one session holds, and since when."""

    __slots__ = ("items", "taken_at")

    def __init__(self, taken_at: float) -> None:
        self.items: dict[Item, None] = {}
        self.taken_at = taken_at


class Leases:
    """Leases by session and request. Counting users is the caller's: this only remembers."""

    def __init__(self) -> None:
        self._of: dict[int, dict[str, Lease]] = {}
        self._held: dict[int, int] = {}
        self.count = 0  # Leased objects, over all sessions and requests.

    def take(self, session: int, request: str, items: Iterable[Item], now: float) -> list[Item]:
        """Add objects to a lease; return those that it did not have. Nothing to lease leaves no trace."""
        requests = self._of.get(session, {})
        lease = requests.get(request)
        held = lease.items if lease is not None else {}
        new = [item for item in dict.fromkeys(items) if item not in held]
        if not new:
            return new
        if lease is None:
            lease = self._of.setdefault(session, {})[request] = Lease(now)
        lease.items.update(dict.fromkeys(new))
        self.count += len(new)
        self._held[session] = self._held.get(session, 0) + len(new)
        return new

    def held(self, session: int) -> int:
        """Return how many objects a session leases."""
        return self._held.get(session, 0)

    def end(self, session: int, request: str) -> list[Item]:
        """End one lease and return its objects, in the order they were taken."""
        requests = self._of.get(session)
        lease = requests.pop(request, None) if requests else None
        if lease is None:
            return []
        self.count -= len(lease.items)
        self._held[session] -= len(lease.items)
        if not requests:
            del self._of[session], self._held[session]
        return list(lease.items)

    def end_session(self, session: int) -> list[Item]:
        """End all leases of a session."""
        return [
            item
            for request in list(self._of.get(session, ()))
            for item in self.end(session, request)
        ]

    def all(self) -> list[tuple[int, Lease]]:
        """Return every lease with its session."""
        return [(session, lease) for session, of in self._of.items() for lease in of.values()]

    def overdue(self, before: float) -> int:
        """Return how many objects are leased since before that time."""
        return sum(len(lease.items) for _, lease in self.all() if lease.taken_at < before)
