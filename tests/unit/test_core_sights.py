"""Sights: one per request, bounded, no namespace makes another forget; and where requests part."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.sights import Request, Sights, Trail

A, B = b"namespace a", b"namespace b"


def digests(start: int, count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(start, start + count)]


def of(namespace: bytes, name: str = "r") -> Request:
    return (namespace, "engine", name)


def test_they_are_counted_by_namespace() -> None:
    sights = Sights(100, 100)
    (one,) = digests(0, 1)
    sights.see(of(A), [one])
    sights.see(of(A), [one])
    sights.see(of(B), [one])
    assert (sights.count(A, one), sights.count(B, one), len(sights)) == (2, 1, 2)
    assert sights.count(b"unheard of", one) == 0
    sights.forget(A)
    assert (sights.count(A, one), sights.count(B, one), len(sights)) == (0, 1, 1)
    sights.forget(b"unheard of")
    sights.check()


def test_a_request_is_new_once() -> None:
    sights = Sights(100, 2)
    assert sights.first_time(of(A, "r1"))
    assert not sights.first_time(of(A, "r1"))
    assert sights.first_time(of(B, "r1"))
    assert sights.first_time((A, "other", "r1"))  # The third: the first is forgotten.
    assert sights.first_time(of(A, "r1"))
    sights.check()


def test_names_do_not_run_into_each_other() -> None:
    sights = Sights(100, 100)
    assert sights.first_time((A, "a/b", "c"))
    assert sights.first_time((A, "a", "b/c"))


def test_the_oldest_are_forgotten_first_and_use_keeps_them() -> None:
    sights = Sights(3, 100)
    old, used, new, newest = digests(0, 4)
    sights.see(of(A), [old, used, new])
    sights.see(of(A), [old])
    sights.see(of(A), [newest])
    assert [sights.count(A, digest) for digest in (old, used, new, newest)] == [2, 0, 1, 1]
    sights.see_beyond(of(A, "other"), [new])
    sights.see_beyond(of(A), [used])
    assert [sights.count(A, digest) for digest in (old, used, new, newest)] == [0, 1, 2, 1]
    assert len(sights) == 3
    sights.check()


def test_a_busy_namespace_does_not_make_a_quiet_one_forget() -> None:
    sights = Sights(100, 100)
    quiet = digests(0, 10)
    sights.see(of(A), quiet)
    for start in range(100, 2000, 50):
        sights.see(of(B), digests(start, 50))
    assert all(sights.count(A, digest) == 1 for digest in quiet)
    assert len(sights) == 100
    sights.check()


def test_a_quiet_namespace_is_seen_though_another_fills_it_all() -> None:
    sights = Sights(100, 100)
    sights.see(of(A), digests(0, 100))
    (one,) = digests(500, 1)
    sights.see(of(B), [one])
    assert (sights.count(B, one), len(sights)) == (1, 100)


def test_one_chain_longer_than_all_that_is_remembered() -> None:
    sights = Sights(10, 100)
    sights.see(of(A), digests(0, 5))
    sights.see(of(B), digests(100, 50))
    assert len(sights) == 10
    sights.check()


def test_what_is_no_block_of_a_prompt_counts_once_for_each_request() -> None:
    sights = Sights(100, 100)
    tail, other = digests(0, 2)
    for _ in range(3):
        sights.see_beyond(of(A, "r1"), [tail, tail])
    assert sights.count(A, tail) == 1
    sights.see_beyond(of(A, "r2"), [tail])
    sights.see_beyond(of(A, "r2"), [])
    assert sights.count(A, tail) == 2
    sights.see(of(A, "r3"), [tail, other])
    sights.see_beyond(of(A, "r3"), [tail, other])
    assert [sights.count(A, digest) for digest in (tail, other)] == [3, 1]
    assert len(sights) == 2
    sights.check()


# --- where requests part


P, Q, X, Y, Z = digests(1000, 5)


def test_prompts_part_behind_the_deepest_block_that_they_share() -> None:
    sights = Sights(100, 100)
    assert sights.see(of(A, "1"), [P, Q, X]) == Trail(0, 0)
    assert sights.see(of(A, "2"), [P, Q, Y]) == Trail(2, 2)
    assert sights.see(of(A, "3"), [P, Q, Z]) == Trail(2, 2)
    assert sights.see(of(A, "4"), [P, digests(9, 1)[0]]) == Trail(1, 1)
    assert sights.see(of(B, "5"), [P, Q]) == Trail(0, 0)


def test_one_that_goes_on_from_another_s_end_does_not_part_from_it() -> None:
    sights = Sights(100, 100)
    sights.see(of(A, "1"), [P, Q])
    assert sights.see(of(A, "2"), [P, Q, X]) == Trail(2, 0)
    assert sights.see(of(A, "3"), [P, Q, X]) == Trail(3, 0)
    assert sights.see(of(A, "4"), [P, Q]) == Trail(2, 0)  # Nor one that ends on its way.
    assert sights.see(of(A, "5"), [P, Q, Y]) == Trail(2, 2)


def test_a_fork_on_the_way_stays_one() -> None:
    """Where others parted, a further one is likely to part, though this one goes on from an end."""
    sights = Sights(100, 100)
    sights.see(of(A, "1"), [P, X])
    sights.see(of(A, "2"), [P, Y])
    assert sights.see(of(A, "3"), [P, X, Z]) == Trail(2, 1)


@pytest.mark.parametrize(
    ("first", "second", "fork"), [(True, True, 2), (True, False, 0), (False, True, 0)]
)
def test_what_lies_inside_the_last_block_is_a_way_too(
    *, first: bool, second: bool, fork: int
) -> None:
    sights = Sights(100, 100)
    sights.see(of(A, "1"), [P, Q], goes_on=first)
    assert sights.see(of(A, "2"), [P, Q], goes_on=second) == Trail(2, fork)


def test_the_past_of_a_prompt_is_known_though_its_start_is_forgotten() -> None:
    sights = Sights(3, 100)
    sights.see(of(A, "1"), [P, Q, X, Y])
    assert sights.count(A, P) == 0
    assert sights.see(of(A, "2"), [P, Q, X, Z]) == Trail(3, 3)


def test_saving_leaves_the_forks_as_they_are() -> None:
    sights = Sights(100, 100)
    sights.see(of(A, "1"), [P, X])
    sights.see(of(A, "2"), [P, Y])
    sights.see_beyond(of(A, "3"), [P, X])
    assert sights.count(A, P) == 3
    assert sights.see(of(A, "4"), [P]) == Trail(1, 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_trails_are_those_of_a_naive_tree(prompts: list[list[int]]) -> None:
    sights = Sights(10_000, 10_000)
    earlier: list[tuple[int, ...]] = []
    for number, prompt in enumerate(prompts):
        path = [bytes(prompt[:depth]) for depth in range(1, len(prompt) + 1)]
        trail = sights.see(of(A, str(number)), path)
        seen = {one[:depth] for one in earlier for depth in range(1, len(one) + 1)}
        reached = max(
            (d for d in range(1, len(prompt) + 1) if tuple(prompt[:d]) in seen), default=0
        )
        earlier.append(tuple(prompt))
        forked = 0
        for depth in range(1, reached + 1):
            ways = {
                one[depth]
                for one in earlier
                if one[:depth] == tuple(prompt[:depth]) and len(one) > depth
            }
            if len(ways) > 1:
                forked = depth
        assert trail == Trail(reached, forked)
        for depth, digest in enumerate(path, 1):
            count = sum(one[:depth] == tuple(prompt[:depth]) for one in earlier)
            assert sights.count(A, digest) == count
    sights.check()
