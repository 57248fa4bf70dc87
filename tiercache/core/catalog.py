"""What is held: objects by namespace and digest, and where their bytes are.

An `Entry` gathers all that ends at one chain digest; two bit masks say which (part, shard, codec) is
held there, so that a plan costs one dictionary look-up per digest, whatever the number of parts,
shards and stored objects.
"""

from collections.abc import Iterator
from enum import IntEnum

from tiercache.core.events import Tail
from tiercache.state import Extent, Key, Label, Layout, Piece, Record, Shard


class Status(IntEnum):
    """Where an object is on its way to being readable. Only SEALED ones count as held."""

    WRITING = 0  # A client writes into the reserved extent.
    SEALING = 1  # Its checksum is being computed.
    SEALED = 2
    DOOMED = 3  # Out of the catalog; its extent is freed when its last user lets go.


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
        self.status = Status.WRITING
        self.users = 0
        self.checksum = b""
        self.parent = b""
        self.requantised = 0
        self.writer = ""
        self.sealed_at = 0.0
        self.piece: Piece | None = None
        self.queued = False  # On its way to NVMe.

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
    """All that ends at one digest. `host`, `nvme` and `held` are masks of the slots held there, and
    in either.

    `tails` are boundaries inside the next block, oldest first; `base` is set on an entry that is such
    a tail.
    """

    __slots__ = ("base", "digest", "held", "host", "items", "nvme", "shelf", "tails")

    def __init__(self, shelf: "Shelf", digest: bytes, base: bytes) -> None:
        self.shelf = shelf
        self.digest = digest
        self.base = base
        self.items: dict[int, Item] = {}
        self.host = 0
        self.nvme = 0
        self.held = 0
        self.tails: list[Tail] = []


class Shelf:
    """One namespace: its entries, and the slots that its masks speak of."""

    def __init__(self, digest: bytes, label: Label | None, layout: Layout | None) -> None:
        self.digest = digest
        self.label = label
        self.layout = layout
        self.start = b""  # The digest of no tokens; known once a client attaches.
        self.entries: dict[bytes, Entry] = {}
        self.slots: dict[tuple[str, Shard, str], Slot] = {}
        self.remembered = False
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


class Catalog:
    """Every object of the node, found by namespace and digest or by number."""

    def __init__(self, tails_max: int) -> None:
        self.shelves: dict[bytes, Shelf] = {}
        self.items: dict[int, Item] = {}  # Ascending by number: dictionaries keep their order.
        self._next = 1
        self._tails_max = tails_max

    def create(self, shelf: Shelf, slot: Slot, where: Tail, span: tuple[int, int]) -> Item:
        """Add an object that is not held yet. `where.base` is b"" unless it ends inside a block.

        The caller guarantees that the slot is free there.
        """
        entry = shelf.entries.get(where.digest)
        if entry is None:
            entry = shelf.entries[where.digest] = Entry(shelf, where.digest, where.base)
            if where.base:
                self._hang(entry, where)
        assert slot.bit not in entry.items
        item = Item(self._next, entry, slot, span)
        self._next += 1
        entry.items[slot.bit] = item
        self.items[item.id] = item
        shelf.objects += 1
        return item

    def find(self, shelf: Shelf, slot: Slot, digest: bytes) -> Item | None:
        """Return the object of that slot at that digest, in whatever status."""
        entry = shelf.entries.get(digest)
        return None if entry is None else entry.items.get(slot.bit)

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
        entry.held = entry.host | entry.nvme

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

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items.values())

    def _hang(self, entry: Entry, tail: Tail) -> None:
        """List a boundary inside a block under the block's digest; the oldest makes room."""
        shelf = entry.shelf
        base = shelf.entries.get(tail.base)
        if base is None:
            base = shelf.entries[tail.base] = Entry(shelf, tail.base, b"")
        if len(base.tails) >= self._tails_max:
            del base.tails[0]
        base.tails.append(tail)

    def _prune(self, entry: Entry) -> None:
        """Drop an entry that says nothing any more, and its mention under its base."""
        if entry.items:
            return
        shelf = entry.shelf
        if entry.base:
            base = shelf.entries.get(entry.base)
            if base is not None:
                base.tails = [tail for tail in base.tails if tail.digest != entry.digest]
                if not base.items and not base.tails and base is not entry:
                    del shelf.entries[entry.base]
        if not entry.tails and shelf.entries.get(entry.digest) is entry:
            del shelf.entries[entry.digest]
