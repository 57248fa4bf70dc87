"""Hypothesis strategies for the vocabulary: layouts, chains, what is held, values, keys."""

from dataclasses import dataclass

from hypothesis import strategies as st

from tiercache.state import Chain, Key, Kind, Layout, Namespace, Part, Shard, Tensor
from tiercache.state.canonical import DIGEST_BYTES, Value

NAMES = st.text(
    st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="/"), min_size=1
)
"""Part names: all that a layout allows."""


@st.composite
def parts(draw: st.DrawFn, block_tokens: int, name: str = "part") -> Part:
    """Draw a part of a layout whose chain has blocks of `block_tokens`."""
    block = draw(st.sampled_from((0, 1, 1, 2, 3))) * block_tokens
    window = 1 if block == 0 else draw(st.sampled_from((None, 1, 2, 3, 9)))
    units = draw(st.sampled_from((1, 1, 2, 4)))
    width = units * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(("uint8", "bfloat16", "float32", "int64")))
    tensors = [Tensor("a", dtype, (width,), ("head",), 0 if units > 1 else None)]
    if draw(st.booleans()):
        shape, axes = (2, width), ("row", "head")
        tensors.append(Tensor("b", "uint8", shape, axes, 1 if units > 1 else None))
    return Part(name, draw(st.sampled_from(tuple(Kind))), window, block, units, tuple(tensors))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout of one to four parts."""
    block = draw(st.sampled_from((1, 2, 4, 5)))
    count = draw(st.integers(1, 4))
    return Layout(tuple(draw(parts(block, f"p{number}")) for number in range(count)), block)


@dataclass(frozen=True, slots=True)
class Held:
    """What `resolve` is asked: positions of a prompt, and what is held there of each part."""

    layout: Layout
    positions: list[int]
    held: list[list[bool]]


@st.composite
def held(draw: st.DrawFn) -> Held:
    """Draw positions (every block edge, and some inside blocks) and what is held there."""
    layout = draw(layouts())
    edges = range(layout.block_tokens, layout.block_tokens * draw(st.integers(0, 14)) + 1)
    inside = draw(st.lists(st.integers(1, max(1, edges.stop)), max_size=4))
    positions = sorted({*edges[:: layout.block_tokens], *inside})
    count = len(positions)
    flags: list[list[bool]] = []
    for _ in layout.parts:
        # Few gaps, or any pattern: both find boundaries often enough to be worth asking.
        gaps = draw(st.sets(st.integers(0, max(0, count - 1)), max_size=2) | st.none())
        pattern = draw(st.integers(0, (1 << count) - 1)) if gaps is None else -1
        flags.append([bool(pattern >> at & 1) and at not in (gaps or ()) for at in range(count)])
    return Held(layout, positions, flags)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Draw a chain of up to 40 tokens, some of them with extras."""
    tokens = draw(st.lists(st.integers(0, 3), max_size=40))
    places = st.integers(0, max(0, len(tokens) - 1))
    extras = draw(st.dictionaries(places, st.binary(max_size=3), max_size=3)) if tokens else {}
    return Chain(tokens, draw(st.integers(1, 9)), extras)


def values() -> st.SearchStrategy[Value]:
    """Return a strategy for everything that has canonical bytes."""
    leaves = st.none() | st.booleans() | st.integers() | st.binary(max_size=4) | st.text(max_size=4)
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


def namespaces() -> st.SearchStrategy[Namespace]:
    """Return a strategy for namespaces, the absence of adapter and tenant included."""
    name = st.text(max_size=5)
    return st.builds(Namespace, name, name, name, name, name, lora=name, salt=name)


@st.composite
def keys(draw: st.DrawFn) -> Key:
    """Draw a key; equal ones are likely."""
    digests = st.sampled_from((bytes(DIGEST_BYTES), b"\x2f" * DIGEST_BYTES))
    start = draw(st.integers(0, 11))
    shard = Shard(start, start + draw(st.integers(1, 11)))
    codecs = st.sampled_from(("native", "int8", "a", "b", "ab"))
    return Key(draw(digests), draw(NAMES), shard, draw(codecs), draw(digests))
