"""What goes into a client and comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from tiercache.state import NATIVE, Care, Hint, Shard
from tiercache.state.care import TTL_MS_MAX
from tiercache.state.seats import RanksOf
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
    `prefill_tokens_per_s`: how fast the engine computes the start of a prompt, over all ranks; with it the
    node declines what it would take longer to bring back. 0: not known.
    """

    ranks: int = 1
    rank: int = 0
    write: bool = True
    name: str = ""
    deadline_s: float = 1.0
    required: bool = False
    retry_s: float = 0.5
    prefill_tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.ranks} ranks")
        if not (self.deadline_s > 0 and self.retry_s >= 0):
            raise ValueError("deadline_s must be above 0 and retry_s at least 0")
        if not self.prefill_tokens_per_s >= 0:
            raise ValueError("prefill_tokens_per_s must be at least 0")


@dataclass(frozen=True, slots=True)
class Scope:
    """What narrows one call: an adapter's content identity and a tenant's salt ("" for none), the
    codecs that are acceptable, what the engine can capture, whether `plan` also leases the other
    ranks' shards, and whether shards saved by ranks of another number will do (`reshard`): then one
    object may come as several blobs, which `tiercache.device.gather` joins.

    `source`: the node of the cluster that handed the request over: it is asked whether it has more,
    whatever it has told so far.

    `seats`: where the engine's ranks sit, when they are on several nodes: every rank on exactly one, this
    rank on node "". A plan with `all_ranks` then gives a boundary that the ranks of all nodes can
    resume, as far as those answer in time; each rank fetches its own shards from its own node.

    How the request's objects should be kept: `ttl_s`, after which they are gone (0: as the namespace
    has it; such objects stay in memory); `priority`, -2 (goes first) to 2 (goes last), a bias; `hint`,
    what the engine knows of the session; `do_not_store`: nothing of the request is ever stored, in any
    tier. ValueError for values outside."""

    lora: str = ""
    salt: str = ""
    codecs: tuple[str, ...] = (NATIVE,)
    capture: Capture = field(default_factory=Capture)
    all_ranks: bool = False
    reshard: bool = False
    source: str = ""
    seats: tuple[RanksOf, ...] = ()
    ttl_s: float = 0.0
    priority: int = 0
    hint: Hint = Hint.NONE
    do_not_store: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ttl_s <= TTL_MS_MAX / 1000:
            raise ValueError(f"ttl_s {self.ttl_s} is not in 0..{TTL_MS_MAX // 1000}")
        if problem := self.care.why_not():
            raise ValueError(problem)

    @property
    def care(self) -> Care:
        """How the request's objects should be kept, as the node hears it. A TTL is rounded up."""
        return Care(ceil(self.ttl_s * 1000), self.priority, self.hint, not self.do_not_store)


@dataclass(frozen=True, slots=True)
class Pushed:
    """How far another node could resume what was pushed to it, from its memory, when it answered.
    `reason` says why that is 0: "unknown_node", "busy", "not_taken", "unavailable", "deadline", or why
    the own node did not answer."""

    boundary: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """How deep one node could resume a prompt, and what it takes to do that on the node that was asked.

    `node` is "" for that one. `tier`: "host" when all is in its memory, "nvme" or "coming" (from another
    node) when something is not, "peer" for another node, "pool" for the pool that nodes share; "" at
    boundary 0. `nbytes` is what the boundary rests on, over all ranks; `absent_bytes` of it are not in
    memory there. `seconds`: how long they take to come, `compute_s`: how long the tokens take to compute.
    -1 for what is not known. `health` of another node is "well", "probed" or "sick".
    """

    node: str
    boundary: int
    tier: str
    nbytes: int
    absent_bytes: int
    seconds: float
    compute_s: float
    health: str


@dataclass(frozen=True, slots=True)
class Places:
    """Where a prompt could be resumed: on the own node first, then on others, the deepest first. `reason`
    says why the own node could resume nothing, or did not answer; then there are no places."""

    places: tuple[Place, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What became of a pin. `outcome`: "pinned", or why not: "incomplete" (not all that the boundary
    rests on is there), "over_budget", "too_many", "invalid" (it may last `age_s` at most),
    "unavailable", "deadline". `objects` and `nbytes` of host memory are pinned for `age_s`."""

    outcome: str
    number: int = 0
    objects: int = 0
    nbytes: int = 0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Blob:
    """One object, in both directions.

    `end`: token count its bytes end at (the boundary, for a snapshot); `start`: first token they
    cover, 0 for a snapshot. `data`: flat bytes. From the client, a read-only view of leased bytes:
    after the release they may become other bytes, but stay readable memory. To `save`, any
    contiguous buffer, and `more` are buffers that follow it: the object is all of them joined.
    `shard`: None for this rank's. `requantised`: how often the bytes were derived from quantised ones.
    """

    part: str
    end: int
    data: memoryview
    start: int = 0
    shard: Shard | None = None
    codec: str = NATIVE
    requantised: int = 0
    more: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object asked for by name. `digest`: of the chain where its bytes end. `shard`: None for
    this rank's."""

    part: str
    digest: bytes
    shard: Shard | None = None
    codec: str = NATIVE


@dataclass(frozen=True, slots=True)
class Cleared:
    """What became of a namespace: `objects` are gone from every tier, `busy` ones are out of sight
    and go when whoever uses them lets go. `failed` names a tier that may bring its objects back with
    the next start of the node. `reason` is "" when the node answered."""

    objects: int
    busy: int
    failed: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of the blobs of one `save`: handed over to be sealed, there already, or declined
    (outcome -> count; "busy", "full", "outweighed", "quota", "do_not_store", "too_large", "deadline",
    "unavailable", ...). Not promised: that what is `stored` is sealed yet, or stays. `evicted`: objects of
    the same tenant that went for it, since the tenant would have been beyond its share."""

    stored: int
    held: int
    declined: Mapping[str, int]
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Flushed:
    """`waiting` objects were not there when the time was up, `lost` could not be sealed or stored
    since the last flush. `reason` is "" when the node answered."""

    waiting: int
    lost: int
    reason: str = ""
