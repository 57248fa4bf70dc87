"""One request's way through the catalog: which positions its prompt passes, and what is held there."""

from collections.abc import Sequence
from itertools import chain

from tiercache.core.books import Session
from tiercache.core.catalog import Entry, Item, Shelf
from tiercache.core.events import PlanAsked, Tail
from tiercache.state import Layout, Part, Shard, resolve


class Route:
    """The positions of a planned request, and what was decided.

    `decided` is the boundary that the request got. `outcome` is what it will be counted as: None while
    that is open, and once it is `settled`.
    """

    __slots__ = (
        "codecs",
        "decided",
        "entries",
        "layout",
        "limit",
        "outcome",
        "positions",
        "sessions",
        "settled",
        "shelf",
    )

    def __init__(self, shelf: Shelf, layout: Layout) -> None:
        self.shelf = shelf
        self.layout = layout
        self.codecs: tuple[str, ...] = ()
        self.positions: list[int] = []
        self.entries: list[Entry] = []
        self.limit = 0
        self.decided = 0
        self.sessions: set[int] = set()
        self.outcome: tuple[int, str, str] | None = None
        self.settled = False

    def walk(self, asked: PlanAsked, limit: int) -> None:
        """Find the entries along the prompt, as deep as `limit` and as anything is held."""
        step = self.layout.block_tokens
        entries = self.shelf.entries
        gap_ends_it = any(
            part.window is None and part.block_tokens == step for part in self.layout.parts
        )
        found: list[tuple[int, Entry]] = []
        absent = Entry(self.shelf, b"", b"")
        for number, digest in enumerate(asked.digests[: limit // step], 1):
            entry = entries.get(digest, absent)
            if gap_ends_it and not entry.held:
                break
            found.append((number * step, entry))
        reached = found[-1][0] if found else 0
        for tail in asked.tails:
            entry = entries.get(tail.digest, absent)
            if entry.held and tail.tokens <= min(limit, reached + step - 1):
                found.append((tail.tokens, entry))
        if asked.tails:
            found.sort(key=lambda pair: pair[0])
        self.positions = [tokens for tokens, _ in found]
        self.entries = [entry for _, entry in found]
        self.limit = limit
        self.codecs = asked.codecs

    def cut(self, tokens: int) -> None:
        """Forget what lies deeper than `tokens`."""
        while self.positions and self.positions[-1] > tokens:
            self.positions.pop()
            self.entries.pop()

    def deepest(self, session: Session, *, in_host: bool) -> int:
        """Return the index of the deepest boundary, or -1.

        All ranks' shards must be held somewhere; with `in_host`, the session's own ones in memory.
        """
        anywhere = [entry.held for entry in self.entries]
        in_memory = [entry.host for entry in self.entries] if in_host else anywhere
        held: list[Sequence[bool]] = []
        for part in self.layout.parts:
            shards = part.shards(session.ranks)
            needs = self._needs(part, shards)
            own = self._needs(part, (shards[session.rank],)) if in_host else needs
            flags = _all_met(in_memory, own)
            if own != needs:
                flags = [a and b for a, b in zip(flags, _all_met(anywhere, needs), strict=True)]
            held.append(flags)
        return resolve(self.layout.parts, self.positions, held)

    def chosen(self, session: Session, position: int, *, all_ranks: bool = False) -> list[Item]:
        """Return the objects that a boundary rests on, shallow first: the session's, or all ranks'."""
        if position < 0:
            return []
        items: list[Item] = []
        for part in self.layout.parts:
            shards = part.shards(session.ranks)
            wanted = dict.fromkeys(shards if all_ranks else (shards[session.rank],))
            entries = self._window(part, position)
            for shard in wanted:
                bits = [self.shelf.slot(part.name, shard, codec).bit for codec in self.codecs]
                items.extend(chain.from_iterable(_first(entry, bits) for entry in entries))
        return items

    def candidates(self, asked: PlanAsked, boundary: int, limit: int) -> list[Tail]:
        """Return the deepest `limit` boundaries inside blocks below `boundary` not named by the client.

        An earlier turn may have ended in any block, the first one included.
        """
        named = {tail.digest for tail in asked.tails}
        step = self.layout.block_tokens
        blocks = [self.shelf.start, *asked.digests[: len(self.entries)]]
        found: list[Tail] = []
        for digest in blocks[boundary // step :]:
            entry = self.shelf.entries.get(digest)
            if entry is not None:
                found.extend(
                    tail
                    for tail in entry.tails
                    if boundary < tail.tokens <= self.limit and tail.digest not in named
                )
        return found[-limit:]

    def why_not(self, session: Session, asked: PlanAsked) -> str:
        """Name why nothing can be resumed."""
        reached = len(self.entries)
        if reached == self.limit // self.layout.block_tokens < len(asked.digests):
            next_entry = self.shelf.entries.get(asked.digests[reached])
            if next_entry is not None and next_entry.held:
                return "beyond_limit"
        masks = [entry.held for entry in self.entries]
        if not any(masks):
            return "unknown_prefix"
        for part in self.layout.parts:
            needs = self._needs(part, part.shards(session.ranks))
            if part.is_snapshot and not any(_all_met(masks, needs)):
                return "no_state"
        return "incomplete"

    def _needs(self, part: Part, shards: Sequence[Shard]) -> tuple[int, ...]:
        """Return one mask per distinct shard: a bit for each codec that will do."""
        return tuple(
            sum(1 << self.shelf.slot(part.name, shard, codec).bit for codec in self.codecs)
            for shard in dict.fromkeys(shards)
        )

    def _window(self, part: Part, position: int) -> list[Entry]:
        """Return the entries that hold a part's window before a position, shallow first."""
        here = self.entries[position]
        if part.is_snapshot:
            return [here]
        block = part.block_tokens
        blocks = self.positions[position] // block
        start = 0 if part.window is None else max(0, blocks - part.window) * block
        edges = [
            entry
            for tokens, entry in zip(self.positions[:position], self.entries, strict=False)
            if tokens > start and tokens % block == 0
        ]
        return [*edges, here]
        return edges


def _all_met(masks: list[int], needs: tuple[int, ...]) -> list[bool]:
    """Return for each mask whether it meets every need, i.e. has at least one bit of it."""
    if all(need & (need - 1) == 0 for need in needs):  # One codec: every bit must be there.
        every = sum(needs)
        return [mask & every == every for mask in masks]
    return [all(mask & need for need in needs) for mask in masks]


def _first(entry: Entry, bits: list[int]) -> list[Item]:
    """Return the object of the first of these slots that is held at an entry."""
    for bit in bits:
        if entry.held >> bit & 1:
            return [entry.items[bit]]
    return []
