"""Histories of two engines with ranks on two nodes each, that reuse one another; and the mistakes they
would find."""

from collections import Counter
from collections.abc import Callable

import pytest

from tiercache.core.cluster import assenting, reach
from tiercache.core.cluster.assenting import Assenting
from tiercache.core.cluster.lending import Lending
from tiercache.core.cluster.reach import Reach
from tiercache.core.route import Route
from tiercache.core.search import Search
from tiercache.state import Part, Shard
from tiercache.testing.sim import HistoryError
from tiercache.testing.sim.twins import run_twins

STEPS = 250
SEEDS = 80
CHUNK = 40
ENOUGH = 60
"""So many histories find each mistake below."""


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_histories_of_twins(first: int) -> None:
    """What is agreed on all ranks have, or it is on its way; they are told the same; no node fetches what
    its ranks do not need; every answer comes in time; and nothing is held at the end."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += run_twins(seed, STEPS)
    reached = ("resumed", "fetched", "joined", "there", "elsewhere", "unknown_prefix", "cleared")
    assert min(counts[name] for name in reached) > 2, f"it gets nowhere: {counts}"


def test_a_seed_is_one_history() -> None:
    assert run_twins(7, STEPS) == run_twins(7, STEPS)


# --- each of these mistakes would cost a wrong token, a wait or a leak


def agree_to_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Assenting, "_ends", lambda _, asked, *__: list(asked.ends))


def agree_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def shards(of: Route, part: Part, session: object) -> list[Shard]:
        first, _ = of.here
        return [part.shards(session.ranks)[first]]  # type: ignore[attr-defined]

    monkeypatch.setattr(Route, "_shards", shards)


def keep_nothing_that_was_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lending, "bring", lambda *_: [])


def take_what_other_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_is_of", lambda *_: True)


def give_each_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(of: Search, within_s: float) -> float:
        return of.began + 3 * max(of._wait_s, within_s)

    monkeypatch.setattr(Search, "_end", end)


def begin_the_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agreement has as much as if nothing had been asked before."""
    monkeypatch.setattr("tiercache.core.cluster.agreeing.SEATED_SHARE", 1.0)


def answer_when_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*given: object, **more: object) -> Search:
        more.pop("until")
        return Search(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(assenting, "Search", search)


def wait_for_a_session_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reach, "close", lambda *_: None)


@pytest.mark.parametrize(
    "mistake",
    [
        agree_to_anything,
        agree_for_one_rank,
        keep_nothing_that_was_agreed_on,
        take_what_other_ranks_need,
        give_each_all_the_time,
        begin_the_time_anew,
        answer_when_it_is_too_late,
        wait_for_a_session_that_is_gone,
    ],
)
def test_a_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mistake(monkeypatch)

    def histories() -> None:
        for seed in range(ENOUGH):
            run_twins(seed, STEPS)

    with pytest.raises(HistoryError):
        histories()
