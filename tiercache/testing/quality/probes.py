"""Prompts that show whether a state was restored as it was, and which part of it was not.

A recurrent state that is too old forgets what came last: recall is asked for by third of the context. A
convolution state that is missing is wrong for three tokens and then never again, so that recall and
perplexity do not see it: for that, a pair *straddles* the boundary, its key the last token before, its
value the first one after.
"""

import random
from dataclasses import dataclass
from typing import Final

from tiercache.testing.recall import episode
from tiercache.testing.recall.task import KEYS, VALUES

CONTEXT: Final = 128
PAIRS: Final = 32
STRADDLED: Final = 85
SEQUENCES: Final = 64
PLACES: Final = ("front", "middle", "back", "straddle")
"""Where the pair stands that is asked for: in a third of the context, or across the boundary."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One sequence: `context` is prefilled up to the boundary, `rest` continues it in one call.

    `asked`: positions in `rest` of the questions, `answers` what each should be answered with, and
    `places` the index in `PLACES` of where each pair stood.
    """

    context: tuple[int, ...]
    rest: tuple[int, ...]
    asked: tuple[int, ...]
    answers: tuple[int, ...]
    places: tuple[int, ...]


def probes(sequences: int = SEQUENCES) -> list[Probe]:
    """Return that many sequences of each kind, recall and straddling; always the same."""
    return [
        *(_recall(seed) for seed in range(sequences)),
        *(_straddling(seed) for seed in range(sequences)),
    ]


def _recall(seed: int) -> Probe:
    task = episode(seed, tokens=CONTEXT, pairs=PAIRS)
    rest = [token for pair in zip(task.questions, task.answers, strict=True) for token in pair]
    thirds = tuple(task.context.index(key) * 3 // CONTEXT for key in task.questions)
    return Probe(task.context, tuple(rest), tuple(range(0, len(rest), 2)), task.answers, thirds)


def _straddling(seed: int) -> Probe:
    """The boundary lies between a key that occurs nowhere else and its value."""
    task = episode(seed, tokens=CONTEXT, pairs=PAIRS)
    source = random.Random(seed)
    key = source.choice(sorted(set(KEYS) - set(task.context)))
    value = source.choice(VALUES)
    context = list(task.context)
    context[STRADDLED - 1 : STRADDLED + 1] = (key, value)
    rest = (*context[STRADDLED:], key)
    return Probe(
        tuple(context[:STRADDLED]), rest, (len(rest) - 1,), (value,), (PLACES.index("straddle"),)
    )
