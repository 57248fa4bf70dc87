"""What nodes tell routers: which boundaries they could resume, and how that changed. Described for other
languages in docs/routers.md.

Two directions. A node publishes batches, three frames each: a topic, the version that the batch leads to
as eight bytes, and a MessagePack map. Whoever missed something asks with two frames: the version it
knows, and of which start of the node. The answer is one batch, in the same three frames.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from tiercache.errors import ProtocolError
from tiercache.state.names import NAME_BYTES

FORMAT: Final = 1
TOPIC: Final = b"residency@"
"""How every topic starts; the node's name follows."""

NOTHING_KNOWN: Final = -1
"""Stands for the version of who knows nothing yet."""

ASK_BYTES_MAX: Final = 64
"""Longest frame of a question."""

Buffer: TypeAlias = bytes | bytearray | memoryview

_VERSION = struct.Struct(">q")
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What became of boundaries between two versions of one node's account of them.

    `boot` changes with every start of the node, and versions begin anew. `host`, `nvme` and `removed` are
    short names, eight bytes each, big endian: what can be resumed now from memory alone, what takes
    something from a slower tier, and what cannot be resumed any more. With `whole` they are all there is,
    and `since` is of no use.
    """

    node: _Text
    boot: _Text
    since: int
    version: int
    whole: bool
    host: bytes
    nvme: bytes
    removed: bytes
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}, not {FORMAT}")
        if not NOTHING_KNOWN <= self.since <= self.version < 1 << 63 or self.version < 0:
            raise ValueError(f"versions {self.since} to {self.version}")
        if any(len(names) % NAME_BYTES for names in (self.host, self.nvme, self.removed)):
            raise ValueError(f"names are {NAME_BYTES} bytes each")
        if self.whole and self.removed:
            raise ValueError("nothing is removed from all there is")


class Ask(NamedTuple):
    """A question: what came after `version` of the start `boot` ("" for whichever it is)."""

    version: int
    boot: str


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Batch)


def batch_frames(batch: Batch) -> list[bytes]:
    """Return the frames of a batch."""
    return [TOPIC + batch.node.encode(), _VERSION.pack(batch.version), _encode(batch)]


def batch_of(frames: Sequence[Buffer]) -> Batch:
    """Return the batch in these frames. Raises ProtocolError when there is none."""
    if len(frames) != 3:
        raise ProtocolError(f"a batch is 3 frames, not {len(frames)}")
    topic, sequence, body = frames
    try:
        batch = _decoder.decode(body)
    except (ValueError, RecursionError) as fault:
        raise ProtocolError(f"not a batch: {fault}") from None
    if bytes(topic) != TOPIC + batch.node.encode() or bytes(sequence) != _VERSION.pack(
        batch.version
    ):
        raise ProtocolError("a batch whose topic or sequence is not its own")
    return batch


def ask_frames(ask: Ask) -> list[bytes]:
    """Return the frames of a question."""
    return [_VERSION.pack(ask.version), ask.boot.encode()]


def ask_of(frames: Sequence[Buffer]) -> Ask:
    """Return the question in these frames. Raises ProtocolError when there is none."""
    if len(frames) != 2 or len(frames[0]) != _VERSION.size or len(frames[1]) > ASK_BYTES_MAX:
        raise ProtocolError("a question is a version of 8 bytes and a boot token")
    (version,) = _VERSION.unpack(frames[0])
    try:
        boot = bytes(frames[1]).decode()
    except UnicodeDecodeError as fault:
        raise ProtocolError(f"a boot token is text: {fault}") from None
    return Ask(max(version, NOTHING_KNOWN), boot)
