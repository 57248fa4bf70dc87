"""Histories of whole clusters, whatever the network and its nodes do; and the mistakes they would find."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tiercache.core.books import Books
from tiercache.core.cluster import reach
from tiercache.core.cluster.events import PeerTold
from tiercache.core.cluster.lending import Lending
from tiercache.core.cluster.peers import Peers
from tiercache.core.cluster.reach import Held, Reach
from tiercache.testing.sim import HistoryError, fleet
from tiercache.testing.sim.fleet import run_fleet
from tiercache.testing.sim.swarm import Swarm, draw

STEPS = 200
SEEDS = 500
CHUNK = 50
ENOUGH = 60
"""So many histories find each mistake below."""


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_histories_of_fleets(first: int) -> None:
    """Outputs are right, nothing from before a flush is found after it, books add up, nothing is held at
    the end, and what nodes believe of one another is so once they have spoken."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        history = run_fleet(seed, STEPS)
        reached.update(history.counts)
        reached["resumed"] += history.resumed
    needed = (
        "resumed", "restarts", "flushed", "copied", "peer_asked found", "peer_asked failed",
        "asked the next one",
    )  # fmt: skip
    assert min(reached[name] for name in needed) > 0, "it gets nowhere"


def test_a_seed_is_one_history() -> None:
    assert run_fleet(7, STEPS) == run_fleet(7, STEPS)


# --- each of these mistakes would cost a wrong token, an old object or a leak


def answer_from_before_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "flush_of", lambda *_: 1 << 40)


class _Always(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def take_what_was_asked_before_a_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(*fields: object) -> Held:
        real = Held._make(fields)
        return real._replace(clears=_Always(real.clears))

    monkeypatch.setattr(reach, "Held", held)


def believe_any_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "fits", lambda *_: True)


def keep_what_was_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lending, "loan_over", lambda *_: None)


def believe_a_start_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(of: Reach, event: PeerTold) -> None:
        if event.whole or event.since == of.version(event.peer):
            of.peers.told(event.peer, event.version, event.added, event.removed, whole=event.whole)

    monkeypatch.setattr(Reach, "told", told)


def believe_what_was_told_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(of: Reach, event: PeerTold) -> None:
        peer = of.peers.get(event.peer)
        if peer is not None and peer.boot == event.boot:
            of.peers.told(event.peer, event.version, event.added, event.removed, whole=event.whole)

    monkeypatch.setattr(Reach, "told", told)


def keep_what_a_node_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "_forget", lambda *_: None)


def lend_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lending, "_gives", lambda *_: True)


def often_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "FLUSHES_SHARE", 0.01)


def often_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes die often, what they told is often late, and nothing is forgotten for lack of room."""

    def drawn(rng: random.Random, steps: int) -> Swarm:
        return replace(draw(rng, steps), node_dies=0.02)

    monkeypatch.setattr(fleet, "draw", drawn)
    monkeypatch.setattr(fleet, "FLAKY_MOST", 0.8)


def often_mad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAD_SHARE", 1.0)


def as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch


Change = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("mistake", "world", "first"),
    [
        (answer_from_before_a_flush, as_ever, 0),
        (take_what_was_asked_before_a_clear, as_ever, 780),
        (believe_any_record, often_mad, 170),
        (keep_what_was_lent, as_ever, 0),
        (believe_a_start_that_is_over, often_dead, 200),
        (believe_what_was_told_of_another_version, as_ever, 300),
        (keep_what_a_node_held_before, as_ever, 0),
        (lend_what_ends, as_ever, 80),
    ],
)
def test_a_mistake_of_a_cluster_is_found(
    monkeypatch: pytest.MonkeyPatch, mistake: Change, world: Change, first: int
) -> None:
    """Where it is seldom of consequence, in a world where it is less so; from a seed on that is near."""
    world(monkeypatch)
    mistake(monkeypatch)

    def histories() -> None:
        for seed in range(first, first + ENOUGH):
            run_fleet(seed, STEPS)

    with pytest.raises(HistoryError):
        histories()
