"""Where in a prompt a checkpoint can be taken, in the terms that the checkpoint policies share."""

from collections.abc import Iterable

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt


def ends(prompt: Prompt, capture: Capture) -> tuple[int, int]:
    """Return the two ends of a prompt: the largest boundary up to `tokens - 1`, and up to `tokens`.

    A state must never be applied to a token that it already contains: the first serves the identical
    prompt, the second its continuation. They may be one.
    """
    grain = capture.grain
    if grain < 1:
        return prompt.tokens - 1, prompt.tokens
    return (prompt.tokens - 1) // grain * grain, prompt.tokens // grain * grain


def floor(tokens: int, capture: Capture) -> int:
    """Return the largest boundary up to `tokens` that can be captured inside a prompt; 0 for none."""
    grain = capture.grain if capture.grain >= 1 else capture.chunk_tokens
    return tokens // grain * grain if grain >= 1 else 0


def chunk_ends(prompt: Prompt, capture: Capture) -> list[int]:
    """Return the ends of prefill chunks that can be captured, ascending."""
    step = capture.chunk_tokens
    if step < 1:
        return []
    first = prompt.resumed // step + 1
    found = range(first * step, prompt.tokens + 1, step)
    return [end for end in found if floor(end, capture) == end]


def every(step: int, prompt: Prompt, capture: Capture) -> list[int]:
    """Return the capturable boundaries nearest to each multiple of `step`, ascending."""
    first = prompt.resumed // step + 1
    multiples = range(first * step, prompt.tokens + 1, step)
    return list(dict.fromkeys(floor(multiple, capture) for multiple in multiples))


def chosen(
    prompt: Prompt, first: Iterable[int], others: Iterable[int] = (), *, most: int = 0
) -> list[int]:
    """Return the boundaries that are still to be computed, ascending.

    Those in `first` all count. Of the `others`, which ascend, the deepest are taken as long as the way
    holds no more than `most` checkpoints with them.
    """
    kept = {end for end in first if prompt.resumed < end <= prompt.tokens}
    extra = [end for end in others if prompt.resumed < end <= prompt.tokens and end not in kept]
    room = max(0, most - prompt.held - len(kept))
    return sorted(kept.union(extra[len(extra) - min(room, len(extra)) :]))
