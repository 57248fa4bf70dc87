"""Who leaves a full device, and what is known of whom."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tiercache.client import Scope
from tiercache.device import (
    PLACEMENTS,
    CostAware,
    Entry,
    Index,
    LeastRecent,
    Placement,
    Policies,
    Prompt,
    Worth,
    placement_named,
)
from tiercache.errors import LayoutError
from tiercache.state import Chain
from tiercache.state.keys import chain_scheme
from tiercache.testing import devices

NAMESPACE = replace(devices.NAMESPACE, chain=chain_scheme(8))
NAMES = tuple(bytes([number]) * 64 for number in range(6))


def worths(*tokens: int, nbytes: int = 10) -> Callable[[bytes], Worth]:
    table = {name: Worth(count, nbytes) for name, count in zip(NAMES, tokens, strict=False)}
    return lambda name: table[name]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_every_placement_promises(name: str) -> None:
    policy, source = placement_named(name), random.Random(1)
    known: set[bytes] = set()
    worth = worths(*range(6))
    for _ in range(2_000):
        one = source.choice(NAMES)
        if source.random() < 0.5:
            policy.used(one)
            known.add(one)
        else:
            policy.gone(one)  # Whether it is known or not.
            known.discard(one)
        spared = source.sample(NAMES, 2)
        found = policy.victim(worth, spared)
        assert found is None or found in known - set(spared)
        assert found == policy.victim(worth, spared)
        if name == "pinned":
            assert found is None
        else:
            assert (found is None) == (not known - set(spared))


def drained(policy: Placement, worth: Callable[[bytes], Worth]) -> list[int]:
    order = []
    while (found := policy.victim(worth)) is not None:
        policy.gone(found)
        order.append(NAMES.index(found))
    return order


def test_the_least_recent_goes_whatever_it_is_worth() -> None:
    policy = LeastRecent()
    for name in (*NAMES[:4], NAMES[0]):
        policy.used(name)
    assert drained(policy, worths(1, 1_000, 5, 9)) == [1, 2, 3, 0]


def test_the_cheapest_to_compute_again_goes_first() -> None:
    policy = CostAware()
    for name in NAMES[:4]:
        policy.used(name)
    assert drained(policy, worths(30, 1_000, 5, 30)) == [2, 0, 3, 1]


def test_of_equal_tokens_the_one_that_frees_more_goes_first() -> None:
    policy = CostAware()
    for name in NAMES[:2]:
        policy.used(name)
    assert policy.victim(lambda name: Worth(8, 100 if name == NAMES[1] else 10)) == NAMES[1]


def test_what_is_dear_and_never_used_goes_in_the_end() -> None:
    """The level rises with each that goes, so that new cheap ones overtake it at some time."""
    policy, worth = CostAware(), worths(50, *[10] * 5)
    policy.used(NAMES[0])
    gone = []
    for step in range(20):
        policy.used(NAMES[1 + step % 3])
        found = policy.victim(worth)
        assert found is not None
        policy.gone(found)
        gone.append(NAMES.index(found))
        if found == NAMES[0]:
            break
    assert gone[-1] == 0
    assert gone[:-1] == [1, 2, 3, 1]


def test_a_checkpoint_that_is_used_counts_from_the_level_of_now() -> None:
    policy, worth = CostAware(), worths(20, 20, 20)
    policy.used(NAMES[0])
    policy.used(NAMES[1])
    policy.gone(NAMES[0])  # It was no victim: the level stays.
    policy.used(NAMES[2])
    assert policy.victim(worth) == NAMES[1]
    policy.gone(NAMES[1])
    policy.used(NAMES[0])
    assert policy.victim(worth) == NAMES[2]


def test_a_policy_is_chosen_by_name() -> None:
    found = Policies.named("cost_aware")
    assert isinstance(found.pool, CostAware)
    assert found.pool is not found.active
    with pytest.raises(ValueError, match="no placement 'best'; there are least_recent, cost_aware"):
        Policies.named("best")


# --- the index


def test_a_checkpoint_is_worth_what_lies_between_it_and_the_next() -> None:
    index: Index[str] = Index(NAMESPACE)
    prompt, other = Prompt("r", Chain(range(64), 8)), Prompt("r", Chain([*range(20), *[9] * 44], 8))
    foreign = Prompt("r", Chain(range(64), 8), Scope(salt="x"))

    def add(held: str, whose: Prompt, tokens: int) -> bytes:
        name = index.name(whose, tokens)
        index.add(name, Entry(held, whose, tokens))
        return name

    deep = add("deep", prompt, 60)
    assert index.marginal(deep) == 60
    low = add("low", prompt, 16)  # Comes later, and lies below.
    strange = add("strange", foreign, 40)
    branch = add("branch", other, 48)
    assert [index.marginal(name) for name in (deep, low, strange, branch)] == [44, 16, 40, 32]
    middle = add("middle", prompt, 40)
    assert [index.marginal(name) for name in (deep, middle, branch)] == [20, 24, 32]
    index.remove(low)
    assert [index.marginal(name) for name in (deep, middle, branch)] == [20, 40, 48]
    index.remove(middle)
    assert index.marginal(deep) == 60
    assert [entry.held for _, entry in index.prefixes(prompt, 64)] == ["deep"]
    assert [entry.held for _, entry in index.prefixes(prompt, 59)] == []
    assert [entry.held for _, entry in index.prefixes(foreign, 64)] == ["strange"]
    for name in (deep, strange, branch):
        assert index.remove(name) is not None
        assert index.remove(name) is None
    books = (index._depths, index._above, index._base, index._names)
    assert not any(len(book) for book in books)


def test_a_chain_of_other_blocks_has_no_name_here() -> None:
    index: Index[str] = Index(NAMESPACE)
    with pytest.raises(LayoutError, match=r"blocks of 16 tokens, under '.*/8'"):
        index.name(Prompt("r", Chain(range(64), 16)), 16)


def test_the_tree_is_right_after_any_history() -> None:
    source = random.Random(5)
    texts = [[*range(cut), *[cut] * (40 - cut)] for cut in (40, 30, 16, 9)]
    scopes = (Scope(), Scope(lora="l"))
    for _ in range(30):
        index: Index[int] = Index(NAMESPACE)
        for step in range(60):
            tokens = source.randint(1, 40)
            text = source.choice(texts)[: source.randint(tokens, 40)]
            prompt = Prompt("r", Chain(text, 8), source.choice(scopes))
            name = index.name(prompt, tokens)
            if index.get(name) is None:
                index.add(name, Entry(step, prompt, tokens))
            else:
                index.remove(name)
            for each in index:
                entry = index.get(each)
                assert entry is not None
                below = next(index.prefixes(entry.prompt, entry.tokens - 1), None)
                expected = entry.tokens - (0 if below is None else below[1].tokens)
                assert index.marginal(each) == expected
                assert index.name_of(entry.held) == each
