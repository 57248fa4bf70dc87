"""A cache without bytes: what one policy would hold and save, on metadata only.

The replay measures policies with it, and a node compares them with it while it runs.
"""

import heapq
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

from tiercache.core.policy.forest import HEIRS_MAX, Forest, Node, Point
from tiercache.core.policy.ranking import Clock, Ranking
from tiercache.core.policy.reuse import SAME_TALK, Ghost, Reuse
from tiercache.core.policy.visits import Path, Tree, Visit

BELOW_MAX: Final = 16
"""Points right below one that comes or goes, whose worth is reckoned again at once; others follow in time:
a start that many conversations share has as many points below it."""

LEARNED_VISITS: Final = 256
LEARNED_USES: Final = 64
"""Before so many requests, and so many that came back to something, nothing new is declined: what is known
of reuse is too little."""

DECLINED_MAX: Final = 64
"""After so many newcomers in a row that were declined the next one is taken all the same."""

Way: TypeAlias = tuple[list[Node], int]
"""What `Forest.follow` finds: the nodes a path enters, and how many of its blocks are held."""


@dataclass(slots=True)
class Tally:
    """What a cache did: resumes, the FLOPs they saved, and bytes written that outlived the request they
    came with."""

    hits: int = 0
    saved: float = 0.0
    kv_bytes: float = 0.0
    state_bytes: float = 0.0
    evictions: int = 0


class Canopy:
    """A forest with its rankings and heirs: what one cache holds, however its bytes are counted.

    Every ranking orders the same points, so another one can be asked at any time. Points in `aside` stay,
    but are not ranked.
    """

    def __init__(self, reuse: Reuse, rankings: Mapping[str, Ranking]) -> None:
        self.forest = Forest()
        self.clock = Clock()
        self.rankings = rankings
        self.aside: dict[Point, int] = {}  # Until when, in ticks.
        self._dues: list[tuple[int, int, Point]] = []
        self._numbers = 0
        self._declined = 0
        self._newcomers: list[Point] = []
        self._reuse = reuse

    def put(self, point: Point) -> None:
        """A point is new, or may be worth less than before."""
        if point in self.aside:
            return
        for ranking in self.rankings.values():
            ranking.put(point, self.clock)

    def take(self, point: Point) -> None:
        """A point is not to be ranked any more."""
        if self.aside.pop(point, None) is None:
            for ranking in self.rankings.values():
                ranking.drop(point)

    def set_aside(self, point: Point, visits: int) -> None:
        """A point is not to be chosen for so many requests."""
        self.take(point)
        self._numbers += 1
        due = self.aside[point] = self.clock.tick + visits
        heapq.heappush(self._dues, (due, self._numbers, point))

    def bring_back(self, point: Point) -> None:
        """A point that is aside is ranked again."""
        del self.aside[point]
        self.put(point)

    def bring_back_due(self) -> None:
        """Rank again what has been aside for long enough."""
        while self._dues and self._dues[0][0] <= self.clock.tick:
            due, _, point = heapq.heappop(self._dues)
            if self.aside.get(point) == due:
                self.bring_back(point)

    def declines(self, point: Point) -> bool:
        """Return whether a new point that is worth least goes before all that is held.

        Not before enough is known. Nor always, if it is a newcomer, of which nothing that is held serves
        the greater part: what looks like a one-off may be the beginning of something.
        """
        if self.clock.tick < LEARNED_VISITS or self._reuse.uses < LEARNED_USES:
            return False
        if not is_newcomer(point):
            return True
        self._declined = (self._declined + 1) % (DECLINED_MAX + 1)
        return self._declined > 0

    def take_stock(self) -> None:
        """The last request is done with: did a newcomer of it find its place?"""
        if any(point.node.point is point for point in self._newcomers):
            self._declined = 0
        self._newcomers.clear()

    def use(self, point: Point, path: Path) -> None:
        """A request along `path` resumed here; heirs that it passes need nothing to fall back on."""
        point.used = self.clock.tick
        point.hits += 1
        if point.heirs:
            point.heirs = [heir for heir in point.heirs if not heir.is_on(path)]
        self.put(point)

    def grow(self, visit: Visit, way: Way, depth: int) -> list[Point]:
        """Hold a path as far as its deepest end, and make all ends beyond `depth` resumable."""
        new = []
        entered, bottom = way
        for end in reversed(visit.ends):
            if end <= depth:
                break
            node = self.forest.extend(entered, visit.path, bottom, end)
            bottom = max(bottom, end)
            if node.point is None:
                new.append(self._add(node, self._reuse.ghost(visit, end)))
        self._newcomers += [point for point in new if is_newcomer(point)]
        return new

    def _add(self, node: Node, ghost: Ghost) -> Point:
        """Make the end of a node resumable. Points right below it are worth less now."""
        point = self.forest.add(node, ghost, self.clock.tick)
        self.put(point)
        for lower in islice(node.below(), BELOW_MAX):
            self.put(lower)
        return point

    def evict(self, point: Point) -> list[Hashable]:
        """Take a point away with the KV that only it needed; return the blocks that went, deepest first."""
        above = point.node.above()
        if above is not None:
            self._bequeath(point, above)
        self.take(point)
        lower = list(islice(point.node.below(), BELOW_MAX))
        gone, grown = self.forest.remove(point)
        if grown is not None and grown.point is not None and grown.point not in lower:
            self.put(grown.point)
        if above is not None and len(above.node.children) < 2:
            self.put(above)  # Evicting it may now give back its KV too.
        for other in lower:
            self.put(other)  # It saves more now.
        return gone

    def _bequeath(self, point: Point, above: Point) -> None:
        heirs = [*above.heirs, *point.heirs, point.ghost]
        if len(heirs) > HEIRS_MAX:
            now, reuse = self.clock.now, self._reuse

            def worth(heir: Ghost) -> float:
                return reuse.rate(heir, now)

            heirs = sorted(heirs, key=worth, reverse=True)[:HEIRS_MAX]
        above.heirs = heirs


