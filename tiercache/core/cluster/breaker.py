"""Which node may be asked now: one that failed is left alone for a while, and comes back gradually."""

TRUSTED = 16
"""Who has done so many things at once, and well, may do any number."""


class Breaker:
    """The health of one peer. Pure: `now` is monotonic seconds.

    After `failures_max` failures in a row the peer is sick for `sick_s`, twice as long after each time it
    proves sick again, up to `sick_s_max`. Then it may be asked one thing at a time, one more for each
    success, until it is trusted with all.
    """

    def __init__(self, failures_max: int, sick_s: float, sick_s_max: float) -> None:
        self._failures_max = failures_max
        self._sick_s = sick_s
        self._sick_s_max = sick_s_max
        self._failures = 0
        self._rest_s = sick_s
        self._until = 0.0
        self._allowed = 0  # How many may be under way; 0: any number.
        self.under_way = 0

    def may_ask(self, now: float) -> bool:
        """Return whether one more thing may be asked."""
        if now < self._until:
            return False
        return not self._allowed or self.under_way < self._allowed

    def is_sick(self, now: float) -> bool:
        """Return whether it is left alone."""
        return now < self._until

    def health(self, now: float) -> str:
        """Return "well", "sick" while it is left alone, or "probed" while it may do a few things only."""
        if self.is_sick(now):
            return "sick"
        return "probed" if self._allowed else "well"

    def asked(self) -> None:
        """Something was asked; `succeeded` or `failed` follows, or `withdrawn`."""
        self.under_way += 1

    def withdrawn(self) -> None:
        """Nobody waits for that answer any more: it says nothing of the peer."""
        self.under_way -= 1

    def succeeded(self) -> None:
        """It answered in time."""
        self.under_way -= 1
        self._failures = 0
        if self._allowed:
            self._allowed += 1
            if self._allowed > TRUSTED:
                self._allowed = 0
                self._rest_s = self._sick_s

    def failed(self, now: float) -> None:
        """It failed, or was late."""
        self.under_way -= 1
        self._failures += 1
        if self._failures >= self._failures_max or self._allowed:
            self._until = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, self._sick_s_max)
            self._allowed = 1
            self._failures = 0
