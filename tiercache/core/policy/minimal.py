"""The least that serves repetition: the deepest boundary of the identical prompt, and forks."""

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt, Sort, Stop
from tiercache.core.policy.places import chosen, ends, floor


class Minimal:
    """One checkpoint for each prompt, and forks at their second sight. A conversation's next turn resumes
    there, and computes the answer before it anew."""

    def place(self, prompt: Prompt, capture: Capture) -> list[int]:
        """See `Checkpoints`."""
        return chosen(prompt, (ends(prompt, capture)[0], floor(prompt.fork, capture)))

    def keeps(self, stop: Stop) -> bool:
        """See `Checkpoints`."""
        return stop.sort in {Sort.PROMPT, Sort.FORK}
