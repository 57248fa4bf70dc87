"""Keys as bytes, for the transport."""

import msgspec

from tiercache.state import Key, Shard


class _Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    namespace: bytes
    part: str
    start: int
    stop: int
    codec: str
    digest: bytes


_decoder = msgspec.msgpack.Decoder(_Packed)
_encode = msgspec.msgpack.Encoder().encode


def packed_key(key: Key) -> bytes:
    """Return a key as bytes."""
    return _encode(
        _Packed(key.namespace, key.part, key.shard.start, key.shard.stop, key.codec, key.digest)
    )


def key_of(packed: bytes) -> Key | None:
    """Return the key in bytes that another node sent; None when there is none in them."""
    try:
        found = _decoder.decode(packed)
        shard = Shard(found.start, found.stop)
        return Key(found.namespace, found.part, shard, found.codec, found.digest)
    except (ValueError, RecursionError):
        return None
