"""The task: multi-query associative recall. Pairs of a key and a value, scattered in noise; then some
keys again, each to be answered with its value."""

import random
from dataclasses import dataclass

KEYS = range(2, 66)
VALUES = range(66, 130)
NOISE = range(130, 192)


@dataclass(frozen=True, slots=True)
class Episode:
    """One sequence: `context` holds the pairs; after it, each of `questions` has its answer in
    `answers`."""

    context: tuple[int, ...]
    questions: tuple[int, ...]
    answers: tuple[int, ...]

    def asked(self, questions: int) -> tuple[int, ...]:
        """Return the context, all but the last of the first `questions` questions with their answers,
        and that last one alone: the model should say `answers[questions - 1]`."""
        told = [
            token
            for pair in zip(self.questions[:questions], self.answers[:questions], strict=True)
            for token in pair
        ]
        return (*self.context, *told[:-1])


def episode(seed: int, *, tokens: int, pairs: int, spread: int | None = None) -> Episode:
    """Return the episode of `seed`: a context of `tokens` tokens with `pairs` distinct keys.

    The pairs stand in the first `spread` tokens (all by default), each in its own two of them; every
    key is asked once, in random order. The models were trained with 32 pairs in 128 tokens.
    """
    within = tokens if spread is None else spread
    if not 0 < pairs <= min(len(KEYS), within // 2) or within > tokens:
        raise ValueError(f"{pairs} pairs do not fit into {within} of {tokens} tokens")
    source = random.Random(seed)
    keys = source.sample(KEYS, pairs)
    values = source.choices(VALUES, k=pairs)
    context = source.choices(NOISE, k=tokens)
    for slot, key, value in zip(
        source.sample(range(within // 2), pairs), keys, values, strict=True
    ):
        context[2 * slot : 2 * slot + 2] = (key, value)
    order = source.sample(range(pairs), pairs)
    return Episode(
        tuple(context), tuple(keys[at] for at in order), tuple(values[at] for at in order)
    )
