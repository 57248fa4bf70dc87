"""One request's way through the catalog: which positions its prompt passes, and what is held there."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import NamedTuple, Protocol

from tiercache.core.catalog import Entry, Item, Shelf
from tiercache.core.events import PlanAsked, Tail
from tiercache.core.search import Search
from tiercache.state import Layout, Part, Shard, resolve, resumable
from tiercache.state.seats import RanksOf, here


class Ranked(Protocol):
    """Whoever is one of several ranks: a session, or an engine of another node."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...


class Terms(NamedTuple):
    """What the nodes of an engine's ranks were asked about: a prompt, by the digest of its last whole
    block; up to which boundary; for which ranks, where; what will do."""

    prompt: bytes
    limit: int
    seats: tuple[RanksOf, ...]
    codecs: tuple[str, ...]
    reshard: bool


def terms_of(asked: PlanAsked) -> Terms:
    """Return what the nodes of an engine's ranks have to be asked about, for a plan."""
    last = asked.digests[-1] if asked.digests else b""
    return Terms(last, asked.limit, tuple(asked.seats), asked.codecs, asked.reshard)


class Route:
    """The positions of a planned request, and what was decided.

    `decided` is the boundary that the request got, `planned` the one it was to get, and `lost` says why
    the other `tokens` of it are computed. `outcome` is what it will be counted as: None while that is open,
    and once it is `settled`.
    """

    __slots__ = (
        "agreed",
        "all_ranks",
        "cap",
        "codecs",
        "decided",
        "entries",
        "given",
        "here",
        "layout",
        "limit",
        "lost",
        "outcome",
        "passed",
        "planned",
        "positions",
        "reached",
        "reshard",
        "search",
        "sessions",
        "settled",
        "shelf",
        "terms",
        "tokens",
    )

    def __init__(self, shelf: Shelf, layout: Layout) -> None:
        self.shelf = shelf
        self.layout = layout
        self.codecs: tuple[str, ...] = ()
        self.all_ranks = False
        self.reshard = False
        self.positions: list[int] = []
        self.entries: list[Entry] = []
        self.limit = 0
        self.cap = 0  # Nothing deeper is given out any more.
        self.reached = 0  # Whole blocks that were looked at.
        self.decided = 0
        self.tokens = 0
        self.planned = 0
        self.lost: dict[str, int] = {}
        self.sessions: set[int] = set()
        self.outcome: tuple[int, str, str] | None = None
        self.settled = False
        self.passed = False  # The eviction policies know of it.
        self.search: Search | None = None  # Once others were looked at.
        self.given = 0  # Who asks has all blocks of so many tokens: they need not be held.
        self.here = (0, 0)  # The ranks that count, from one up to before another; (0, 0): all.
        self.agreed: frozenset[bytes] | None = None  # Where ranks are elsewhere: what all have.
        self.terms: tuple[Terms, float] | None = None  # What they were asked; good until then.

    def walk(self, asked: PlanAsked, limit: int) -> None:
        """Find the entries along the prompt, as deep as anything is held.

        No more than `limit` is given out: other ranks may have been promised more.
        """
        step = self.layout.block_tokens
        entries = self.shelf.entries
        gap_ends_it = any(
            part.window is None and part.block_tokens == step for part in self.layout.parts
        )
        found: list[tuple[int, Entry]] = []
        absent = Entry(self.shelf, b"", b"")
        for number, digest in enumerate(asked.digests, 1):
            entry = entries.get(digest, absent)
            if gap_ends_it and not entry.held and number * step > self.given:
                break
            found.append((number * step, entry))
        whole = len(found)
        self.reached = min(whole, limit // step)
        for tail in {tail.tokens: tail for tail in (*asked.ends, *asked.tails)}.values():
            entry = entries.get(tail.digest, absent)
            if entry.held and tail.tokens < (whole + 1) * step:
                found.append((tail.tokens, entry))
        if asked.tails or asked.ends:
            found.sort(key=lambda pair: pair[0])
        while found and not found[-1][1].held:
            found.pop()
        self.positions = [tokens for tokens, _ in found]
        self.entries = [entry for _, entry in found]
        self.limit = self.cap = limit
        self.tokens = asked.tokens
        self.codecs = tuple(dict.fromkeys(asked.codecs))
        self.all_ranks = asked.all_ranks
        self.reshard = asked.reshard
        if asked.seats:
            self.here = here(asked.seats)

    def begin(self, session: int, asked: PlanAsked) -> bool:
        """Return whether no other session takes part. Then all ranks sit where this plan says."""
        if not self.sessions <= {session}:
            return False
        self.here = here(asked.seats)
        if not asked.seats:
            self.agreed = self.terms = None
        return True

    @property
    def way(self) -> int:
        """The deepest position where anything is held; 0 for none."""
        return self.positions[-1] if self.positions else 0

    def leads_to(self, tokens: int, digest: bytes) -> bool:
        """Return whether the prompt that was walked last begins with the one of that boundary."""
        at = bisect_left(self.positions, tokens)
        if tokens == 0 or at == len(self.positions):
            return tokens == 0  # Nothing was planned, and nothing can be mistaken for it.
        return self.positions[at] == tokens and self.entries[at].digest == digest

    def cut(self, tokens: int) -> None:
        """Give out nothing deeper than `tokens` any more."""
        self.cap = min(self.cap, tokens)

    def deepest_known(self) -> int:
        """Return the index of the deepest position that may be given out, or -1."""
        return bisect_right(self.positions, self.cap) - 1

    def deepest(self, session: Ranked, *, in_host: bool, all_ranks: bool = False) -> int:
        """Return the index of the deepest boundary, or -1.

        All ranks' shards must be held somewhere; with `in_host`, the session's own ones in memory, or
        those of all ranks too.
        """
        count = self.deepest_known() + 1
        entries, positions = self.entries[:count], self.positions[:count]
        anywhere = [entry.held for entry in entries]
        in_memory = [entry.host for entry in entries] if in_host else anywhere
        held: list[Sequence[bool]] = []
        for part in self.layout.parts:
            needs = self._needs(part, self._shards(part, session))
            only_own = in_host and not all_ranks
            shards = part.shards(session.ranks)
            own = self._needs(part, (shards[session.rank],)) if only_own else needs
            flags = _all_met(in_memory, own)
            if own != needs:
                flags = [a and b for a, b in zip(flags, _all_met(anywhere, needs), strict=True)]
            if self.given and part.window is None:
                given = bisect_right(positions, self.given)
                flags[:given] = [True] * given
            held.append(flags)
        if self.agreed is None:
            return resolve(self.layout.parts, positions, held)
        found = resumable(self.layout.parts, positions, held)
        return next((at for at in found if self.agrees(at)), -1)

    def agrees(self, position: int) -> bool:
        """Return whether the engine's ranks on other nodes have that boundary too."""
        return self.agreed is None or self.entries[position].digest in self.agreed

    def resumable(self, session: Ranked, position: int) -> Iterator[int]:
        """Yield the positions up to that one at which all ranks' shards are complete somewhere, given out
        or not, the deepest first."""
        masks = [entry.held for entry in self.entries[: position + 1]]
        held = [
            _all_met(masks, self._needs(part, self._shards(part, session)))
            for part in self.layout.parts
        ]
        return resumable(self.layout.parts, self.positions[: position + 1], held)

    def resumable_after(self, session: Ranked, boundary: int) -> set[int]:
        """Return the boundaries deeper than `boundary` that are complete, given out or not."""
        beyond = self.entries[bisect_right(self.positions, boundary) :]
        masks = [entry.held for entry in beyond]
        states = [part for part in self.layout.parts if part.is_snapshot]
        needs = [self._needs(part, self._shards(part, session)) for part in states]
        # Mostly this settles it, without a look at the whole way.
        if not beyond or not all(any(_all_met(masks, need)) for need in needs):
            return set()
        found = self.resumable(session, len(self.positions) - 1)
        return set(takewhile(lambda end: end > boundary, (self.positions[at] for at in found)))

    def lacks(self, session: Ranked, boundary: int) -> str:
        """Name what is missing behind a boundary where something is held: "no_state" when some part of
        the state is nowhere, else "incomplete"."""
        beyond = self.entries[bisect_right(self.positions, boundary) :]
        return self._lacks_at(session, [entry.held for entry in beyond])

    def _lacks_at(self, session: Ranked, masks: list[int]) -> str:
        for part in self.layout.parts:
            needs = self._needs(part, self._shards(part, session))
            if part.is_snapshot and not any(_all_met(masks, needs)):
                return "no_state"
        return "incomplete"

    def checkpoints(self, session: Ranked) -> int:
        """Return at how many positions all that is no run of blocks is held."""
        needs = [
            self._needs(part, self._shards(part, session))
            for part in self.layout.parts
            if part.is_snapshot
        ]
        masks = [entry.held for entry in self.entries]
        return sum(map(all, zip(*(_all_met(masks, need) for need in needs), strict=True)))

    def chosen(self, session: Ranked, position: int, *, all_ranks: bool = False) -> list[Item]:
        """Return the objects that a boundary rests on, shallow first: the session's, or all ranks'.

        Of several codecs that are there, one in memory comes first, then the client's order counts.
        """
        if position < 0:
            return []
        items: list[Item] = []
        for part in self.layout.parts:
            shards = part.shards(session.ranks)
            own = (shards[session.rank],)
            wanted = dict.fromkeys(self._shards(part, session) if all_ranks else own)
            entries = self._window(part, position)
            for need in self._needs(part, tuple(wanted)):
                items.extend(chain.from_iterable(_first(entry, need) for entry in entries))
        return items

    def whole(self, session: Ranked) -> int:
        """Return for how many tokens every run of blocks is held without a gap, for all ranks."""
        step = self.layout.block_tokens
        blocks = [
            (at, entry)
            for at, entry in zip(self.positions, self.entries, strict=True)
            if at % step == 0
        ]
        tokens = len(blocks) * step
        for part in self.layout.parts:
            if part.window is not None:
                continue
            needs = self._needs(part, self._shards(part, session))
            ends = [(at, entry) for at, entry in blocks if at % part.block_tokens == 0]
            met = _all_met([entry.held for _, entry in ends], needs)
            whole = len(ends) if all(met) else met.index(False)
            tokens = min(tokens, whole * part.block_tokens)
        return tokens

    def candidates(self, asked: PlanAsked, boundary: int, limit: int) -> list[Tail]:
        """Return the deepest `limit` boundaries inside blocks below `boundary` not named by the client.

        An earlier turn may have ended in any block, the first one included.
        """
        named = {tail.digest for tail in asked.tails}
        entries = self.shelf.entries
        blocks = [self.shelf.start, *asked.digests[: self.reached]]
        found: list[Tail] = []
        for digest in blocks[boundary // self.layout.block_tokens :]:
            entry = entries.get(digest)
            if entry is not None and entry.tails:
                found.extend(
                    tail
                    for tail in entry.tails
                    if boundary < tail.tokens <= self.limit
                    and tail.digest not in named
                    and entries[tail.digest].held
                )
        found.sort(key=lambda tail: tail.tokens)
        return found[-limit:]

    def why_not(self, session: Ranked, asked: PlanAsked) -> str:
        """Name why nothing can be resumed."""
        if self.reached == self.limit // self.layout.block_tokens < len(asked.digests):
            next_entry = self.shelf.entries.get(asked.digests[self.reached])
            if next_entry is not None and next_entry.held:
                return "beyond_limit"
        masks = [entry.held for entry in self.entries[: self.deepest_known() + 1]]
        return self._lacks_at(session, masks) if any(masks) else "unknown_prefix"

    def _shards(self, part: Part, session: Ranked) -> Sequence[Shard]:
        """Return the shards of the ranks that count."""
        shards = part.shards(session.ranks)
        first, stop = self.here
        return shards[first:stop] if stop else shards

    def _needs(self, part: Part, shards: Sequence[Shard]) -> tuple[tuple[int, ...], ...]:
        """Return, for each distinct shard, the masks of which one must be held as a whole."""
        return tuple(
            tuple(
                cover
                for codec in self.codecs
                for cover in self.shelf.covers(part.name, shard, codec, reshard=self.reshard)
            )
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


def _all_met(masks: list[int], needs: tuple[tuple[int, ...], ...]) -> list[bool]:
    """Return for each mask whether it meets every need, i.e. holds one of its covers as a whole."""
    if all(len(covers) == 1 for covers in needs):  # One codec, one split: every bit must be there.
        every = 0
        for (cover,) in needs:
            every |= cover
        return [mask & every == every for mask in masks]
    return [
        all(any(mask & cover == cover for cover in covers) for covers in needs) for mask in masks
    ]


def _first(entry: Entry, covers: tuple[int, ...]) -> list[Item]:
    """Return the objects of one of these covers that is held at an entry, in memory if there is one."""
    for mask in (entry.host, entry.held):
        for cover in covers:
            if mask & cover != cover:
                continue
            if cover & (cover - 1) == 0:
                return [entry.items[cover.bit_length() - 1]]
            return [item for bit, item in entry.items.items() if cover >> bit & 1]
    return []
