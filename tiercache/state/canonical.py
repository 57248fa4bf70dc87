"""One way to turn values into bytes, so that a digest is the same everywhere.

Keys must be equal in every process, on every host and under every Python version: a
hash that depends on a process is a cache that never hits. No library encoder is used
here: its output could change with its version. Every value carries its type and its length, so
two different inputs never give the same bytes.
"""

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

Value: TypeAlias = "bool | int | str | bytes | Sequence[Value] | None"

DIGEST_BYTES = 32


def encode(value: Value) -> bytes:
    """Return the canonical bytes of `value`: a type letter, a length, the content.

    Integers are written in decimal, text as UTF-8, sequences as their items. `None`, "" and 0 are
    all different. Raises TypeError for any other type: a digest is never guessed.
    """
    match value:
        case None:
            return b"n0:"
        case bool():
            return b"t1:" + (b"1" if value else b"0")
        case int():
            return _tagged(b"i", str(value).encode())
        case str():
            return _tagged(b"s", value.encode())
        case bytes():
            return _tagged(b"b", value)
        case tuple() | list():
            return _tagged(b"l", b"".join(encode(item) for item in value))
        case _:
            raise TypeError(f"no canonical bytes for {type(value).__name__}")


def digest(domain: str, *values: Value) -> bytes:
    """Return the SHA-256 digest (32 bytes) of `values` under `domain`.

    Different domains never collide, whatever the values.
    """
    return hashlib.sha256(encode((f"tiercache/{domain}", *values))).digest()


def _tagged(tag: bytes, content: bytes) -> bytes:
    return b"%s%d:%s" % (tag, len(content), content)
