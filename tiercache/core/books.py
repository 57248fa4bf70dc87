"""All that one node knows, and the few moves that keep it consistent.

The parts of the core (planning, saving, write-back, operation) work on these books; none of them
keeps a copy. `check` says whether they add up.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import inf
from typing import NamedTuple

from tiercache.core.catalog import Catalog, Item, Shelf, Status
from tiercache.core.cluster.summary import Own
from tiercache.core.commands import Command, Forget, Reply, ReplyBody
from tiercache.core.cost import work_of
from tiercache.core.counters import Counters
from tiercache.core.leases import Leases
from tiercache.core.limits import Limits
from tiercache.core.log import Log
from tiercache.core.pace import Pace
from tiercache.core.passage import Passage
from tiercache.core.policy.base import Eviction
from tiercache.core.policy.tenants import ByTenant
from tiercache.core.protection import Protection
from tiercache.core.sights import Request, Sights
from tiercache.core.space import Space
from tiercache.core.tenants import Tenant
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


class Room(NamedTuple):
    """The answer to who asks for memory: an extent, or why there is none ("full", "quota"). `own`: how
    many objects of the same tenant went because the tenant would have been beyond its share."""

    extent: Extent | None
    why: str
    own: int


NO_ROOM = Room(None, "full", 0)


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
        self.prefill_tokens_per_s = 0.0
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
        clustering = limits.clustering
        tells = clustering.peers_max or clustering.tells_routers
        own = Own(clustering.names_max, clustering.name_changes_max) if tells else None
        self.catalog = Catalog(limits.tails_max, own)
        self.space = Space(limits.host_segments, ALIGNMENT)
        self.log = Log(limits.nvme_bytes, limits.nvme_segment_bytes, ALIGNMENT)
        self.leases = Leases()
        self.sights = Sights(limits.sights_max, limits.recent_requests_max)
        self.protection = Protection(limits, ALIGNMENT)
        self.passage = Passage(limits, self.catalog)
        self.eviction: ByTenant[Item] = self.protection.around(self.passage.make, self.sights)
        self.sessions: dict[int, Session] = {}
        self.abandoned: dict[int, Session] = {}  # Ended, but their process may still touch memory.
        self.counters = Counters()
        self.nvme_pace = Pace(limits.sample_bytes_min)
        self.disk = Disk.OPENING if limits.nvme_bytes else Disk.OFF
        self._flushes: dict[bytes, int] = {}
        self.standing_until = 0.0 if clustering.peers_max else inf
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
        if item.idle and item.users == 0:
            self.withdraw(item)
        item.users += 1

    def withdraw(self, item: Item) -> None:
        """An idle item may not be dropped any more."""
        item.idle = False
        self.eviction.remove(item)

    def look_at(self, items: Iterable[Item]) -> None:
        """Like `use` of each, but they keep their places in the order of eviction: nobody wanted them."""
        for item in items:
            item.users += 1

    def let_go(self, item: Item) -> None:
        """End one use. The last one makes a held item droppable and frees a doomed one."""
        self.let_go_of((item,))

    def let_go_of(self, items: Sequence[Item]) -> None:
        """End one use of each: deep blocks become droppable before the shallow ones they rest on."""
        for item in reversed(items):
            item.users -= 1
            assert item.users >= 0
            if not item.users and not item.idle:
                self._settle(item)

    def _settle(self, item: Item) -> None:
        if item.status is Status.DOOMED:
            self.doomed.discard(item)
            for extent in filter(None, (item.host, item.target)):
                self.free(item, extent)
            item.host = item.target = None
        elif (
            not item.idle
            and item.status is Status.SEALED
            and item.host is not None
            and item not in self.protection.pins
        ):
            item.idle = True
            self.eviction.add(item)

    def unpin(self, items: Iterable[Item]) -> None:
        """These are under no pin any more: who nobody uses may go, deep blocks before shallow ones."""
        for item in reversed(list(items)):
            if item.users == 0:
                self._settle(item)

    # --- making room and letting bytes go

    def allocate(self, shelf: Shelf, nbytes: int) -> Room:
        """Return room in the host tier for an object of a namespace, dropping what nobody uses.

        A tenant beyond its share drops its own objects only; nobody else's go for it.
        """
        size = self.space.rounded(nbytes)
        tenant = shelf.tenant
        assert tenant is not None  # Only what has a name is given memory.
        own = 0
        while tenant.would_pass("host", size):
            most = self.limits.evictions_per_reserve_max
            victim = self._first_idle(self.eviction.of(tenant)) if own < most else None
            if victim is None or size > tenant.allowed("host"):
                return Room(None, "quota", own)
            self.evict(victim)
            self.counters.add("quota_evictions", "host")
            own += 1
        extent = self._run(nbytes, tenant)
        if extent is None:
            return NO_ROOM
        tenant.taken["host"] += extent.size
        return Room(extent, "", own)

    def _run(self, nbytes: int, tenant: Tenant) -> Extent | None:
        extent = self.space.allocate(nbytes)
        if extent is not None or nbytes > self.space.object_bytes_max:
            return extent
        for _ in range(self.limits.evictions_per_reserve_max):
            victim = self.victim(tenant)
            if victim is None:
                return None
            self.evict(victim)
            extent = self.space.allocate(nbytes)
            if extent is not None:
                return extent
        return None

    def free(self, item: Item, extent: Extent) -> None:
        """Give back memory that an object took."""
        tenant = item.entry.shelf.tenant
        assert tenant is not None
        tenant.taken["host"] -= extent.size
        self.space.free(extent)

    def victim(self, tenant: Tenant) -> Item | None:
        """Return what leaves memory next for a tenant; None when all that may go is in use.

        What others were promised does not go for it, its own does.
        """
        found = self._first_idle(self.eviction)
        if found is None and tenant.is_limited:
            return self._first_idle(self.eviction.of(tenant))
        return found

    def _first_idle(self, order: Eviction[Item]) -> Item | None:
        for item in order.victims():
            if not item.users:
                return item
            self.withdraw(item)  # Being looked at: it comes back when that is over.
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
        self.withdraw(item)
        self.free(item, item.host)
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
        if item.idle:
            self.withdraw(item)
        self.protection.gone(item)
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

    # --- the cluster

    def is_isolated(self, now: float) -> bool:
        """Return whether this node may have missed a flush, and so must give nothing out."""
        return now >= self.standing_until

    def flush_of(self, namespace: bytes) -> int:
        """Return the number of the last flush of a namespace that was carried out here."""
        return self._flushes.get(namespace, 0)

    def flushed(self, namespace: bytes, number: int) -> None:
        """A flush was carried out: objects from before it are taken from nobody any more."""
        self._flushes[namespace] = max(number, self._flushes.get(namespace, 0))

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
        shelf.work = work_of(namespace.model, self.limits.evicting.works)
        self.named(shelf)
        self.catalog.learn(shelf, layout)
        shelf.start = chain_start(namespace.chain)
        return shelf

    def named(self, shelf: Shelf) -> None:
        """The label of a shelf is known: what it holds is its tenant's."""
        for tenant in self.protection.named(shelf):
            self.eviction.forget(tenant)
            self.passage.left(tenant)
        assert shelf.tenant is not None
        self.eviction.join(shelf.tenant)

    def _drop_empty_shelf(self) -> bool:
        in_use = {id(session.shelf) for session in self.sessions.values()}
        for digest, shelf in self.catalog.shelves.items():
            if not shelf.entries and id(shelf) not in in_use:
                del self.catalog.shelves[digest]
                self.protection.tenants.leave(shelf)
                self.sights.forget(digest)
                self.passage.forget(shelf)
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
