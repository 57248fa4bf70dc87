"""An order for each tenant that has a share of its own, and one for all the others."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar, cast

from tiercache.core.policy.base import Eviction
from tiercache.core.tenants import Tenant

T = TypeVar("T")


class ByTenant(Generic[T]):
    """An eviction policy made of several: who takes more than its share drops its own things only.

    `make(tenant)` makes a policy, for a tenant or (None) for all who have no share of their own. First
    gives who has more than its share, since that was lowered; then those without one. A share is also a
    guarantee: others give only, the fullest first, when `overcommitted()`. `owner` says whose an item is;
    None, or a tenant without a share: everybody's.
    """

    def __init__(
        self,
        make: Callable[[Tenant | None], Eviction[T]],
        owner: Callable[[T], Tenant | None],
        overcommitted: Callable[[], bool],
    ) -> None:
        self._make = make
        self._owner = owner
        self._overcommitted = overcommitted
        self._common = make(None)
        self._own: dict[Tenant | None, Eviction[T]] = {}
        self._beyond: dict[
            Tenant, None
        ] = {}  # Their share was lowered; perhaps below what they take.

    def of(self, tenant: Tenant | None) -> Eviction[T]:
        """Return the policy in which a tenant's items are."""
        return self._own.get(tenant, self._common)

    def join(self, tenant: Tenant) -> None:
        """A tenant is there, and has no items yet. Idempotent."""
        if tenant.is_limited and tenant not in self._own:
            self._own[tenant] = self._make(tenant)

    def tenants(self) -> set[Tenant]:
        """Return those who have a policy of their own."""
        return {tenant for tenant in self._own if tenant is not None}

    def policies(self) -> Iterator[Eviction[T]]:
        """Yield every policy, the common one first."""
        yield self._common
        yield from self._own.values()

    def move(self, tenant: Tenant, change: Callable[[], None]) -> None:
        """Let `change` give a tenant a share, another or none; its items follow, in their order."""
        before = self.of(tenant)
        change()
        if tenant.is_limited:
            self._beyond[tenant] = None
        if tenant.is_limited == (before is not self._common):
            return
        items = [item for item in before if self._owner(item) is tenant]
        for item in items:
            before.remove(item)
        if not tenant.is_limited:
            self.forget(tenant)
        self.join(tenant)
        after = self.of(tenant)
        for item in items:
            after.add(item)

    def forget(self, tenant: Tenant) -> None:
        """The tenant holds nothing any more."""
        policy = self._own.pop(tenant, None)
        self._beyond.pop(tenant, None)
        assert not policy

    def add(self, item: T) -> None:
        """See `Eviction`."""
        policy = self._own.get(self._owner(item), self._common) if self._own else self._common
        policy.add(item)

    def remove(self, item: T) -> None:
        """See `Eviction`."""
        policy = self._own.get(self._owner(item), self._common) if self._own else self._common
        policy.remove(item)

    def victims(self) -> Iterator[T]:
        """See `Eviction`."""
        for tenant in list(self._beyond):
            if _fullness(tenant) > 1:
                yield from self.of(tenant).victims()
            else:
                del self._beyond[tenant]
        yield from self._common.victims()
        if self._own and self._overcommitted():
            tenants = (tenant for tenant in self._own if tenant is not None)
            for tenant in sorted(tenants, key=_fullness, reverse=True):
                yield from self._own[tenant].victims()

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.policies())

    def __contains__(self, item: object) -> bool:
        return item in self.of(self._owner(cast("T", item)))

    def __len__(self) -> int:
        return sum(map(len, self.policies()))


def _fullness(tenant: Tenant) -> float:
    return tenant.taken["host"] / max(tenant.allowed("host"), 1)
