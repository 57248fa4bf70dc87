"""Touches the arena's memory in the background, so that no client pays for the first use."""

import threading

from tiercache.tiers.host import PREFAULT_STEP_BYTES, HostArena


class Prefault:
    """A thread that touches all of an arena, and stops between two steps when told."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._total = sum(arena.segments)
        self._steps = -1  # It asks before each step whether to stop, so one more than were done.
        self._touched: int | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="prefault", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes touched so far; while it works, to within a step per segment."""
        if self._touched is not None:
            return self._touched
        return min(self._total, max(0, self._steps) * PREFAULT_STEP_BYTES)

    def close(self, timeout_s: float) -> bool:
        """Stop; False when a step took longer than `timeout_s`."""
        self._stopping = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        self._touched = self._arena.prefault(self._asked)

    def _asked(self) -> bool:
        self._steps += 1
        return self._stopping
