"""Choosing a policy, tuning one, and asking what other sizes of memory would save."""

import pytest

from tiercache.core.cost import Work
from tiercache.core.policy import marconi_order
from tiercache.core.policy.marconi_order import ALPHAS, Marconi, Tuner
from tiercache.core.policy.meta import AUTO, CANDIDATES, HYPER, INDEX, RECENT, Choice
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.standing import Standing
from tiercache.core.policy.visits import Shape, Tree, Visit
from tiercache.core.policy.whatif import FACTORS, WhatIf

TREE = Tree("t", Shape(4, 10, 30, Work(1.0, 0.1)))


def visit(names: str, now: float = 0.0) -> Visit:
    path = [names[: depth + 1] for depth in range(len(names))]
    return Visit(TREE, path, len(path), (len(path),), now)


def test_the_choice_follows_who_saves_more() -> None:
    """One prompt comes again and again, between so many others that LRU has always dropped it."""
    reuse = Reuse(1000)
    choice = Choice(40 * 5, reuse, (RECENT, HYPER))
    assert choice.current == RECENT
    for turn in range(60):
        for number in range(8):
            again = number == 0 or (turn == 0 and number == 1)
            asked = visit("a" if again else chr(1000 + turn * 8 + number), float(turn * 8 + number))
            choice.visit(asked, reuse.visit(asked))
    assert choice.current == HYPER
    choice.grow(visit("ab"), 1)
    choice.forget("t")
    assert all(shadow.used == 0 for shadow in choice.shadows.values())


def test_the_choice_looks_at_a_sample() -> None:
    """Where memory holds many checkpoints one conversation of eight will do."""
    reuse = Reuse(1000)
    choice = Choice(1e6, reuse)
    choice.grow(visit("ab"), 8)  # Nobody asked for anything yet.
    for talk in range(32):
        choice.visit(visit(chr(97 + talk)), talk)
        choice.grow(visit(chr(97 + talk) * 2), talk)
    for shadow in choice.shadows.values():
        assert shadow.budget == 1e6 / 8
        assert shadow.canopy.forest.blocks == 2 * 4


def test_a_standing_knows_what_it_follows() -> None:
    plain = Standing(HYPER, 1000, 100)
    assert (plain.current, list(plain.rankings()), plain.choice) == (HYPER, [HYPER], None)
    plain.visit(visit("ab"))
    plain.grow(visit("abc"), 2)
    plain.forget("t")
    assert len(plain.reuse) == 0
    auto = Standing(AUTO, 1000, 100)
    assert auto.current == CANDIDATES[0]
    assert auto.rankings().keys() == set(CANDIDATES)
    auto.visit(visit("ab"))
    auto.grow(visit("abc"), 2)
    assert auto.choice is not None
    assert auto.choice.shadows[INDEX].resident(TREE, visit("abc").path) == 3
    auto.forget("t")
    assert auto.choice.shadows[INDEX].used == 0


def test_alpha_is_tuned_by_replaying_the_first_requests() -> None:
    standing = Standing("marconi", 200, 100)
    (order,) = standing.rankings().values()
    assert isinstance(order, Marconi)
    for turn in range(400):
        standing.evictions = turn // 4
        standing.visit(visit(chr(97 + turn % 9) * (1 + turn % 3), float(turn)))
    assert standing._tuner is not None
    assert standing._tuner.done
    assert order.alpha == standing._tuner.alpha
    assert order.alpha in ALPHAS


@pytest.mark.parametrize(("visits", "blocks"), [(5, 10**6), (10**6, 10)])
def test_the_window_is_bounded(visits: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marconi_order, "WINDOW_VISITS_MAX", visits)
    monkeypatch.setattr(marconi_order, "WINDOW_BLOCKS_MAX", blocks)
    monkeypatch.setattr(marconi_order, "REPLAYS_PER_VISIT", 3)
    tuner = Tuner(Marconi(), 100, Reuse(100))
    for number in range(5 + 2 * len(ALPHAS)):
        assert not tuner.done
        tuner.visit(visit("ab", float(number)), 0)
    assert tuner.done
    tuner.visit(visit("ab"), 0)


# --- what if


def test_more_memory_saves_more() -> None:
    reuse = Reuse(10_000)
    whatif = WhatIf(64 * 60, reuse)
    assert set(whatif.curve().values()) == {0.0}
    whatif.forget()
    for turn in range(40):
        for number in range(120):
            asked = visit(chr(1000 + number) * 2, float(turn * 120 + number))
            whatif.visit(asked, reuse.visit(asked))
    curve = whatif.curve()
    assert list(curve) == [f"{factor:g}" for factor in FACTORS]
    assert 0 < curve["0.5"] < curve["1"] < curve["2"] <= curve["4"] <= 1
    whatif.forget()
    assert all(shadow.used == 0 for shadow in whatif._shadows.values())


def test_a_sample_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.core.policy.whatif.POINTS_MAX", 20)
    reuse = Reuse(10_000)
    whatif = WhatIf(1e6, reuse)
    rates = []
    for number in range(2000):
        asked = visit(chr(1000 + number) * 2, float(number))
        whatif.visit(asked, reuse.visit(asked))
        rates.append(whatif._rate)
    assert rates[0] == 8
    assert rates[-1] == 64  # 2,000 conversations, 20 points.
    assert max(len(s.canopy.forest.points_of("t")) for s in whatif._shadows.values()) <= 21
