"""An average rate of bytes."""


class ByteDebt:
    """Keeps an average rate: what was moved is a debt that time pays off. No clock of its own; one that
    stands still, or goes back, pays nothing and costs nothing."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._debt = 0.0
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long to wait before moving more."""
        self._pay(now)
        return self._debt / self._bytes_per_s

    def add(self, nbytes: int, now: float) -> None:
        """Note that so much was moved."""
        self._pay(now)
        self._debt += nbytes

    def _pay(self, now: float) -> None:
        now = max(now, self._at)
        self._debt = max(0.0, self._debt - (now - self._at) * self._bytes_per_s)
        self._at = now
