"""Eviction by restore points: a checkpoint goes together with the KV that only it needed.

What requests pass makes the forest, what the node holds hangs in it by its digest. The point that is worth
least gives its checkpoint, then its KV, the deepest block first, as far as room is wanted: what served only
a point that is gone goes before everything else. What no request passed since the node started hangs
nowhere: the one let go of longest ago goes when the point that is worth least was used since then.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from tiercache.core.policy.forest import Point
from tiercache.core.policy.shadow import Canopy, Way, deepest
from tiercache.core.policy.standing import Standing
from tiercache.core.policy.visits import Tree, Visit, sound

T = TypeVar("T")

ASIDE_VISITS = 256
"""A point that is in use when its turn comes, or was spared, is not asked again for so many requests."""


SWEPT_PER_POINT = 2
"""For each point that comes, so many are asked whether anything is held there, oldest first."""

UNWANTED_MAX = 65_536
"""Blocks that went, or would have gone first if they had been there: when they come, they go first."""


class Place(NamedTuple):
    """Where an item hangs: in which tree, at which block's digest. `boundary`: it serves the boundary there
    alone (a checkpoint, a partial block), and not those below."""

    tree: Hashable
    digest: Hashable
    boundary: bool


class Asking(NamedTuple):
    """What room is wanted for: where it hangs, in which block of its prompt, and whether its request said
    that it is worth more than others."""

    place: Place
    depth: int
    urgent: bool


class _Spot(Generic[T]):
    """One block of the forest: the items there that may go, and the point if there is one, with the turn of
    its last use."""

    __slots__ = ("items", "point", "turn")

    def __init__(self) -> None:
        self.items: list[T] = []
        self.point: Point | None = None
        self.turn = 0


class Pointwise(Generic[T]):
    """An `Eviction`. `place` says where an item hangs, `in_use` whether something that is held at a block
    of a tree may not go now. `asking`: what room is wanted for, if it is known; `outweighed`: it was
    declined, since all that may go is worth more. Nothing is declined without `declines`: where a slower
    tier takes what goes, memory is the only way there."""

    def __init__(
        self,
        standing: Standing,
        place: Callable[[T], Place],
        in_use: Callable[[Hashable, Hashable], bool],
        *,
        declines: bool = True,
    ) -> None:
        self._standing = standing
        self._place = place
        self._in_use = in_use
        self._declines = declines
        self._canopy = Canopy(standing.reuse, standing.rankings())
        self._spots: dict[Hashable, dict[Hashable, _Spot[T]]] = {}
        self._astray: dict[Hashable, dict[Hashable, list[T]]] = {}
        self._fallen: OrderedDict[T, None] = OrderedDict()
        self._stray: OrderedDict[T, int] = OrderedDict()
        self._turn = 0
        self._unwanted: OrderedDict[Place, None] = OrderedDict()
        self.asking: Asking | None = None
        self.outweighed = False
        self._taken: dict[Point, None] = {}  # Since the last request.
        self._idle: dict[T, Place] = {}
        self._offered: tuple[T, Point] | None = None
        self._rounds: deque[tuple[Hashable, Point]] = deque()

    # --- what requests do

    def visit(self, visit: Visit, resumed: int) -> None:
        """A request came, and resumes after `resumed` blocks; `visit.ends` will be checkpoints."""
        self.settle()
        canopy = self._canopy
        canopy.take_stock()
        for point in self._taken:
            if point in canopy.aside:
                canopy.bring_back(point)
        self._taken.clear()
        canopy.clock.now = visit.now
        canopy.clock.tick += 1
        entered, held = canopy.forest.follow(visit.tree, visit.path)
        passed = [
            node.point
            for node in entered
            if node.point is not None and resumed < node.end <= min(held, visit.usable)
        ]
        for point in passed:  # It was not offered: there may be nothing any more.
            if not self._holds(visit.tree, point):
                self._fall(visit.tree.name, point)
        entered, held = canopy.forest.follow(visit.tree, visit.path)
        found = deepest(entered, min(held, resumed))
        if found is not None:
            canopy.use(found, visit.path)
            self._turn += 1
            self._spots[visit.tree.name][found.node.blocks[-1]].turn = self._turn
        self._grow(visit, (entered, held))

    def grow(self, visit: Visit) -> None:
        """A request wrote more than its prompt: its path is longer now."""
        self._grow(visit, self._canopy.forest.follow(visit.tree, visit.path))

    def forget(self, tree: Hashable) -> None:
        """A namespace is gone, or another policy's; what is still in it hangs nowhere."""
        self.settle()
        for point in self._canopy.forest.points_of(tree):
            self._canopy.take(point)
        self._canopy.forest.forget(tree)
        for spot in self._spots.pop(tree, {}).values():
            for item in spot.items:
                self._let_fall(item)

    def _holds(self, tree: Tree, point: Point) -> bool:
        digest = point.node.blocks[-1]
        items = self._spots[tree.name][digest].items
        return any(self._idle[i].boundary for i in items) or self._in_use(tree.name, digest)

    def _grow(self, visit: Visit, way: Way) -> None:
        """A path is in the forest as far as its ends go: what was loose there hangs in it now."""
        tree = visit.tree.name
        spots = self._spots.setdefault(tree, {})
        visit = sound(visit, way[1], spots)
        astray = self._astray.get(tree, {})
        ends = set(visit.ends)
        for depth in range(way[1], max(visit.ends, default=0)):
            digest = visit.path[depth]
            if self._unwanted:
                self._unwanted.pop(Place(tree, digest, boundary=False), None)
            spot = spots[digest] = _Spot()
            for item in astray.pop(digest, ()):
                self._catch(item)
                spot.items.append(item)
                if self._idle[item].boundary:
                    ends.add(depth + 1)
        self._turn += 1
        new = self._canopy.grow(replace(visit, ends=tuple(sorted(ends))), way, 0)
        for point in new:
            spot = spots[point.node.blocks[-1]]
            spot.point = point
            spot.turn = self._turn
            self._unwanted.pop(Place(tree, point.node.blocks[-1], boundary=True), None)
        for point in new:
            if not point.node.fits(self._standing.budget):  # Others would go for it in vain.
                self._fall(tree, point)
        self._rounds.extend((tree, point) for point in new)
        self._sweep(SWEPT_PER_POINT * (len(new) + 1))

    def _sweep(self, count: int) -> None:
        """Of the next points in the round, those at which nothing is held go: no room may ever be wanted
        for which their turn would come. What comes after all is like what no request passed."""
        for _ in range(min(count, len(self._rounds))):
            tree, point = self._rounds.popleft()
            digest = point.node.blocks[-1]
            spot = self._spots.get(tree, {}).get(digest)
            if spot is None or spot.point is not point:
                continue
            stays = spot.items or self._canopy.clock.tick - point.used < ASIDE_VISITS
            if stays or self._in_use(tree, digest):
                self._rounds.append((tree, point))
            else:
                self._fall(tree, point, unwanted=False)

    # --- Eviction

    def add(self, item: T) -> None:
        """See `Eviction`."""
        place = self._idle[item] = self._place(item)
        spot = self._spots.get(place.tree, {}).get(place.digest)
        point = None if spot is None else spot.point
        if place.boundary and spot is not None and point is None:
            self._let_fall(item)  # Its point fell before it came.
            return
        if spot is None:
            if place in self._unwanted:
                self._let_fall(item)
                return
            self._turn += 1
            self._stray[item] = self._turn
            self._keep(item, place)
            return
        spot.items.append(item)
        if point is None:
            return
        if self._offered is not None and self._offered[0] is item:
            self._offered = None  # It was spared, as if it had been used: as long once more.
            self._canopy.set_aside(point, max(ASIDE_VISITS, self._canopy.clock.tick - point.used))
        elif point in self._canopy.aside:
            self._canopy.bring_back(point)

    def remove(self, item: T) -> None:
        """See `Eviction`."""
        place = self._idle.pop(item)
        if item in self._fallen or item in self._stray:
            self._catch(item)
            astray = self._astray[place.tree]
            others = astray[place.digest]
            others.remove(item)
            if not others:
                del astray[place.digest]
        else:
            self._spots[place.tree][place.digest].items.remove(item)

    def victims(self) -> Iterator[T]:
        """See `Eviction`."""
        while self._idle:
            self.settle()
            if self._fallen:
                yield next(iter(self._fallen))
                continue
            asking = self.asking
            if self._declines and asking is not None and asking.place in self._unwanted:
                self.outweighed = True  # What room is wanted for would be the next to go.
                return
            point = self._lowest()
            if point is not None and self._stays(point):
                self._taken[point] = None
                self._canopy.set_aside(point, 1)
                continue
            stray = next(iter(self._stray), None)
            if point is None:
                if stray is None and self._declines:
                    return
                # Otherwise what waits with a checkpoint that is in use gives way, oldest first.
                yield next(iter(self._idle)) if stray is None else stray
                continue
            tree, digest = _key(point)
            spot = self._spots[tree][digest]
            if stray is not None and self._stray[stray] < spot.turn:
                yield stray
                continue
            item = next((item for item in spot.items if self._idle[item].boundary), None)
            if item is not None:
                self._offered = item, point
                yield item
            elif self._in_use(tree, digest):
                self._canopy.set_aside(point, ASIDE_VISITS)
            else:
                self._fall(tree, point)

    def _stays(self, point: Point) -> bool:
        """Return whether a point is what room is wanted for, and shall have it though it is worth least."""
        asking = self.asking
        if asking is None or point.hits or _key(point)[0] != asking.place.tree:
            return False
        if not point.node.rests_on(asking.depth, asking.place.digest):
            return False
        return asking.urgent or not self._declines or not self._canopy.declines(point)

    def __iter__(self) -> Iterator[T]:
        return iter(self._idle)

    def __contains__(self, item: object) -> bool:
        return item in self._idle

    def __len__(self) -> int:
        return len(self._idle)

    # --- inside

    def _lowest(self) -> Point | None:
        canopy = self._canopy
        canopy.bring_back_due()
        ranking = canopy.rankings[self._standing.current]
        point = ranking.lowest(canopy.clock)
        if point is None:  # All that is left is in use, or was spared.
            for other in list(canopy.aside):
                if other not in self._taken and not self._in_use(*_key(other)):
                    canopy.bring_back(other)
            point = ranking.lowest(canopy.clock)
        return point

    def settle(self) -> None:
        """The item that was offered last is gone, and so its point; unless it is only in use.

        To be called before anything is learned from the next request.
        """
        if self._offered is None or self._offered[0] in self._idle:
            return
        _, point = self._offered
        self._offered = None
        tree, digest = _key(point)
        spot = self._spots.get(tree, {}).get(digest)
        if spot is None or spot.point is not point:
            return
        if self._in_use(tree, digest):
            self._canopy.set_aside(point, ASIDE_VISITS)
        else:
            self._fall(tree, point)

    def _fall(self, tree: Hashable, point: Point, *, unwanted: bool = True) -> None:
        """A point goes, then what served only it, deepest first; if `unwanted`, what comes later too."""
        self._standing.evictions += 1
        digest = point.node.blocks[-1]
        spots = self._spots[tree]
        spot = spots[digest]
        spot.point = None
        gone = self._canopy.evict(point)
        if not gone:
            for item in [item for item in spot.items if self._idle[item].boundary]:
                spot.items.remove(item)
                self._let_fall(item)
        if unwanted:
            self._unwanted[Place(tree, digest, boundary=True)] = None
            self._unwanted.update((Place(tree, block, boundary=False), None) for block in gone)
        for block in gone:
            for item in sorted(
                spots.pop(block).items, key=lambda item: not self._idle[item].boundary
            ):
                self._let_fall(item)
        while len(self._unwanted) > UNWANTED_MAX:
            self._unwanted.popitem(last=False)

    def _let_fall(self, item: T) -> None:
        self._fallen[item] = None
        self._keep(item, self._idle[item])

    def _catch(self, item: T) -> None:
        if self._stray.pop(item, None) is None:
            del self._fallen[item]

    def _keep(self, item: T, place: Place) -> None:
        self._astray.setdefault(place.tree, {}).setdefault(place.digest, []).append(item)

    def check(self) -> None:
        """Raise AssertionError if the forest, what hangs in it and the rankings do not agree."""
        canopy = self._canopy
        points, hanging = _hanging(canopy, self._spots, self._idle)
        astray = [i for by in self._astray.values() for items in by.values() for i in items]
        assert len(astray) == len(set(astray)), "loose twice"
        assert set(astray) == self._fallen.keys() | self._stray.keys(), "loose items"
        assert len(hanging) + len(astray) == len(self._idle), "items in two places, or in none"
        assert self._idle.keys() == {*hanging, *astray}, "items"
        assert canopy.aside.keys() <= points
        for ranking in canopy.rankings.values():
            assert len(ranking) == len(points) - len(canopy.aside), "a ranking"