class Shadow:
    """What a cache of `budget` bytes would hold if it evicted by the ranking named `chosen`."""

    def __init__(
        self, budget: float, rankings: Mapping[str, Ranking], chosen: str, reuse: Reuse
    ) -> None:
        self.canopy = Canopy(reuse, rankings)
        self.budget = budget
        self.chosen = chosen
        self.tally = Tally()
        self._reuse = reuse

    @property
    def used(self) -> float:
        """Bytes held."""
        return self.canopy.forest.nbytes

    def resident(self, tree: Tree, path: Path) -> int:
        """Return how many blocks of a path are held, resumable or not."""
        return self.canopy.forest.follow(tree, path)[1]

    def visit(self, visit: Visit) -> int:
        """Take in one request; return after how many blocks it could resume."""
        canopy, path = self.canopy, visit.path
        canopy.take_stock()
        clock = canopy.clock
        clock.now = visit.now
        entered, held = canopy.forest.follow(visit.tree, path)
        depth = self._resume(visit, entered, held)
        new = canopy.grow(visit, (entered, held), depth)
        self._make_room(new)
        self._count(visit, new, held, max(visit.ends, default=0))
        clock.tick += 1
        return depth

    def grow(self, visit: Visit) -> None:
        """A request that was taken in wrote more: its path is longer now."""
        forest = self.canopy.forest
        self._make_room(self.canopy.grow(visit, forest.follow(visit.tree, visit.path), 0))

    def forget(self, tree: Hashable) -> None:
        """A namespace is gone."""
        for point in self.canopy.forest.points_of(tree):
            self.canopy.take(point)
        self.canopy.forest.forget(tree)

    def _resume(self, visit: Visit, entered: list[Node], held: int) -> int:
        usable = min(held, visit.usable)
        point = deepest(entered, usable)
        depth = 0 if point is None else point.node.end
        if (
            not visit.tree.shape.state_bytes
        ):  # Any block will do, and the point above is as good as one.
            depth = usable
        if point is not None:
            self.canopy.use(point, visit.path)
        if depth:
            self.tally.hits += 1
            self.tally.saved += visit.tree.shape.work.flops(depth * visit.tree.shape.block_tokens)
        return depth

    def _make_room(self, new: Collection[Point]) -> None:
        canopy = self.canopy
        for point in new:
            if not point.node.fits(self.budget):  # Others would go for it in vain.
                self._evict(point)
        taken = []
        while canopy.forest.nbytes > self.budget:
            lowest = canopy.rankings[self.chosen].lowest(canopy.clock)
            if lowest is None:
                break
            if lowest in new and not canopy.declines(lowest):
                taken.append(lowest)
                canopy.set_aside(lowest, 1)
            else:
                self._evict(lowest)
        for point in taken:
            canopy.bring_back(point)
        if taken:
            self._make_room(())  # Two of them may be more than there is room for.

    def _evict(self, point: Point) -> None:
        self.canopy.evict(point)
        self.tally.evictions += 1

    def _count(self, visit: Visit, new: list[Point], held: int, bottom: int) -> None:
        tally, shape = self.tally, visit.tree.shape
        tally.state_bytes += shape.state_bytes * sum(p.node.point is p for p in new)
        if bottom > held:
            left = min(self.resident(visit.tree, visit.path), bottom)
            tally.kv_bytes += shape.block_bytes * max(left - held, 0)


def is_newcomer(point: Point) -> bool:
    """Return whether no point that is held covers as much of a new one as a conversation's turns do."""
    above = point.node.above()
    return above is None or above.node.end < point.node.end * SAME_TALK


def deepest(entered: list[Node], usable: int) -> Point | None:
    """Return the deepest point on a path that lies within `usable` blocks."""
    for node in reversed(entered):
        if node.point is not None and node.end <= usable:
            return node.point
    return None
