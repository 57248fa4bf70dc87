"""What a node can be told to do with other nodes, and what it answers them."""

from math import inf

import msgspec

from tiercache.state import Care, Extent, Record


class _Command(msgspec.Struct, frozen=True):
    pass


class Locate(_Command, frozen=True):
    """Ask a node where it could resume this prompt; fields as in `LocateAsked`. It is waited for `wait_s`
    at most. Answer: `LocateEnded`."""

    job: int
    peer: str
    boot: str
    request: str
    namespace: bytes
    digests: list[bytes]
    limit: int
    whole: int
    ranks: int
    codecs: tuple[str, ...]
    reshard: bool
    flush: int
    partial: bool = False
    first: int = 0
    stop: int = 0
    some: bool = False
    wait_s: float = inf


class Announce(_Command, frozen=True):
    """Tell a node to come and take what is held of this prompt; fields as in `Announced`. It is waited for
    `wait_s`. Answer: `AnnounceEnded`."""

    job: int
    peer: str
    boot: str
    request: str
    namespace: bytes
    digests: list[bytes]
    limit: int
    ranks: int
    codecs: tuple[str, ...]
    reshard: bool
    flush: int
    wait_s: float


class Agree(_Command, frozen=True):
    """Ask a node where other ranks of an engine sit which of the boundaries `ends` those could resume;
    fields as in `AgreeAsked`. It is waited for `wait_s` at most. Answer: `AgreeEnded`."""

    job: int
    peer: str
    boot: str
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
    wait_s: float


class Pull(_Command, frozen=True):
    """Fetch each object from a node into its host extent, and check it. `flush`: the number of the last
    flush of the namespace. Answer: `Pulled`."""

    job: int
    peer: str
    boot: str
    objects: list[tuple[Record, Extent]]
    flush: int = 0


class Deposit(_Command, frozen=True):
    """Put all that a boundary rests on into the pool, then say there that it is whole. What is there
    already stays. It belongs to the time after the flush of that number. Answer: `Deposited`."""

    job: int
    namespace: bytes
    boundary: int
    digest: bytes
    flush: int
    objects: list[tuple[Record, Extent]]


class FlushPool(_Command, frozen=True):
    """Make what is in the pool of these namespaces from before their flush of that number unfindable for
    all. Answer: `PoolFlushed`, since an operator waits to hear that it is true."""

    job: int
    flushes: dict[bytes, int]


# --- replies


class Located(_Command, frozen=True):
    """Answers `LocateAsked`: the boundary, and the objects it rests on that the asker lacks."""

    boundary: int
    records: list[Record]


class Taken(_Command, frozen=True):
    """Answers `Announced`: how far this node could resume the prompt from its memory now."""

    boundary: int


class Agreed(_Command, frozen=True):
    """Answers `AgreeAsked`: the boundaries that can be resumed here, the deepest first."""

    ends: list[int]


class Place(_Command, frozen=True):
    """How deep one node (`node` "": this one) could resume a prompt, and what it takes to do that here.

    `tier` is "host", "nvme" or "coming", "peer" for another node, "pool" for the pool; "" at boundary 0.
    `nbytes` is what the boundary rests on, over all ranks, and `absent_bytes` of it are not in memory
    here; `seconds` is how long they take to come, `compute_s` how long the tokens take to compute. -1: not
    known.
    """

    node: str
    boundary: int
    tier: str = ""
    nbytes: int = 0
    absent_bytes: int = 0
    seconds: float = 0.0
    compute_s: float = -1.0
    health: str = ""


class Places(_Command, frozen=True):
    """Answers `WhereAsked`: this node, then the others that told of the prompt, the deepest first. `reason`
    says why this one can resume nothing."""

    places: list[Place]
    reason: str
    block_tokens: int


class Lent(_Command, frozen=True):
    """Answers `LendAsked`: where each object is, its size and checksum; None for one that is not there."""

    objects: list[tuple[Extent, int, bytes] | None]


class Summarised(_Command, frozen=True):
    """Answers `SummaryAsked`; fields as in `PeerTold`."""

    version: int
    whole: bool
    added: list[int]
    removed: list[int]
