"""What goes into a client and comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiercache.state import NATIVE, Shard
from tiercache.wire.messages import Capture


@dataclass(frozen=True, slots=True)
class Options:
    """How a client attaches and how long it waits.

    `ranks`, `rank`: the tensor-parallel split this process is part of. `write`: whether it saves.
    `name` says which engine calls: its ranks share it, and no other engine has it, since the same
    request id under one name is the same request. Without one, a client is by itself. `deadline_s`
    bounds what one call waits for the node, its lock and its connection included; copying bytes in
    `save` comes on top. `required`: `attach` raises when the node cannot be had; otherwise the
    client starts detached. `retry_s`: attempts to attach are at least this far apart.
    """

    ranks: int = 1
    rank: int = 0
    write: bool = True
    name: str = ""
    deadline_s: float = 1.0
    required: bool = False
    retry_s: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.ranks} ranks")
        if not (self.deadline_s > 0 and self.retry_s >= 0):
            raise ValueError("deadline_s must be above 0 and retry_s at least 0")


@dataclass(frozen=True, slots=True)
class Scope:
    """What narrows one call: an adapter's content identity and a tenant's salt ("" for none), the
    codecs that are acceptable, what the engine can capture, whether `plan` also leases the other
    ranks' shards, and whether shards saved by ranks of another number will do (`reshard`): then one
    object may come as several blobs, which `tiercache.device.gather` joins."""

    lora: str = ""
    salt: str = ""
    codecs: tuple[str, ...] = (NATIVE,)
    capture: Capture = field(default_factory=Capture)
    all_ranks: bool = False
    reshard: bool = False


@dataclass(frozen=True, slots=True)
class Blob:
    """One object, in both directions.

    `end`: token count its bytes end at (the boundary, for a snapshot); `start`: first token they
    cover, 0 for a snapshot. `data`: flat bytes. From the client, a read-only view of leased bytes:
    after the release they may become other bytes, but stay readable memory. To `save`, any
    contiguous buffer. `shard`: None for this rank's. `requantised`: how often the bytes were derived
    from quantised ones.
    """

    part: str
    end: int
    data: memoryview
    start: int = 0
    shard: Shard | None = None
    codec: str = NATIVE
    requantised: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object asked for by name. `digest`: of the chain where its bytes end. `shard`: None for
    this rank's."""

    part: str
    digest: bytes
    shard: Shard | None = None
    codec: str = NATIVE


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of the blobs of one `save`: handed over to be sealed, there already, or declined
    (outcome -> count; "busy", "full", "too_large", "deadline", "unavailable", ...). Not promised:
    that what is `stored` is sealed yet, or stays."""

    stored: int
    held: int
    declined: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Flushed:
    """`waiting` objects were not there when the time was up, `lost` could not be sealed or stored
    since the last flush. `reason` is "" when the node answered."""

    waiting: int
    lost: int
    reason: str = ""
