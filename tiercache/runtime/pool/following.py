"""What this node knows of the pool: its boundaries by short name, and its flushes."""

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tiercache.core.cluster import events as ev
from tiercache.core.cluster.peers import POOL
from tiercache.state.names import short
from tiercache.tiers.remote_ledger import Marks, Pages
from tiercache.tiers.remote_sets import Sets, Sought
from tiercache.tiers.remote_store import SealedStore

DOUBT_S = 60.0
"""How long a boundary is not told to the core that was not there for it."""

CHECKED_TOGETHER = 4
"""Of what this node announced, so many are looked for each time."""

DOUBTED_MAX = 65_536

LEFT_MAX = 4096
"""Namespaces with something left from before a flush. What is left of more of them is left to the rules of
the store."""


class Followed:
    """One namespace in one epoch."""

    def __init__(self, pages: Pages, epoch: int) -> None:
        self.pages = pages
        self.epoch = epoch
        self.read: set[int] = set()  # As it was found in the pool.
        self.version = 0  # Of the pages, when they were.
        self.own: dict[int, Sought] = {}  # Announced here, and perhaps not told in the pool yet.
        self.doubted: OrderedDict[int, float] = OrderedDict()
        self.told: set[int] = set()  # To the core.
        self.is_short = False  # The core had no room for all of them.


class Look(NamedTuple):
    """What a look at one namespace found: its last flush, and the names; None after another flush.

    `asked`: which of those announced here were looked for; `gone`: which of them are not there.
    """

    flush: int
    names: set[int] | None
    version: int = 0
    asked: Mapping[int, Sought] = MappingProxyType({})
    gone: frozenset[int] = frozenset()


