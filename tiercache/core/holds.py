"""What is kept in place for a while because somebody is likely to read it next.

A hold says where nothing lies, so nobody reads because of it, and it may end at any time: it ends by
itself, which a lease never does.
"""

from collections import OrderedDict
from collections.abc import Iterator
from math import inf
from typing import TypeAlias

from tiercache.core.books import Books
from tiercache.core.catalog import Item

Name: TypeAlias = tuple[int, str]
"""Whose: a session, and its request."""


class Hold:
    """What one request keeps from being dropped, and until when."""

    __slots__ = ("items", "until")

    def __init__(self, items: list[Item], until: float) -> None:
        self.items = items
        self.until = until


class Holds:
    """At most `holds_max` of them, and `objects_max` objects: the oldest ones end first."""

    def __init__(self, books: Books, holds_max: int, objects_max: int) -> None:
        self._books = books
        self._holds_max = holds_max
        self._objects_max = objects_max
        self._holds: OrderedDict[Name, Hold] = OrderedDict()
        self._held = 0
        self._soonest = inf  # No hold ends before.

    def items(self) -> Iterator[Item]:
        """Yield each item once for every hold that keeps it."""
        for hold in self._holds.values():
            yield from hold.items

    def sessions(self) -> set[int]:
        """Return who keeps something."""
        return {session for session, _ in self._holds}

    def keep(self, name: Name, items: list[Item], until: float, now: float) -> None:
        """Keep these instead of what was kept under the name."""
        self.end(name)
        items = list(dict.fromkeys(items))
        if not items or until <= now:
            return
        self._books.look_at(items)  # Reading them is what makes them recent.
        self._holds[name] = Hold(items, until)
        self._held += len(items)
        self._soonest = min(self._soonest, until)
        while len(self._holds) > self._holds_max or self._held > self._objects_max:
            self.end(next(iter(self._holds)))

    def end(self, name: Name) -> None:
        """Keep nothing under the name any more. No error when nothing is."""
        hold = self._holds.pop(name, None)
        if hold is not None:
            self._held -= len(hold.items)
            self._books.let_go_of(hold.items)

    def close(self, session: int) -> None:
        """Keep nothing of a session any more."""
        for name in [name for name in self._holds if name[0] == session]:
            self.end(name)

    def tick(self, now: float) -> None:
        """End every hold whose time is up."""
        for name in [name for name, hold in self._holds.items() if hold.until <= now]:
            self.end(name)
        self._soonest = min((hold.until for hold in self._holds.values()), default=inf)

    def wakeup(self) -> float | None:
        """Return when the next hold's time is up, or a time before."""
        return self._soonest if self._soonest < inf else None

    def check(self) -> None:
        """Raise AssertionError if the sum is wrong."""
        assert self._held == sum(len(hold.items) for hold in self._holds.values())
        assert all(hold.until >= self._soonest for hold in self._holds.values())
