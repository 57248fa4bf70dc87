"""What nodes ask one another, beside the bytes of objects. Carried by the transport as it is.

Fields that a newer version adds at the end are ignored; a request that is not known is answered with
`Unknown`.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from tiercache.core.cluster import commands as cm
from tiercache.core.cluster.agreeing import ENDS_MAX
from tiercache.errors import ProtocolError
from tiercache.state import Care, Key, Record, Shard
from tiercache.state.canonical import DIGEST_BYTES
from tiercache.state.names import packed, unpacked
from tiercache.transport.base import CHECKSUM_BYTES

RECORDS_MAX = 65_536
TEXT_CHARS_MAX = 1024
WORD_CHARS_MAX = 128
CODECS_MAX = 64
WALL_S_MAX = 1e11
"""Seconds since 1970: some thousand years."""

WRITER_CHARS_MAX = 64
"""What goes to another node of the name of who made an object: a record stays small."""


Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Word = Annotated[str, Meta(max_length=WORD_CHARS_MAX)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Short = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Locate(_Message, frozen=True, tag="locate"):
    """Where could this prompt be resumed? Fields as in the core's event `LocateAsked`; `digests` are
    concatenated, `wait_ms` is how long the answer is waited for."""

    request: Text
    namespace: Digest
    digests: bytes
    limit: Count
    whole: Count
    ranks: Count
    codecs: Annotated[list[Text], Meta(max_length=CODECS_MAX)]
    reshard: bool
    flush: Count
    wait_ms: Count
    partial: bool = False
    first: Count = 0
    stop: Count = 0
    some: bool = False


class Announced(_Message, frozen=True, tag="announced"):
    """Come and take what I have of this prompt. Fields as in the core's event of this name; `digests` are
    concatenated."""

    request: Text
    namespace: Digest
    digests: bytes
    limit: Count
    ranks: Count
    codecs: Annotated[list[Text], Meta(max_length=CODECS_MAX)]
    reshard: bool
    flush: Count
    wait_ms: Count


class Agree(_Message, frozen=True, tag="agree"):
    """Which of these boundaries could the ranks that sit with you resume? Fields as in the core's event
    `AgreeAsked`; `digests` are concatenated, `wait_ms` is how long the answer is waited for: 0, at once."""

    writer: Text
    request: Text
    namespace: Digest
    digests: bytes
    tokens: Count
    limit: Count
    ranks: Count
    first: Count
    stop: Count
    codecs: Annotated[list[Text], Meta(max_length=CODECS_MAX)]
    reshard: bool
    chunk_tokens: Count
    grain: Count
    care: Care
    flush: Count
    ends: Annotated[list[Count], Meta(max_length=ENDS_MAX)]
    wait_ms: Count = 0


class Summarise(_Message, frozen=True, tag="summarise"):
    """What could you resume, and what of that changed since `version`? -1: since ever."""

    version: Annotated[int, Meta(ge=-1, lt=1 << 53)]


class Told(_Message, frozen=True):
    """A record, as it goes between nodes. The namespace is that of the question."""

    part: Word
    shard_start: Count
    shard_stop: Count
    codec: Word
    digest: Digest
    start: Count
    end: Count
    nbytes: Count
    checksum: Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
    writer: Text
    sealed_at: Annotated[float, Meta(ge=0, le=WALL_S_MAX)]
    parent: Short
    base: Short
    requantised: Count


class Located(_Message, frozen=True, tag="located"):
    """Answers `Locate`."""

    boundary: Count
    records: Annotated[list[Told], Meta(max_length=RECORDS_MAX)]


class Taken(_Message, frozen=True, tag="taken"):
    """Answers `Announced`: how far the prompt could be resumed now."""

    boundary: Count


class Agreed(_Message, frozen=True, tag="agreed"):
    """Answers `Agree`: those of the boundaries that can be resumed."""

    ends: Annotated[list[Count], Meta(max_length=ENDS_MAX)]


class Summary(_Message, frozen=True, tag="summary"):
    """Answers `Summarise`. `added` and `removed` are short names, eight bytes each."""

    version: Count
    whole: bool
    added: bytes
    removed: bytes


class Unknown(_Message, frozen=True, tag="unknown"):
    """The answer to what this version does not know."""


Question: TypeAlias = Locate | Summarise | Announced | Agree
Answer: TypeAlias = Located | Summary | Taken | Agreed | Unknown

encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(Question)
_answer = msgspec.msgpack.Decoder(Answer)


def decoded_question(body: bytes | memoryview) -> Question | None:
    """Return what another node asks; None for what is not known here."""
    try:
        return _question.decode(body)
    except (ValueError, RecursionError):
        return None


def decoded_answer(body: bytes | memoryview) -> Answer:
    """Return what another node answers; raises ProtocolError."""
    try:
        return _answer.decode(body)
    except (ValueError, RecursionError) as fault:
        raise ProtocolError(f"not an answer: {fault}") from None


def question_of(command: cm.Locate, wait_s: float) -> Locate:
    """Return what the core wants to know, as a message."""
    return Locate(
        command.request,
        command.namespace,
        b"".join(command.digests),
        command.limit,
        command.whole,
        command.ranks,
        list(command.codecs),
        command.reshard,
        command.flush,
        int(wait_s * 1000),
        command.partial,
        command.first,
        command.stop,
        command.some,
    )


def announced_of(command: cm.Announce) -> Announced:
    """Return what another node is told, as a message."""
    return Announced(
        command.request,
        command.namespace,
        b"".join(command.digests),
        command.limit,
        command.ranks,
        list(command.codecs),
        command.reshard,
        command.flush,
        int(command.wait_s * 1000),
    )


def agree_of(command: cm.Agree, wait_s: float) -> Agree:
    """Return what a node with other ranks is asked, as a message."""
    return Agree(
        command.writer,
        command.request,
        command.namespace,
        b"".join(command.digests),
        command.tokens,
        command.limit,
        command.ranks,
        command.first,
        command.stop,
        list(command.codecs),
        command.reshard,
        command.chunk_tokens,
        command.grain,
        command.care,
        command.flush,
        command.ends,
        int(wait_s * 1000),
    )


def digests_of(question: Locate | Announced | Agree) -> list[bytes]:
    """Return the digests of a question; none when they are no whole number."""
    joined = question.digests
    if len(joined) % DIGEST_BYTES:
        return []
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def answer_of(
    body: cm.Located | cm.Summarised | cm.Taken | cm.Agreed,
) -> Located | Summary | Taken | Agreed:
    """Return what the core answers, as a message."""
    if isinstance(body, cm.Agreed):
        return Agreed(body.ends)
    if isinstance(body, cm.Taken):
        return Taken(body.boundary)
    if isinstance(body, cm.Summarised):
        return Summary(body.version, body.whole, packed(body.added), packed(body.removed))
    return Located(body.boundary, [_told(record) for record in body.records])


def names_of(joined: bytes) -> list[int]:
    """Return the short names in a summary; raises ProtocolError."""
    try:
        return unpacked(joined)
    except ValueError as fault:
        raise ProtocolError(str(fault)) from None


def records_of(located: Located, namespace: bytes) -> list[Record]:
    """Return the records that a node sent; raises ProtocolError."""
    try:
        return [_record(told, namespace) for told in located.records]
    except ValueError as fault:
        raise ProtocolError(str(fault)) from None


def _told(record: Record) -> Told:
    key = record.key
    return Told(
        key.part,
        key.shard.start,
        key.shard.stop,
        key.codec,
        key.digest,
        record.start,
        record.end,
        record.nbytes,
        record.checksum,
        record.writer[:WRITER_CHARS_MAX],
        max(0.0, min(record.sealed_at, WALL_S_MAX)),
        record.parent,
        record.base,
        record.requantised,
    )


def _record(told: Told, namespace: bytes) -> Record:
    shard = Shard(told.shard_start, told.shard_stop)
    return Record(
        Key(namespace, told.part, shard, told.codec, told.digest),
        told.start,
        told.end,
        told.nbytes,
        told.checksum,
        told.writer,
        told.sealed_at,
        told.parent,
        told.base,
        told.requantised,
    )