def _key(point: Point) -> tuple[Hashable, Hashable]:
    """Return where a point is: its tree, and the digest of the last block before it."""
    node = point.node
    digest = node.blocks[-1]
    while node.parent is not None:
        node = node.parent
    return node.tree, digest


def _hanging(
    canopy: Canopy,
    spots_of: Mapping[Hashable, Mapping[Hashable, _Spot[T]]],
    places: Mapping[T, Place],
) -> tuple[set[Point], list[T]]:
    """Return all points of the forest, and what hangs there; raise AssertionError if they do not agree."""
    canopy.forest.check()
    blocks: dict[Hashable, set[Hashable]] = {}
    points = set()
    for node in canopy.forest:
        root = node
        while root.parent is not None:
            root = root.parent
        blocks.setdefault(root.tree, set()).update(node.blocks)
        if node.point is not None:
            points.add(node.point)
            assert spots_of[root.tree][node.blocks[-1]].point is node.point, "a stray point"
    hanging: list[T] = []
    for tree, spots in spots_of.items():
        assert spots.keys() == blocks.get(tree, set()), "blocks of the forest"
        for spot in spots.values():
            hanging.extend(spot.items)
            assert spot.point is None or spot.point in points, "a point that is gone"
            alone = any(places[item].boundary for item in spot.items)
            assert spot.point is not None or not alone, "a checkpoint that never goes"
    return points, hanging
