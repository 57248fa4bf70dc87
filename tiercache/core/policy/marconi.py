"""Both ends of a prompt, the end of what was decoded, and forks at their second sight.

After "Marconi: Prefix Caching for the Era of Hybrid LLMs" (MLSys 2025): a sequence's end is likely to be
continued, and a prefix that two requests share is likely to be shared by a third; everything between is
almost never resumed at. Forks come from a memory of digests, so an evicted prefix is still known.
"""

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt, Sort, Stop
from tiercache.core.policy.places import chosen, ends, floor


class Marconi:
    """The default. `decode_interval_tokens`: also keep what is offered at multiples of it while
    decoding (0: nothing but the end)."""

    def __init__(self, decode_interval_tokens: int = 0) -> None:
        self._decode_interval = decode_interval_tokens

    def place(self, prompt: Prompt, capture: Capture) -> list[int]:
        """See `Checkpoints`."""
        return chosen(prompt, (*ends(prompt, capture), floor(prompt.fork, capture)))

    def keeps(self, stop: Stop) -> bool:
        """See `Checkpoints`."""
        if stop.sort is Sort.OUTPUT:
            interval = self._decode_interval
            return stop.last or (interval > 0 and stop.tokens % interval == 0)
        return stop.sort is not Sort.INSIDE
