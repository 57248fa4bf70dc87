"""What can happen to a node. Everything the core ever learns arrives as one of these."""

import msgspec

from tiercache.core import guard_events
from tiercache.core.cluster.events import ClusterEvent, PoolFlushed
from tiercache.errors import Fault
from tiercache.state import Care, Extent, Label, Layout, Namespace, Record, Shard
from tiercache.state.care import NO_CARE
from tiercache.state.seats import RanksOf


class _Event(msgspec.Struct, frozen=True):
    pass


class Tail(_Event, frozen=True):
    """A boundary inside a block: tokens in total, its digest, the digest of the block before it."""

    tokens: int
    digest: bytes
    base: bytes


class Capture(_Event, frozen=True):
    """What an engine can capture: multiples of `grain` tokens. With `grain` 0, only the ends of chunks of
    `chunk_tokens` (0: none) and of the prompt."""

    chunk_tokens: int
    grain: int


class Offer(_Event, frozen=True):
    """An object that a client would like to store. `part` indexes the layout's parts."""

    part: int
    shard: Shard
    codec: str
    digest: bytes
    base: bytes
    start: int
    end: int
    nbytes: int
    parent: bytes
    requantised: int


class Wanted(_Event, frozen=True):
    """An object asked for by name."""

    part: int
    shard: Shard
    codec: str
    digest: bytes


# --- sessions


class Attached(_Event, frozen=True):
    """A client serves one namespace as one of `ranks`; replied to with `Accepted` or `Refused`.
    `prefill_tokens_per_s`: how fast it computes the start of a prompt, 0 when it does not say."""

    session: int
    call: int
    namespace: Namespace
    layout: Layout
    ranks: int
    rank: int
    write: bool
    writer: str
    prefill_tokens_per_s: float = 0.0


class Closed(_Event, frozen=True):
    """A session ended. `acknowledged`: its owner is gone, or said it will not touch memory again."""

    session: int
    acknowledged: bool


class Gone(_Event, frozen=True):
    """The owner of an ended session is gone for certain."""

    session: int


# --- requests (each gets one reply)


class PlanAsked(_Event, frozen=True):
    """Where can this request resume? `digests`: of the prompt's whole blocks, in order. `reshard`: shards
    of other ways to split a part will do. `ends`: the prompt's own ends that lie inside blocks. `source`: a
    node that is asked whatever it has told, since the request comes from there. `seats`: where the ranks
    sit, when not all of them do here; then `all_ranks` stands for those that do, and a boundary is given
    out when the other nodes have it too."""

    session: int
    call: int
    request: str
    lora: str
    salt: str
    digests: list[bytes]
    tokens: int
    limit: int
    tails: list[Tail]
    codecs: tuple[str, ...]
    capture: Capture
    all_ranks: bool
    reshard: bool = False
    ends: list[Tail] = []
    care: Care = NO_CARE
    source: str = ""
    seats: list[RanksOf] = []


class PushAsked(_Event, frozen=True):
    """Have the node `to` take what is held of this prompt, `limit` tokens at most; by `deadline`."""

    session: int
    call: int
    request: str
    lora: str
    salt: str
    digests: list[bytes]
    limit: int
    codecs: tuple[str, ...]
    reshard: bool
    to: str
    deadline: float


class SurveyAsked(_Event, frozen=True):
    """What is held of this path for this rank? `digests`: of consecutive whole blocks. `before`: of blocks
    somewhere before them, which count as seen. What it finds is kept until `until` at most."""

    session: int
    call: int
    request: str
    lora: str
    salt: str
    digests: list[bytes]
    codecs: tuple[str, ...]
    until: float
    before: list[bytes] = []


class LoadAsked(_Event, frozen=True):
    """Wait until a planned request's objects are in host memory, until `deadline` at most. `boundary`
    and `digest` are those of the plan that is meant."""

    session: int
    call: int
    request: str
    lora: str
    salt: str
    boundary: int
    digest: bytes
    deadline: float


class ReserveAsked(_Event, frozen=True):
    """Give room for these objects."""

    session: int
    call: int
    request: str
    lora: str
    salt: str
    offers: list[Offer]
    care: Care = NO_CARE


