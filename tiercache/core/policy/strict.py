"""Nothing at its first sight: every checkpoint has to be reached by a second request first.

Best where memory is very scarce and prompts repeat as they are. A conversation's turns are resumed once
each, and never here: the next turn finds its predecessor recorded, not stored.
"""

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt, Stop
from tiercache.core.policy.places import chosen, ends, floor

SECOND = 2


class Strict:
    """Ends and forks that an earlier request reached."""

    def place(self, prompt: Prompt, capture: Capture) -> list[int]:
        """See `Checkpoints`."""
        again = (end for end in ends(prompt, capture) if _met(prompt, end))
        return chosen(prompt, (*again, floor(prompt.fork, capture)))

    def keeps(self, stop: Stop) -> bool:
        """See `Checkpoints`."""
        return stop.sights >= SECOND


def _met(prompt: Prompt, end: int) -> bool:
    if end % prompt.block_tokens:
        return end in prompt.met
    return end <= prompt.reached
