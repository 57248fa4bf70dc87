"""What other nodes bring about. Like all events: what the core learns, it learns from these."""

import msgspec

from tiercache.errors import Fault
from tiercache.state import Care, Key, Record


class _Event(msgspec.Struct, frozen=True):
    pass


# --- who is there


class MembersSeen(_Event, frozen=True):
    """The other nodes that are there now, by name, each with its boot token."""

    boots: dict[str, str]


class PeerTold(_Event, frozen=True):
    """What a node could resume, by short name: all of it when `whole`, else what changed after version
    `since`. `boot` is of the start that told it."""

    peer: str
    boot: str
    version: int
    whole: bool
    added: list[int]
    removed: list[int]
    since: int = -1


class StandingHeld(_Event, frozen=True):
    """This node is a member until then, in monotonic seconds, and has heard of every flush before. Then it
    gives nothing out, until it is one again."""

    until: float


class FlushesKnown(_Event, frozen=True):
    """What an earlier start of this node carried out: the number of each namespace's last flush."""

    flushes: dict[bytes, int]


class SummaryAsked(_Event, frozen=True):
    """What could this node resume, and what of that changed since `version`?"""

    session: int
    call: int
    version: int


# --- what this node asks of others


class LocateEnded(_Event, frozen=True):
    """What became of `Locate`: how far the node could resume, and the objects; a fault when it did not
    say. What it sent may be wrong in any way."""

    job: int
    boundary: int
    records: list[Record]
    fault: Fault | None


class AnnounceEnded(_Event, frozen=True):
    """What became of `Announce`: how far the node could resume then; a fault when it did not say."""

    job: int
    boundary: int
    fault: Fault | None


class AgreeEnded(_Event, frozen=True):
    """What became of `Agree`: which boundaries the ranks there could resume; a fault when it did not say.
    What it sent may be wrong in any way."""

    job: int
    ends: list[int]
    fault: Fault | None


class Pulled(_Event, frozen=True):
    """Outcomes of `Pull`, in its order; None means the bytes are there and checked."""

    job: int
    faults: list[Fault | None]


class Deposited(_Event, frozen=True):
    """What became of `Deposit`: None when the boundary can be found in the pool. Nobody reads the
    objects' memory any more."""

    job: int
    fault: Fault | None


class PoolFlushed(_Event, frozen=True):
    """What became of `FlushPool`; None when all who share the pool will hear of it."""

    job: int
    fault: Fault | None


# --- what others ask of this node. `session` is the number of a connection; nothing was attached.


class LocateAsked(_Event, frozen=True):
    """Where could this prompt be resumed by those of `ranks` ranks from `first` up to before `stop` (0,
    0: by all), `limit` tokens at most?

    `digests`: of its whole blocks, in order. The asker has all blocks of the first `whole` tokens itself:
    they need not be here. `partial`: also what lies along the way of which no boundary can be made yet.
    `some`: where those ranks could resume nothing, what any of them could, or with `reshard` a part of
    any. A node that has not carried out the flush of that number answers nothing. Answered by `deadline`;
    what was found is kept until `until` at most.
    """

    session: int
    call: int
    peer: str
    request: str
    namespace: bytes
    digests: list[bytes]
    limit: int
    whole: int
    ranks: int
    codecs: tuple[str, ...]
    reshard: bool
    flush: int
    deadline: float
    until: float
    partial: bool = False
    first: int = 0
    stop: int = 0
    some: bool = False


class Announced(_Event, frozen=True):
    """A node says: come and take what I have of this prompt. Answered by `deadline`."""

    session: int
    call: int
    peer: str
    request: str
    namespace: bytes
    digests: list[bytes]
    limit: int
    ranks: int
    codecs: tuple[str, ...]
    reshard: bool
    flush: int
    deadline: float


class AgreeAsked(_Event, frozen=True):
    """Another node plans a request of which the ranks from `first` up to before `stop`, of `ranks`, sit
    here. Which of the boundaries `ends` could they resume? Fields as in `PlanAsked` and `LocateAsked`;
    `writer` is the engine's name. Answered by `deadline`, at once where no third node may have more; what
    was found is kept until `until` at most."""

    session: int
    call: int
    peer: str
    writer: str
    request: str
    namespace: bytes
    digests: list[bytes]
    tokens: int
    limit: int
    ranks: int
    first: int
    stop: int
    codecs: tuple[str, ...]
    reshard: bool
    chunk_tokens: int
    grain: int
    care: Care
    flush: int
    ends: list[int]
    deadline: float
    until: float


class WhereAsked(_Event, frozen=True):
    """Where could a prompt be resumed, and what would it take? Nothing is kept for who asks.

    `namespace` is a digest, or b"" for the session's own with `lora` and `salt`. `digests` are of whole
    blocks of `block_tokens` tokens (0: of as many as are known here), `limit` is the deepest boundary of
    use.
    """

    session: int
    call: int
    namespace: bytes
    lora: str
    salt: str
    digests: list[bytes]
    block_tokens: int
    limit: int
    codecs: tuple[str, ...]
    reshard: bool


class LendAsked(_Event, frozen=True):
    """Lend these objects, each of that many bytes, until `LoanOver` of the same call."""

    session: int
    call: int
    wanted: list[tuple[Key, int]]


class LoanOver(_Event, frozen=True):
    """Nobody reads what was lent for that call any more. Comes exactly once."""

    session: int
    call: int


class PeerLeft(_Event, frozen=True):
    """A connection of another node ended; its loans end by themselves."""

    session: int


ClusterEvent = (
    MembersSeen
    | PeerTold
    | SummaryAsked
    | LocateEnded
    | Pulled
    | LocateAsked
    | LendAsked
    | WhereAsked
    | LoanOver
    | PeerLeft
    | FlushesKnown
    | StandingHeld
    | Announced
    | AnnounceEnded
    | AgreeAsked
    | AgreeEnded
    | Deposited
)
