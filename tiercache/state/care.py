"""How a request wants the objects that it stores to be kept."""

from enum import IntEnum
from typing import Final

import msgspec

PRIORITY_MIN: Final = -2
PRIORITY_MAX: Final = 2
TTL_MS_MAX: Final = 366 * 86_400_000


class Hint(IntEnum):
    """What an engine knows of the session that a request belongs to. A class, and never a promise."""

    NONE = 0
    END_OF_SESSION = 1  # Nothing will continue what this request leaves behind.
    TOOL_CALL_PENDING = 2  # The session waits for a tool, and goes on from here soon.


class Care(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A request's wishes.

    `ttl_ms`: objects are gone this long after they were stored (0: as the namespace has it).
    `priority`: -2 (goes first) to 2 (goes last); a bias, never a lock. `store`: False when nothing of
    the request may be stored, in any tier.
    """

    ttl_ms: int = 0
    priority: int = 0
    hint: Hint = Hint.NONE
    store: bool = True

    def why_not(self) -> str:
        """Return what is wrong with these values, "" when nothing is."""
        if not 0 <= self.ttl_ms <= TTL_MS_MAX:
            return f"a TTL is 0..{TTL_MS_MAX} ms"
        if not PRIORITY_MIN <= self.priority <= PRIORITY_MAX:
            return f"a priority is {PRIORITY_MIN}..{PRIORITY_MAX}"
        return ""


NO_CARE: Final = Care()
"""No wishes at all."""
