"""What is held along a path: for engines that choose the boundary themselves, and fetch by name."""

from collections.abc import Iterator
from itertools import compress, takewhile

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Entry, Item, Shelf
from tiercache.core.cluster.reach import Question, Reach
from tiercache.core.cluster.walking import Sought, in_place, route_of
from tiercache.core.commands import Refused, Surveyed
from tiercache.core.events import SurveyAsked
from tiercache.core.filling import Filling
from tiercache.core.holds import Holds
from tiercache.core.losses import split
from tiercache.core.writeback import WriteBack
from tiercache.state import resumable


class Surveying:
    """Answers `SurveyAsked`.

    A survey says where nothing lies, so nobody reads because of it, and its hold may end at any time:
    it ends by itself, which a lease never does.
    """

    def __init__(self, books: Books, writeback: WriteBack, filling: Filling, reach: Reach) -> None:
        self._books = books
        self._writeback = writeback
        self._filling = filling
        self._reach = reach
        limits = books.limits
        self._holds = Holds(books, limits.surveys_max, limits.surveyed_objects_max)

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every survey that keeps it."""
        yield from self._holds.items()

    def survey(self, session: Session, shelf: Shelf, asked: SurveyAsked, now: float) -> None:
        """Answer what is held, keep what the deepest boundary needs and every state, and send for
        what of it is on NVMe only. Where other nodes have told of more, they are asked first."""
        books = self._books
        path = Path(shelf, session, asked)
        deepest = next(resumable(path.layout.parts, path.positions, path.flags), -1)
        boundary = path.positions[deepest] if deepest >= 0 else 0
        if self._ask(session, path, asked, boundary, now):
            return  # `reached` goes on.
        same = self._see(session, shelf, asked)
        self._writeback.consider_all(path.entries)
        needed = path.needed(deepest)
        absent = [item for item in needed if item.host is None]
        self._count(path, (len(asked.digests), same), deepest, "nvme" if absent else "host")
        until = min(asked.until, now + books.limits.lease_s_max)
        self._holds.keep((session.number, asked.request), [*needed, *path.states()], until, now)
        for segment in {item.nvme.segment for item in needed if item.nvme is not None}:
            books.log.touch(segment)
        self._filling.start(absent)
        books.reply(session.number, asked.call, Surveyed(path.flags, path.start))

    def _see(self, session: Session, shelf: Shelf, asked: SurveyAsked) -> int:
        """Count the sight, once for a request; return how many blocks of the path were seen before.

        What the engine had itself was of use, too: it may have earned a place on NVMe by that.
        """
        sights, name = self._books.sights, session.scoped(shelf, asked.request)
        if not sights.first_time(name):
            return 0
        reached = sights.see(name, [*asked.before, *asked.digests], goes_on=True).reached
        had = (shelf.entries.get(digest) for digest in asked.before)
        self._writeback.consider_all(entry for entry in had if entry is not None)
        return max(0, reached - len(asked.before))

    def _ask(
        self, session: Session, path: "Path", asked: SurveyAsked, boundary: int, now: float
    ) -> bool:
        """Ask another node, or the next one, for all ranks of a request; True when the survey waits for
        it."""
        if not self._reach.is_open:
            return False
        shelf, layout, start = path.shelf, path.layout, path.start

        def whole() -> int:
            limit = len(asked.digests) * layout.block_tokens
            ranks, codecs = session.ranks, asked.codecs
            sought = Sought(asked.request, asked.digests, limit, ranks, codecs, reshard=False)
            held = route_of(shelf, layout, sought).whole(session)
            return start + held if held else 0

        def kept() -> list[Item]:
            deepest = boundary // layout.block_tokens - 1
            return in_place(layout, path.entries, path.needed(deepest) if deepest >= 0 else ())

        question = Question(asked, shelf, asked.digests, start, boundary, whole, kept)
        return self._reach.ask_once(session, question, now)

    def reached(self, asked: SurveyAsked, now: float) -> None:
        """Another node has said what it has, or is late: answer the survey that waited for it."""
        books = self._books
        session = books.sessions[asked.session]
        shelf = books.shelf_of(session, asked.lora, asked.salt)
        if shelf is None:  # Cleared meanwhile, and no room to open it again.
            books.reply(asked.session, asked.call, Refused("refused", "too many namespaces"))
            return
        self.survey(session, shelf, asked, now)

    def _count(self, path: "Path", blocks: tuple[int, int], deepest: int, tier: str) -> None:
        """Count what became of a path of so many blocks, of which so many were seen before."""
        counters = self._books.counters
        tokens, same = (count * path.layout.block_tokens for count in blocks)
        counters.add("lookup_tokens", amount=tokens)
        boundary = path.positions[deepest] if deepest >= 0 else 0
        held = path.positions[-1] if path.positions else 0
        lost = split(
            boundary, ("incomplete", held), ("not_held", max(held, same)), ("unseen", tokens)
        )
        for reason, count in lost.items():
            counters.add("lost_tokens", reason, count)
        if deepest < 0:
            counters.add("lookups", "miss")
            counters.add("misses", "incomplete" if path.entries else "unknown_prefix")
            return
        counters.add("lookups", f"hit_{tier}")
        counters.add("hit_tokens", tier, path.positions[deepest])

    # --- the end of a hold

    def release(self, session: Session, request: str) -> None:
        """The session is done with what it surveyed."""
        self._holds.end((session.number, request))

    def close(self, session: Session) -> None:
        """The session is gone."""
        self._holds.close(session.number)

    def tick(self, now: float) -> None:
        """End every hold whose time is up."""
        self._holds.tick(now)

    def wakeup(self) -> float | None:
        """Return when the next hold's time is up, or a time before."""
        return self._holds.wakeup()

    def check(self) -> None:
        """Raise AssertionError if the sum is wrong or an owner is gone."""
        self._holds.check()
        assert self._holds.sessions() <= self._books.sessions.keys()


