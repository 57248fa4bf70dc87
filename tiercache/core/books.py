"""All that one node knows, and the few moves that keep it consistent.

The parts of the core (planning, saving, write-back, operation) work on these books; none of them
keeps a copy. `check` says whether they add up.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum

from tiercache.core.catalog import Catalog, Item, Shelf, Status
from tiercache.core.commands import Command, Forget, Reply, ReplyBody
from tiercache.core.counters import Counters
from tiercache.core.leases import Leases
from tiercache.core.limits import Limits
from tiercache.core.log import Log
from tiercache.core.policy.base import Eviction
from tiercache.core.policy.lru import Lru
from tiercache.core.sights import Request, Sights
from tiercache.core.space import Space
from tiercache.state import Extent, Key, Layout, Namespace
from tiercache.state.keys import chain_start

ALIGNMENT = 4096
"""Extents are whole pages, so that direct I/O runs straight to and from the arena."""


class Disk(IntEnum):
    """How far the NVMe tier has come."""

    OFF = 0
    FAILED = 1  # What was found is read; nothing is written any more.
    OPENING = 2  # Nothing is known of it yet, and nothing may be written.
    SCANNING = 3  # Written and read; what an earlier start left is not all known.
    READY = 4


class Session:
    """A client that serves one namespace as one of `ranks`."""

    def __init__(self, number: int, shelf: Shelf, namespace: Namespace, layout: Layout) -> None:
        self.number = number
        self.shelf = shelf
        self.namespace = namespace
        self.layout = layout
        self.ranks = 1
        self.rank = 0
        self.write = False
        self.writer = ""
        self.narrowed: dict[tuple[str, str], Shelf] = {("", ""): shelf}
        self.reserved: dict[int, Item] = {}  # Tickets not committed yet.
        self.reserved_at: dict[int, float] = {}
        self.unsealed: set[Item] = set()  # Committed, checksum not known yet.
        self.lost = 0  # Committed, but never sealed or stored, since the last flush.

    def scoped(self, shelf: Shelf, request: str) -> Request:
        """Return a request's full name. Ranks of one engine share its name, and so its requests."""
        return (shelf.digest, self.writer, request)


