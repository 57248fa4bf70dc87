"""What every eviction policy must do. Subclass, say how to make one, and pytest runs it all.

class TestMyPolicy(EvictionContract):
    def make(self) -> Eviction[Thing]: ...
"""

import random

import pytest

from tiercache.core.events import Capture
from tiercache.core.policy.base import Admission, Checkpoints, Eviction, Prompt, Sort, Stop


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


class AdmissionContract:
    """What an `Admission` promises."""

    def make(self) -> Admission:
        """Return a policy."""
        raise NotImplementedError

    def test_more_sights_never_earn_less(self) -> None:
        """What earned its place keeps it."""
        policy = self.make()
        earned = [policy.earned(sights) for sights in range(20)]
        assert earned == sorted(earned)


class CheckpointsContract:
    """What a `Checkpoints` promises."""

    def make(self) -> Checkpoints:
        """Return a policy."""
        raise NotImplementedError

    def prompts(self) -> list[tuple[Prompt, Capture]]:
        """Return prompts of many shapes, and what their engines can capture."""
        chance = random.Random(11)
        found = []
        for _ in range(400):
            block = chance.choice((1, 4, 16))
            tokens = chance.randint(1, 300)
            reached = chance.randint(0, tokens // block) * block
            fork = chance.randint(0, reached // block) * block
            ends = frozenset(end for end in (tokens - 1, tokens) if chance.random() < 0.5)
            resumed = chance.choice((0, chance.randint(0, tokens)))
            prompt = Prompt(tokens, resumed, block, reached, fork, ends, chance.randint(0, 9))
            capture = Capture(chance.choice((-3, 0, 8, 50)), chance.choice((-3, 0, 1, 4, 16, 64)))
            found.append((prompt, capture))
        return found

    def test_places_are_still_to_be_computed(self) -> None:
        """Each once, ascending, deeper than what is resumed."""
        for prompt, capture in self.prompts():
            places = self.make().place(prompt, capture)
            assert places == sorted(set(places))
            assert all(prompt.resumed < end <= prompt.tokens for end in places)

    def test_places_are_within_the_engine_s_means(self) -> None:
        """Multiples of the grain, or ends of chunks and of the prompt."""
        for prompt, capture in self.prompts():
            for end in self.make().place(prompt, capture):
                if capture.grain >= 1:
                    assert end % capture.grain == 0
                elif end not in {prompt.tokens - 1, prompt.tokens}:
                    assert capture.chunk_tokens >= 1
                    assert end % capture.chunk_tokens == 0

    def test_the_same_question_has_the_same_answer(self) -> None:
        """A policy remembers nothing: histories can be replayed."""
        policy = self.make()
        for prompt, capture in self.prompts():
            assert policy.place(prompt, capture) == self.make().place(prompt, capture)

    def test_a_fork_is_captured(self) -> None:
        """Whatever else a policy wants: where requests part, a third one resumes."""
        prompt = Prompt(100, 0, 16, reached=48, fork=48)
        assert 48 in self.make().place(prompt, Capture(0, 16))
        assert self.make().keeps(Stop(48, Sort.FORK, 2, last=False))

    def test_more_sights_never_earn_less(self) -> None:
        """What is kept at one sight is kept at two."""
        policy = self.make()
        for sort in Sort:
            for last in (True, False):
                kept = [policy.keeps(Stop(96, sort, sights, last)) for sights in range(1, 9)]
                assert kept == sorted(kept)
