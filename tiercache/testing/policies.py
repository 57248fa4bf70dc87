"""What every eviction policy must do. Subclass, say how to make one, and pytest runs it all.

class TestMyPolicy(EvictionContract):
    def make(self) -> Eviction[Thing]: ...
"""

import random

import pytest

from tiercache.core.policy.base import Eviction


class Thing:
    """Something to be dropped: equal to itself only, as the core's objects are."""


class EvictionContract:
    """What an `Eviction` promises."""

    def make(self) -> Eviction[Thing]:
        """Return an empty policy."""
        raise NotImplementedError

    def filled(self, count: int) -> tuple[Eviction[Thing], list[Thing]]:
        """Return a policy with that many things, and the things in the order they were added."""
        policy, things = self.make(), [Thing() for _ in range(count)]
        for thing in things:
            policy.add(thing)
        return policy, things

    def test_starts_empty(self) -> None:
        """Nothing is in it, and nothing can be dropped."""
        policy = self.make()
        assert (len(policy), list(policy), list(policy.victims())) == (0, [], [])
        assert Thing() not in policy

    def test_holds_what_was_added(self) -> None:
        """Each thing once, whatever the order."""
        policy, things = self.filled(5)
        assert len(policy) == 5
        assert set(policy) == set(things)
        assert len(list(policy)) == 5
        assert all(thing in policy for thing in things)

    def test_forgets_what_was_removed(self) -> None:
        """A removed thing is neither found nor offered, and may come back."""
        policy, things = self.filled(3)
        policy.remove(things[1])
        assert things[1] not in policy
        assert set(policy) == {things[0], things[2]}
        policy.add(things[1])
        assert set(policy) == set(things)

    def test_removing_a_stranger_is_a_bug(self) -> None:
        """The caller guarantees that what it removes is there."""
        policy, _ = self.filled(2)
        with pytest.raises(KeyError):
            policy.remove(Thing())
        assert len(policy) == 2

    def test_victims_are_members_and_go_once(self) -> None:
        """The caller removes what it drops while iterating; then it is not offered again."""
        policy, things = self.filled(10)
        dropped = []
        for victim in policy.victims():
            assert victim in policy
            policy.remove(victim)
            dropped.append(victim)
        assert len(set(dropped)) == len(dropped)
        assert set(dropped) | set(policy) == set(things)

    def test_stopping_early_drops_nothing_more(self) -> None:
        """Whoever stops asking has changed nothing else."""
        policy, _ = self.filled(10)
        for victim in policy.victims():
            policy.remove(victim)
            break
        assert len(policy) in {9, 10}

    def test_the_same_history_gives_the_same_victims(self) -> None:
        """A policy is deterministic: histories can be replayed."""

        def history() -> list[int]:
            chance = random.Random(7)
            policy, things = self.filled(30)
            numbers = {thing: number for number, thing in enumerate(things)}
            for _ in range(200):
                thing = chance.choice(things)
                if thing in policy:
                    policy.remove(thing)
                else:
                    policy.add(thing)
            order = []
            for victim in policy.victims():
                policy.remove(victim)
                order.append(numbers[victim])
            return order

        assert history() == history()
