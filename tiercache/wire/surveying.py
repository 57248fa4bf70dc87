"""The part of the protocol for engines that choose boundaries themselves. The rest is in `messages.py`."""

import msgspec


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class Survey(_Message, frozen=True, tag="survey"):
    """Asks what is held along a path, for an engine that chooses the boundary itself.

    `chain`: digests of consecutive whole blocks, concatenated. The first need not be the sequence's
    first: what comes before is the client's own. Only this rank's shards count. What the deepest
    boundary rests on, and every state on the path, is kept in the tiers for `hold_ms` or until
    `Release`; it is not leased, and the bytes are to be had with `Fetch`. `before`: digests of blocks that
    the client has itself and that come somewhere before the path; they count as seen, and no more.
    """

    call: int
    request: str
    lora: str
    salt: str
    chain: bytes
    codecs: list[str]
    hold_ms: int
    before: bytes = b""


class Surveyed(_Message, frozen=True, tag="surveyed"):
    """Answers `Survey`. `held`: for each part of the layout one byte per block of the path, 1 where
    the object that ends there is held, in whatever tier. All are as long as the part of the path
    that was looked at: it ends at the first block where a part that needs all its blocks has none.
    `start`: how many tokens come before the path, as what is held on it says; -1 when nothing is."""

    call: int
    held: list[bytes]
    start: int
