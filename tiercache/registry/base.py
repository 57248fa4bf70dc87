"""The interface of a registry, and the values that nodes share through it."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Protocol, TypeAlias

import msgspec

from tiercache.errors import ConfigError

NAME_CHARACTERS_MAX = 128

TENANT = re.compile("-|[0-9a-f]{8}")
"""A tenant's label: nobody writes a salt down."""

Portion: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the others see it. Fields that a newer version adds are ignored.

    `name` stays over restarts, `boot` is of this start. `address` is where other nodes connect,
    `protocols` the lowest and the highest version of the protocol between nodes that it speaks.
    """

    name: str
    boot: str
    address: str
    protocols: tuple[int, int]
    host_bytes: int = 0
    nvme_bytes: int = 0


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of each tier that a tenant may take on every node, 0 to 1. None: what the node says."""

    host: Portion | None = None
    nvme: Portion | None = None

    def changed(self, change: "TenantShare") -> "TenantShare":
        """Return this share with what `change` says of it."""
        return TenantShare(
            host=self.host if change.host is None else change.host,
            nvme=self.nvme if change.nvme is None else change.nvme,
        )


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What was shared at one moment; all of it was read at once.

    `flushes`: the number of each namespace's last flush. `dropped`: for each member, up to which flush
    of a namespace it has dropped what it held. `shares`: what tenants may take, by their labels.
    """

    members: Mapping[str, Member] = msgspec.field(default_factory=dict)
    flushes: Mapping[str, int] = msgspec.field(default_factory=dict)
    dropped: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    shares: Mapping[str, TenantShare] = msgspec.field(default_factory=dict)

    def behind(self, namespace: str, flush: int) -> tuple[str, ...]:
        """Return the members that may still hold objects from before that flush, by name."""
        return tuple(
            sorted(
                name
                for name in self.members
                if self.dropped.get(name, {}).get(namespace, 0) < flush
            )
        )


Changed: TypeAlias = Callable[[View], None]


class Registry(Protocol):
    """One node's door to what the cluster shares. All methods run on one event loop.

    Not promised: that a view is the latest, or that a member in it still lives. Promised: a member that
    has stopped leaves every view within the registry's time to live, and `held_until` of a node that is
    cut off passes before others may see it gone.
    """

    @property
    def held_until(self) -> float:
        """Monotonic time until which this node is a member for certain, and the view knows every flush
        that others count on; 0 before it is a member."""
        ...

    @property
    def view(self) -> View:
        """What was read last. Empty before the first reading; kept while the registry is away."""
        ...

    async def run(self, changed: Changed) -> None:
        """Be a member until cancelled, calling `changed` with each new view, and whenever the node has
        become a member anew. Comes back by itself when the registry was away. Raises ConfigError when
        another node has taken this one's name."""
        ...

    async def flush(self, namespace: str) -> int:
        """Begin one more flush of a namespace; return its number. Raises UnavailableError.

        Numbers ascend, also over the loss of all that a registry knew (`next_flush`).
        """
        ...

    async def dropped(self, namespace: str, flush: int) -> None:
        """Say that this node has dropped all that it held from before that flush. Raises
        UnavailableError; what was said is said again when the node becomes a member anew."""
        ...

    async def share(self, tenant: str, change: TenantShare | None) -> TenantShare | None:
        """Change what a tenant may take on every node; what `change` leaves out stays as it is. None:
        nothing is said of it any more. Returns what is said now. Raises UnavailableError."""
        ...


def next_flush(last: int, wall: float) -> int:
    """Return the number of the flush after `last`. `wall`: seconds since 1970.

    The time in it keeps numbers ascending when a registry lost what it knew; a clock that is wrong, or
    goes back, still gives a higher number than the last.
    """
    return max(last + 1, int(wall * 1000))


def check_name(name: str, what: str) -> str:
    """Return `name` if it can be part of a registry's key; raises ConfigError."""
    if not (name.isascii() and name.isprintable() and 0 < len(name) <= NAME_CHARACTERS_MAX):
        raise ConfigError(f"{what} {name!r} must be 1-{NAME_CHARACTERS_MAX} printable characters")
    if "/" in name or " " in name:
        raise ConfigError(f"{what} {name!r} must not contain '/' or a space")
    return name
