"""The control protocol: this file is the protocol.

A client sends requests and notices, a node sends replies. Every request has exactly one reply, with
the same `call`. A notice has none. Messages say where bytes are; they never carry them. A miss, a
refusal and "not worth it" are replies with a reason, not errors.
"""

import msgspec

from tiercache.state import Care, Layout, Namespace, Piece
from tiercache.state.care import NO_CARE
from tiercache.state.seats import RanksOf
from tiercache.wire import clustering, guarding, sharing, surveying

PROTOCOL = 1


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


# --- values used inside messages


class Tail(_Message, frozen=True):
    """A boundary inside a block: `tokens` in total, its digest, the digest of the block before."""

    tokens: int
    digest: bytes
    base: bytes


class Capture(_Message, frozen=True):
    """What an engine can capture while it runs: boundaries that are multiples of `grain` tokens (1: any).
    With `grain` 0 only the prompt's two ends, at its length and one token before, and the ends of
    prefill chunks of `chunk_tokens` (0: it does not prefill in chunks)."""

    chunk_tokens: int = 0
    grain: int = 1


class Offer(_Message, frozen=True):
    """One object that a client would like to store. Fields as in `Record`; `part` is an index."""

    part: int
    shard_start: int
    shard_stop: int
    codec: str
    digest: bytes
    base: bytes
    start: int
    end: int
    nbytes: int
    parent: bytes = b""
    requantised: int = 0


class Wanted(_Message, frozen=True):
    """One object asked for by name."""

    part: int
    shard_start: int
    shard_stop: int
    codec: str
    digest: bytes


class Grant(_Message, frozen=True):
    """The answer to one offer.

    `outcome` is "granted" (write `nbytes` at `offset` of `segment`, then commit `ticket`), "held"
    (it is there already), "busy" (somebody else is writing it), or why it was declined. `own`: objects
    of the same tenant that went, since it would have been beyond its share.
    """

    outcome: str
    ticket: int = 0
    segment: int = 0
    offset: int = 0
    own: int = 0


# --- requests


class Hello(_Message, frozen=True, tag="hello"):
    """Opens every connection. `client` says who is calling, for people."""

    call: int
    protocol: int
    client: str


class Attach(_Message, frozen=True, tag="attach"):
    """Asks to serve one namespace. The reply carries the arena's descriptors. `write` asks for
    writable ones. `prefill_tokens_per_s`: how fast the engine computes the start of a prompt, over all
    ranks; 0 when it does not say."""

    call: int
    namespace: Namespace
    layout: Layout
    ranks: int
    rank: int
    write: bool
    prefill_tokens_per_s: float = 0.0


class Plan(_Message, frozen=True, tag="plan"):
    """Asks where a request can resume and where to take checkpoints. Idempotent by `request`.

    `chain`: digests of the prompt's whole blocks, concatenated. `tokens`: length of the prompt.
    `limit`: deepest boundary of use (`tokens` - 1 for an engine that must compute one token).
    `tails`: boundaries inside blocks that the client has verified against its own tokens.
    `codecs`: encodings it accepts. `all_ranks`: also lease the other ranks' shards.
    `reshard`: take shards of other tensor-parallel sizes too; then several pieces may make one object.
    `ends`: the prompt's own ends that lie inside blocks, for the node to know them again.
    `care`: how what the request reaches should be kept. `source`: the node of the cluster that handed
    the request over, and is asked first. `seats`: where the ranks sit, if not all of them do on this
    node: a boundary is given out when the ranks elsewhere have it too, and `all_ranks` means those here.
    """

    call: int
    request: str
    lora: str
    salt: str
    chain: bytes
    tokens: int
    limit: int
    tails: list[Tail]
    codecs: list[str]
    capture: Capture
    all_ranks: bool
    reshard: bool = False
    ends: list[Tail] = []
    care: Care = NO_CARE
    source: str = ""
    seats: list[RanksOf] = []


class Load(_Message, frozen=True, tag="load"):
    """Waits until a planned request's objects are in host memory, `wait_ms` at most.

    `boundary` and `digest` are those of the plan that is meant: a request may have been planned anew,
    for another prompt.
    """

    call: int
    request: str
    lora: str
    salt: str
    boundary: int
    digest: bytes
    wait_ms: int


class Reserve(_Message, frozen=True, tag="reserve"):
    """Asks for room to write objects into, and says how they should be kept."""

    call: int
    request: str
    lora: str
    salt: str
    offers: list[Offer]
    care: Care = NO_CARE


class Fetch(_Message, frozen=True, tag="fetch"):
    """Asks for objects by name and leases what is there, as lease `request`."""

    call: int
    request: str
    lora: str
    salt: str
    wanted: list[Wanted]
    wait_ms: int


