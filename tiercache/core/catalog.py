"""What is held: objects by namespace and digest, and where their bytes are.

An `Entry` gathers all that ends at one chain digest; two bit masks say which (part, shard, codec) is
held there, so that a plan costs one dictionary look-up per digest, whatever the number of parts,
shards and stored objects.
"""

from bisect import bisect_right
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING

from tiercache.core.cluster.summary import Own
from tiercache.core.cost import EVEN
from tiercache.core.events import Tail
from tiercache.state import Extent, Hint, Key, Label, Layout, Piece, Record, Shard
from tiercache.state.names import short

if TYPE_CHECKING:
    from tiercache.core.tenants import Tenant

NUMBERS_SPARE = 1024
"""Numbers of items that are gone are swept out once there are more of them than items, and this."""


COVERS_MAX = 4096
"""Ways to put shards together that one namespace remembers."""


class Status(IntEnum):
    """Where an object is on its way to being readable. Only SEALED ones count as held."""

    WRITING = 0  # A client writes into the reserved extent.
    SEALING = 1  # Its checksum is being computed.
    SEALED = 2
    DOOMED = 3  # Out of the catalog; its extent is freed when its last user lets go.


class Told(IntEnum):
    """What others were told of an entry."""

    NOTHING = 0
    SLOWER = 1  # That it can be resumed, not from memory alone.
    MEMORY = 2


class Slot:
    """One (part, shard, codec) of a namespace; `bit` is its place in the masks."""

    __slots__ = ("bit", "codec", "part", "shard")

    def __init__(self, part: str, shard: Shard, codec: str, bit: int) -> None:
        self.part = part
        self.shard = shard
        self.codec = codec
        self.bit = bit


class Item:
    """One object: the bytes of one slot at one entry, in the host tier, on NVMe, or both.

    `host` and `nvme` are set only while the bytes there are whole. `target` is a host extent being
    filled: by its writer, or from NVMe. `users` counts what keeps the host extent in place: leases and
    running jobs. `piece` is the answer that leads a client to the bytes, made once.
    """

    __slots__ = (
        "checksum",
        "end",
        "entry",
        "host",
        "id",
        "idle",
        "nbytes",
        "nvme",
        "parent",
        "piece",
        "queued",
        "requantised",
        "sealed_at",
        "slot",
        "start",
        "status",
        "target",
        "too_slow",
        "users",
        "writer",
    )

    def __init__(self, number: int, entry: "Entry", slot: Slot, span: tuple[int, int]) -> None:
        self.id = number
        self.entry = entry
        self.slot = slot
        self.start, self.end = span
        self.nbytes = 0
        self.host: Extent | None = None
        self.nvme: Extent | None = None
        self.target: Extent | None = None
        self.too_slow = False  # Kept from NVMe for that, and counted.
        self.status = Status.WRITING
        self.users = 0
        self.checksum = b""
        self.parent = b""
        self.requantised = 0
        self.writer = ""
        self.sealed_at = 0.0
        self.piece: Piece | None = None
        self.queued = False  # On its way to NVMe.
        self.idle = False  # In the order of eviction.

    @property
    def key(self) -> Key:
        """The object's name."""
        slot = self.slot
        return Key(self.entry.shelf.digest, slot.part, slot.shard, slot.codec, self.entry.digest)

    @property
    def record(self) -> Record:
        """The object's label."""
        return Record(
            self.key,
            self.start,
            self.end,
            self.nbytes,
            self.checksum,
            self.writer,
            self.sealed_at,
            self.parent,
            self.entry.base,
            self.requantised,
        )


class Entry:
    """All that ends at one digest. `host` and `nvme` are masks of the slots held there, `coming` of those
    on their way from another node and nowhere here yet; `held` is any of these.

    `tails` are boundaries inside the next block, the one used last at the end; `base` is set on an entry
    that is such a tail. `hint` is what the request that reached it last said of its session, at
    `hinted_at`; `priority` is the highest that any request gave it.
    """

    __slots__ = (
        "base",
        "coming",
        "digest",
        "held",
        "hint",
        "hinted_at",
        "host",
        "items",
        "nvme",
        "priority",
        "shelf",
        "tails",
        "told",
    )

    def __init__(self, shelf: "Shelf", digest: bytes, base: bytes) -> None:
        self.shelf = shelf
        self.digest = digest
        self.base = base
        self.items: dict[int, Item] = {}
        self.host = 0
        self.nvme = 0
        self.coming = 0
        self.held = 0
        self.tails: tuple[Tail, ...] = ()
        self.told = Told.NOTHING  # To other nodes and routers.
        self.hint = Hint.NONE
        self.hinted_at = 0.0
        self.priority: int | None = None  # Nobody said anything.

    def due(self) -> Told:
        """Return what others should be told of it."""
        held = self.host | self.nvme
        if self.base or not self.shelf.has_all(held):
            return Told.NOTHING
        in_memory = held == self.host or self.shelf.has_all(self.host)
        return Told.MEMORY if in_memory else Told.SLOWER

    def agrees(self, end: int, base: bytes) -> bool:
        """Return whether an object that ends at `end` tokens can be here: a digest names one boundary."""
        return self.base == base and all(item.end == end for item in self.items.values())


