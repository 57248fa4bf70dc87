"""Everything that can be captured at the end of a block. For small states and for comparison: with the
states of large models it fills any memory with what is never resumed at."""

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt, Stop
from tiercache.core.policy.places import chosen, ends, every, floor


class Dense:
    """The ends, forks, and every block's end, as long as a request's way holds no more than `most`
    checkpoints; whatever is offered is kept."""

    def __init__(self, most: int) -> None:
        self._most = most

    def place(self, prompt: Prompt, capture: Capture) -> list[int]:
        """See `Checkpoints`."""
        first = (*ends(prompt, capture), floor(prompt.fork, capture))
        blocks = every(prompt.block_tokens, prompt, capture)
        return chosen(prompt, first, blocks, most=self._most)

    def keeps(self, stop: Stop) -> bool:
        """See `Checkpoints`."""
        return stop.sights >= 0
