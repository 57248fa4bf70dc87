"""Which checkpoint leaves when the device is full. Policies choose; the tiers move the bytes.

A policy knows checkpoints by *name*: the digest of a namespace and that of a boundary, one after the other.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Worth:
    """What is lost and what is won when a checkpoint goes.

    `tokens`: to be computed again by who needs it, from the next shallower checkpoint of its prefix
    that is here. `nbytes`: of the device that it takes.
    """

    tokens: int
    nbytes: int


class Placement(Protocol):
    """Names the checkpoint to go. Each is `used` before it is anything else here, and `gone` at last."""

    def used(self, name: bytes) -> None:
        """A checkpoint came, or was resumed from."""
        ...

    def gone(self, name: bytes) -> None:
        """A checkpoint left; nothing happens when it is not known."""
        ...

    def victim(
        self, worth: Callable[[bytes], Worth], spared: Collection[bytes] = ()
    ) -> bytes | None:
        """Return the one to go, None when all should stay; never one of `spared`.

        `worth` answers for every checkpoint that is known here. It stays known until `gone`.
        """
        ...


class LeastRecent:
    """The one that was used least recently goes."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def used(self, name: bytes) -> None:
        """Move to the end."""
        self._order[name] = None
        self._order.move_to_end(name)

    def gone(self, name: bytes) -> None:
        """Forget it."""
        self._order.pop(name, None)

    def victim(
        self, worth: Callable[[bytes], Worth], spared: Collection[bytes] = ()
    ) -> bytes | None:
        """Return the first."""
        del worth
        return next((name for name in self._order if name not in spared), None)


class CostAware:
    """The one goes that saves the fewest tokens for its bytes, and was not used for long.

    GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997): what a
    checkpoint is worth counts from the level at its last use, and the level rises to the worth of each
    that went. So what is cheap goes first, and what is dear goes too when it is never used again.
    `victim` looks at all of them: there are as many as slots.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._from: OrderedDict[bytes, float] = OrderedDict()
        self._named: tuple[bytes, float] | None = None

    def used(self, name: bytes) -> None:
        """Count from the level of now."""
        self._from[name] = self._level
        self._from.move_to_end(name)

    def gone(self, name: bytes) -> None:
        """Forget it; when it was the victim, the level rises."""
        if self._from.pop(name, None) is not None and self._named and self._named[0] == name:
            self._level = max(self._level, self._named[1])
            self._named = None

    def victim(
        self, worth: Callable[[bytes], Worth], spared: Collection[bytes] = ()
    ) -> bytes | None:
        """Return the one of least worth; of equals, the one used least recently."""

        def standing(name: bytes) -> float:
            found = worth(name)
            return self._from[name] + found.tokens / max(found.nbytes, 1)

        names = (name for name in self._from if name not in spared)
        worths = ((standing(name), name) for name in names)
        found = min(worths, key=lambda pair: pair[0], default=None)
        self._named = None if found is None else (found[1], found[0])
        return None if found is None else found[1]


class Pinned:
    """All stay: a full pool takes nothing more."""

    def used(self, name: bytes) -> None:
        """Nothing follows from it."""

    def gone(self, name: bytes) -> None:
        """Nothing follows from it."""

    def victim(
        self, worth: Callable[[bytes], Worth], spared: Collection[bytes] = ()
    ) -> bytes | None:
        """Return None."""
        del worth, spared
        return None


PLACEMENTS: Final[Mapping[str, Callable[[], Placement]]] = MappingProxyType(
    {"least_recent": LeastRecent, "cost_aware": CostAware, "pinned": Pinned}
)
"""How to make each policy, by name."""


def placement_named(name: str) -> Placement:
    """Return a new policy of that name; ValueError when there is none."""
    if name not in PLACEMENTS:
        raise ValueError(f"no placement {name!r}; there are {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]()


@dataclass(frozen=True, slots=True)
class Policies:
    """Who goes when the checkpoint pool is full, and who of those in active slots when they are."""

    pool: Placement
    active: Placement

    @classmethod
    def named(cls, name: str) -> "Policies":
        """Return the same policy for both; ValueError when there is none of that name."""
        return cls(placement_named(name), placement_named(name))
