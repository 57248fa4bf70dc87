"""What a client asks that concerns other nodes of the cluster. Part of the protocol in `messages.py`."""

import msgspec


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Push(_Message, frozen=True, tag="push"):
    """Asks that the node `to` takes what is held of this prompt here, and goes on from it.

    `chain`: digests of the prompt's whole blocks, concatenated. `limit`: deepest boundary of use. It may
    be asked again and again while the prompt is being computed: each time, what is new goes over.
    """

    call: int
    request: str
    lora: str
    salt: str
    chain: bytes
    limit: int
    codecs: list[str]
    reshard: bool
    to: str
    wait_ms: int


class Pushed(_Message, frozen=True, tag="pushed"):
    """Answers `Push`: how far the other node could resume the prompt from its memory then. `reason` says
    why it is 0: "unknown_node", "busy", "not_taken", "unavailable", "deadline"."""

    call: int
    boundary: int
    reason: str


class Where(_Message, frozen=True, tag="where"):
    """Asks where a prompt could be resumed, on this node and on the others, and what that takes. It changes
    nothing: no lease, no visit.

    `namespace`: its whole digest; b"" for the session's own, narrowed by `lora` and `salt`. `chain`:
    digests of the prompt's whole blocks of `block_tokens` tokens (0: of as many as the node knows),
    concatenated. `limit`: deepest boundary of use.
    """

    call: int
    namespace: bytes
    lora: str
    salt: str
    chain: bytes
    block_tokens: int
    limit: int
    codecs: list[str]
    reshard: bool


class Place(_Message, frozen=True):
    """How deep one node could resume, and what it takes to do that on the node that was asked.

    `node` is "" for the one that was asked. `tier`: "host" when all is in its memory, "nvme" or "coming"
    (from another node) when something is not, "peer" for another node, "pool" for the pool that nodes
    share, which have told so much and are not asked; "" at boundary 0. `nbytes`: what the boundary rests
    on, over all ranks; `absent_bytes` of it are not in memory here. `seconds`: how long they take to come,
    `compute_s`: how long the tokens take to compute. -1 for what is not known. `health` is that of the
    other node.
    """

    node: str
    boundary: int
    tier: str
    nbytes: int
    absent_bytes: int
    seconds: float
    compute_s: float
    health: str


class Places(_Message, frozen=True, tag="places"):
    """Answers `Where`: the node that was asked, then others that have told of the prompt, the deepest
    first. `reason` says why the first can resume nothing."""

    call: int
    places: list[Place]
    reason: str
    block_tokens: int


Request = Push | Where
Reply = Pushed | Places
