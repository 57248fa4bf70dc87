"""What this node tells the others: which boundaries it could resume, in short."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple


class Summary(NamedTuple):
    """What changed between two versions; or all there is, when `whole`."""

    version: int
    whole: bool
    added: list[int]
    removed: list[int]


class Own:
    """The boundaries of this node, by short name, and how they changed lately.

    One that moves between memory and a slower tier counts as changed: it is told anew. At most
    `names_max` are told, those that became known last. `changes_max` changes are remembered: who
    has missed more is told everything.
    """

    def __init__(self, names_max: int, changes_max: int) -> None:
        self._names_max = names_max
        self._held: OrderedDict[int, int] = OrderedDict()  # Name -> boundaries that share it.
        self._slower: set[int] = set()  # Of these, what is not in memory.
        self._changes: deque[tuple[int, bool]] = deque(maxlen=changes_max)
        self.version = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, name: int, *, slower: bool = False) -> None:
        """A boundary can be resumed from now on; `slower`: not from memory alone."""
        count = self._held.get(name, 0)
        self._held[name] = count + 1
        if not count:
            if slower:
                self._slower.add(name)
            self._change(name, added=True)
            if len(self._held) > self._names_max:
                oldest, _ = self._held.popitem(last=False)
                self._slower.discard(oldest)
                self._change(oldest, added=False)

    def move(self, name: int, *, slower: bool) -> None:
        """A boundary can be resumed as before, now from memory alone, or (`slower`) no longer."""
        if name not in self._held or (name in self._slower) is slower:
            return
        if slower:
            self._slower.add(name)
        else:
            self._slower.remove(name)
        self._change(name, added=True)

    def slower(self, names: Iterable[int]) -> set[int]:
        """Return those of these boundaries that take something that is not in memory. Where two share a
        name, one of them does."""
        return self._slower.intersection(names)

    def remove(self, name: int) -> None:
        """A boundary cannot be resumed any more. One that is not told is no error."""
        count = self._held.get(name, 0)
        if count > 1:
            self._held[name] = count - 1
        elif count:
            del self._held[name]
            self._slower.discard(name)
            self._change(name, added=False)

    def _change(self, name: int, *, added: bool) -> None:
        self.version += 1
        self._changes.append((name, added))

    def since(self, version: int) -> Summary:
        """Return what changed since `version`; everything, when that is not known any more."""
        missed = self.version - version
        if not 0 <= missed <= len(self._changes):
            return Summary(self.version, whole=True, added=list(self._held), removed=[])
        # From the end: looking into the middle of a deque takes long.
        last = dict(reversed(list(islice(reversed(self._changes), missed))))
        added = [name for name, there in last.items() if there]
        removed = [name for name, there in last.items() if not there]
        return Summary(self.version, whole=False, added=added, removed=removed)
