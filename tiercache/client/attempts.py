"""When to try the node again, what `status` says, and what is worth a log line. No I/O, no clock."""

import logging
from typing import Final

from tiercache.errors import ProtocolError, RefusedError, UnavailableError

REFUSED_S: Final = 30.0
"""How long a refusal stands before the client asks again."""

SLOW_RETRY_S_MAX: Final = 10.0
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

    def failed(
        self, now: float, fault: RefusedError | ProtocolError | OSError, path: str
    ) -> UnavailableError:
        """The attempt at the node of `path` ended at `now`; return what the call then ends with."""
        match fault:
            case TimeoutError():
                self._timed_out(now)
                return UnavailableError("deadline")
            case OSError():
                self.detached(f"{path}: {fault.strerror or fault}")
            case _:
                self._refused(now, str(fault))
        return UnavailableError(f"unavailable: {self.status}")

    def _timed_out(self, now: float) -> None:
        # The next one will cost its whole deadline, too.
        pause = min(SLOW_RETRY_S_MAX, self._retry_s * 2**self._slow)
        self._slow = min(self._slow + 1, 16)
        self._next = max(self._next, now + pause)
        self.detached("the node does not answer")

    def _refused(self, now: float, why: str) -> None:
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
        self.until = 0.0

    def heard(self, now: float) -> None:
        """Something came from the node."""
        self._heard_at = now
        self.until = 0.0

    def missed(self, now: float) -> None:
        """A call ended unanswered."""
        if self._heard_at <= now - self._deadline_s:
            self.until = now + SILENT_DEADLINES * self._deadline_s

    def lasts(self, now: float) -> bool:
        """Whether the node is silent."""
        return self.until > now
