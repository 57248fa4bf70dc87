"""What the index of the NVMe tier says of one object, as bytes.

Key: `o` and the object's canonical key. Value: msgpack of the record, the extent, the mark of the
start that wrote it, and a hash of the key: an entry under a wrong key must not be believed. The two
digests are in the key only.
"""

from functools import lru_cache

import msgspec
import xxhash

from tiercache.state import Extent, Key, Label, Layout, Record, Shard
from tiercache.state.canonical import DIGEST_BYTES
from tiercache.tiers.base import Found

OBJECTS = b"o"
NAMESPACES = b"n"

_DIGEST_AT = len(OBJECTS) + DIGEST_BYTES
_TAIL_AT = _DIGEST_AT + DIGEST_BYTES
_SHARDS_MAX = 4096
"""Different shards kept while entries are read: they repeat endlessly."""


class _Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key_hash: int
    start_mark: int
    part: str
    shard_start: int
    shard_stop: int
    codec: str
    start: int
    end: int
    nbytes: int
    checksum: bytes
    writer: str
    sealed_at: float
    parent: bytes
    base: bytes
    requantised: int
    segment: int
    offset: int
    size: int


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """A namespace as it is kept for the next start."""

    label: Label
    layout: Layout


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Entry).decode


def object_key(key: Key) -> bytes:
    """Return the index key of an object."""
    return OBJECTS + key.encode()


def encode_entry(record: Record, extent: Extent, start_mark: int) -> tuple[bytes, bytes]:
    """Return the index key and the index value of an object."""
    key = record.key
    raw_key = object_key(key)
    return raw_key, _encode(
        _Entry(
            xxhash.xxh3_64_intdigest(raw_key),
            start_mark,
            key.part,
            key.shard.start,
            key.shard.stop,
            key.codec,
            record.start,
            record.end,
            record.nbytes,
            record.checksum,
            record.writer,
            record.sealed_at,
            record.parent,
            record.base,
            record.requantised,
            extent.segment,
            extent.offset,
            extent.size,
        )
    )


def decode_entry(raw_key: bytes, value: bytes) -> tuple[int, Found] | None:
    """Return the object and the mark of the start that wrote it; None when the entry is damaged.

    An entry whose value was written under another key is damaged too.
    """
    try:
        entry = _decode(value)
        if entry.key_hash != xxhash.xxh3_64_intdigest(raw_key):
            return None
        key = Key(
            raw_key[len(OBJECTS) : _DIGEST_AT],
            entry.part,
            _shard(entry.shard_start, entry.shard_stop),
            entry.codec,
            raw_key[_DIGEST_AT:_TAIL_AT],
        )
    except (msgspec.DecodeError, ValueError):
        return None
    extent = Extent(entry.segment, entry.offset, entry.size)
    if not 0 <= entry.nbytes <= entry.size or entry.offset < 0:
        return None
    return entry.start_mark, Found(_record(key, entry), extent)


def _record(key: Key, entry: _Entry) -> Record:
    return Record(
        key,
        entry.start,
        entry.end,
        entry.nbytes,
        entry.checksum,
        entry.writer,
        entry.sealed_at,
        entry.parent,
        entry.base,
        entry.requantised,
    )


@lru_cache(maxsize=_SHARDS_MAX)
def _shard(start: int, stop: int) -> Shard:
    return Shard(start, stop)
