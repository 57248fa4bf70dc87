"""Our policies keep the contract that is shipped for everybody's, and do what their names say."""

import time

import pytest

from tiercache.core.policy.admission import Eager, SecondSight
from tiercache.core.policy.base import Admission, Checkpoints, Eviction
from tiercache.core.policy.lru import Lru
from tiercache.core.policy.noop import KeepAll
from tiercache.core.policy.pointwise import Place, Pointwise
from tiercache.core.policy.retention import checkpoints_of
from tiercache.core.policy.standing import Standing
from tiercache.testing.policies import (
    AdmissionContract,
    CheckpointsContract,
    EvictionContract,
    Thing,
)


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


class TestPointwise(EvictionContract):
    """Of things that no request passed it is an LRU."""

    def make(self) -> Eviction[Thing]:
        return Pointwise(
            Standing("auto", 1000, 100),
            lambda thing: Place("", id(thing), boundary=False),
            lambda _tree, _digest: False,
        )

    def test_what_was_let_go_of_longest_ago_goes_first(self) -> None:
        policy, things = self.filled(4)
        policy.remove(things[0])
        policy.add(things[0])
        order = []
        for victim in policy.victims():
            policy.remove(victim)
            order.append(things.index(victim))
        assert order == [1, 2, 3, 0]


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


class TestSecondSight(AdmissionContract):
    def make(self) -> Admission:
        return SecondSight()


class TestEager(AdmissionContract):
    def make(self) -> Admission:
        return Eager()


class TestMarconi(CheckpointsContract):
    def make(self) -> Checkpoints:
        return checkpoints_of("marconi")


class TestMarconiWhileDecoding(CheckpointsContract):
    def make(self) -> Checkpoints:
        return checkpoints_of("marconi", decode_interval_tokens=32)


class TestStrict(CheckpointsContract):
    def make(self) -> Checkpoints:
        return checkpoints_of("strict")


class TestMinimal(CheckpointsContract):
    def make(self) -> Checkpoints:
        return checkpoints_of("minimal")


class TestInterval(CheckpointsContract):
    def make(self) -> Checkpoints:
        return checkpoints_of("interval", interval_tokens=24, most=8)


class TestChunkEnds(CheckpointsContract):
    def make(self) -> Checkpoints:
        return checkpoints_of("chunk", most=8)


class TestDense(CheckpointsContract):
    def make(self) -> Checkpoints:
        return checkpoints_of("dense", most=1000)
