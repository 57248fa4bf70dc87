"""Short names of boundaries: what nodes tell each other, and routers, of what they could resume."""

import struct

NAME_BYTES = 8


def short(namespace: bytes, digest: bytes) -> int:
    """Return 64 bits that stand for a boundary of a namespace.

    Two may share a name by accident, about once in 2**64 pairs: then a node is asked for nothing. No
    object is ever found by its short name.
    """
    return int.from_bytes(namespace[:NAME_BYTES]) ^ int.from_bytes(digest[:NAME_BYTES])


def packed(names: list[int]) -> bytes:
    """Return names as bytes, in order."""
    return struct.pack(f">{len(names)}Q", *names)


def unpacked(names: bytes) -> list[int]:
    """Return the names in bytes that `packed` made; raises ValueError for others."""
    if len(names) % NAME_BYTES:
        raise ValueError(f"names are {NAME_BYTES} bytes each, not {len(names)} in all")
    return list(struct.unpack(f">{len(names) // NAME_BYTES}Q", names))