class Flush(_Message, frozen=True, tag="flush"):
    """Waits until all this session committed is sealed and, if `durable`, stored on NVMe as far as
    it has earned it; `wait_ms` at most."""

    call: int
    durable: bool
    wait_ms: int


class Stats(_Message, frozen=True, tag="stats"):
    """Asks for counters and gauges."""

    call: int


class List(_Message, frozen=True, tag="list"):
    """Asks for objects, `count` at most, after the position named by `cursor` (0 first)."""

    call: int
    cursor: int
    count: int
    prefix: str


class Inspect(_Message, frozen=True, tag="inspect"):
    """Asks for everything known of the objects whose key text starts with `key`."""

    call: int
    key: str


class Evict(_Message, frozen=True, tag="evict"):
    """Drops objects. `prefix` selects by key text ("" all), `tier` is "host", "nvme" or "" (both),
    `nbytes` stops once that much is freed (0: no stop). Leased objects stay and are counted."""

    call: int
    prefix: str
    tier: str
    nbytes: int


class Clear(_Message, frozen=True, tag="clear"):
    """Drops one namespace (its digest in hex, or the start of it), or all (""), in all tiers."""

    call: int
    namespace: str


class Verify(_Message, frozen=True, tag="verify"):
    """Reads up to `count` objects after `cursor` back and checks them."""

    call: int
    cursor: int
    count: int


# --- notices


class Commit(_Message, frozen=True, tag="commit"):
    """The bytes of these tickets are written: seal them. `checksums`: their XXH3-128, one per ticket,
    b"" for one that the node must sum itself; none at all when it must sum all."""

    tickets: list[int]
    checksums: list[bytes] = []


class Cancel(_Message, frozen=True, tag="cancel"):
    """These tickets will not be written."""

    tickets: list[int]


class Release(_Message, frozen=True, tag="release"):
    """The client is done with what these requests leased."""

    requests: list[str]


class Detach(_Message, frozen=True, tag="detach"):
    """The client ends the session and will not touch the arena again."""


# --- replies


class Welcome(_Message, frozen=True, tag="welcome"):
    """Answers `Hello`. `boot` changes with every start of the node."""

    call: int
    protocol: int
    boot: str
    version: str
    frame_bytes_max: int
    batch_max: int


class Attached(_Message, frozen=True, tag="attached"):
    """Answers `Attach`. `segments`: sizes of the arena's segments. The descriptors ride on this
    message: one read-only per segment, then, for a writer, one writable per segment."""

    call: int
    segments: list[int]


class Planned(_Message, frozen=True, tag="planned"):
    """Answers `Plan`.

    `boundary`: tokens that can be resumed (0: none, `reason` says why). `ready`: all of it is in
    host memory and `pieces` are this rank's objects, leased; otherwise `load` waits for the rest,
    of which `ready_boundary` tokens are in host memory now. `checkpoints`: token counts worth
    capturing. `candidates`: boundaries inside blocks, deeper than `boundary`, that the client may
    verify and name.
    """

    call: int
    boundary: int
    ready: bool
    ready_boundary: int
    pieces: list[Piece]
    checkpoints: list[int]
    candidates: list[Tail]
    reason: str


class Loaded(_Message, frozen=True, tag="loaded"):
    """Answers `Load`: what was really obtained, leased. `boundary` may be lower than planned."""

    call: int
    boundary: int
    pieces: list[Piece]
    reason: str


class Reserved(_Message, frozen=True, tag="reserved"):
    """Answers `Reserve`, one grant per offer, in order."""

    call: int
    grants: list[Grant]


class Fetched(_Message, frozen=True, tag="fetched"):
    """Answers `Fetch`, one piece or None per wanted object, in order."""

    call: int
    pieces: list[Piece | None]


class Flushed(_Message, frozen=True, tag="flushed"):
    """Answers `Flush`. `waiting` objects were not there when the time was up; `lost` could not be
    sealed or stored since the last flush."""

    call: int
    waiting: int
    lost: int


class Report(_Message, frozen=True, tag="report"):
    """Answers the operator's questions with JSON text; its shape is documented in docs/wire.md."""

    call: int
    body: bytes


class Failed(_Message, frozen=True, tag="failed"):
    """The request cannot be served at all: `kind` is "refused", "protocol" or "invalid"."""

    call: int
    kind: str
    text: str


Question = Stats | List | Inspect | Evict | Clear | Verify
Request = (
    Hello
    | Attach
    | Plan
    | surveying.Survey
    | Load
    | Reserve
    | Fetch
    | Flush
    | Question
    | guarding.Request
    | sharing.Request
    | clustering.Request
)
Notice = Commit | Cancel | Release | Detach
FromClient = Request | Notice
Reply = (
    Welcome
    | Attached
    | Planned
    | surveying.Surveyed
    | Loaded
    | Reserved
    | Fetched
    | Flushed
    | guarding.Pinned
    | sharing.Reply
    | Report
    | Failed
)
