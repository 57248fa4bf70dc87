"""When will a boundary be used again? What is known of each one, and what its like have done before.

A `Ghost` is what is remembered of a boundary at which a checkpoint was taken, whether it is still held or
not. Two tables learn from all of them: one knows the pause before its last use, one a running mean of
the pauses of its conversation; the rest of the class is what the boundary is (the end of a first turn, a
later one, a shared prefix, ...) and how much text it added. Their mean is the estimate.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Hashable

from tiercache.core.policy.hazards import BUCKETS, Hazards, bucket_end, bucket_of
from tiercache.core.policy.visits import Path, Tree, Visit

FIRST, EARLY, LATER, CONTINUED, SHARED, JUNCTION, POPULAR = range(7)
"""Kinds: the end of a first turn, of the next two, of one after; continued once; begun from once by
something longer than itself; used more often or a junction; and the rest by powers of eight."""

USES_FEW = 4
"""What was used less often may still be the end of a turn, or continued once."""

_KINDS_POPULAR = ((USES_FEW, JUNCTION), (8, POPULAR), (32, POPULAR + 1))
_KIND_LAST = POPULAR + 2
_PAUSES = 7  # None yet, then by factors of four from four seconds.
_SIZES = 4
_WHOLE = (4096, 16384, 65536)  # Tokens of a prompt that nothing was known of.
_ADDED = (1024, 4096, 16384)  # Tokens that a turn added.
EARLY_TURNS = 3
SAME_TALK = 0.4
"""A prompt continues the conversation of a boundary that covers at least this part of it."""

CONTINUES = 0.5
PAUSE_WEIGHT = 0.3
"""What the last pause counts in the running mean of their logarithms."""

RENEW_VISITS = 256
"""The tables take in what they counted each time that so many requests have come; of the first so many,
each time that there are twice as many."""

RENEW_FIRST = 32

PAUSE_S_MIN = 1e-3


class Ghost:
    """What is known of one boundary: `last` use in seconds, how many `uses`, the `turn` it ended."""

    __slots__ = (
        "counts",
        "depth",
        "digest",
        "last",
        "pause",
        "recent",
        "serial",
        "steady",
        "talk",
        "turn",
        "uses",
    )

    def __init__(self, digest: Hashable, depth: int, now: float) -> None:
        self.digest = digest
        self.depth = depth
        self.last = now
        self.pause = 0.0  # Running mean of the conversation's pauses; 0.0: none yet.
        self.uses = 0
        self.turn = 0
        self.talk = 0  # The number of its conversation.
        self.recent = 0  # Classes in the two tables.
        self.steady = 0
        self.serial = 0  # -1: forgotten.
        self.counts: tuple[list[float], ...] = ()

    def is_on(self, path: Path) -> bool:
        """Return whether a path passes here."""
        return self.depth <= len(path) and path[self.depth - 1] == self.digest


class Reuse:
    """Ghosts by digest, the last `ghosts_max` of them, and what they taught."""

    def __init__(self, ghosts_max: int) -> None:
        self._ghosts_max = ghosts_max
        self._trees: dict[Hashable, OrderedDict[Hashable, Ghost]] = {}
        self._total = 0
        coarser = (_SIZES, _SIZES * _PAUSES)
        self._recent = Hazards(coarser)
        self._steady = Hazards(coarser)
        self._waiting: list[deque[tuple[float, int, Ghost]]] = [
            deque()
            for _ in range(BUCKETS - 1)  # Nothing is to come for who is in the last bucket.
        ]
        self._visits = 0
        self._talks = 0
        self.uses = 0  # Requests that came back to something that was known.
        self.talk = 0  # The number of the last request's conversation.

    def __len__(self) -> int:
        return self._total

    def rate(self, ghost: Ghost, now: float) -> float:
        """Return the estimate for a boundary, in uses a second over the best horizon."""
        age = max(now - ghost.last, 0.0)
        return (self._recent.index(ghost.recent, age) + self._steady.index(ghost.steady, age)) / 2

    def visit(self, visit: Visit) -> int:
        """Learn from one request; return the number of its conversation, which is `talk` from now on."""
        path, now, step = visit.path, visit.now, visit.tree.shape.block_tokens
        self._pass_time(now)
        ghosts = self._of(visit.tree)
        found = _deepest(ghosts, path, visit.usable)
        pause = recent = 0.0
        if found is not None:
            recent = max(now - found.last, PAUSE_S_MIN)
            pause = recent
            if found.pause:
                pause = recent**PAUSE_WEIGHT * found.pause ** (1 - PAUSE_WEIGHT)
            self._use(found, len(path), (recent, pause), now)
            ghosts.move_to_end(found.digest)
            self.uses += 1
        talk = self._talk_of(visit, found)
        for end in visit.ends:
            if path[end - 1] in ghosts:
                continue
            ghost = Ghost(path[end - 1], end, now)
            ghost.talk = talk
            whole = end == len(path)
            size = _size(end * step, _WHOLE)
            pauses = (0.0, 0.0)
            kind = JUNCTION
            if whole:
                kind = FIRST
                if found is not None:
                    size = _size((end - found.depth) * step, _ADDED)
                    if found.depth >= len(path) * SAME_TALK:
                        ghost.turn = found.turn + 1
                        ghost.pause = pause
                        pauses = (recent, pause)
                        kind = EARLY if ghost.turn < EARLY_TURNS else LATER
            self._set(ghost, kind, size, pauses)
            self._add(ghosts, ghost)
        self._visits += 1
        early = RENEW_FIRST <= self._visits < RENEW_VISITS and self._visits.bit_count() == 1
        if early or self._visits % RENEW_VISITS == 0:
            self._recent.renew()
            self._steady.renew()
        self.talk = talk
        return talk

    def ghost(self, visit: Visit, end: int) -> Ghost:
        """Return what is known of the boundary after `end` blocks of a path."""
        ghosts = self._of(visit.tree)
        found = ghosts.get(visit.path[end - 1])
        if found is None:
            found = Ghost(visit.path[end - 1], end, visit.now)
            self._set(found, JUNCTION, 0, (0.0, 0.0))
            self._add(ghosts, found)
        return found

    def grow(self, visit: Visit, start: int) -> int:
        """What a request wrote extends its path: its end is what will be continued now, and no longer the
        boundary after `start` blocks. Return the number of its conversation, 0 if it is not known."""
        ghosts = self._of(visit.tree)
        before = ghosts.get(visit.path[start - 1]) if start else None
        end = len(visit.path)
        known = ghosts.get(visit.path[end - 1])
        if known is not None:
            return known.talk
        ghost = Ghost(visit.path[end - 1], end, visit.now)
        if before is None:
            self._set(ghost, FIRST, 0, (0.0, 0.0))
        else:
            ghost.turn, ghost.pause, ghost.talk = before.turn, before.pause, before.talk
            ghost.recent, ghost.steady = before.recent, before.steady
            self._count_in(ghost)
            self._set(before, CONTINUED, before.recent % _SIZES, (0.0, 0.0))
            before.serial += 1  # Neither used nor passed by: it counts for nothing.
            self._waiting[0].append((before.last, before.serial, before))
        self._add(ghosts, ghost)
        return ghost.talk

    def forget(self, tree: Hashable) -> None:
        """A namespace is gone."""
        for ghost in self._trees.pop(tree, {}).values():
            ghost.serial = -1
            self._total -= 1

    def _of(self, tree: Tree) -> OrderedDict[Hashable, Ghost]:
        return self._trees.setdefault(tree.name, OrderedDict())

    def _talk_of(self, visit: Visit, found: Ghost | None) -> int:
        if found is not None and found.depth >= len(visit.path) * SAME_TALK:
            return found.talk
        self._talks += 1
        return self._talks

    def _use(self, ghost: Ghost, blocks: int, pauses: tuple[float, float], now: float) -> None:
        bucket = bucket_of(now - ghost.last)
        self._recent.used(ghost.recent, bucket)
        self._steady.used(ghost.steady, bucket)
        kind = ghost.recent // (_SIZES * _PAUSES)
        ghost.uses += 1
        if kind < CONTINUED and ghost.uses < USES_FEW:
            if ghost.depth == blocks:  # What was added is less than a block: the turn ends here.
                ghost.turn += 1
                ghost.pause = pauses[1]
                kind = EARLY if ghost.turn < EARLY_TURNS else LATER
            else:
                kind = CONTINUED if ghost.depth >= blocks * CONTINUES else SHARED
        else:
            kind = next((k for uses, k in _KINDS_POPULAR if ghost.uses < uses), _KIND_LAST)
        ghost.last = now
        ghost.serial += 1
        self._set(ghost, kind, ghost.recent % _SIZES, pauses)
        self._waiting[0].append((now, ghost.serial, ghost))

    def _set(self, ghost: Ghost, kind: int, size: int, pauses: tuple[float, float]) -> None:
        ghost.recent = (kind * _PAUSES + _pause_class(pauses[0])) * _SIZES + size
        ghost.steady = (kind * _PAUSES + _pause_class(pauses[1])) * _SIZES + size
        self._count_in(ghost)

    def _count_in(self, ghost: Ghost) -> None:
        ghost.counts = (self._recent.reached(ghost.recent), self._steady.reached(ghost.steady))

    def _add(self, ghosts: OrderedDict[Hashable, Ghost], ghost: Ghost) -> None:
        ghosts[ghost.digest] = ghost
        self._waiting[0].append((ghost.last, ghost.serial, ghost))
        self._total += 1
        if self._total > self._ghosts_max:
            # The namespace that takes most gives: a busy one does not make the others forget.
            fullest = max(self._trees.values(), key=len)
            _, oldest = fullest.popitem(last=False)
            oldest.serial = -1
            self._total -= 1

    def _pass_time(self, now: float) -> None:
        """Count every bucket that a waiting ghost has come to the end of. They wait in order of time."""
        for bucket, waiting in enumerate(self._waiting):
            if not waiting:
                continue
            before = now - bucket_end(bucket)
            further = self._waiting[bucket + 1] if bucket + 1 < len(self._waiting) else None
            while waiting and waiting[0][0] <= before:
                entry = waiting.popleft()
                _, serial, ghost = entry
                if ghost.serial == serial:
                    for reached in ghost.counts:
                        reached[bucket] += 1
                    if further is not None:
                        further.append(entry)


def _deepest(ghosts: dict[Hashable, Ghost], path: Path, usable: int) -> Ghost | None:
    for depth in range(min(len(path), usable), 0, -1):
        found = ghosts.get(path[depth - 1])
        if found is not None:
            return found
    return None


def _pause_class(pause: float) -> int:
    if pause <= 0.0:
        return 0
    return min(int(math.log2(max(pause, 1.0)) / 2) + 1, _PAUSES - 1)


def _size(tokens: int, bounds: tuple[int, int, int]) -> int:
    return sum(tokens >= bound for bound in bounds)
