"""Trees of runs against a model that keeps every block by itself."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.cost import Work
from tiercache.core.policy.forest import Forest, Node
from tiercache.core.policy.reuse import Ghost
from tiercache.core.policy.visits import Shape, Tree

WORK = Work(1.0, 0.5)
TREE = Tree("t", Shape(4, 8.0, 100.0, WORK))
FLAT = Tree("f", Shape(4, 8.0, 0.0, WORK))


def chained(names: str) -> list[str]:
    """A path whose digests name all that comes before."""
    return [names[: depth + 1] for depth in range(len(names))]


def grown(forest: Forest, names: str, tree: Tree = TREE) -> Node:
    """Hold a path and make its end resumable."""
    path = chained(names)
    entered, held = forest.follow(tree, path)
    node = forest.extend(entered, path, held, len(path))
    if node.point is None:
        forest.add(node, Ghost(path[-1], len(path), 0.0), 0)
    forest.check()
    return node


def test_a_path_is_one_run_until_something_divides_it() -> None:
    forest = Forest()
    end = grown(forest, "abcdef")
    assert (end.start, end.end, end.tokens, forest.blocks) == (0, 6, 24, 6)
    fork = grown(forest, "abcxy")
    assert end.start == fork.start == 3
    assert end.parent is fork.parent
    assert forest.follow(TREE, chained("abcd"))[1] == 4
    assert forest.follow(TREE, chained("abq"))[1] == 2
    assert forest.follow(TREE, chained("q"))[1] == 0
    assert forest.follow(FLAT, chained("abc"))[1] == 0  # Another tree.


def test_a_few_of_many_points_below_cost_no_more_than_a_few() -> None:
    forest = Forest()
    start = grown(forest, "a")
    for number in range(500):
        grown(forest, "a" + chr(1000 + number))
    grown(forest, "bcx")
    grown(forest, "bcy")
    root = forest.root(TREE)
    assert {p.node.tokens for p in root.below()} == {4, 12}
    assert sum(1 for _ in start.below()) == 500

    class Watched(dict[Hashable, Node]):
        def values(self) -> Watched.Values:  # type: ignore[override]
            return Watched.Values(super().values())

        class Values:
            seen = 0

            def __init__(self, nodes: Iterable[Node]) -> None:
                self._nodes = nodes

            def __iter__(self) -> Iterator[Node]:
                for node in self._nodes:
                    Watched.Values.seen += 1
                    yield node

    start.children = Watched(start.children)
    assert len(list(islice(start.below(), 3))) == 3
    assert Watched.Values.seen == 3


def test_what_a_point_frees_and_saves() -> None:
    forest = Forest()
    lower = grown(forest, "abcdef")
    assert lower.freed() == 100 + 6 * 8
    assert lower.gain() == WORK.flops(24)
    upper = grown(forest, "abc")
    assert upper.point is not None
    assert lower.above() is upper.point
    assert upper.above() is None
    assert (upper.freed(), lower.freed()) == (100.0, 100 + 3 * 8)
    assert lower.gain() == WORK.extending(12, 24)
    assert lower.density() == lower.gain() / lower.freed()
    assert list(upper.below()) == [lower.point]
    assert forest.nbytes == 2 * 100 + 6 * 8


def test_a_fork_without_a_point_is_looked_through() -> None:
    forest = Forest()
    first, second = grown(forest, "abcd"), grown(forest, "abxy")
    top = grown(forest, "a")
    assert first.above() is second.above() is top.point
    assert set(top.below()) == {first.point, second.point}


def test_without_checkpoints_any_block_will_do() -> None:
    forest = Forest()
    lower = grown(forest, "abcd", FLAT)
    upper = grown(forest, "ab", FLAT)
    assert lower.gain() == WORK.extending(8, 16)
    assert upper.density() == math.inf  # Nothing would be freed.


def test_what_a_resume_needs_fits_or_does_not() -> None:
    node = Node(TREE.shape, None, 0, ["a", "ab"])
    assert node.fits(116.0)
    assert not node.fits(115.0)
    assert Node(Shape(4, 8.0, 0.0, WORK), None, 0, ["a", "ab"]).fits(1.0)


def test_the_way_to_a_node_has_its_blocks_only() -> None:
    root = Node(TREE.shape, None, 0, [])
    upper = Node(TREE.shape, root, 0, ["a", "ab"])
    lower = Node(TREE.shape, upper, 2, ["abc"])
    for depth, block in enumerate(("a", "ab", "abc"), 1):
        assert lower.rests_on(depth, block)
        assert not lower.rests_on(depth, "x")
    assert not lower.rests_on(0, "abc")
    assert not lower.rests_on(4, "abc")


def test_removing_takes_what_nothing_else_needs() -> None:
    forest = Forest()
    first, second = grown(forest, "abcd"), grown(forest, "abxy")
    assert first.point is not None
    gone, joined = forest.remove(first.point)
    assert gone == ["abcd", "abc"]
    assert joined is second
    assert (second.start, forest.blocks, forest.points) == (0, 4, 1)
    forest.check()
    assert second.point is not None
    assert forest.remove(second.point) == (["abxy", "abx", "ab", "a"], None)
    assert (forest.nbytes, list(forest)) == (0.0, [])


def test_removing_the_middle_joins_what_is_left() -> None:
    forest = Forest()
    lower, upper = grown(forest, "abcdef"), grown(forest, "abc")
    assert upper.point is not None
    assert forest.remove(upper.point) == ([], lower)
    assert (lower.start, lower.end) == (0, 6)
    forest.check()


def test_a_fork_that_is_a_point_stays_a_fork() -> None:
    forest = Forest()
    grown(forest, "abcd")
    grown(forest, "abxy")
    top = grown(forest, "ab")
    assert top.point is not None
    assert forest.remove(top.point) == ([], None)
    forest.check()


def test_a_tree_can_be_forgotten() -> None:
    forest = Forest()
    grown(forest, "abcd")
    grown(forest, "abxy")
    kept = grown(forest, "abcd", FLAT)
    assert len(forest.points_of("t")) == 2
    forest.forget("t")
    forest.forget("t")
    assert (forest.points_of("t"), forest.points_of("f")) == ([], [kept.point])
    assert forest.blocks == 4
    forest.check()


def test_a_leaf_without_a_point_is_a_bug() -> None:
    forest = Forest()
    node = grown(forest, "abc")
    node.point = None
    entered, held = forest.follow(TREE, chained("abcde"))
    with pytest.raises(AssertionError, match="nothing needs"):
        forest.extend(entered, chained("abcde"), held, 5)


names = st.text("ab", min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), names), max_size=30))
def test_it_holds_what_a_set_of_blocks_would(steps: list[tuple[bool, str]]) -> None:
    """Blocks: all prefixes of a point. Points: what was added and not removed."""
    forest, points = Forest(), set[str]()
    for adds, name in steps:
        if adds:
            grown(forest, name)
            points.add(name)
        elif points:
            chosen = sorted(points)[len(name) % len(points)]
            entered, held = forest.follow(TREE, chained(chosen))
            assert held == len(chosen)
            node = forest.split(entered, len(chosen))
            assert node.point is not None
            points.remove(chosen)
            before = {prefix for other in {*points, chosen} for prefix in chained(other)}
            after = {prefix for other in points for prefix in chained(other)}
            gone, _ = forest.remove(node.point)
            assert gone == sorted(before - after, key=len, reverse=True)
        forest.check()
        blocks = {prefix for other in points for prefix in chained(other)}
        assert {digest for node in forest for digest in node.blocks} == blocks
        for path in map(chained, ("aaaa", "abab", "bbbb", name)):
            count = sum(1 for digest in path if digest in blocks)
            assert forest.follow(TREE, path)[1] == count


def test_every_case_of_a_common_prefix() -> None:
    forest = Forest()
    grown(forest, "abcdefgh")
    for size in range(1, 8):
        path = chained("abcdefgh"[:size] + "z")
        assert forest.follow(TREE, path)[1] == size
        assert forest.follow(TREE, path[:size])[1] == size
