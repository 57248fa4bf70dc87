"""What a node can be told to do. The core decides; whoever executes these never chooses.

Commands on the NVMe tier must be executed in the order they were given; `Fill` and `Check` may overtake
others, since the core never reuses an extent that a running job reads.
"""

import msgspec

from tiercache.core.cluster.commands import (
    Agree,
    Agreed,
    Announce,
    Deposit,
    FlushPool,
    Lent,
    Locate,
    Located,
    Places,
    Pull,
    Summarised,
    Taken,
)
from tiercache.core.events import Tail
from tiercache.state import Extent, Key, Label, Layout, Piece, Record


class _Command(msgspec.Struct, frozen=True):
    pass


class Seal(_Command, frozen=True):
    """Compute the XXH3-128 of each object's bytes. Answer: `Sealed`."""

    job: int
    objects: list[tuple[Extent, int]]


class Store(_Command, frozen=True):
    """Write each object from its host extent to its NVMe extent, zeros behind it. Answer: `Stored`."""

    job: int
    objects: list[tuple[Record, Extent, Extent]]


class Fill(_Command, frozen=True):
    """Read each object from its NVMe extent into its host extent. Answer: `Filled`."""

    job: int
    objects: list[tuple[Record, Extent, Extent]]


class Check(_Command, frozen=True):
    """Check each object where it is ("host" or "nvme") against its checksum. Answer: `Checked`."""

    job: int
    objects: list[tuple[Record, str, Extent]]


class Forget(_Command, frozen=True):
    """Make these objects unfindable on the NVMe tier."""

    keys: list[Key]


class Reclaim(_Command, frozen=True):
    """Forget `keys`, then give back the space of `segments`."""

    segments: list[int]
    keys: list[Key]


class Wipe(_Command, frozen=True):
    """Forget `keys` for certain. Answer: `Wiped`, since an operator waits to hear that it is true."""

    job: int
    keys: list[Key]


class Remember(_Command, frozen=True):
    """Keep what a namespace is called and how it is laid out, for the next start."""

    label: Label
    layout: Layout


# --- replies


class Accepted(_Command, frozen=True):
    """The session serves its namespace."""


ISOLATED = "isolated: this node does not know whether the others have flushed what it holds"


class Refused(_Command, frozen=True):
    """The request cannot be served: "refused" (never) or "invalid" (this one)."""

    kind: str
    text: str


class Planned(_Command, frozen=True):
    """Answers `PlanAsked`; fields as in the wire message of this name."""

    boundary: int
    ready: bool
    ready_boundary: int
    pieces: list[Piece]
    checkpoints: list[int]
    candidates: list[Tail]
    reason: str


class Pushed(_Command, frozen=True):
    """Answers `PushAsked`: how far the other node could resume then, or why it took nothing."""

    boundary: int
    reason: str


class Surveyed(_Command, frozen=True):
    """Answers `SurveyAsked`; fields as in the wire message of this name."""

    held: list[bytes]
    start: int


class Loaded(_Command, frozen=True):
    """Answers `LoadAsked`."""

    boundary: int
    pieces: list[Piece]
    reason: str


class Granted(_Command, frozen=True):
    """The answer to one offer: an extent to write, or why not. `own`: objects of the same tenant that
    went since it would have been beyond its share."""

    outcome: str
    ticket: int
    extent: Extent | None
    own: int = 0


class Reserved(_Command, frozen=True):
    """Answers `ReserveAsked`, one grant per offer."""

    grants: list[Granted]


class Fetched(_Command, frozen=True):
    """Answers `FetchAsked`, one piece or None per wanted object."""

    pieces: list[Piece | None]


class Flushed(_Command, frozen=True):
    """Answers `FlushAsked`."""

    waiting: int
    lost: int


class Row(_Command, frozen=True):
    """One object as an operator sees it. `left_s`: how long it lasts, None when it has no end."""

    id: int
    key: str
    record: Record
    kind: str
    label: Label | None
    layout: str
    host: Extent | None
    nvme: Extent | None
    status: str
    leases: int
    sights: int
    dtype: str = ""
    left_s: float | None = None
    pinned: bool = False


class Rows(_Command, frozen=True):
    """Answers `ListAsked`. `cursor` continues after the last one looked at; 0 when there are no more."""

    rows: list[Row]
    cursor: int


class Evicted(_Command, frozen=True):
    """Answers `EvictAsked` and `ClearAsked`. `busy` objects were leased or in use: unfindable as soon as
    they are released when cleared, kept when evicted. `failed` names the tier that could not be cleared for
    good: its objects are out of sight now, but may come back with the next start."""

    objects: int
    nbytes: int
    busy: int
    failed: str = ""


class Verified(_Command, frozen=True):
    """Answers `VerifyAsked`: how many copies were read, and which failed with which fault."""

    checked: int
    nbytes: int
    failed: list[tuple[str, str, str]]
    cursor: int


class Pinned(_Command, frozen=True):
    """Answers `PinAsked`, `KeysPinAsked` and `UnpinAsked`. `outcome` is "pinned", "unpinned", or why not;
    `number` that of the pin, 0 for none; `age_s` how long it will last."""

    outcome: str
    number: int = 0
    objects: int = 0
    nbytes: int = 0
    age_s: float = 0.0


class PinRow(_Command, frozen=True):
    """One pin as an operator sees it. `session` is 0 for an operator's."""

    number: int
    owner: str
    session: int
    objects: int
    nbytes: int
    left_s: float


class PinRows(_Command, frozen=True):
    """Answers `PinsAsked`: the first of `count` pins, and what all of them take."""

    pins: list[PinRow]
    count: int
    nbytes: int
    nbytes_max: int


class ShareRow(_Command, frozen=True):
    """One tenant: the shares it may take, what that is in bytes, what it takes, and what became of its
    offers. `common`: the cluster says so of one tier, or both."""

    tenant: str
    host: float
    nvme: float
    allowed: dict[str, int]
    taken: dict[str, int]
    outcomes: dict[str, int]
    common: bool = False


class ShareRows(_Command, frozen=True):
    """Answers `SharesAsked`. `host` and `nvme` are the shares of a tenant that is not named."""

    host: float
    nvme: float
    tenants: list[ShareRow]


class Stats(_Command, frozen=True):
    """Answers `StatsAsked`."""

    counters: dict[str, dict[str, int]]
    gauges: dict[str, dict[str, float]]
    namespaces: list[tuple[Label, dict[str, int]]]


ReplyBody = (
    Accepted
    | Refused
    | Planned
    | Surveyed
    | Pushed
    | Loaded
    | Reserved
    | Fetched
    | Flushed
    | Rows
    | Evicted
    | Verified
    | Pinned
    | PinRows
    | ShareRows
    | Stats
    | Agreed
    | Located
    | Lent
    | Summarised
    | Taken
    | Places
)


class Reply(_Command, frozen=True):
    """Send this answer to that call of that session."""

    session: int
    call: int
    body: ReplyBody


Command = (
    Reply
    | Seal
    | Store
    | Fill
    | Check
    | Forget
    | Reclaim
    | Wipe
    | Remember
    | Locate
    | Pull
    | Agree
    | Announce
    | Deposit
    | FlushPool
)
