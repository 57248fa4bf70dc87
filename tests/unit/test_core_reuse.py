"""What is learned of reuse: hazards, their index, and the ghosts that teach."""

import itertools
import math
import random

import pytest

from tiercache.core.cost import EVEN
from tiercache.core.policy import reuse as module
from tiercache.core.policy.hazards import (
    BUCKETS,
    FIRST_S,
    Hazards,
    _smoothed,
    bucket_end,
    bucket_of,
)
from tiercache.core.policy.reuse import RENEW_VISITS, Ghost, Reuse
from tiercache.core.policy.visits import Shape, Tree, Visit

TREE = Tree("t", Shape(1024, 1.0, 1.0, EVEN))
OTHER = Tree("o", TREE.shape)


def visit(names: str, now: float, *, usable: int = 99, tree: Tree = TREE, fork: int = 0) -> Visit:
    path = [names[: depth + 1] for depth in range(len(names))]
    ends = tuple(sorted({fork, len(path)} - {0}))
    return Visit(tree, path, usable, ends, now)


def test_buckets_grow_by_a_quarter_of_an_octave() -> None:
    assert [bucket_of(age) for age in (0.0, 0.49, 0.5, 0.59, 0.6, 1.0)] == [0, 0, 1, 1, 2, 5]
    assert bucket_of(1e12) == BUCKETS - 1
    for age in (0.1, 3.0, 77.0, 5000.0):
        bucket = bucket_of(age)
        assert age < bucket_end(bucket)
        assert bucket == 0 or age >= bucket_end(bucket - 1)
    assert bucket_end(0) == FIRST_S


def test_what_nothing_is_known_of_is_used_ever_less() -> None:
    """A constant chance for each octave: the rate falls as one over the age."""
    hazards = Hazards((4, 28))
    rates = [hazards.index(3, age) for age in (1.0, 10.0, 100.0, 1000.0)]
    assert rates == sorted(rates, reverse=True)
    assert 5 < rates[0] / rates[1] < 20
    assert hazards.index(3, 0.25) > 0
    assert hazards.index(3, 1e9) == hazards.index(3, 1e10)


def test_the_best_horizon_is_found() -> None:
    """By the definition: the largest ratio of chance to time over all horizons."""
    hazards = Hazards((1, 1))
    chance = random.Random(3)
    for _ in range(400):
        hazards.used(0, bucket_of(chance.lognormvariate(3, 1)))
    for bucket in range(BUCKETS - 1):
        hazards.reached(0)[bucket] += 5
    hazards.renew()
    learned = hazards._hazards(0)
    edges = [0.0, *(bucket_end(bucket) for bucket in range(BUCKETS))]
    for bucket in (0, 10, 30, 50, 70):
        best, alive, gained, time = 0.0, 1.0, 0.0, 0.0
        for later in range(bucket, BUCKETS):
            hazard = learned[later]
            time += alive * (edges[later + 1] - edges[later]) * (1 - hazard / 2)
            gained += alive * hazard
            alive *= 1 - hazard
            best = max(best, gained / time)
        assert math.isclose(hazards.index(0, edges[bucket]), best, rel_tol=1e-9)


def test_it_waits_for_the_peak_and_gives_up_after_it() -> None:
    hazards = Hazards((1, 1))
    for _ in range(2000):
        hazards.used(0, bucket_of(60.0))
    for bucket in range(bucket_of(60.0)):
        hazards.reached(0)[bucket] += 2000
    hazards.renew()
    before, near, after = (hazards.index(0, age) for age in (1.0, 50.0, 500.0))
    assert near > before > after


def test_counts_are_taken_together_with_their_neighbours() -> None:
    """What one bucket counted is half there, and a quarter on either side; nothing is lost at the ends."""
    assert _smoothed([0.0, 0.0, 4.0, 0.0, 0.0]) == [0.0, 1.0, 2.0, 1.0, 0.0]
    assert _smoothed([4.0, 0.0, 0.0]) == [3.0, 1.0, 0.0]
    assert _smoothed([0.0, 0.0, 8.0]) == [0.0, 2.0, 6.0]
    hazards = Hazards((1, 1))
    middle = bucket_of(60.0)
    for _ in range(500):
        hazards.used(0, middle)
    for bucket in range(BUCKETS):
        hazards.reached(0)[bucket] += 500
    hazards.renew()
    learned = hazards._hazards(0)
    low, high = learned[middle - 1], learned[middle + 1]
    assert math.isclose(low, high, rel_tol=1e-6)
    assert 5 * learned[middle - 2] < low < learned[middle]


