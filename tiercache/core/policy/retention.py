"""The checkpoint policies by the names that settings give them."""

from typing import Literal, TypeAlias

from tiercache.core.policy.base import Checkpoints
from tiercache.core.policy.chunk import ChunkEnds
from tiercache.core.policy.dense import Dense
from tiercache.core.policy.interval import Interval
from tiercache.core.policy.marconi import Marconi
from tiercache.core.policy.minimal import Minimal
from tiercache.core.policy.strict import Strict

Retention: TypeAlias = Literal["marconi", "strict", "minimal", "interval", "chunk", "dense"]


def checkpoints_of(
    name: Retention, *, interval_tokens: int = 0, decode_interval_tokens: int = 0, most: int = 0
) -> Checkpoints:
    """Return the policy of that name.

    `interval_tokens`: of "interval" only, at least 1. `most`: checkpoints that one request's way may
    hold before intervals, chunks and blocks add none.
    """
    base = Marconi(decode_interval_tokens)
    match name:
        case "marconi":
            return base
        case "strict":
            return Strict()
        case "minimal":
            return Minimal()
        case "interval":
            return Interval(interval_tokens, most, base)
        case "chunk":
            return ChunkEnds(most, base)
        case "dense":
            return Dense(most)
