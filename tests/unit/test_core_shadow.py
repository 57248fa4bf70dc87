"""Caches without bytes: against naive ones, and what their rankings prefer."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.cost import Work
from tiercache.core.policy import marconi_order, ranking
from tiercache.core.policy.forest import Point
from tiercache.core.policy.marconi_order import Marconi
from tiercache.core.policy.meta import HYPER, INDEX, RECENT
from tiercache.core.policy.meta import ranking as ranking_of
from tiercache.core.policy.ranking import Clock, Heap, Hyperbolic, Recent
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.shadow import BELOW_MAX, Shadow
from tiercache.core.policy.visits import Shape, Tree, Visit

SHAPE = Shape(4, 10, 30, Work(1.0, 0.1))
TREE = Tree("t", SHAPE)
FLAT = Tree("f", Shape(4, 10, 0, Work(1.0, 0.1)))


def visit(names: str, now: float = 0.0, *, fork: int = 0, tree: Tree = TREE) -> Visit:
    path = [names[: depth + 1] for depth in range(len(names))]
    ends = tuple(sorted({fork, len(path)} - {0}))
    return Visit(tree, path, len(path), ends, now)


def shadow(budget: float, name: str = RECENT) -> Shadow:
    reuse = Reuse(1000)
    return Shadow(budget, {name: ranking_of(name, reuse)}, name, reuse)


def test_a_hit_needs_the_checkpoint() -> None:
    cache = shadow(1000)
    assert [cache.visit(visit(name)) for name in ("abcd", "abxy", "abxyz", "abcd")] == [0, 0, 4, 4]
    assert cache.resident(TREE, visit("abq").path) == 2
    assert cache.visit(visit("abqq", fork=2)) == 0
    assert cache.visit(visit("abrr")) == 2
    assert cache.tally.hits == 3
    assert cache.tally.saved == 2 * SHAPE.work.flops(16) + SHAPE.work.flops(8)
    assert cache.tally.state_bytes == 6 * 30
    assert cache.tally.kv_bytes == (4 + 2 + 1 + 2 + 2) * 10
    cache.canopy.forest.check()


def test_no_deeper_than_it_may() -> None:
    cache = shadow(1000)
    cache.visit(visit("abcd", fork=2))
    again = visit("abcd")
    assert cache.visit(Visit(TREE, again.path, 3, again.ends, 1.0)) == 2


def test_without_checkpoints_every_block_serves() -> None:
    cache = shadow(1000)
    cache.visit(visit("abcd", tree=FLAT))
    assert cache.visit(visit("abcx", tree=FLAT)) == 3
    assert cache.visit(visit("abcd", tree=FLAT)) == 4
    assert cache.visit(visit("z", tree=FLAT)) == 0


def test_what_does_not_outlive_its_request_was_not_written() -> None:
    cache = shadow(75)
    cache.visit(visit("abcd"))
    assert (cache.tally.kv_bytes, cache.tally.state_bytes) == (40, 30)
    cache.visit(visit("vwxyz"))  # 80 bytes: it cannot stay.
    assert (cache.tally.kv_bytes, cache.tally.state_bytes) == (40, 30)
    assert (cache.used, cache.tally.evictions) == (70, 1)  # And nothing went for it in vain.


def test_a_path_can_grow_and_a_tree_be_forgotten() -> None:
    cache = shadow(1000)
    cache.visit(visit("ab"))
    cache.grow(visit("abcd"))
    cache.visit(visit("ab", tree=FLAT))
    assert cache.visit(visit("abcdef")) == 4
    cache.forget("t")
    assert cache.visit(visit("abcdef")) == 0
    assert cache.visit(visit("ab", tree=FLAT)) == 2
    cache.canopy.forest.check()


def test_the_oldest_goes_and_who_was_used_stays() -> None:
    cache = shadow(150)
    for name in ("aa", "bb", "cc", "aa", "dd"):
        cache.visit(visit(name))
    held = [name for name in ("aa", "bb", "cc", "dd") if cache.resident(TREE, visit(name).path)]
    assert held == ["aa", "cc", "dd"]


class Naive:
    """The same, written down plainly: points by name, everything reckoned anew each time."""

    def __init__(self, budget: float, worth: Callable[["Naive", str], float]) -> None:
        self.budget = budget
        self.worth = worth
        self.points: dict[str, int] = {}
        self.tick = 0

    def blocks(self) -> set[str]:
        return {name[: depth + 1] for name in self.points for depth in range(len(name))}

    def used(self) -> float:
        return len(self.blocks()) * 10 + len(self.points) * 30

    def above(self, name: str) -> int:
        return max((len(o) for o in self.points if o != name and name.startswith(o)), default=0)

    def forks(self, name: str) -> int:
        return len({block for block in self.blocks() if block[:-1] == name})

    def visit(self, path: Visit) -> int:
        name = str(path.path[-1])
        held = [other for other in self.points if name.startswith(other)]
        depth = max(map(len, held), default=0)
        if depth:
            self.points[name[:depth]] = self.tick
        new = [name[:end] for end in path.ends if end > depth and name[:end] not in self.points]
        self.points |= dict.fromkeys(new, self.tick)
        for other in new:
            if len(other) * 10 + 30 > self.budget:
                del self.points[other]
        taken: set[str] = set()
        while self.used() > self.budget:
            left = [other for other in self.points if other not in taken]
            if not left:
                new, taken = [], set()
                continue
            lowest = min(left, key=lambda name: self.worth(self, name))
            if lowest in new:
                taken.add(lowest)  # So few requests: what is new is not declined.
            else:
                del self.points[lowest]
        self.tick += 1
        return depth


def recency(cache: Naive, name: str) -> float:
    """Of what was used at once the deepest goes first, and leaves before what they rest on."""
    return cache.points[name] + (0.5 if cache.forks(name) else 0.0) + 0.25 / (1 + len(name))


names = st.text("ab", min_size=1, max_size=6)
requests = st.lists(st.tuples(names, st.integers(0, 3)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(3, 25))
def test_it_is_what_a_naive_cache_is(steps: list[tuple[str, int]], size: int) -> None:
    cache, naive = shadow(size * 10), Naive(size * 10, recency)
    for name, fork in steps:
        asked = visit(name, fork=min(fork, len(name)))
        assert cache.visit(asked) == naive.visit(asked)
        cache.canopy.forest.check()
        points = {str(p.node.blocks[-1]) for p in cache.canopy.forest.points_of("t")}
        assert points == naive.points.keys()
        assert cache.used == naive.used()


def marconi_worth(alpha: float) -> Callable[[Naive, str], float]:
    def efficiency(cache: Naive, name: str) -> float:
        saved = SHAPE.work.extending(cache.above(name) * 4, len(name) * 4)
        return saved / (30 + len(name) * 10)

    def scaled(value: float, values: list[float]) -> float:
        low, high = min(values), max(values)
        return (value - low) / (high - low) if high > low else 1.0

    def worth(cache: Naive, name: str) -> float:
        candidates = [other for other in cache.points if cache.forks(other) < 2]
        if name not in candidates:
            return 1e9
        recencies = [1 / (cache.tick + 1 - cache.points[other]) for other in candidates]
        efficiencies = [efficiency(cache, other) for other in candidates]
        recency = scaled(1 / (cache.tick + 1 - cache.points[name]), recencies)
        return recency + alpha * scaled(efficiency(cache, name), efficiencies)

    return worth


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(5, 30), st.sampled_from([0.0, 0.3, 1.0]))
def test_marconi_drops_one_of_the_least(
    steps: list[tuple[str, int]], size: int, alpha: float
) -> None:
    """By the definition, over all candidates: no other one is worth less."""
    order = Marconi(alpha)
    cache = Shadow(1e9, {"m": order}, "m", Reuse(100))
    naive = Naive(size * 10, marconi_worth(alpha))
    for name, fork in steps:
        asked = visit(name, fork=min(fork, len(name)))
        cache.visit(asked)
        cache.canopy.clock.tick -= 1
        naive.points = {str(p.node.blocks[-1]): p.used for p in cache.canopy.forest.points_of("t")}
        while naive.used() > naive.budget:
            point = order.lowest(cache.canopy.clock)
            assert point is not None
            chosen = str(point.node.blocks[-1])
            least = min(naive.worth(naive, other) for other in naive.points)
            assert naive.worth(naive, chosen) <= least + 1e-9
            cache.canopy.evict(point)
            del naive.points[chosen]
        assert len(order) == len(naive.points)
        cache.canopy.clock.tick += 1
        naive.tick += 1


def test_marconi_finds_something_where_everything_forks() -> None:
    order = Marconi(0.5)
    assert order.lowest(Clock()) is None
    cache = Shadow(1e9, {"m": order}, "m", Reuse(100))
    for name in ("ab", "ac", "a"):
        cache.visit(visit(name))
    (fork,) = [p for p in cache.canopy.forest.points_of("t") if len(p.node.children) > 1]
    for point in cache.canopy.forest.points_of("t"):
        if point is not fork:
            order.drop(point)
    assert order.lowest(cache.canopy.clock) is fork


def test_a_point_that_came_to_fork_is_passed_over() -> None:
    order = Marconi(0.0)
    cache = Shadow(1e9, {"m": order}, "m", Reuse(100))
    cache.visit(visit("a"))
    cache.visit(visit("ab"))
    cache.visit(visit("ac"))  # The fork at "a" is used, but not put again.
    found = order.lowest(cache.canopy.clock)
    assert found is not None
    assert str(found.node.blocks[-1]) == "ab"


def test_a_walk_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marconi_order, "WALK_MAX", 1)
    order = Marconi(1.0)
    cache = Shadow(1e9, {"m": order}, "m", Reuse(100))
    for size in range(1, 9):
        cache.visit(visit(chr(97 + size) * (9 - size)))
    assert order.lowest(cache.canopy.clock) is not None


@pytest.mark.parametrize("make", [lambda: Marconi(0.2), lambda: Heap(Hyperbolic())])
def test_entries_of_what_changed_are_swept_out(
    make: Callable[[], Marconi | Heap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "STALE_SPARE", 4)
    monkeypatch.setattr(marconi_order, "STALE_SPARE", 4)
    order = make()
    cache = Shadow(1e9, {"m": order}, "m", Reuse(100))
    for _ in range(50):
        cache.visit(visit("ab"))
    heap = order._oldest._heap if isinstance(order, Marconi) else order._heap
    assert len(heap) <= 10
    assert order.lowest(cache.canopy.clock) is not None


def test_uses_age_and_size_count_for_hyper() -> None:
    cache = shadow(1e9, HYPER)
    for name in ("aa", "aa", "bb", "cccccccc"):
        cache.visit(visit(name))
    order = cache.canopy.rankings[HYPER]
    found = order.lowest(cache.canopy.clock)
    assert found is not None
    assert str(found.node.blocks[-1]) == "bb"  # Once, and small.
    for _ in range(100):
        cache.visit(visit("dd"))
    again = order.lowest(cache.canopy.clock)
    assert again is not None
    assert str(again.node.blocks[-1]) != "dd"
    assert Hyperbolic().time(cache.canopy.clock) == cache.canopy.clock.tick
    assert Recent().time(cache.canopy.clock) == 0.0


def test_a_score_that_rose_is_found_out() -> None:
    """What rested on a point that went is worth more than it says."""
    cache = shadow(1e9, HYPER)
    cache.visit(visit("aaaa"))
    cache.visit(visit("aaaab"))
    cache.visit(visit("zzz"))
    upper = next(p for p in cache.canopy.forest.points_of("t") if p.node.end == 4)
    cache.canopy.evict(upper)
    found = cache.canopy.rankings[HYPER].lowest(cache.canopy.clock)
    assert found is not None
    assert str(found.node.blocks[-1]) == "zzz"


def test_heirs_are_remembered_and_use_ends_it() -> None:
    cache = shadow(1e9, INDEX)
    cache.visit(visit("aa"))
    for number in range(8):
        cache.visit(visit("aa" + chr(98 + number) * 2, float(number)))
    root = next(p for p in cache.canopy.forest.points_of("t") if p.node.end == 2)
    for point in list(cache.canopy.forest.points_of("t")):
        if point is not root:
            cache.canopy.evict(point)
    assert len(root.heirs) == 4
    heir = root.heirs[0]
    longer = visit(str(heir.digest) + "x", 20.0)
    assert cache.visit(longer) == 2
    assert heir not in root.heirs
    assert len(root.heirs) == 3
    before = cache.canopy.rankings[INDEX].lowest(cache.canopy.clock)
    assert before is not None


def test_nothing_is_left_to_go() -> None:
    cache = shadow(-1)
    cache.visit(visit("ab"))
    assert (cache.used, cache.tally.evictions) == (0, 1)


def test_what_is_aside_is_not_ranked() -> None:
    cache = shadow(1e9)
    cache.visit(visit("ab"))
    canopy = cache.canopy
    (point,) = canopy.forest.points_of("t")
    canopy.take(point)
    canopy.aside[point] = 0
    canopy.put(point)
    order = canopy.rankings[RECENT]
    assert (len(order), order.lowest(canopy.clock)) == (0, None)
    canopy.evict(point)
    assert (canopy.aside, cache.used) == ({}, 0)


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="nothing"):
        ranking_of("nothing", Reuse(1))


class Counting(Recent):
    """Counts how often a point's worth was reckoned."""

    scored = 0

    def score(self, point: Point, clock: Clock) -> float:
        Counting.scored += 1
        return super().score(point, clock)


def test_a_point_above_many_costs_no_more_than_above_a_few() -> None:
    """Conversations that share a start: it is begun, dropped and begun again at each request at worst."""
    reuse = Reuse(1000)
    cache = Shadow(1e9, {RECENT: Heap(Counting())}, RECENT, reuse)
    for number in range(300):
        cache.visit(visit("ab" + chr(1000 + number)))
    Counting.scored = 0
    cache.visit(visit("ab"))
    assert cache.canopy.forest.points == 301
    assert BELOW_MAX <= Counting.scored <= 2 * BELOW_MAX
