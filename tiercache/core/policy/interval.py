"""A checkpoint every so many tokens, beside the ends and forks."""

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt, Sort, Stop
from tiercache.core.policy.marconi import Marconi
from tiercache.core.policy.places import chosen, every


class Interval:
    """As `Marconi`, and the boundaries nearest to multiples of `tokens`, as long as a request's way holds
    no more than `most` checkpoints."""

    def __init__(self, tokens: int, most: int, base: Marconi) -> None:
        self._tokens = tokens
        self._most = most
        self._base = base

    def place(self, prompt: Prompt, capture: Capture) -> list[int]:
        """See `Checkpoints`."""
        first = self._base.place(prompt, capture)
        return chosen(prompt, first, every(self._tokens, prompt, capture), most=self._most)

    def keeps(self, stop: Stop) -> bool:
        """See `Checkpoints`."""
        on_grid = stop.sort is Sort.INSIDE and stop.tokens % self._tokens == 0
        return on_grid or self._base.keeps(stop)
