"""Our policies keep the contract that is shipped for everybody's, and do what their names say."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.events import Capture
from tiercache.core.policy.admission import Eager, SecondSight
from tiercache.core.policy.base import Eviction
from tiercache.core.policy.checkpoints import ChunkEnds
from tiercache.core.policy.lru import Lru
from tiercache.core.policy.noop import KeepAll
from tiercache.testing.policies import EvictionContract, Thing


class TestLru(EvictionContract):
    def make(self) -> Eviction[Thing]:
        return Lru()

    def test_what_was_let_go_of_longest_ago_goes_first(self) -> None:
        policy, things = self.filled(4)
        policy.remove(things[0])
        policy.add(things[0])  # Used again, and let go of again.
        order = []
        for victim in policy.victims():
            policy.remove(victim)
            order.append(things.index(victim))
        assert order == [1, 2, 3, 0]
        assert list(policy) == []

    def test_the_cost_of_a_victim_does_not_grow(self) -> None:
        policy, things = self.filled(200_000)
        started = time.perf_counter()
        for victim in policy.victims():
            policy.remove(victim)
        assert time.perf_counter() - started < 5.0  # Looking from the start each time takes hours.
        assert len(things) == 200_000


class TestKeepAll(EvictionContract):
    def make(self) -> Eviction[Thing]:
        return KeepAll()

    def test_nothing_ever_goes(self) -> None:
        policy, _ = self.filled(3)
        assert list(policy.victims()) == []


@pytest.mark.parametrize(("sights", "earned"), [(0, False), (1, False), (2, True), (9, True)])
def test_the_second_sight_earns_a_place(sights: int, *, earned: bool) -> None:
    assert SecondSight().earned(sights) is earned
    assert Eager().earned(sights)


def place(
    tokens: int, resumed: int = 0, chunk: int = 0, grain: int = 1, limit: int = 4
) -> list[int]:
    return ChunkEnds(limit).place(tokens, resumed, Capture(chunk, grain))


@pytest.mark.parametrize(
    ("placed", "expected"),
    [
        (place(100), [99, 100]),  # For the identical prompt, and for its continuation.
        (place(100, grain=64), [64]),
        (place(128, grain=64), [64, 128]),
        (place(129, grain=64), [128]),
        (place(63, grain=64), []),
        (place(1), [1]),
        (place(100, resumed=99), [100]),
        (place(100, resumed=100), []),
        (place(100, chunk=30), [30, 60, 90, 99, 100]),
        (place(1000, chunk=100), [700, 800, 900, 999, 1000]),  # The last four.
        (place(1000, chunk=100, limit=0), [999, 1000]),
        (place(100, resumed=60, chunk=30), [90, 99, 100]),
        (place(100, chunk=30, grain=20), [60, 80, 100]),  # 30 and 90 cannot be captured.
        (place(100, chunk=-5, grain=-5), [99, 100]),
    ],
)
def test_checkpoints(placed: list[int], expected: list[int]) -> None:
    assert placed == expected


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(-3, 700), st.integers(-3, 200))
def test_checkpoints_are_within_means(tokens: int, resumed: int, chunk: int, grain: int) -> None:
    found = place(tokens, resumed, chunk, grain)
    assert found == sorted(set(found))
    assert len(found) <= 4 + 2
    assert all(resumed < end <= tokens and end % max(grain, 1) == 0 for end in found)
