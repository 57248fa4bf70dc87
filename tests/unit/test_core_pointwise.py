"""Eviction by restore points: what goes with what, and what stays out of the way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.bench import TREE, Bench, Object
from tiercache.core.policy import pointwise
from tiercache.core.policy.pointwise import Place
from tiercache.core.policy.visits import Visit


def test_a_checkpoint_goes_with_the_kv_that_only_it_needs() -> None:
    bench = Bench()
    bench.take("abcd")
    bench.take("abxy", fork=2)
    bench.visit("abxy", resumed=4)
    assert bench.drop() == ["abcd*", "abcd", "abc", "ab*", "abxy*", "abxy", "abx", "ab", "a"]


def test_a_point_that_others_rest_on_gives_its_checkpoint_only() -> None:
    bench = Bench()
    bench.take("ab")
    bench.take("abcd", resumed=2)
    bench.visit("abcd", resumed=4)
    assert bench.drop(1) == ["ab*"]
    bench.visit("abq")  # The block is still held, and belongs to this way.
    assert bench.drop(3) == ["abcd*", "abcd", "abc"]


def test_kv_goes_only_as_far_as_room_is_wanted() -> None:
    bench = Bench()
    bench.take("abcd")
    bench.take("xy")
    assert bench.drop(2) == ["abcd*", "abcd"]
    bench.take("pq")
    assert bench.drop(2) == ["abc", "ab"]
    bench.visit("ab")  # Its first block is wanted again.
    bench.store("ab")
    assert bench.drop() == ["xy*", "xy", "x", "pq*", "pq", "p", "ab*", "ab", "a"]


def test_without_a_checkpoint_a_point_is_nothing() -> None:
    """It was announced and never came: its KV goes first."""
    bench = Bench()
    bench.take("xy")
    bench.visit("abc")
    bench.store("abc", state=False)
    bench.visit("xy", resumed=2)
    assert bench.drop(3) == ["abc", "ab", "a"]


def test_what_was_not_offered_and_is_not_there_is_forgotten() -> None:
    bench = Bench()
    bench.visit("abcd")
    bench.store("abcd", state=False)
    bench.take("abcdef")  # Nothing could be resumed at "abcd".
    bench.busy.add("abcdef")
    bench.visit("abcdefg")
    bench.take("xy")
    assert "abcd*" not in bench.drop()


def test_what_is_in_use_waits_aside() -> None:
    bench = Bench()
    bench.take("ab")
    bench.take("xy")
    used = bench.state("ab")
    bench.policy.remove(used)
    bench.busy.add("ab")
    assert bench.drop(3) == ["xy*", "xy", "x"]
    assert bench.drop() == []
    bench.busy.clear()
    bench.policy.add(used)
    assert bench.drop() == ["ab*", "ab", "a"]


def test_what_is_aside_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "ASIDE_VISITS", 3)
    bench = Bench()
    bench.take("ab")
    bench.take("xy")
    used = bench.state("ab")
    bench.policy.remove(used)
    bench.busy.add("ab")
    assert bench.drop(1) == ["xy*"]
    assert len(bench.policy._canopy.aside) == 1
    bench.busy.clear()
    for number in range(4):
        bench.take(f"{number}q")
    assert bench.drop(2) == ["xy", "x"]
    assert bench.drop(2) == ["ab", "a"]  # Its checkpoint is gone.


def test_an_offer_that_is_taken_into_use_stays() -> None:
    bench = Bench()
    bench.take("ab")
    bench.take("xy")
    offered = next(bench.policy.victims())
    bench.policy.remove(offered)
    bench.busy.add("ab")
    assert bench.drop(1) == ["xy*"]
    bench.busy.clear()
    bench.policy.add(offered)
    assert bench.drop(5) == ["xy", "x", "ab*", "ab", "a"]


def test_an_offer_that_is_spared_goes_later() -> None:
    bench = Bench()
    bench.take("ab")
    bench.take("xy")
    offered = next(bench.policy.victims())
    assert repr(offered) == "ab*"
    assert next(bench.policy.victims()) is offered  # Nothing happened.
    bench.policy.remove(offered)
    bench.policy.add(offered)
    assert bench.drop() == ["xy*", "xy", "x", "ab*", "ab", "a"]


def test_a_visit_ends_an_offer() -> None:
    bench = Bench()
    bench.take("abcd")
    bench.drop(1)
    bench.visit("abcdef")
    bench.store("abcdef")
    bench.policy.check()
    bench.take("xy")
    assert bench.drop(3) == ["abcdef*", "abcdef", "abcde"]


def test_an_offer_of_what_is_forgotten() -> None:
    bench = Bench()
    bench.take("abcd")
    bench.take("xy")
    offered = next(bench.policy.victims())
    bench.policy.remove(offered)
    bench.policy._fall("t", bench.policy._spots["t"]["abcd"].point)  # type: ignore[arg-type]
    bench.policy.check()
    assert next(bench.policy.victims()).name == "abcd"


def test_strays_wait_for_their_turn() -> None:
    """What no request passed: oldest first, and before whatever was used since."""
    bench = Bench()
    old = Object("old", boundary=False)
    bench.held["old"] = [old]
    bench.policy.add(old)
    bench.take("ab")
    new = Object("new", boundary=True)
    bench.held["new"] = [new]
    bench.policy.add(new)
    assert list(bench.policy) == [old, *bench.held["a"], *bench.held["ab"], new]
    assert bench.drop() == ["old", "ab*", "ab", "a", "new*"]


def test_strays_are_found_when_somebody_passes() -> None:
    bench = Bench()
    bench.store("abc")
    bench.take("xy")
    bench.visit("abc", resumed=3)
    assert bench.drop() == ["xy*", "xy", "x", "abc*", "abc", "ab", "a"]


def test_a_way_can_grow() -> None:
    bench = Bench()
    bench.take("ab")
    path = ["a", "ab", "abc", "abcd"]
    bench.policy.grow(Visit(TREE, path, 0, (4,), 1.0))
    bench.store("abcd")
    bench.take("xy")
    bench.visit("ab", resumed=2)
    assert bench.drop() == ["abcd*", "abcd", "abc", "xy*", "xy", "x", "ab*", "ab", "a"]


def test_a_forgotten_tree_leaves_strays() -> None:
    bench = Bench()
    bench.take("abc")
    bench.take("abx", fork=2)
    point = next(iter(bench.policy._canopy.forest.points_of("t")))
    bench.policy._canopy.set_aside(point, 9)
    bench.policy.forget("t")
    bench.policy.forget("t")
    bench.policy.check()
    assert len(bench.policy) == len(bench.drop()) == 7


def test_a_checkpoint_inside_goes_with_all_that_serves_it_alone() -> None:
    bench = Bench()
    bench.take("ab")
    partial = Object("ab", boundary=True)
    bench.held["ab"].append(partial)
    bench.policy.add(partial)
    bench.take("abcd", resumed=2)
    bench.visit("abcd", resumed=4)
    assert bench.drop(3) == ["ab*", "ab*", "abcd*"]


def test_all_that_is_left_is_in_use() -> None:
    bench = Bench()
    bench.take("ab")
    used = bench.state("ab")
    bench.policy.remove(used)
    bench.busy.add("ab")
    assert bench.drop() == []
    late = Object("late", boundary=False)
    bench.held["late"] = [late]
    bench.policy.add(late)
    assert bench.drop() == ["late"]


def test_what_comes_too_late_goes_first() -> None:
    bench = Bench("index")
    bench.take("abcdefgh")
    bench.take("xy")
    bench.visit("pq")  # Announced; before it comes, room is wanted.
    for name in ("abcdefgh", "xy"):
        bench.busy.add(name)
        bench.policy.remove(bench.state(name))
    assert bench.drop() == []
    bench.busy.clear()
    for name in ("abcdefgh", "xy"):
        bench.policy.add(bench.state(name))
    bench.store("pq")
    assert bench.drop(3) == ["p", "pq", "pq*"]


def test_a_fork_that_comes_too_late_goes_first() -> None:
    bench = Bench()
    bench.visit("ab")
    bench.visit("abcd")
    bench.store("abcd")
    bench.visit("abcd", resumed=4)
    spot = bench.policy._spots["t"]["ab"]
    assert spot.point is None  # It was not offered, and nothing was there.
    late = Object("ab", boundary=True)
    bench.held["ab"].append(late)
    bench.policy.add(late)
    assert bench.drop(2) == ["ab*", "abcd*"]


def test_a_checkpoint_that_a_way_passes_is_a_point() -> None:
    bench = Bench()
    bench.store("ab")
    bench.visit("abcd")
    bench.store("abcd")
    assert bench.policy._spots["t"]["ab"].point is not None
    assert bench.drop(3) == ["abcd*", "abcd", "abc"]


def test_the_unwanted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "UNWANTED_MAX", 2)
    bench = Bench()
    bench.take("abcd")
    bench.drop()
    assert list(bench.policy._unwanted) == [Place("t", "ab", False), Place("t", "a", False)]


def test_digests_that_somebody_made_up() -> None:
    bench = Bench()
    bench.take("abc")
    policy = bench.policy
    policy.visit(Visit(TREE, ["z", "ab", "q"], 3, (1, 3), 5.0), 0)  # Known elsewhere.
    policy.check()
    policy.visit(Visit(TREE, ["p", "q", "p"], 3, (2, 3), 5.0), 0)  # Twice.
    policy.check()
    assert set(policy._spots["t"]) == {"a", "ab", "abc", "z", "p", "q"}
    policy.visit(Visit(TREE, ["w"], 1, (), 5.0), 0)
    policy.check()


words = st.text("ab", min_size=1, max_size=5)
steps = st.lists(st.tuples(st.sampled_from("vsdrub"), words, st.integers(0, 3)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from(["point-lru", "index", "auto"]))
def test_whatever_happens_the_sums_are_right(
    history: list[tuple[str, str, int]], policy: str
) -> None:
    """Items come, go, are used and let go of in any order; each is offered while it may go."""
    bench = Bench(policy)
    used: list[Object] = []
    for what, name, number in history:
        match what:
            case "v":
                bench.visit(name, min(number, len(name)), min(number // 2, len(name)))
            case "s":
                bench.store(name)
            case "d":
                bench.drop(number)
            case "r" if len(bench.policy):
                item = list(bench.policy)[number % len(bench.policy)]
                bench.policy.remove(item)
                bench.held[item.name].remove(item)
            case "u" if len(bench.policy):
                item = list(bench.policy)[number % len(bench.policy)]
                bench.policy.remove(item)
                bench.busy.add(item.name)
                used.append(item)
            case _ if used:
                item = used.pop()
                bench.busy.discard(item.name)
                bench.policy.add(item)
        bench.policy.check()
    bench.busy.clear()
    for item in used:
        bench.policy.add(item)
    count = len(bench.policy)
    for block in {item.name for item in bench.policy}:
        bench.held.setdefault(block, [])
    for item in bench.policy:
        if item not in bench.held[item.name]:
            bench.held[item.name].append(item)
    assert len(bench.drop()) == count
    assert len(bench.policy) == 0
