"""Names as routers in other languages make them: by the words of docs/routers.md, with nothing of ours."""

import hashlib
import struct

from tiercache.state import Chain
from tiercache.state.names import packed, short, unpacked

BLOCK = 16


def block_digests(tokens: list[int]) -> list[bytes]:
    scheme = f"sha256-u32le-1/{BLOCK}".encode()
    body = b"s15:tiercache/chain" + b"s%d:%s" % (len(scheme), scheme)
    last = hashlib.sha256(b"l%d:%s" % (len(body), body)).digest()
    found = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = struct.pack(f"<{BLOCK}I", *tokens[start : start + BLOCK])
        last = hashlib.sha256(last + b"block" + block).digest()
        found.append(last)
    return found


def test_names_can_be_made_from_their_description() -> None:
    tokens = [7, 0, (1 << 32) - 1, *range(45)]
    digests = block_digests(tokens)
    assert digests == list(Chain(tokens, BLOCK).digests[1:])
    namespace = bytes(range(100, 132))
    described = bytes(a ^ b for a, b in zip(namespace[:8], digests[2][:8], strict=True))
    assert packed([short(namespace, digests[2])]) == described
    assert unpacked(described) == [short(namespace, digests[2])]
