"""The smallest hybrid model, for tests that count tokens and bytes: blocks of four tokens."""

from itertools import pairwise

from tiercache.client import Blob, Client, Options, Saved
from tiercache.state import Chain, Kind, Layout, Namespace, Part, Tensor

BLOCK = 4
KV_BYTES = 8
STATE_BYTES = 64
TOKENS = tuple(range(1, 12))
SHORT = Options(deadline_s=0.5, retry_s=0.0)
"""For tests in which the node is meant not to answer."""


def layout_of(state_bytes: int) -> Layout:
    """Return a layout with KV of `KV_BYTES` per token and a snapshot of `state_bytes`."""
    kv = Tensor("k", "int8", (KV_BYTES,), ("d",))
    snapshot = Tensor("s", "int8", (state_bytes,), ("d",))
    return Layout(
        (
            Part("kv", Kind.KV, None, BLOCK, 1, (kv,)),
            Part("state", Kind.RECURRENT, 1, 0, 1, (snapshot,)),
        ),
        block_tokens=BLOCK,
    )


def namespace_of(layout: Layout) -> Namespace:
    """Return the namespace of a layout."""
    return Namespace.of(layout, model="tiny", weights="w", tokenizer="t")


LAYOUT = layout_of(STATE_BYTES)
NAMESPACE = namespace_of(LAYOUT)
CHAIN = Chain(TOKENS, BLOCK)


def content(nbytes: int, seed: int) -> memoryview:
    """Return bytes that no other seed has."""
    return memoryview(bytes((seed * 7 + at) % 251 for at in range(nbytes)))


def blobs_for(end: int, state_bytes: int = STATE_BYTES) -> list[Blob]:
    """Return all that is needed to resume at `end`."""
    edges = [*range(0, end, BLOCK), end]
    blobs = [
        Blob("kv", stop, content(KV_BYTES * (stop - start), start), start)
        for start, stop in pairwise(edges)
    ]
    return [*blobs, Blob("state", end, content(state_bytes, end))]


def store(client: Client, end: int) -> None:
    """Save all that is needed to resume CHAIN at `end`; the node has it on return."""
    blobs = blobs_for(end)
    saved = client.save("writer", CHAIN, blobs)
    if saved != Saved(len(blobs), 0, {}):
        raise AssertionError(saved)
    flushed = client.flush(wait_s=20)
    if flushed.reason:
        raise AssertionError(flushed)