def test_a_class_with_few_counts_leans_on_its_like() -> None:
    hazards = Hazards((4, 28))
    for _ in range(500):
        hazards.used(1, bucket_of(10.0))
        hazards.reached(28)[bucket_of(10.0)] += 1
    hazards.renew()
    unknown = hazards.index(2, 9.0)  # Of the same kind as class 1.
    assert hazards.index(28, 9.0) < unknown <= hazards.index(1, 9.0)
    assert hazards.index(28 * 5, 9.0) < unknown  # Of a kind nothing is known of.
    assert hazards.index(28, 9.0) < hazards.index(5, 9.0) <= unknown  # Likewise, but less alike.


def kind_of(ghost: Ghost) -> int:
    return ghost.recent // 28


def pause_of(number: int) -> int:
    return number // 4 % 7


def test_nobody_waits_for_what_is_after_the_last_bucket() -> None:
    """What is remembered does not grow with time."""
    reuse = Reuse(10)
    for number in range(200):
        reuse.visit(visit(chr(1000 + number), number * 20_000.0))
    assert len(reuse) == 10
    assert sum(map(len, reuse._waiting)) <= 10


def test_kinds_of_boundaries() -> None:
    reuse = Reuse(100)
    first = visit("abcd", 0.0)
    reuse.visit(first)
    ghost = reuse.ghost(first, 4)
    assert (kind_of(ghost), ghost.turn, ghost.uses) == (module.FIRST, 0, 0)
    second = visit("abcdefg", 100.0)
    reuse.visit(second)
    assert (kind_of(ghost), ghost.uses, ghost.last) == (module.CONTINUED, 1, 100.0)
    kinds = [kind_of(reuse.ghost(second, 7))]
    now = 100.0
    names = "abcdefg"
    for letter in "hijk":
        names += letter
        now += 10.0
        reuse.visit(visit(names, now))
        kinds.append(kind_of(reuse.ghost(visit(names, now), len(names))))
    early, later = module.EARLY, module.LATER
    assert kinds == [early, early, later, later, later]


def test_a_short_start_is_shared_and_then_popular() -> None:
    reuse = Reuse(100)
    root = visit("ab", 0.0)
    reuse.visit(root)
    ghost = reuse.ghost(root, 2)
    seen = []
    for number in range(40):
        reuse.visit(visit("ab" + chr(200 + number) * 8, number + 1.0))
        seen.append(kind_of(ghost))
    assert seen[0] == module.SHARED
    assert seen[1:3] == [module.JUNCTION] * 2
    assert set(seen[3:7]) == {module.POPULAR}
    assert set(seen[7:31]) == {module.POPULAR + 1}
    assert set(seen[31:]) == {module.POPULAR + 2}


def test_turns_that_end_in_the_same_block_end_turns() -> None:
    """What is added is less than a block: the boundary is still what will be continued."""
    reuse = Reuse(100)
    first = visit("abcd", 0.0)
    reuse.visit(first)
    ghost = reuse.ghost(first, 4)
    seen = []
    for number in range(1, 4):
        reuse.visit(visit("abcd", 10.0 * number))
        seen.append((kind_of(ghost), ghost.turn, ghost.uses))
    early, later = module.EARLY, module.LATER
    assert seen == [(early, 1, 1), (early, 2, 2), (later, 3, 3)]
    assert math.isclose(ghost.pause, 10.0)
    reuse.visit(visit("abcd", 40.0))  # So often, it is something else.
    assert (kind_of(ghost), ghost.uses) == (module.POPULAR, 4)


def test_after_turns_in_the_same_block_a_boundary_is_continued_once() -> None:
    reuse = Reuse(100)
    reuse.visit(visit("abcd", 0.0))
    ghost = reuse.ghost(visit("abcd", 0.0), 4)
    reuse.visit(visit("abcd", 10.0))
    longer = visit("abcde", 20.0)
    reuse.visit(longer)
    assert (kind_of(ghost), ghost.uses) == (module.CONTINUED, 2)
    after = reuse.ghost(longer, 5)
    assert (kind_of(after), after.turn) == (module.EARLY, 2)
    reuse.visit(visit("abcd", 30.0))  # Once continued, the same prompt is no turn.
    assert (kind_of(ghost), ghost.uses) == (module.JUNCTION, 3)


def test_a_fork_is_a_junction() -> None:
    reuse = Reuse(100)
    forked = visit("abcdef", 0.0, fork=3)
    reuse.visit(forked)
    assert kind_of(reuse.ghost(forked, 3)) == module.JUNCTION
    assert kind_of(reuse.ghost(forked, 6)) == module.FIRST
    late = reuse.ghost(forked, 2)  # Nobody was told of it.
    assert kind_of(late) == module.JUNCTION
    assert reuse.ghost(forked, 2) is late


