"""Histories of fleets that share a pool, whatever it does; and the mistakes they would find."""

from collections import Counter
from collections.abc import Callable

import pytest

from tiercache.core.books import Books
from tiercache.core.cluster.depositing import Depositing
from tiercache.core.expiry import Expiry
from tiercache.testing.sim import HistoryError
from tiercache.testing.sim.fleet import run_fleet

STEPS = 400
SEEDS = 60
CHUNK = 30
ENOUGH = 50
"""So many histories find each mistake below."""


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_histories_of_fleets_with_a_pool(first: int) -> None:
    """Outputs are right, nothing from before a flush is found after it, memory that the pool uses is not
    used for anything else, books add up, and nothing is held at the end."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        history = run_fleet(seed, STEPS, pooled=True)
        reached.update(history.counts)
        reached["resumed"] += history.resumed
    needed = ("resumed", "restarts", "flushed", "pool stored", "pool found", "pool fetched")
    assert min(reached[name] for name in needed) > 0, f"it gets nowhere: {reached}"


def test_a_seed_is_one_history() -> None:
    assert run_fleet(7, STEPS, pooled=True) == run_fleet(7, STEPS, pooled=True)


# --- each of these mistakes would cost a wrong token, an old object or a leak


def find_what_is_from_before_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "flush_of", lambda *_: 0)


def let_go_of_what_a_deposit_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Depositing, "in_jobs", lambda _: iter(()))
    send = Depositing._send

    def sent(of: Depositing, *given: object) -> None:
        send(of, *given)  # type: ignore[arg-type]
        of._books.let_go_of(next(reversed(of._sending.values())).items)

    monkeypatch.setattr(Depositing, "_send", sent)
    monkeypatch.setattr(Books, "let_go", _unless_unused)


def _unless_unused(of: Books, item: object) -> None:
    if item.users:  # type: ignore[attr-defined]
        item.users -= 1  # type: ignore[attr-defined]
        if not item.users:  # type: ignore[attr-defined]
            of._settle(item)  # type: ignore[arg-type]


def keep_what_a_deposit_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(of: Depositing, event: object, now: float) -> None:
        del event, now

    monkeypatch.setattr(Depositing, "ended", ended)


def give_away_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "is_own", lambda *_: False)


Change = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("mistake", "first"),
    [
        (find_what_is_from_before_a_flush, 30),
        (let_go_of_what_a_deposit_reads, 3),
        (keep_what_a_deposit_read, 3),
        (give_away_what_ends, 7),
    ],
)
def test_a_mistake_with_a_pool_is_found(
    monkeypatch: pytest.MonkeyPatch, mistake: Change, first: int
) -> None:
    mistake(monkeypatch)

    def histories() -> None:
        for seed in range(first, first + ENOUGH):
            run_fleet(seed, STEPS, pooled=True)

    with pytest.raises(HistoryError):
        histories()
