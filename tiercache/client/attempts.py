"""When to try the node again, what `status` says, and what is worth a log line. No I/O, no clock."""

import logging
from typing import Final

REFUSED_S: Final = 30.0
"""How long a refusal stands before the client asks again."""

SLOW_RETRY_S_MAX: Final = 30.0
"""Longest pause after attempts that cost their whole deadline; it doubles up to here."""

SILENT_DEADLINES: Final = 8
"""How many deadlines calls fail at once after one that heard nothing, unless the node is heard."""

CAUSES_MAX: Final = 64
"""Causes that are remembered as logged."""

_log = logging.getLogger("tiercache.client")


class Attempts:
    """At most one attempt to attach per `retry_s`, fewer when they cost time or were refused."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._next = 0.0
        self._slow = 0
        self._causes: set[str] = set()
        self.status = "detached: not attached yet"

    def may_begin(self, now: float) -> bool:
        """Whether an attempt may begin at `now`; if so, it has begun."""
        if now < self._next:
            return False
        self._next = now + self._retry_s
        return True

    def withdrawn(self) -> None:
        """The attempt was given up by the caller; it says nothing of the node."""
        self._next = 0.0

    def attached(self, boot: str) -> None:
        """The attempt ended well."""
        if self.status != "attached" and self._causes:
            _log.info("attached to the node again (boot %s)", boot)
        self.status = "attached"
        self._slow = 0
        self._causes.clear()

    def detached(self, why: str) -> None:
        """The node is away."""
        self.status = f"detached: {why}"
        self.note(f"running uncached: {why}")

    def timed_out(self, now: float) -> None:
        """The attempt ended at `now` without an answer: the next costs its deadline, too."""
        pause = min(SLOW_RETRY_S_MAX, self._retry_s * 2**self._slow)
        self._slow = min(self._slow + 1, 16)
        self._next = max(self._next, now + pause)
        self.detached("the node does not answer")

    def refused(self, now: float, why: str) -> None:
        """The node will not serve this client."""
        self._next = now + REFUSED_S
        self.status = f"refused: {why}"
        self.note(f"running uncached: the node refused: {why}")

    def note(self, cause: str) -> None:
        """Log a cause, once until the next attachment."""
        if cause not in self._causes and len(self._causes) < CAUSES_MAX:
            self._causes.add(cause)
            _log.warning("%s", cause)


class Silence:
    """Whether a connected node has stopped answering: a frozen one must not cost every call its
    deadline. It is silent after a call that heard nothing for a whole deadline, until it is heard
    or SILENT_DEADLINES have passed."""

    def __init__(self, deadline_s: float, now: float) -> None:
        self._deadline_s = deadline_s
        self._heard_at = now
        self._until = 0.0

    def heard(self, now: float) -> None:
        """Something came from the node."""
        self._heard_at = now
        self._until = 0.0

    def missed(self, now: float) -> None:
        """A call ended unanswered."""
        if self._heard_at <= now - self._deadline_s:
            self._until = now + SILENT_DEADLINES * self._deadline_s

    def lasts(self, now: float) -> bool:
        """Whether the node is silent."""
        return now < self._until
