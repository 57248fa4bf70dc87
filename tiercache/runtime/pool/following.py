"""What this node knows of the pool: its boundaries by short name, and its flushes."""

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
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


class Look(NamedTuple):
    """What a look at one namespace found: its last flush, and the names; None after another flush."""

    flush: int
    names: set[int] | None
    version: int = 0


class Following:
    """Reads what the pool says of itself, and tells the core what changed.

    `look`, `mark` and `begin` block, and are one thread's; all else is the loop's.
    """

    def __init__(
        self,
        store: SealedStore,
        writer: str,
        names_max: int,
        hear: Callable[[ev.PeerTold], None],
    ) -> None:
        self._store = store
        self._marks = Marks(store)
        self._writer = writer
        self._names_max = names_max
        self._hear = hear
        self._followed: dict[bytes, Followed] = {}
        self._version = -1

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

    def looked(self, found: Followed, names: set[int], version: int) -> None:
        """This is what the pages say."""
        if version != found.version or found.doubted:
            found.read, found.version = names, version
            self.tell(found)

    def tell(self, found: Followed) -> None:
        """Tell the core what there may be for it."""
        now = time.monotonic()
        while found.doubted and next(iter(found.doubted.values())) <= now:
            found.doubted.popitem(last=False)
        self._tell(found, (found.read | found.own.keys()) - found.doubted.keys())

    def _tell(self, found: Followed, names: set[int]) -> None:
        added, removed = list(names - found.told), list(found.told - names)
        found.told = names
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
        own = set(pages.own)
        unsaid = {name: sought for name, sought in list(found.own.items()) if name not in own}
        doubted = {name: found.own[name] for name in list(found.doubted) if name in found.own}
        looked = {**unsaid, **doubted, **self._some(found)}
        if looked:
            there = Sets(self._store.at(namespace, found.epoch)).holds(
                namespace, list(looked.values()), until - time.monotonic()
            )
            held = {name for name, is_there in zip(looked, there, strict=True) if is_there}
            left_s = until - time.monotonic()
            fault = pages.change(held - own, looked.keys() - held, left_s)
            if fault is not None:
                raise fault
            for name in looked.keys() - held:
                found.own.pop(name, None)
        return Look(flush, pages.names, pages.version)

    def marked(self, namespace: bytes, within_s: float) -> int:
        """Return the last flush that the pool knows of; raises StorageFault."""
        return self._marks.last(namespace, within_s)

    def _some(self, found: Followed) -> dict[int, Sought]:
        """Return a few of those that this node announced, in turn: others may have found them lost."""
        names = list(itertools.islice(found.own, CHECKED_TOGETHER))
        some = {}
        for name in names:
            some[name] = found.own[name] = found.own.pop(name)
        return some

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
        self._store.flush(namespace, flush, within_s)
