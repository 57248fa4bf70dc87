"""Every error tiercache raises, each with the answer to "should I try again?".

    TiercacheError
    +-- ConfigError        a setting is wrong; the text names the key and the fix
    +-- LayoutError        a layout, shard or object does not fit the model it claims to describe
    +-- ProtocolError      a peer broke the wire protocol (or speaks another version)
    +-- RefusedError       the node will not serve this client; the reason says why
    +-- UnavailableError   the node cannot be reached, or did not answer before the deadline
    +-- StorageFault       a disk or a store failed; `fault` says how
    +-- TransportFault     bytes did not come from a peer; `fault` says how

A miss, a full cache and "not worth it" are values, never errors.
"""

from enum import StrEnum


class Retry(StrEnum):
    """Whether the same call may succeed later."""

    NEVER = "never"
    LATER = "later"


class TiercacheError(Exception):
    """Base of all errors of this package."""

    retry: Retry = Retry.NEVER


class ConfigError(TiercacheError):
    """A setting is wrong; nothing was started and nothing was lost."""


class LayoutError(TiercacheError):
    """A layout, shard or object does not fit the model it claims to describe."""


class ProtocolError(TiercacheError):
    """The peer broke the wire protocol; the connection is closed."""


class RefusedError(TiercacheError):
    """The node will not serve this client; run uncached."""


class UnavailableError(TiercacheError):
    """The node cannot be reached, or did not answer before the deadline."""

    retry = Retry.LATER


class Fault(StrEnum):
    """How a tier failed. Each fault has one meaning for the core."""

    NO_SPACE = "no_space"  # The device is full: stop writing, go on reading, try again later.
    IO = "io"  # The device failed: the object is lost there.
    DAMAGED = "damaged"  # The bytes are not the ones that were sealed: a miss, quarantined.
    MISSING = "missing"  # The bytes are gone: a miss.


class StorageFault(TiercacheError):
    """A disk or a store failed."""

    retry = Retry.LATER

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault
        self.detail = detail


class PeerFault(StrEnum):
    """How fetching from a peer failed."""

    MISSING = "missing"  # The peer does not hold the object: a miss.
    MISMATCH = "mismatch"  # What the peer holds has another size: a miss.
    DAMAGED = "damaged"  # The bytes are not the ones that were sealed: a miss.
    BUSY = "busy"  # The peer, or this end, has no room for the request now.
    LATE = "late"  # The deadline passed.
    LOST = "lost"  # The connection ended, or there was none to be had.
    REFUSED = "refused"  # The peer will not talk: version, key or certificate.
    PROTOCOL = "protocol"  # The peer broke the protocol; the connection is closed.


class TransportFault(TiercacheError):
    """Bytes did not come from a peer. The same call may succeed later where `retry` says so."""

    def __init__(self, fault: PeerFault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault
        self.detail = detail
        passing = fault in {PeerFault.BUSY, PeerFault.LATE, PeerFault.LOST}
        self.retry = Retry.LATER if passing else Retry.NEVER