class Following:
    """Reads what the pool says of itself, and tells the core what changed: at most `names_max` boundaries
    of one namespace, and `told_max` of all. More are told when there is room again.

    `look`, `mark` and `begin` block, and are one thread's; all else is the loop's. Only the loop changes
    what is known, but for the pages.
    """

    def __init__(
        self,
        store: SealedStore,
        writer: str,
        names_max: int,
        told_max: int,
        hear: Callable[[ev.PeerTold], None],
    ) -> None:
        self._store = store
        self._marks = Marks(store)
        self._writer = writer
        self._names_max = names_max
        self._room = told_max  # What the core would take besides what it was told.
        self._hear = hear
        self._followed: dict[bytes, Followed] = {}
        self._version = -1
        self._left: dict[bytes, int] = {}  # Namespace -> flush: not all from before it is removed.

    @property
    def is_tidy(self) -> bool:
        """Whether nothing is known to be left of what was flushed."""
        return not self._left

    # --- on the loop

    def epoch_of(self, namespace: bytes) -> int:
        """Return the last flush that the pool itself is known to have had; -1 when none is."""
        found = self._followed.get(namespace)
        return found.epoch if found is not None else -1

    def names(self, namespace: bytes, epoch: int) -> set[int]:
        """Return the short names that are known in that epoch."""
        found = self._followed.get(namespace)
        return found.told if found is not None and found.epoch == epoch else set()

    def follow(self, namespace: bytes, epoch: int) -> Followed:
        """Return what is known of a namespace in an epoch; nothing of another one stays known."""
        found = self._followed.get(namespace)
        if found is None or found.epoch != epoch:
            self.forget(namespace)
            pages = Pages(self._store, namespace, epoch, self._writer, self._names_max)
            found = self._followed[namespace] = Followed(pages, epoch)
        return found

    def leave(self, namespaces: set[bytes]) -> None:
        """Follow nothing but these."""
        for namespace in self._followed.keys() - namespaces:
            self.forget(namespace)

    def forget(self, namespace: bytes) -> None:
        """A namespace was flushed: nothing that was known of it is so any more."""
        found = self._followed.pop(namespace, None)
        if found is not None:
            self._tell(found, set())

    def announced(self, namespace: bytes, epoch: int, sought: Sought) -> None:
        """A boundary was put there by this node."""
        found = self._followed.get(namespace)
        if found is not None and found.epoch == epoch:
            name = short(namespace, sought.boundary.digest)
            found.doubted.pop(name, None)
            found.own[name] = sought
            while len(found.own) > self._names_max:
                del found.own[next(iter(found.own))]
            self.tell(found)

    def missed(self, namespace: bytes, epoch: int, names: list[int]) -> None:
        """These were not there for this node, whatever was told."""
        found = self._followed.get(namespace)
        if found is not None and found.epoch == epoch and names:
            for name in names:
                found.doubted[name] = time.monotonic() + DOUBT_S
                found.doubted.move_to_end(name)
            while len(found.doubted) > DOUBTED_MAX:
                found.doubted.popitem(last=False)
            self.tell(found)

    def looked(self, namespace: bytes, found: Followed, look: Look) -> None:
        """This is what a look has found; of nothing that is not followed any more."""
        if look.names is None or self._followed.get(namespace) is not found:
            return
        for name, sought in look.asked.items():
            if found.own.get(name) is sought:  # Else it was announced once more meanwhile.
                del found.own[name]
                if name not in look.gone:
                    found.own[name] = sought  # The others come before it the next time.
        if look.version != found.version or look.gone or found.doubted or found.is_short:
            found.read, found.version = look.names, look.version
            self.tell(found)

    def tell(self, found: Followed) -> None:
        """Tell the core what there may be for it."""
        now = time.monotonic()
        while found.doubted and next(iter(found.doubted.values())) <= now:
            found.doubted.popitem(last=False)
        self._tell(found, (found.read | found.own.keys()) - found.doubted.keys())

    def _tell(self, found: Followed, names: set[int]) -> None:
        fresh, removed = names - found.told, list(found.told - names)
        self._room += len(removed)
        added = list(itertools.islice(fresh, self._room))
        self._room -= len(added)
        found.told = found.told.difference(removed).union(added)
        found.is_short = len(added) < len(fresh)
        if added or removed:
            since, self._version = self._version, self._version + 1
            self._hear(ev.PeerTold(POOL, "", self._version, False, added, removed, since))

    # --- in a thread

    def look(self, namespace: bytes, found: Followed, within_s: float) -> Look:
        """Look for flushes, then at the pages; raises StorageFault.

        What this node announced and the pages do not say is said in them, if it is still there.
        """
        until = time.monotonic() + within_s
        flush = self._marks.last(namespace, within_s)
        if flush > found.epoch:
            return Look(flush, None)
        if flush < found.epoch:  # The pool has forgotten it.
            self.mark(namespace, found.epoch, until - time.monotonic())
        pages = found.pages
        pages.read(until - time.monotonic())
        said, own = set(pages.own), found.own.copy()  # The loop goes on meanwhile.
        unsaid = {name: sought for name, sought in own.items() if name not in said}
        doubted = {name: own[name] for name in list(found.doubted) if name in own}
        some = dict(itertools.islice(own.items(), CHECKED_TOGETHER))
        looked = {**unsaid, **doubted, **some}
        gone: frozenset[int] = frozenset()
        if looked:
            there = Sets(self._store.at(namespace, found.epoch)).holds(
                namespace, list(looked.values()), until - time.monotonic()
            )
            held = {name for name, is_there in zip(looked, there, strict=True) if is_there}
            left_s = until - time.monotonic()
            gone = frozenset(looked.keys() - held)
            fault = pages.change(held - said, gone, left_s)
            if fault is not None:
                raise fault
        return Look(flush, pages.names, pages.version, looked, gone)

    def marked(self, namespace: bytes, within_s: float) -> int:
        """Return the last flush that the pool knows of; raises StorageFault."""
        return self._marks.last(namespace, within_s)

    def mark(self, namespace: bytes, flush: int, within_s: float) -> None:
        """See to it that the pool knows of a flush, and let it forget what is from before; raises
        StorageFault."""
        self._marks.ensure(namespace, flush, secrets.token_bytes(16), within_s)
        self._forget(namespace, flush, within_s)

    def begin(self, namespace: bytes, flush: int, within_s: float) -> int:
        """Begin a flush that has that number, or the next one that is free; return which. Raises
        StorageFault."""
        number = self._marks.begin(namespace, flush, secrets.token_bytes(16), within_s)
        self._forget(namespace, number, within_s)
        return number

    def _forget(self, namespace: bytes, flush: int, within_s: float) -> None:
        """Space is given back as far as it goes: nobody finds what is from before in any case."""
        if self._store.flush(namespace, flush, within_s) is not None:
            self._left[namespace] = flush
            while len(self._left) > LEFT_MAX:
                self._left.pop(next(iter(self._left)), None)

    def tidy(self, within_s: float) -> None:
        """Go on to give space back where that did not come to an end, in one namespace. In any thread,
        and in one at a time."""
        for namespace, flush in list(self._left.items())[:1]:
            self._left.pop(namespace, None)
            self._forget(namespace, flush, within_s)
