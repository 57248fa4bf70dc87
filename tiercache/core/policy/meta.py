"""The policy that chooses: every other one runs as a shadow, and the one that saves most is followed."""

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from tiercache.core.policy.marconi_order import Marconi
from tiercache.core.policy.ranking import Heap, Hyperbolic, Indexed, Ranking, Recent
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.shadow import Shadow
from tiercache.core.policy.visits import Shape, Visit

RECENT, HYPER, INDEX, MARCONI, AUTO = "point-lru", "hyper", "index", "marconi", "auto"

CANDIDATES = (INDEX, RECENT)
"""What `auto` chooses from; the first is followed until another has shown that it saves more."""

HALF_LIFE = 2000
"""What a shadow saved counts half after so many requests."""

SIGMAS = 2.5
"""How sure it must be that another one saves more: its lead over the one that is followed, in standard
deviations of that lead, were it chance. Leads are looked at after every request, and one that is chance
wanders: within six half-lives it passes 1.5 deviations in every second run, and 2.5 in one of fifteen."""

RATE: Final = 8
"""Shadows take in one conversation of so many, and are as much smaller (after "SHARDS", Waldspurger et al.,
2015); one of fewer where memory holds few checkpoints."""

POINTS_MIN: Final = 2048
"""So many checkpoints at least go into a shadow: with fewer, chance would choose."""


def sampled(budget: float, shape: Shape, points_min: int = POINTS_MIN) -> int:
    """Return one of how many conversations the shadows of a cache of `budget` bytes take in, so that
    `points_min` checkpoints go into each."""
    size = max(shape.state_bytes, shape.block_bytes)
    return max(1, min(RATE, int(budget / (points_min * size))))


def ranking(name: str, reuse: Reuse) -> Ranking:
    """Return a new ranking by its name."""
    match name:
        case "point-lru":
            return Heap(Recent())
        case "hyper":
            return Heap(Hyperbolic())
        case "index":
            return Heap(Indexed(reuse))
        case "marconi":
            return Marconi()
        case _:
            raise ValueError(f"no policy {name!r}")


class Choice:
    """Shadows of a cache of `budget` bytes by policy, and which of them is ahead. They see a sample of the
    conversations."""

    def __init__(self, budget: float, reuse: Reuse, names: Iterable[str] = CANDIDATES) -> None:
        self._budget = budget
        self._rate = 0  # Not known before the first request, as `_fade`.
        self._fade = 1.0
        self.shadows: Mapping[str, Shadow] = {
            name: Shadow(budget, {name: ranking(name, reuse)}, name, reuse) for name in names
        }
        self.current = next(iter(self.shadows))
        self._lead = dict.fromkeys(self.shadows, 0.0)
        self._noise = dict.fromkeys(self.shadows, 0.0)

    def grow(self, visit: Visit, talk: int) -> None:
        """A request of the conversation numbered `talk` wrote more."""
        if not self._rate or talk % self._rate:
            return
        for shadow in self.shadows.values():
            shadow.grow(visit)

    def forget(self, tree: Hashable) -> None:
        """A namespace is gone."""
        for shadow in self.shadows.values():
            shadow.forget(tree)

    def visit(self, visit: Visit, talk: int) -> None:
        """Let every shadow take in a request of the conversation numbered `talk`; see who is ahead."""
        if not self._rate:
            self._rate = sampled(self._budget, visit.tree.shape)
            for shadow in self.shadows.values():
                shadow.budget = self._budget / self._rate
            self._fade = 0.5 ** (self._rate / HALF_LIFE)
        if talk % self._rate:
            return
        saved = {}
        for name, shadow in self.shadows.items():
            before = shadow.tally.saved
            shadow.visit(visit)
            saved[name] = shadow.tally.saved - before
        lead, noise, own, fade = self._lead, self._noise, saved[self.current], self._fade
        for name, value in saved.items():
            ahead = value - own
            lead[name] = lead[name] * fade + ahead
            noise[name] = noise[name] * fade + ahead * ahead
        best = max(lead, key=lambda name: lead[name] - SIGMAS * math.sqrt(noise[name]))
        base = lead[best]
        if base > SIGMAS * math.sqrt(noise[best]):
            for name in lead:  # Leads are over the one that is followed.
                lead[name] -= base
            self.current = best
