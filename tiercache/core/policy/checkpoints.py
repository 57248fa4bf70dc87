"""Where to capture recurrent state: the ends of prefill chunks and of the prompt."""

from tiercache.core.events import Capture


class ChunkEnds:
    """The last `limit` chunk ends, and both prompt ends.

    Two prompt ends, since a state must never be applied to a token that it already contains: the
    largest boundary up to `tokens - 1` serves the identical prompt, `tokens` serves its continuation.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def place(self, tokens: int, resumed: int, capture: Capture) -> list[int]:
        """See `Checkpoints`."""
        grain = max(capture.grain, 1)
        ends = {(tokens - 1) // grain * grain, tokens // grain * grain}
        step = capture.chunk_tokens
        if step > 0:
            last = tokens // step
            first = max(resumed // step + 1, last - self._limit + 1)
            ends.update(
                chunk * step for chunk in range(first, last + 1) if chunk * step % grain == 0
            )
        return sorted(end for end in ends if resumed < end <= tokens)
