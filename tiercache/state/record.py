"""What one sealed object says of itself, in memory, on the wire and on disk."""

from dataclasses import dataclass

from tiercache.state.keys import Key


@dataclass(frozen=True, slots=True)
class Record:
    """The label of one sealed, read-only object.

    `start` and `end` are the token range its bytes cover: a block `[start, end)`, or for a snapshot
    `start == 0` and `end` the boundary it stands at. `parent` is the digest of the checkpoint that the
    request resumed from (b"" for none), `base` the chain digest of the last whole block before `end` when
    `end` lies inside a block (b"" otherwise). `requantised` counts how often its bytes were derived from
    already quantised ones. `checksum` is XXH3-128 of the bytes. `sealed_at` is wall-clock seconds, for
    people only: no decision reads it. dtype and layout follow from the namespace and the part.
    """

    key: Key
    start: int
    end: int
    nbytes: int
    checksum: bytes
    writer: str
    sealed_at: float
    parent: bytes = b""
    base: bytes = b""
    requantised: int = 0