class Shelf:
    """One namespace: its entries, and the slots that its masks speak of."""

    def __init__(self, digest: bytes, label: Label | None, layout: Layout | None) -> None:
        self.digest = digest
        self.label = label
        self.layout = layout
        self.clears = 0  # How often it was cleared.
        self.start = b""  # The digest of no tokens; known once a client attaches.
        self.entries: dict[bytes, Entry] = {}
        self.slots: dict[tuple[str, Shard, str], Slot] = {}
        self._covers: dict[tuple[str, Shard, str], tuple[int, tuple[int, ...]]] = {}
        self.remembered = False
        self.tenant: Tenant | None = None  # Known once the label is.
        self.ttl_s = 0.0  # How long objects last that say nothing themselves; 0: for ever.
        self.work = EVEN  # What computing a prompt costs here, and how fast its start is computed.
        self.prefill_tokens_per_s = 0.0  # 0: not known.
        self.objects = 0
        self.held = {"host": 0, "nvme": 0}
        self.bytes = {"host": 0, "nvme": 0}

    def slot(self, part: str, shard: Shard, codec: str) -> Slot:
        """Return the slot of that name, made when it is new."""
        name = (part, shard, codec)
        found = self.slots.get(name)
        if found is None:
            found = self.slots[name] = Slot(part, shard, codec, len(self.slots))
        return found

    def has_all(self, mask: int) -> bool:
        """Return whether a mask has something of every snapshot part; where there are none, anything."""
        if not mask or self.layout is None:
            return False
        parts = {slot.part for slot in self.slots.values() if mask >> slot.bit & 1}
        return all(part.name in parts for part in self.layout.parts if part.is_snapshot)

    def covers(self, part: str, shard: Shard, codec: str, *, reshard: bool) -> tuple[int, ...]:
        """Return the masks of slots that together hold a shard, those with the fewest first.

        Without `reshard` that is its own slot or nothing. With it, the slots of one other way to split
        the part will do too: wider ones that contain the shard, or narrower ones that fill it.
        """
        own = self.slots.get((part, shard, codec))
        if not reshard:
            return () if own is None else (1 << own.bit,)
        known = self._covers.get((part, shard, codec))
        if known is None or known[0] != len(self.slots):  # Slots are only ever added.
            known = (len(self.slots), self._find_covers(part, shard, codec))
            if len(self._covers) >= COVERS_MAX:
                self._covers.clear()  # Whoever asks may name any codec.
            self._covers[part, shard, codec] = known
        return known[1]

    def _find_covers(self, part: str, shard: Shard, codec: str) -> tuple[int, ...]:
        widths = {s.stop - s.start for p, s, c in self.slots if (p, c) == (part, codec)}
        found: list[int] = []
        for width in widths:
            mask = 0
            for start in range(shard.start - shard.start % width, shard.stop, width):
                slot = self.slots.get((part, Shard(start, start + width), codec))
                if slot is None:  # Also the end of a part with very many units.
                    break
                mask |= 1 << slot.bit
            else:
                found.append(mask)
        return tuple(sorted(found, key=lambda mask: (mask.bit_count(), mask)))