def test_pauses_are_remembered_and_averaged() -> None:
    reuse = Reuse(100)
    reuse.visit(visit("ab", 0.0))
    reuse.visit(visit("abc", 10.0))
    third = reuse.ghost(visit("abc", 10.0), 3)
    assert third.pause == 10.0
    assert (pause_of(third.recent), pause_of(third.steady)) == (2, 2)
    reuse.visit(visit("abcd", 10.0 + 640.0))
    fourth = reuse.ghost(visit("abcd", 650.0), 4)
    assert math.isclose(fourth.pause, 640**0.3 * 10**0.7)
    assert (pause_of(fourth.recent), pause_of(fourth.steady)) == (5, 3)
    reuse.visit(visit("zz", 700.0))
    assert pause_of(reuse.ghost(visit("zz", 700.0), 2).recent) == 0


def test_only_what_a_request_could_use_is_used() -> None:
    reuse = Reuse(100)
    reuse.visit(visit("abc", 0.0))
    reuse.visit(visit("abc", 5.0, usable=2))
    assert reuse.ghost(visit("abc", 5.0), 3).uses == 0


def test_trees_do_not_meet() -> None:
    reuse = Reuse(100)
    reuse.visit(visit("abc", 0.0))
    reuse.visit(visit("abc", 5.0, tree=OTHER))
    assert len(reuse) == 2
    assert reuse.ghost(visit("abc", 5.0), 3).uses == 0
    reuse.forget("t")
    reuse.forget("t")
    assert len(reuse) == 1


def test_ghosts_are_bounded_and_the_fullest_tree_gives() -> None:
    reuse = Reuse(3)
    reuse.visit(visit("z", 0.0, tree=OTHER))
    for number, name in enumerate("abcde"):
        reuse.visit(visit(name, float(number)))
    assert len(reuse) == 3
    reuse.visit(visit("z", 9.0, tree=OTHER))
    assert reuse.ghost(visit("z", 9.0, tree=OTHER), 1).uses == 1
    reuse.visit(visit("e", 10.0))
    assert reuse.ghost(visit("e", 10.0), 1).uses == 1
    assert len(reuse) == 3


def test_it_learns_how_fast_conversations_go() -> None:
    """Turns come after 20 seconds, one-off prompts never again."""
    reuse = Reuse(10_000)
    now = 0.0
    letters = itertools.count(1000)
    while reuse._visits < 6 * RENEW_VISITS:
        now += 1.0
        talk = chr(next(letters))
        for turn in range(1, 4):
            reuse.visit(visit(talk * turn * 2, now + 20.0 * turn))
        reuse.visit(visit(chr(next(letters)) * 30, now + 61.0))
        now += 61.0
    continued = visit(chr(next(letters)) * 2, now)
    once = visit(chr(next(letters)) * 30, now)
    reuse.visit(continued)
    reuse.visit(once)
    rates = [reuse.rate(reuse.ghost(v, len(v.path)), now + 15.0) for v in (continued, once)]
    assert rates[0] > 5 * rates[1]
    assert reuse.rate(reuse.ghost(once, 30), now - 5.0) > 0  # Asked for a time before.


def test_what_a_request_wrote_is_what_will_be_continued() -> None:
    reuse = Reuse(100)
    prompt = visit("abcd", 0.0)
    reuse.visit(prompt)
    longer = visit("abcdef", 3.0)
    reuse.grow(longer, 4)
    before, after = reuse.ghost(prompt, 4), reuse.ghost(longer, 6)
    assert (kind_of(before), kind_of(after)) == (module.CONTINUED, module.FIRST)
    assert after.talk == before.talk
    reuse.grow(longer, 4)  # Again: nothing new.
    assert len(reuse) == 2
    reuse.visit(visit("abcdefgh", 13.0))
    assert (before.uses, after.uses) == (0, 1)
    reuse.grow(visit("xyz", 20.0), 0)  # Without a prompt.
    assert kind_of(reuse.ghost(visit("xyz", 20.0), 3)) == module.FIRST
    reuse.grow(visit("pqr", 20.0), 2)  # Its prompt's end is not known any more.
    assert len(reuse) == 5


def test_conversations_have_numbers() -> None:
    reuse = Reuse(100)
    assert reuse.visit(visit("abc", 0.0)) == 1
    assert reuse.visit(visit("xyz", 0.0)) == 2
    assert reuse.visit(visit("abcd", 1.0)) == 1
    assert reuse.visit(visit("ab" + "q" * 9, 2.0)) == 3


@pytest.mark.parametrize("name", ["FIRST", "LATER"])
def test_kinds_are_few(name: str) -> None:
    assert 0 <= getattr(module, name) < module.POPULAR