class Books:
    """The state of one node. Every move leaves it consistent; commands pile up in `out`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.catalog = Catalog(limits.tails_max)
        self.space = Space(limits.host_segments, ALIGNMENT)
        self.log = Log(limits.nvme_bytes, limits.nvme_segment_bytes, ALIGNMENT)
        self.eviction: Eviction[Item] = Lru()
        self.leases = Leases()
        self.sights = Sights(limits.sights_max, limits.recent_requests_max)
        self.sessions: dict[int, Session] = {}
        self.abandoned: dict[int, Session] = {}  # Ended, but their process may still touch memory.
        self.counters = Counters()
        self.disk = Disk.OPENING if limits.nvme_bytes else Disk.OFF
        self.out: list[Command] = []
        self.doomed: set[Item] = set()
        self._jobs = 0

    # --- talking

    def reply(self, session: int, call: int, body: ReplyBody) -> None:
        """Answer a call. Operators ask without a session, so whoever sends it may find nobody."""
        self.out.append(Reply(session, call, body))

    def next_job(self) -> int:
        """Return a job number that was never used."""
        self._jobs += 1
        return self._jobs

    # --- who uses what

    def use(self, item: Item) -> None:
        """Keep the item's host extent in place until `let_go`."""
        if item.users == 0 and item.host is not None:
            self.eviction.remove(item)
        item.users += 1

    def look_at(self, item: Item) -> None:
        """Like `use`, but the item keeps its place in the order of eviction: nobody wanted it."""
        item.users += 1

    def let_go(self, item: Item) -> None:
        """End one use. The last one makes a held item droppable and frees a doomed one."""
        assert item.users > 0
        item.users -= 1
        if item.users == 0:
            self._settle(item)

    def let_go_of(self, items: Sequence[Item]) -> None:
        """End one use of each: deep blocks become droppable before the shallow ones they rest on."""
        for item in reversed(items):
            self.let_go(item)

    def _settle(self, item: Item) -> None:
        if item.status is Status.DOOMED:
            self.doomed.discard(item)
            for extent in (item.host, item.target):
                if extent is not None:
                    self.space.free(extent)
            item.host = item.target = None
        elif item.status is Status.SEALED and item.host is not None and item not in self.eviction:
            self.eviction.add(item)

    # --- making room and letting bytes go

    def allocate(self, nbytes: int) -> Extent | None:
        """Return room in the host tier, dropping what nobody uses; None when that does not do."""
        extent = self.space.allocate(nbytes)
        if extent is not None or nbytes > self.space.object_bytes_max:
            return extent
        for _ in range(self.limits.evictions_per_reserve_max):
            victim = self.victim()
            if victim is None:
                return None
            self.evict(victim)
            extent = self.space.allocate(nbytes)
            if extent is not None:
                return extent
        return None

    def victim(self) -> Item | None:
        """Return what leaves memory next; None when all of it is in use."""
        for item in self.eviction.victims():
            if not item.users:
                return item
            self.eviction.remove(item)  # Being looked at: it comes back when that is over.
        return None

    def evict(self, victim: Item) -> None:
        """Drop a victim from memory."""
        self.counters.add("evictions", "host")
        self.counters.add("evicted_bytes", "host", victim.nbytes)
        self.drop_host(victim)

    def drop_host(self, item: Item) -> None:
        """Give up the host copy of an item that nobody uses; it goes for good if it was the only one."""
        assert item.users == 0
        assert item.host is not None
        if item.nvme is None:
            self.discard(item)
            return
        self.eviction.remove(item)
        self.space.free(item.host)
        item.host = None
        item.piece = None
        self.catalog.update(item)

    def drop_nvme(self, item: Item) -> None:
        """Give up the NVMe copy; the caller sees to the index. It goes for good if it was the only
        one."""
        assert item.nvme is not None
        self.log.drop(item)
        item.nvme = None
        self.catalog.update(item)
        if item.host is None and item.status is Status.SEALED:
            self.discard(item)

    def drop_stored(self, item: Item) -> None:
        """Give up the NVMe copy of an object, in the index too."""
        self.forget([item.key])
        self.drop_nvme(item)

    def forget(self, keys: list[Key]) -> None:
        """Have the index of the NVMe tier forget these, before anything is stored anew."""
        if not keys:
            return
        last = self.out[-1] if self.out else None
        if isinstance(last, Forget):
            last.keys.extend(keys)
        else:
            self.out.append(Forget(keys))

    def discard(self, item: Item, *, forget: bool = True) -> None:
        """Take an item out of every tier: nothing finds it again. Users keep its extent in place.

        `forget`: tell the NVMe tier; otherwise the caller does.
        """
        if item.nvme is not None:
            self.log.drop(item)
            item.nvme = None
            if forget:
                self.forget([item.key])
        if item in self.eviction:
            self.eviction.remove(item)
        self.catalog.remove(item)
        self.doomed.add(item)
        if item.users == 0:
            self._settle(item)

    # --- leases

    def lease(self, session: int, request: str, items: Iterable[Item], now: float) -> None:
        """Promise the session that these host extents stay until the request is released."""
        for item in self.leases.take(session, request, items, now):
            self.use(item)

    def release(self, session: int, request: str) -> None:
        """End a lease."""
        self.let_go_of(self.leases.end(session, request))

    # --- the whole

    def shelf_of(self, session: Session, lora: str, salt: str) -> Shelf | None:
        """Return the shelf of the session's namespace for this adapter and tenant; None when there are
        too many."""
        found = session.narrowed.get((lora, salt))
        if found is not None and self.catalog.shelves.get(found.digest) is found:
            return found
        narrow = session.namespace.narrow(
            lora=lora or session.namespace.lora, salt=salt or session.namespace.salt
        )
        shelf = self.open_shelf(narrow, session.layout)
        if shelf is not None:
            if len(session.narrowed) > self.limits.namespaces_max:
                session.narrowed.clear()
            session.narrowed[lora, salt] = shelf
        return shelf

    def open_shelf(self, namespace: Namespace, layout: Layout) -> Shelf | None:
        """Return the shelf of a namespace, made when it is new; an empty one makes room."""
        shelves = self.catalog.shelves
        shelf = shelves.get(namespace.digest)
        if shelf is None:
            if len(shelves) >= self.limits.namespaces_max and not self._drop_empty_shelf():
                return None
            shelf = shelves[namespace.digest] = Shelf(namespace.digest, namespace.label(), layout)
        shelf.label = namespace.label()
        shelf.layout = layout
        shelf.start = chain_start(namespace.chain)
        return shelf

    def _drop_empty_shelf(self) -> bool:
        in_use = {id(session.shelf) for session in self.sessions.values()}
        for digest, shelf in self.catalog.shelves.items():
            if not shelf.entries and id(shelf) not in in_use:
                del self.catalog.shelves[digest]
                self.sights.forget(digest)
                return True
        return False

    def quarantined_bytes(self) -> int:
        """Return what cannot be reused since a process that may still touch it is not known to be
        gone."""
        items = {item for session in self.abandoned.values() for item in session.reserved.values()}
        for number, lease in self.leases.all():
            if number in self.abandoned:
                items.update(lease.items)
        extents = (extent for item in items for extent in (item.host, item.target))
        return sum(extent.size for extent in extents if extent is not None)
