"""Who takes how much: tenants, their shares of each tier, and what they take.

A tenant is everybody who uses one salt; without a salt, everybody else is one tenant, "-". Its name is
the label that `Namespace.tenant` derives from the salt, so the salt itself is never needed here.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from tiercache.core.catalog import Shelf

TIERS: Final = ("host", "nvme")
OUTCOMES: Final = ("stored", "evicted_own", "rejected", "held", "declined")


class Share(msgspec.Struct, frozen=True):
    """The part of each tier that a tenant may take, 0 to 1; 1 is no limit, and no guarantee."""

    host: float = 1.0
    nvme: float = 1.0

    def why_not(self) -> str:
        """Return what is wrong with these values, "" when nothing is."""
        fine = 0 <= self.host <= 1 and 0 <= self.nvme <= 1
        return "" if fine else "a share lies between 0 and 1"


class Tenant:
    """One tenant. `taken` is the space that its objects and reservations take, by tier, in bytes.

    `outcomes` counts its offers: stored, stored after dropping its own, rejected because nothing of its
    own could go, there already, and declined for any other reason. They add up to its offers.
    """

    __slots__ = (
        "_capacity",
        "name",
        "outcomes",
        "segments_bytes",
        "share",
        "shelves",
        "taken",
    )

    def __init__(self, name: str, share: Share, capacity: Mapping[str, int]) -> None:
        self.name = name
        self.share = share
        self.shelves = 0
        self.segments_bytes = 0  # Of the segments on NVMe that count against its share.
        self.taken = dict.fromkeys(TIERS, 0)
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self._capacity = capacity

    @property
    def is_limited(self) -> bool:
        """Whether it has a share of host memory of its own."""
        return self.share.host < 1

    def allowed(self, tier: str) -> int:
        """Return the bytes that the tenant may take in a tier."""
        share = self.share.host if tier == "host" else self.share.nvme
        return int(share * self._capacity[tier])

    def would_pass(self, tier: str, nbytes: int) -> bool:
        """Return whether `nbytes` more would be more than its share."""
        share = self.share.host if tier == "host" else self.share.nvme
        return share < 1 and self.taken[tier] + nbytes > self.allowed(tier)

    def count(self, outcome: str, *, own: bool) -> None:
        """Count what became of one offer. `own`: something of its own went for it."""
        match outcome:
            case "granted":
                self.outcomes["evicted_own" if own else "stored"] += 1
            case "quota":
                self.outcomes["rejected"] += 1
            case "held":
                self.outcomes["held"] += 1
            case _:
                self.outcomes["declined"] += 1


class Tenants:
    """All tenants that hold something or have a share. Others are forgotten."""

    def __init__(
        self, default: Share, shares: Mapping[str, Share], capacity: Mapping[str, int]
    ) -> None:
        self.default = default
        self._shares = dict(shares)  # Those that an operator set, kept while nothing is held.
        self._common: dict[str, tuple[float | None, float | None]] = {}  # The cluster's.
        self._capacity = dict(capacity)
        self._known: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._known.values())

    def join(self, shelf: Shelf) -> None:
        """The shelf's label is known: from now on its bytes are its tenant's."""
        assert shelf.tenant is None
        assert shelf.label is not None
        name = shelf.label.tenant
        tenant = self._known.get(name)
        if tenant is None:
            tenant = self._known[name] = Tenant(name, self.share_of(name), self._capacity)
        shelf.tenant = tenant
        tenant.shelves += 1
        for entry in shelf.entries.values():
            for item in entry.items.values():
                # Nobody attached to a namespace without a name: nothing of it is in memory.
                assert item.host is item.target is None
                assert item.nvme is not None
                tenant.taken["nvme"] += item.nvme.size

    def leave(self, shelf: Shelf) -> None:
        """The shelf is empty and gone. What is left of it is its tenant's until it is given back."""
        if shelf.tenant is not None:
            shelf.tenant.shelves -= 1

    def take_gone(self) -> list[Tenant]:
        """Forget the tenants that hold nothing any more, and return them."""
        gone = [
            tenant
            for tenant in self._known.values()
            if not (tenant.shelves or tenant.segments_bytes or any(tenant.taken.values()))
        ]
        for tenant in gone:
            del self._known[tenant.name]
        return gone

    def find(self, name: str) -> Tenant | None:
        """Return a tenant that holds something; None when nobody of that name does."""
        return self._known.get(name)

    def share_of(self, name: str) -> Share:
        """Return what a tenant of that name may take: what the cluster says, else what this node does."""
        own, (host, nvme) = self.own_of(name), self.common_of(name)
        return Share(own.host if host is None else host, own.nvme if nvme is None else nvme)

    def own_of(self, name: str) -> Share:
        """Return what this node says that a tenant of that name may take."""
        return self._shares.get(name, self.default)

    def common_of(self, name: str) -> tuple[float | None, float | None]:
        """Return what the cluster says of memory and of the disk; None for what it leaves to this node."""
        return self._common.get(name, (None, None))

    def overcommitted(self, tier: str) -> bool:
        """Return whether those who have a share were promised more than there is, all together."""
        shares = (t.share.host if tier == "host" else t.share.nvme for t in self._known.values())
        return sum(share for share in shares if share < 1) > 1

    def named(self) -> set[str]:
        """Return the names that have a share, of the cluster's or of this node's."""
        return {*self._shares, *self._common}

    def own(self) -> Mapping[str, Share]:
        """Return the shares of this node's settings, and those that were set on it, by name."""
        return self._shares

    def agree(self, common: Mapping[str, tuple[float | None, float | None]]) -> set[str]:
        """Take what the cluster says from now on; return the names it spoke of or speaks of."""
        named = {*self._common, *common}
        self._common = dict(common)
        return named

    def keep(self, name: str, share: Share) -> None:
        """Remember the share of a name."""
        self._shares[name] = share
