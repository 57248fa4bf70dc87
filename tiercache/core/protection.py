"""What must not be dropped now, what goes first, and who takes too much: beside the eviction policy.

The policy says what is least valuable. This says which of it may go: pinned objects may not, the tenant
that is beyond its share gives its own, what many requests share is set aside within a bound, and classes
bias the order. Nothing here is a lock: every protection has a budget and an end.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tiercache.core.catalog import Entry, Item, Shelf
from tiercache.core.expiry import Expiry
from tiercache.core.limits import Limits, Protecting
from tiercache.core.pins import Pins
from tiercache.core.policy.base import Eviction
from tiercache.core.policy.bias import Biased
from tiercache.core.policy.shelter import Sheltered
from tiercache.core.policy.tenants import ByTenant
from tiercache.core.sights import Request, Sights
from tiercache.core.tenants import Share, Tenant, Tenants
from tiercache.state import Care, Hint
from tiercache.state.care import NO_CARE
from tiercache.state.keys import KEY_NAMESPACE_CHARS

BIAS_MIN: Final = -3
BIAS_MAX: Final = 4
HINT_BIAS: Final = 2
"""How many priorities a hint is worth."""


class Protection:
    """Pins, ends, tenants and classes of one node. `now` is the time of the event that is handled."""

    def __init__(self, limits: Limits, alignment: int) -> None:
        self.terms = terms = limits.protecting
        self.now = 0.0
        capacity = {"host": sum(limits.host_segments), "nvme": limits.nvme_bytes}
        self.capacity = capacity
        self.tenants = Tenants(
            Share(terms.host_share, terms.nvme_share),
            {name: Share(host, nvme) for name, host, nvme in terms.shares},
            capacity,
        )
        self.pins = Pins(terms, capacity["host"], alignment)
        self.expiry = Expiry()
        self._unstored: OrderedDict[Request, None] = OrderedDict()
        self._unstored_max = limits.recent_requests_max
        self._hinted = False
        self.shelters: dict[Tenant | None, Sheltered[Item]] = {}

    # --- the order of eviction

    def around(
        self, make: Callable[[Tenant | None], Eviction[Item]], sights: Sights
    ) -> ByTenant[Item]:
        """Return the policies that `make` makes, one for each tenant with a share, with all that stands
        beside them."""

        def policy(tenant: Tenant | None) -> Eviction[Item]:
            shelter = Sheltered(
                Biased(make(tenant), self.bias),
                lambda item: self._is_shared(item, sights),
                self.pins.space_of,
                lambda: self.now,
                lambda: self.shelter_bytes(tenant),
                self.terms.shared_s_max,
            )
            self.shelters[tenant] = shelter
            return shelter

        return ByTenant(
            policy,
            lambda item: item.entry.shelf.tenant,
            lambda: self.tenants.overcommitted("host"),
        )

    def shelter_bytes(self, tenant: Tenant | None) -> int:
        """Return how many bytes may be set aside for being shared, of a tenant with a share or (None) of
        all others."""
        of = self.capacity["host"] if tenant is None else tenant.allowed("host")
        return int(self.terms.shared_share_max * of)

    def _is_shared(self, item: Item, sights: Sights) -> bool:
        if not self.terms.shared_share_max:
            return False
        entry = item.entry
        return sights.count(entry.shelf.digest, entry.digest) >= self.terms.shared_sights_min

    def bias(self, item: Item) -> int:
        """Return the class of an object now: below 0 it goes first, above 0 it is spared so often."""
        if not self._hinted:
            return 0  # Nobody ever said anything.
        return bias_of(item.entry, self.now, self.terms)

    # --- names

    def named(self, shelf: Shelf) -> list[Tenant]:
        """The label of a shelf is known. Return the tenants that are gone."""
        label = shelf.label
        assert label is not None
        if shelf.tenant is not None:
            return []
        text = label.digest.hex()
        shelf.ttl_s = self.terms.ttl_s
        for name, ttl_s in self.terms.ttl_s_of:
            begins = len(name) >= KEY_NAMESPACE_CHARS and text.startswith(name)
            if begins or name == label.model:
                shelf.ttl_s = ttl_s
        gone = self.tenants.take_gone() if self.tenants.find(label.tenant) is None else []
        for tenant in gone:
            self.shelters.pop(tenant, None)
        self.tenants.join(shelf)
        return gone

    # --- what requests say

    def refuses(self, request: Request, care: Care) -> bool:
        """Return whether nothing of a request may be stored; remembered, should it not say so again."""
        if care.store:
            return request in self._unstored
        self._unstored[request] = None
        if len(self._unstored) > self._unstored_max:
            self._unstored.popitem(last=False)
        return True

    def stored(self, item: Item, care: Care) -> None:
        """A request stores an object, with these wishes."""
        until = self._until(item.entry.shelf, care)
        if until is not None:
            self.expiry.begin(item, until, own=care.ttl_ms > 0)
        self.reached(item.entry, care)

    def kept(self, item: Item, care: Care) -> None:
        """A request would have stored an object that is there already: it lasts for both."""
        self.expiry.prolong(item, self._until(item.entry.shelf, care))
        self.reached(item.entry, care)

    def _until(self, shelf: Shelf, care: Care) -> float | None:
        ttl_s = care.ttl_ms / 1000 or shelf.ttl_s
        return self.now + ttl_s if ttl_s else None

    def planned(self, entries: list[Entry], position: int, care: Care) -> None:
        """A request goes on from the entry at `position` (-1: from none), over these: what was said of
        them holds no more."""
        self._hinted = self._hinted or care != NO_CARE
        if not self._hinted:
            return  # Nobody ever said anything.
        if care.hint is Hint.END_OF_SESSION:  # Others go on from what lies before.
            if position >= 0:
                self.reached(entries[position], care)
            return
        for entry in entries:
            self.reached(entry, care)

    def reached(self, entry: Entry, care: Care) -> None:
        """A request reached a boundary, with these wishes."""
        self._hinted = self._hinted or care != NO_CARE
        entry.hint = care.hint
        entry.hinted_at = self.now
        if entry.priority is None or care.priority > entry.priority:
            entry.priority = care.priority

    # --- ends

    def gone(self, item: Item) -> None:
        """An object is out of the catalog."""
        self.pins.drop(item)
        self.expiry.forget(item)

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return what is protected now, by name and label."""
        sheltered = sum(shelter.aside_bytes for shelter in self.shelters.values())
        return {
            "pins_open": {"": len(self.pins)},
            "pinned_objects": {"": self.pins.objects},
            "pinned_bytes": {"": self.pins.bytes},
            "pinned_bytes_max": {"": self.pins.bytes_max},
            "sheltered_bytes": {"": sheltered},
            "expiring_objects": {"": len(self.expiry)},
            "tenants": {"": len(self.tenants)},
        }

    def wakeup(self) -> float | None:
        """Return when something ends by itself, or a time before."""
        ends = (self.pins.wakeup(), self.expiry.wakeup())
        return min((end for end in ends if end is not None), default=None)


def bias_of(entry: Entry, now: float, terms: Protecting) -> int:
    """Return the class of what ends at a boundary, `BIAS_MIN` to `BIAS_MAX`.

    Its priority; a session that ended takes `HINT_BIAS` from it, a pending tool call adds as much for
    `tool_call_s_max`.
    """
    bias = entry.priority or 0
    match entry.hint:
        case Hint.END_OF_SESSION:
            bias -= HINT_BIAS
        case Hint.TOOL_CALL_PENDING if now - entry.hinted_at < terms.tool_call_s_max:
            bias += HINT_BIAS
        case _:
            pass
    return max(BIAS_MIN, min(bias, BIAS_MAX, terms.chances_max))
