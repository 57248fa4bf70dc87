"""How fast a tier gives bytes back."""

from typing import Final

from tiercache.core.limits import MIB

SAMPLE_BYTES: Final = 64 * MIB
"""A longer run counts in parts of this size, so that a busy tier is measured too."""

KEPT: Final = 0.875
"""What a new sample leaves of the weight of those before it."""


class Pace:
    """How long a tier takes to begin, and how fast it goes on: averages over what it did.

    A run lasts as long as anything is on its way. One of at least `sample_bytes_min` says how fast the tier
    is; a shorter one, how long a read takes to begin.
    """

    def __init__(self, sample_bytes_min: int) -> None:
        self._sample_bytes_min = sample_bytes_min
        self._in_flight = 0
        self._since = 0.0
        self._run_bytes = 0
        self._run_s = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self._short = 0.0
        self._short_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The average; 0 while it is not known."""
        return self._bytes / self._seconds if self._seconds else 0.0

    @property
    def begins_s(self) -> float:
        """How long a read takes to begin; 0 while it is not known."""
        return self._short_s / self._short if self._short else 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything is."""
        return self.bytes_per_s > 0 or self.begins_s > 0

    def started(self, nbytes: int, now: float) -> None:
        """A read of so many bytes began."""
        self._run_s += now - self._since if self._in_flight else 0.0
        self._since = now
        self._in_flight += nbytes

    def ended(self, nbytes: int, given: int, now: float) -> None:
        """A read of `nbytes` bytes ended; `given` of them came."""
        self._run_s += now - self._since
        self._since = now
        self._in_flight -= nbytes
        self._run_bytes += given
        if self._in_flight and self._run_bytes < SAMPLE_BYTES:
            return
        if self._run_bytes and self._run_s > 0:
            self._learn(self._run_bytes, self._run_s)
        self._run_bytes, self._run_s = 0, 0.0

    def _learn(self, nbytes: int, seconds: float) -> None:
        if nbytes < self._sample_bytes_min:
            self._short = self._short * KEPT + 1
            self._short_s = self._short_s * KEPT + seconds
            return
        moving_s = seconds - self.begins_s if seconds > self.begins_s else seconds
        self._bytes = self._bytes * KEPT + nbytes
        self._seconds = self._seconds * KEPT + moving_s

    def seconds(self, nbytes: float, *, queued: bool = True) -> float:
        """Return how long it takes until so many bytes are there, behind what is on its way if `queued`.

        What is not known counts as no time.
        """
        waiting = nbytes + (self._in_flight if queued else 0)
        return self.begins_s + (waiting / self.bytes_per_s if self._seconds else 0.0)
