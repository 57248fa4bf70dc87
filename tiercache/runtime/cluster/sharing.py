"""What the cluster says that tenants may take, as the machine of one node hears it."""

import logging
from collections.abc import Callable, Mapping

from tiercache.core import guard_events
from tiercache.registry.base import TenantShare
from tiercache.runtime.log import say


class Sharing:
    """Tells the machine of all shares whenever one has changed. It keeps to `shares_max` of them, the
    first by name, which are the same on every node; operators are told of the rest."""

    def __init__(self, hear: Callable[[guard_events.SharesTold], None], shares_max: int) -> None:
        self._hear = hear
        self._shares_max = shares_max
        self._told: Mapping[str, TenantShare] = {}

    def heard(self, shares: Mapping[str, TenantShare]) -> None:
        """The cluster says this, and nothing else."""
        if shares == self._told:
            return
        self._told = shares
        said = {tenant: (share.host, share.nvme) for tenant, share in shares.items()}
        self._hear(guard_events.SharesTold(said))
        if len(shares) > self._shares_max:
            left = sorted(shares)[self._shares_max]
            say(logging.WARNING, "too many tenants have shares in this cluster: some do not count",
                shares=len(shares), shares_max=self._shares_max, first_left_out=left)  # fmt: skip
