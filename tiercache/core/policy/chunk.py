"""The ends of prefill chunks, beside the ends and forks: what an engine has at hand anyway."""

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt, Sort, Stop
from tiercache.core.policy.marconi import Marconi
from tiercache.core.policy.places import chosen, chunk_ends


class ChunkEnds:
    """As `Marconi`, and the last chunk ends, as long as a request's way holds no more than `most`
    checkpoints. What an engine offers unasked inside a prompt is taken for a chunk's end."""

    def __init__(self, most: int, base: Marconi) -> None:
        self._most = most
        self._base = base

    def place(self, prompt: Prompt, capture: Capture) -> list[int]:
        """See `Checkpoints`."""
        first = self._base.place(prompt, capture)
        return chosen(prompt, first, chunk_ends(prompt, capture), most=self._most)

    def keeps(self, stop: Stop) -> bool:
        """See `Checkpoints`."""
        return stop.sort is Sort.INSIDE or self._base.keeps(stop)