class FetchAsked(_Event, frozen=True):
    """Lease these objects by name, waiting for the slower tier until `deadline` at most."""

    session: int
    call: int
    request: str
    lora: str
    salt: str
    wanted: list[Wanted]
    deadline: float


class FlushAsked(_Event, frozen=True):
    """Say when everything committed so far is sealed and, if `durable`, stored."""

    session: int
    call: int
    durable: bool
    deadline: float


class StatsAsked(_Event, frozen=True):
    """Counters and gauges, please."""

    session: int
    call: int


class ListAsked(_Event, frozen=True):
    """Objects whose key text starts with `prefix`, `count` at most, with ids above `cursor`."""

    session: int
    call: int
    cursor: int
    count: int
    prefix: str


class EvictAsked(_Event, frozen=True):
    """Drop objects whose key text starts with `prefix` from `tier` ("" both), up to `nbytes` (0: all)."""

    session: int
    call: int
    prefix: str
    tier: str
    nbytes: int


class ClearAsked(_Event, frozen=True):
    """Drop namespaces whose hex digest starts with `namespace` from every tier.

    `flush`: the number of the cluster's flush that this carries out; `namespace` is a whole digest then.
    """

    session: int
    call: int
    namespace: str
    flush: int = 0


class VerifyAsked(_Event, frozen=True):
    """Read objects with ids above `cursor` back, `count` at most, and check them."""

    session: int
    call: int
    cursor: int
    count: int


# --- notices (no reply)


class Committed(_Event, frozen=True):
    """The bytes of these tickets are written. `checksums`: their XXH3-128, one per ticket, b"" for one
    that the node must sum; none at all when it must sum all."""

    session: int
    tickets: list[int]
    checksums: list[bytes] = []


class Cancelled(_Event, frozen=True):
    """These tickets will not be written."""

    session: int
    tickets: list[int]


class Released(_Event, frozen=True):
    """The session is done with what these requests leased."""

    session: int
    requests: list[str]


# --- what commands came to


class Sealed(_Event, frozen=True):
    """The checksums that `Seal` asked for, in its order."""

    job: int
    checksums: list[bytes]


class Stored(_Event, frozen=True):
    """Outcomes of `Store`, in its order; None means durable."""

    job: int
    faults: list[Fault | None]


class Filled(_Event, frozen=True):
    """Outcomes of `Fill`, in its order; None means the bytes are there and checked."""

    job: int
    faults: list[Fault | None]


class Checked(_Event, frozen=True):
    """Outcomes of `Check`, in its order."""

    job: int
    faults: list[Fault | None]


class Wiped(_Event, frozen=True):
    """What `Wipe` came to; None means the objects will not come back."""

    job: int
    fault: Fault | None


# --- the disk's start, and time


class NvmeOpened(_Event, frozen=True):
    """The NVMe tier is there, with these segments (number -> bytes); objects follow as `Found`."""

    segments: dict[int, int]
    namespaces: list[tuple[Label, Layout]]


class Found(_Event, frozen=True):
    """Objects stored before this start."""

    objects: list[tuple[Record, Extent]]


class ScanEnded(_Event, frozen=True):
    """Everything stored before this start has been found."""


class NvmeFailed(_Event, frozen=True):
    """The NVMe tier could not be opened, or its scan ended early: nothing is written to it any more."""

    fault: Fault


class TierFailed(_Event, frozen=True):
    """A background call on the NVMe tier (forget, reclaim, remember) failed."""

    fault: Fault


class Tick(_Event, frozen=True):
    """Time has passed."""


Outcome = Sealed | Stored | Filled | Checked | Wiped | PoolFlushed
"""What commands on this node's tiers came to, and clears of the pool."""

Event = (
    Attached
    | Closed
    | Gone
    | PlanAsked
    | SurveyAsked
    | PushAsked
    | LoadAsked
    | ReserveAsked
    | FetchAsked
    | FlushAsked
    | StatsAsked
    | ListAsked
    | EvictAsked
    | ClearAsked
    | VerifyAsked
    | guard_events.Event
    | Committed
    | Cancelled
    | Released
    | Outcome
    | NvmeOpened
    | Found
    | ScanEnded
    | NvmeFailed
    | TierFailed
    | Tick
    | ClusterEvent
)
