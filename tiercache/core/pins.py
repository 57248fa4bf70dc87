"""Pins: objects that are not evicted for a while, within a budget. Each has an owner and an end."""

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from tiercache.core.catalog import Item
from tiercache.core.expiry import STALE_MAX
from tiercache.core.limits import Protecting
from tiercache.core.tenants import Tenant


class Pin:
    """Some objects under one pin. `session` is its owner, None for an operator's."""

    __slots__ = ("items", "number", "owner", "session", "until")

    def __init__(
        self, number: int, owner: str, session: int | None, items: Iterable[Item], until: float
    ) -> None:
        self.number = number
        self.owner = owner
        self.session = session
        self.items = dict.fromkeys(items)
        self.until = until


class Pins:
    """All pins. An object under several pins counts once; its bytes are those of `space_of`.

    The budget is `pinned_share_max` of `capacity`, and of that a tenant with a share has its part.
    """

    def __init__(self, terms: Protecting, capacity: int, alignment: int) -> None:
        self._terms = terms
        self._alignment = alignment
        self.bytes_max = int(terms.pinned_share_max * capacity)
        self.bytes = 0
        self._bytes_of: dict[Tenant | None, int] = {}
        self._pins: dict[int, Pin] = {}
        self._of: dict[Item, set[int]] = {}
        self._owned: dict[int | None, int] = {}  # Pins by session.
        self._due: list[tuple[float, int]] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __contains__(self, item: object) -> bool:
        return item in self._of

    @property
    def objects(self) -> int:
        """Objects under a pin."""
        return len(self._of)

    def space_of(self, item: Item) -> int:
        """Return the host memory that an object takes while it is there."""
        return -(-item.nbytes // self._alignment) * self._alignment

    def bytes_of(self, tenant: Tenant | None) -> int:
        """Return what a tenant has pinned."""
        return self._bytes_of.get(tenant, 0)

    def why_not(self, session: int | None, items: Iterable[Item]) -> str:
        """Return why these cannot be pinned: "nothing", "too_many", "over_budget"; "" when they can."""
        wanted: dict[Tenant | None, int] = {}
        found = False
        for item in items:
            found = True
            if item not in self._of:
                tenant = item.entry.shelf.tenant
                wanted[tenant] = wanted.get(tenant, 0) + self.space_of(item)
        if not found:
            return "nothing"
        if self._owned.get(session, 0) >= self._terms.pins_per_owner_max:
            return "too_many"
        for tenant, nbytes in wanted.items():
            share = 1.0 if tenant is None else tenant.share.host
            if self.bytes_of(tenant) + nbytes > int(share * self.bytes_max):
                return "over_budget"
        return "over_budget" if self.bytes + sum(wanted.values()) > self.bytes_max else ""

    def begin(self, owner: str, session: int | None, items: Iterable[Item], until: float) -> Pin:
        """Pin objects. The caller has asked `why_not`."""
        self._last += 1
        pin = self._pins[self._last] = Pin(self._last, owner, session, items, until)
        self._owned[session] = self._owned.get(session, 0) + 1
        for item in pin.items:
            if item not in self._of:
                self._count(item, self.space_of(item))
            self._of.setdefault(item, set()).add(pin.number)
        heappush(self._due, (until, pin.number))
        if len(self._due) > 2 * len(self._pins) + STALE_MAX:
            self._due = [(pin.until, pin.number) for pin in self._pins.values()]
            heapify(self._due)
        return pin

    def find(self, number: int) -> Pin | None:
        """Return a pin."""
        return self._pins.get(number)

    def end(self, pin: Pin) -> list[Item]:
        """End a pin. Return the objects that are under no other."""
        del self._pins[pin.number]
        self._owned[pin.session] -= 1
        if not self._owned[pin.session]:
            del self._owned[pin.session]
        free = []
        for item in pin.items:
            self._of[item].remove(pin.number)
            if not self._of[item]:
                del self._of[item]
                self._count(item, -self.space_of(item))
                free.append(item)
        return free

    def of_session(self, session: int) -> list[Pin]:
        """Return a session's pins."""
        if session not in self._owned:
            return []
        return [pin for pin in self._pins.values() if pin.session == session]

    def take_due(self, now: float) -> list[Pin]:
        """Return the pins whose end has come; the caller ends them."""
        found: list[Pin] = []
        while self._due and self._due[0][0] <= now:
            pin = self._pins.get(heappop(self._due)[1])
            if pin is not None:
                found.append(pin)
        return found

    def wakeup(self) -> float | None:
        """Return when the next pin ends, or a time before."""
        return self._due[0][0] if self._due else None

    def drop(self, item: Item) -> None:
        """An object is gone, pinned or not. A pin that has lost all of its objects stays until its end."""
        numbers = self._of.pop(item, None)
        if numbers is None:
            return
        for number in numbers:
            del self._pins[number].items[item]
        self._count(item, -self.space_of(item))

    def check(self) -> None:
        """Raise AssertionError if the sums are wrong or a limit is passed."""
        assert self.bytes == sum(self._bytes_of.values()) == sum(map(self.space_of, self._of))
        assert self.bytes <= self.bytes_max, "more is pinned than may be"
        pinned = {(item, pin.number) for pin in self for item in pin.items}
        assert pinned == {(item, number) for item, of in self._of.items() for number in of}
        owned = Counter(pin.session for pin in self)
        assert owned == self._owned
        assert max(owned.values(), default=0) <= self._terms.pins_per_owner_max
        for tenant, nbytes in self._bytes_of.items():
            of = [item for item in self._of if item.entry.shelf.tenant is tenant]
            assert nbytes == sum(map(self.space_of, of)), "pinned bytes of a tenant"
        ends = {number for _, number in self._due}
        assert self._pins.keys() <= ends, "a pin without an end"

    def _count(self, item: Item, nbytes: int) -> None:
        tenant = item.entry.shelf.tenant
        self.bytes += nbytes
        left = self.bytes_of(tenant) + nbytes
        if left:
            self._bytes_of[tenant] = left
        else:
            del self._bytes_of[tenant]
