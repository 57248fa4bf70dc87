"""What a sealed object looks like in a pool, and what it is called there.

An object is a header of `HEADER_BYTES`, then its bytes. The header holds all of the record:

    8   magic
    2   format, little-endian
    2   length of the record's encoding, little-endian
    16  seal: over the three fields above and the encoding
    n   the record, MessagePack, one way to write each
        zeros up to the end

With a secret the seal is the first half of HMAC-SHA-256, without one of SHA-256. It covers the
checksum of the bytes, which is XXH3-128: made against accidents. So a secret shows objects of
strangers and of other clusters, but somebody who may write to the pool and computes a collision is not
kept out; pools are for nodes that trust one another.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass, field

import msgspec

from tiercache.errors import LayoutError
from tiercache.state import Key, Record, Shard
from tiercache.state.canonical import DIGEST_BYTES, digest
from tiercache.tiers.remote import EPOCH_MAX, Name

HEADER_BYTES = 1024
FORMAT = 1
"""Another format has other headers: its objects are DAMAGED to this one, and replaced."""

MAGIC = b"tierobj\n"
CHECKSUM_BYTES = 16
SECRET_BYTES_MIN = 16

_FIXED = struct.Struct("<8sHH")
_SEAL_AT = _FIXED.size
_SEAL_BYTES = 16
_BODY_AT = _SEAL_AT + _SEAL_BYTES
RECORD_BYTES_MAX = HEADER_BYTES - _BODY_AT
_SPACE_DIGITS = 32


class _Label(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    namespace: bytes
    digest: bytes
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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Label).decode


@dataclass(frozen=True, slots=True)
class Realm:
    """Whose objects these are. Clusters with other realms share a pool and never meet.

    `cluster` is a name. `secret`, when there is one, is known to the nodes of the cluster only: without
    it neither the names nor the seals can be made. It is in no text of this value.
    """

    cluster: str
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not self.cluster:
            raise ValueError("a cluster needs a name")
        if self.secret and len(self.secret) < SECRET_BYTES_MIN:
            raise ValueError(f"a secret has at least {SECRET_BYTES_MIN} bytes")

    def space(self, namespace: bytes) -> str:
        """Return what stands for a namespace of this cluster."""
        return digest("pool/space", self.secret, self.cluster, namespace).hex()[:_SPACE_DIGITS]

    def name(self, key: Key, epoch: int) -> Name:
        """Return what the pool calls the object of a key in an epoch of its namespace."""
        if not 0 <= epoch <= EPOCH_MAX:
            raise ValueError(f"an epoch is 0..{EPOCH_MAX}, not {epoch}")
        leaf = digest("pool/leaf", self.secret, self.cluster, key.encode()).hex()
        return Name(self.space(key.namespace), epoch, leaf)


def seal(record: Record, realm: Realm) -> bytes:
    """Return the header of an object; LayoutError when its names are too long for one."""
    key = record.key
    encoded = _encode(
        _Label(
            key.namespace,
            key.digest,
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
        )
    )
    if len(encoded) > RECORD_BYTES_MAX:
        raise LayoutError(
            f"the record of {key} takes {len(encoded)} bytes, and a header has {RECORD_BYTES_MAX}: "
            f"shorten the names of the part, the codec or the writer"
        )
    fixed = _FIXED.pack(MAGIC, FORMAT, len(encoded))
    return (fixed + _seal(fixed, encoded, realm) + encoded).ljust(HEADER_BYTES, b"\0")


def unseal(header: bytes | bytearray | memoryview, realm: Realm) -> Record | None:
    """Return the record that a header holds; None unless every byte of it is what `seal` writes.

    Any bytes of any length are fine.
    """
    if len(header) != HEADER_BYTES:
        return None
    magic, form, nbytes = _FIXED.unpack_from(header)
    if (magic, form) != (MAGIC, FORMAT) or nbytes > RECORD_BYTES_MAX:
        return None
    encoded = bytes(header[_BODY_AT : _BODY_AT + nbytes])
    sealed = bytes(header[_SEAL_AT:_BODY_AT])
    if not hmac.compare_digest(sealed, _seal(bytes(header[:_SEAL_AT]), encoded, realm)):
        return None
    try:
        label = _decode(encoded)
        record = _record(label)
    except (msgspec.DecodeError, ValueError):  # The second when numbers or text make no key.
        return None
    whole = seal(record, realm) == bytes(header)
    return record if whole and _is_sound(record) else None


def _is_sound(record: Record) -> bool:
    return (
        record.nbytes >= 0
        and 0 <= record.start <= record.end
        and record.requantised >= 0
        and len(record.checksum) == CHECKSUM_BYTES
        and len(record.parent) in {0, DIGEST_BYTES}
        and len(record.base) in {0, DIGEST_BYTES}
    )


def _record(label: _Label) -> Record:
    key = Key(
        label.namespace,
        label.part,
        Shard(label.shard_start, label.shard_stop),
        label.codec,
        label.digest,
    )
    return Record(
        key,
        label.start,
        label.end,
        label.nbytes,
        label.checksum,
        label.writer,
        label.sealed_at,
        label.parent,
        label.base,
        label.requantised,
    )


def _seal(fixed: bytes, encoded: bytes, realm: Realm) -> bytes:
    content = b"%s%s" % (fixed, encoded)
    if realm.secret:
        return hmac.digest(realm.secret, content, "sha256")[:_SEAL_BYTES]
    return hashlib.sha256(content).digest()[:_SEAL_BYTES]