class Path:
    """What one rank has along consecutive blocks.

    `positions` are token counts from the first block on. `flags` say for each part of the layout whether
    its object there is held, in whatever tier, one byte per position; path and flags end at the first
    block where a part that needs all its blocks has none.
    """

    def __init__(self, shelf: Shelf, session: Session, asked: SurveyAsked) -> None:
        assert shelf.layout is not None
        self.shelf, self.layout = shelf, shelf.layout
        step = self.layout.block_tokens
        self._bits: list[list[int]] = []  # By part, of the slots that will do, the client's first.
        for part in self.layout.parts:
            shard = part.shards(session.ranks)[session.rank]
            names = ((part.name, shard, codec) for codec in dict.fromkeys(asked.codecs))
            slots = (shelf.slots.get(name) for name in names)
            self._bits.append([slot.bit for slot in slots if slot is not None])
        gap_ends_it = any(
            part.window is None and part.block_tokens == step for part in self.layout.parts
        )
        self.entries = _run(shelf, asked.digests, gap_ends_it=gap_ends_it)
        held = [entry.held for entry in self.entries]
        depth = len(held)
        masks = [sum(1 << bit for bit in bits) for bits in self._bits]
        kinds = set(held)  # Few, however long the path is.
        self.flags: list[bytes] = []
        for part, mask in zip(self.layout.parts, masks, strict=True):
            has = {there: mask & there != 0 for there in kinds}
            flags = bytes(map(has.__getitem__, held))
            self.flags.append(flags)
            if part.window is None:
                whole = part.block_tokens // step
                gap = flags[whole - 1 :: whole].find(0)
                depth = depth if gap < 0 else min(depth, (gap + 1) * whole - 1)
        del self.entries[depth:]
        self.flags = [flags[:depth] for flags in self.flags]
        self.positions = range(step, (depth + 1) * step, step)

    @property
    def start(self) -> int:
        """How many tokens come before the path, as what is held on it says; -1 when nothing is."""
        said = (
            item.end - position
            for entry, position in zip(self.entries, self.positions, strict=True)
            for item in entry.items.values()
        )
        return max(-1, next(said, -1))

    def needed(self, position: int) -> list[Item]:
        """Return the objects that a boundary rests on, shallow first; none for -1."""
        items: list[Item] = []
        for number, part in enumerate(self.layout.parts):
            start = 0
            if part.is_snapshot:
                start = position
            elif part.window is not None:
                start = position + 1 - part.window * part.block_tokens // self.layout.block_tokens
            items += self._items(number, max(0, start), position + 1)
        return items

    def states(self) -> list[Item]:
        """Return all objects of parts that do not need all their blocks."""
        items: list[Item] = []
        for number, part in enumerate(self.layout.parts):
            if part.window is not None:
                items += self._items(number, 0, len(self.entries))
        return items

    def _items(self, number: int, start: int, stop: int) -> list[Item]:
        """Return a part's objects at these positions, one at each, in memory if there is one."""
        bits = self._bits[number]
        there = compress(self.entries[start:stop], self.flags[number][start:stop])
        if len(bits) == 1:
            (bit,) = bits
            return [entry.items[bit] for entry in there]
        return [_first(entry, bits) for entry in there]


def _run(shelf: Shelf, digests: list[bytes], *, gap_ends_it: bool) -> list[Entry]:
    """Return the entries along a path, up to the last one that holds anything, or the first that does
    not."""
    if gap_ends_it:
        there = takewhile(_holds, map(shelf.entries.get, digests))
        return [entry for entry in there if entry is not None]
    absent = Entry(shelf, b"", b"")
    found = [shelf.entries.get(digest, absent) for digest in digests]
    while found and not found[-1].held:
        found.pop()
    return found


def _holds(entry: Entry | None) -> bool:
    return entry is not None and entry.held != 0


def _first(entry: Entry, bits: list[int]) -> Item:
    masks = (entry.host, entry.held)
    return next(entry.items[bit] for mask in masks for bit in bits if mask >> bit & 1)
