"""What would another amount of memory save? A curve from shadows of other sizes, while the node runs.

Conversations are sampled, one of `rate`, and the shadows are as much smaller: their hit ratios are close
to those of the whole (after "SHARDS", Waldspurger et al., 2015). When they grow beyond their bounds, they
begin anew with half the conversations.
"""

from typing import Final

from tiercache.core.policy.meta import INDEX, ranking, sampled
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.shadow import Shadow
from tiercache.core.policy.visits import Visit

FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
"""Sizes compared, as multiples of the memory that the node has."""

POINTS_MAX: Final = 4096
BLOCKS_MAX: Final = 262_144
RATE_MAX: Final = 1 << 20
POINTS_MIN: Final = 64
"""So many checkpoints at least go into the shadow of the memory there is."""

FADE: Final = 0.5 ** (1 / 10_000)


class WhatIf:
    """The curve of a node of `budget` bytes."""

    def __init__(self, budget: float, reuse: Reuse) -> None:
        self._budget = budget
        self._reuse = reuse
        self._rate = 0  # Not known before the first request.
        self._shadows: dict[float, Shadow] = {}
        self._saved = dict.fromkeys(FACTORS, 0.0)
        self._total = 0.0

    def visit(self, visit: Visit, talk: int) -> None:
        """Take in one request of the conversation numbered `talk`."""
        shape = visit.tree.shape
        if not self._rate:
            self._begin(sampled(self._budget, shape, POINTS_MIN))
        if talk % self._rate:
            return
        self._total = self._total * FADE + shape.work.flops(len(visit.path) * shape.block_tokens)
        for factor, shadow in self._shadows.items():
            before = shadow.tally.saved
            shadow.visit(visit)
            self._saved[factor] = self._saved[factor] * FADE + shadow.tally.saved - before
        forest = self._shadows[FACTORS[-1]].canopy.forest
        if forest.points > POINTS_MAX or forest.blocks > BLOCKS_MAX:
            self._begin(min(self._rate * 2, RATE_MAX))

    def curve(self) -> dict[str, float]:
        """Return by factor which part of the prefill's FLOPs memory of that size would save.

        0 while nothing is known.
        """
        total = self._total or 1.0
        return {f"{factor:g}": saved / total for factor, saved in self._saved.items()}

    @staticmethod
    def curve_of(whatif: "WhatIf | None") -> dict[str, float]:
        """Return the curve of one that may not be there."""
        if whatif is None:
            return {f"{factor:g}": 0.0 for factor in FACTORS}
        return whatif.curve()

    def forget(self) -> None:
        """A namespace is gone: begin anew."""
        if self._rate:
            self._begin(self._rate)

    def _begin(self, rate: int) -> None:
        self._rate = rate
        self._shadows = {
            factor: Shadow(
                self._budget * factor / rate,
                {INDEX: ranking(INDEX, self._reuse)},
                INDEX,
                self._reuse,
            )
            for factor in FACTORS
        }
