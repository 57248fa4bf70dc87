"""Where checkpoints go that leave the device: to the node, through a client."""

import queue
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from tiercache.client import Blob, Saved, Scope
from tiercache.device.leaving import Demoted
from tiercache.state import Chain

_LOOK_S: Final = 0.05


class Saves(Protocol):
    """The one call of `tiercache.client.Client` that is needed here. It raises for no fault."""

    def save(self, request: str, chain: Chain, blobs: Sequence[Blob], *, scope: Scope) -> Saved:
        """Offer objects to the node."""
        ...


class DirectOutlet:
    """Saves at once, in the calling thread: for tools and tests, where waiting does no harm."""

    def __init__(self, client: Saves) -> None:
        self.outcomes: Counter[str] = Counter()
        self._client = client
        self._finished: list[Demoted] = []

    def offer(self, demoted: Demoted) -> bool:
        """Save it."""
        self.outcomes.update(save(self._client, demoted))
        self._finished.append(demoted)
        return True

    def finished(self) -> list[Demoted]:
        """Return what was saved since the last call."""
        found, self._finished = self._finished, []
        return found


class ThreadOutlet:
    """Saves in a thread of its own; more than `queue_max` waiting ones are declined."""

    def __init__(self, client: Saves, queue_max: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._client = client
        self._waiting: queue.Queue[Demoted | None] = queue.Queue(queue_max)
        self._finished: deque[Demoted] = deque()
        self._thread = threading.Thread(target=self._work, name="tiercache-demote", daemon=True)
        self._thread.start()

    def offer(self, demoted: Demoted) -> bool:
        """Queue it; False when the queue is full, or a mistake has ended the thread."""
        if not self._thread.is_alive():
            return False
        try:
            self._waiting.put_nowait(demoted)
        except queue.Full:
            return False
        return True

    def finished(self) -> list[Demoted]:
        """Return what was saved since the last call; what waits, too, when a mistake ended the thread."""
        if not self._thread.is_alive():
            while not self._waiting.empty():
                if (unsaved := self._waiting.get_nowait()) is not None:
                    self._finished.append(unsaved)
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def close(self) -> None:
        """Save what waits, and end the thread. Idempotent."""
        while self._thread.is_alive():
            # A thread that a mistake ends meanwhile leaves the queue full.
            with suppress(queue.Full):
                self._waiting.put(None, timeout=_LOOK_S)
                break
        self._thread.join()

    def _work(self) -> None:
        while (demoted := self._waiting.get()) is not None:
            try:
                self.outcomes.update(save(self._client, demoted))
            finally:
                self._finished.append(demoted)


def save(client: Saves, demoted: Demoted) -> dict[str, int]:
    """Offer a checkpoint to the node; return how many of its objects had which outcome.

    Whose it is goes with it: it is saved under the adapter and the salt that it was kept under.
    """
    prompt, blobs = demoted.prompt, demoted.copy.blobs()
    saved = client.save(prompt.request, prompt.chain, blobs, scope=prompt.scope)
    return {"stored": saved.stored, "held": saved.held, **saved.declined}
