"""Sights: one per request, bounded, and no namespace makes another forget."""

import hashlib

from tiercache.core.sights import BEYOND_MAX, Sights

A, B = b"namespace a", b"namespace b"


def digests(start: int, count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(start, start + count)]


def test_they_are_counted_by_namespace() -> None:
    sights = Sights(100, 100)
    (one,) = digests(0, 1)
    sights.see(A, [one])
    sights.see(A, [one])
    sights.see(B, [one])
    assert (sights.count(A, one), sights.count(B, one), len(sights)) == (2, 1, 2)
    assert sights.count(b"unheard of", one) == 0
    sights.forget(A)
    assert (sights.count(A, one), sights.count(B, one), len(sights)) == (0, 1, 1)
    sights.forget(b"unheard of")
    sights.check()


def test_a_request_is_new_once() -> None:
    sights = Sights(100, 2)
    name = (A, "engine", "r1")
    assert sights.first_time(name)
    assert not sights.first_time(name)
    assert sights.first_time((B, "engine", "r1"))
    assert sights.first_time((A, "other", "r1"))  # The third: the first is forgotten.
    assert sights.first_time(name)
    sights.check()


def test_names_do_not_run_into_each_other() -> None:
    sights = Sights(100, 100)
    assert sights.first_time((A, "a/b", "c"))
    assert sights.first_time((A, "a", "b/c"))


def test_the_oldest_are_forgotten_first_and_use_keeps_them() -> None:
    sights = Sights(3, 100)
    old, used, new, newest = digests(0, 4)
    sights.see(A, [old, used, new])
    sights.see(A, [old])
    sights.see(A, [newest])
    assert [sights.count(A, digest) for digest in (old, used, new, newest)] == [2, 0, 1, 1]
    assert len(sights) == 3
    sights.check()


def test_a_busy_namespace_does_not_make_a_quiet_one_forget() -> None:
    sights = Sights(100, 100)
    quiet = digests(0, 10)
    sights.see(A, quiet)
    for start in range(100, 2000, 50):
        sights.see(B, digests(start, 50))
    assert all(sights.count(A, digest) == 1 for digest in quiet)
    assert len(sights) == 100
    sights.check()


def test_a_quiet_namespace_is_seen_though_another_fills_it_all() -> None:
    sights = Sights(100, 100)
    sights.see(A, digests(0, 100))
    (one,) = digests(500, 1)
    sights.see(B, [one])
    assert (sights.count(B, one), len(sights)) == (1, 100)


def test_one_chain_longer_than_all_that_is_remembered() -> None:
    sights = Sights(10, 100)
    sights.see(A, digests(0, 5))
    sights.see(B, digests(100, 50))
    assert len(sights) == 10
    sights.check()


def test_boundaries_inside_blocks_count_once_for_each_request() -> None:
    sights = Sights(100, 100)
    (tail,) = digests(0, 1)
    for _ in range(3):
        sights.see_beyond((A, "engine", "r1"), [tail, tail])
    assert sights.count(A, tail) == 1
    sights.see_beyond((A, "engine", "r2"), [tail])
    assert sights.count(A, tail) == 2
    sights.see_beyond((A, "engine", "r2"), [])
    assert len(sights) == 1
    sights.check()


def test_what_is_remembered_of_a_request_is_bounded() -> None:
    sights = Sights(1000, 2)
    for request in ("r1", "r2", "r3"):
        sights.see_beyond((A, "engine", request), digests(0, 2 * BEYOND_MAX))
    sights.check()
    many = digests(0, 2 * BEYOND_MAX)
    sights.see_beyond((A, "engine", "r3"), many[-BEYOND_MAX:])
    assert {sights.count(A, digest) for digest in many} == {3}