class Catalog:
    """Every object of the node, found by namespace and digest or by number."""

    def __init__(self, tails_max: int, own: Own | None = None) -> None:
        self.own = own  # What other nodes and routers are told, where there are any.
        self.shelves: dict[bytes, Shelf] = {}
        self.items: dict[int, Item] = {}
        self._numbers: list[int] = []  # Of all items, ascending, and of some that are gone.
        self._next = 1
        self._tails_max = tails_max

    def learn(self, shelf: Shelf, layout: Layout) -> None:
        """The layout of a namespace is known: what was found of it without can be told now."""
        was, shelf.layout = shelf.layout, layout
        if was is None and self.own is not None:
            for entry in shelf.entries.values():
                self._tell(self.own, entry)

    def create(self, shelf: Shelf, slot: Slot, where: Tail, span: tuple[int, int]) -> Item:
        """Add an object that is not held yet. `where.base` is b"" unless it ends inside a block.

        The caller guarantees that the slot is free there, and that the entry agrees.
        """
        entry = shelf.entries.get(where.digest)
        if entry is None:
            entry = shelf.entries[where.digest] = Entry(shelf, where.digest, where.base)
        assert slot.bit not in entry.items
        item = Item(self._next, entry, slot, span)
        self._next += 1
        entry.items[slot.bit] = item
        self.items[item.id] = item
        self._numbers.append(item.id)
        if len(self._numbers) > 2 * len(self.items) + NUMBERS_SPARE:
            self._numbers = list(self.items)
        shelf.objects += 1
        self.mention(entry)
        return item

    def find(self, shelf: Shelf, slot: Slot, digest: bytes) -> Item | None:
        """Return the object of that slot at that digest, in whatever status."""
        entry = shelf.entries.get(digest)
        return None if entry is None else entry.items.get(slot.bit)

    def mention(self, entry: Entry) -> None:
        """List a boundary inside a block under its block, as the one used last; the first makes room."""
        if not (entry.base and entry.items and self._tails_max):
            return
        shelf = entry.shelf
        base = shelf.entries.get(entry.base)
        if base is None:
            base = shelf.entries[entry.base] = Entry(shelf, entry.base, b"")
        others = [tail for tail in base.tails if tail.digest != entry.digest]
        end = next(iter(entry.items.values())).end
        spare = len(others) + 1 - self._tails_max
        base.tails = (*others[max(spare, 0) :], Tail(end, entry.digest, entry.base))

    def update(self, item: Item) -> None:
        """Bring masks and sums up to date after a place or the status of `item` changed."""
        entry, bit = item.entry, 1 << item.slot.bit
        sealed = item.status is Status.SEALED
        shelf = entry.shelf
        in_host = bit if sealed and item.host is not None else 0
        on_nvme = bit if sealed and item.nvme is not None else 0
        for tier, was, is_in in (
            ("host", entry.host & bit, in_host),
            ("nvme", entry.nvme & bit, on_nvme),
        ):
            if bool(was) != bool(is_in):
                shelf.bytes[tier] += item.nbytes if is_in else -item.nbytes
                shelf.held[tier] += 1 if is_in else -1
        entry.host = entry.host & ~bit | in_host
        entry.nvme = entry.nvme & ~bit | on_nvme
        coming = sealed and item.target is not None and not (in_host | on_nvme)
        entry.coming = entry.coming & ~bit | (bit if coming else 0)
        entry.held = entry.host | entry.nvme | entry.coming
        if self.own is not None:
            self._tell(self.own, entry)

    def _tell(self, own: Own, entry: Entry) -> None:
        """Others hear of a boundary at which every snapshot part has something, or, where there are
        none, of every block. Whether it can be resumed indeed, this node says when it is asked."""
        was, now = entry.told, entry.due()
        if now is was:
            return
        entry.told = now
        name = short(entry.shelf.digest, entry.digest)
        if now is Told.NOTHING:
            own.remove(name)
        elif was is Told.NOTHING:
            own.add(name, slower=now is Told.SLOWER)
        else:
            own.move(name, slower=now is Told.SLOWER)

    def remove(self, item: Item) -> None:
        """Take an object out: nothing finds it again. Its extents are the caller's to free."""
        entry = item.entry
        item.status = Status.DOOMED
        self.update(item)
        del entry.items[item.slot.bit]
        del self.items[item.id]
        entry.shelf.objects -= 1
        self._prune(entry)

    def objects(self) -> dict[str, float]:
        """Return how many objects each tier holds."""
        counts = {"host": 0.0, "nvme": 0.0}
        for shelf in self.shelves.values():
            for tier, count in shelf.held.items():
                counts[tier] += count
        return counts

    def after(self, number: int) -> Iterator[Item]:
        """Yield the items with a higher number, ascending; the catalog must not change meanwhile."""
        items = self.items
        for at in range(bisect_right(self._numbers, number), len(self._numbers)):
            item = items.get(self._numbers[at])
            if item is not None:
                yield item

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items.values())

    def _prune(self, entry: Entry) -> None:
        """Drop an entry that says nothing any more, and its mention under its base."""
        if entry.items:
            return
        shelf = entry.shelf
        if entry.base:
            base = shelf.entries.get(entry.base)
            if base is not None:
                base.tails = tuple(tail for tail in base.tails if tail.digest != entry.digest)
                if not base.items and not base.tails and base is not entry:
                    del shelf.entries[entry.base]
        if not entry.tails and shelf.entries.get(entry.digest) is entry:
            del shelf.entries[entry.digest]
