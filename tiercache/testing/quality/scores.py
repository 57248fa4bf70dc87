"""How well restored runs did, beside the uninterrupted ones."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tiercache.testing.quality.probes import PLACES, Probe

Logits = NDArray[np.float64]

__all__ = ["PLACES", "Logits", "Score", "score"]

EMPTY: Final = float("nan")


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Over all questions: the share answered right, by place; `agreement`, the share whose most likely
    token is the uninterrupted run's; `kl`, the mean divergence from it in nats. `drop` is the largest
    loss of recall in any place, and `questions` how many there were."""

    front: float
    middle: float
    back: float
    straddle: float
    agreement: float
    kl: float
    drop: float
    questions: int


def score(probes: Sequence[Probe], exact: Sequence[Logits], found: Sequence[Logits]) -> Score:
    """Return the score of `found` beside `exact`: for each probe `[questions, vocabulary]` logits."""
    answers = np.concatenate([probe.answers for probe in probes])
    places = np.concatenate([probe.places for probe in probes])
    ours, theirs = np.concatenate(list(found)), np.concatenate(list(exact))
    best, expected = ours.argmax(-1), theirs.argmax(-1)
    recall, before = _recall(best == answers, places), _recall(expected == answers, places)
    losses = [old - new for old, new in zip(before, recall, strict=True)]
    log_ours, log_theirs = _log_softmax(ours), _log_softmax(theirs)
    divergence = (np.exp(log_theirs) * (log_theirs - log_ours)).sum(-1)
    front, middle, back, straddle = recall
    return Score(
        front=front,
        middle=middle,
        back=back,
        straddle=straddle,
        agreement=float((best == expected).mean()),
        kl=max(0.0, float(divergence.mean())),
        drop=max(0.0, *(loss for loss in losses if loss == loss)),  # noqa: PLR0124 - NaN has no drop
        questions=len(answers),
    )


def _recall(right: NDArray[np.bool_], places: NDArray[np.int64]) -> list[float]:
    """Return the share of right answers in each place; NaN where nothing was asked."""
    return [
        float(right[places == place].mean()) if (places == place).any() else EMPTY
        for place in range(len(PLACES))
    ]


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
