"""The kinds of state of hybrid models as parts of a layout, from a model's dimensions alone.

An engine's adapter that knows its configuration describes it with these. They differ in one point from
what is read off a running Hugging Face model: the convolution of Mamba2 is two parts here, its channels
(split by head) and its B|C groups, of which a wide tensor-parallel engine has fewer than ranks and
holds copies. In one part, no rank of such an engine would have what the part calls a unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from tiercache.errors import LayoutError
from tiercache.state import Kind, Part, Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """A recurrent state: `count` heads of `[value, key]` in every one of `layers`."""

    layers: Sequence[int]
    count: int
    value: int
    key: int
    dtype: str = "float32"


def recurrent(heads: Heads) -> Part:
    """Return the recurrent part of KDA, GDN, Mamba2 or lightning attention, split by head."""
    shape, axes = (heads.count, heads.value, heads.key), ("head", "value", "key")
    tensors = tuple(
        Tensor(f"{layer}.recurrent", heads.dtype, shape, axes, None if heads.count == 1 else 0)
        for layer in heads.layers
    )
    return Part("recurrent", Kind.RECURRENT, 1, 0, heads.count, tensors)


def recurrent_channels(layers: Sequence[int], channels: int, key: int, dtype: str) -> Part:
    """Return the recurrent part of Mamba1, split by channel."""
    tensors = tuple(
        Tensor(f"{layer}.recurrent", dtype, (channels, key), ("channel", "key"), 0)
        for layer in layers
    )
    return Part("recurrent", Kind.RECURRENT, 1, 0, channels, tensors)


@dataclass(frozen=True, slots=True)
class Columns:
    """What a convolution keeps: the last `count` inputs (one less than its kernel is wide)."""

    layers: Sequence[int]
    count: int
    dtype: str = "bfloat16"


def conv_qkv(columns: Columns, query_key: tuple[int, int], value: tuple[int, int]) -> Part:
    """Return the convolution part of KDA or GDN: q|k|v, cut piece by piece.

    `query_key`, `value`: heads and their width. A unit is a key head with its value heads.
    """
    side, main = query_key[0] * query_key[1], value[0] * value[1]
    units = gcd(query_key[0], value[0])
    return _conv("conv", columns, (side, side, main), units)


def conv_channels(columns: Columns, channels: int, units: int) -> Part:
    """Return the convolution part of Mamba1, or the channels (x) of Mamba2's, split by head."""
    return _conv("conv", columns, (channels,), units)


def conv_groups(columns: Columns, groups: int, width: int) -> Part:
    """Return the B|C part of Mamba2's convolution, split by group; ranks beyond hold copies."""
    return _conv("conv_groups", columns, (groups * width, groups * width), groups)


def latent(
    layers: Sequence[int], latent_dim: int, rope_dim: int, block_tokens: int, dtype: str
) -> Part:
    """Return the KV part of MLA: every rank holds the same, and it is stored once."""
    shapes = (("latent", latent_dim), ("rope", rope_dim))
    tensors = tuple(
        Tensor(f"{layer}.{what}", dtype, (dim,), (what,))
        for layer in layers
        for what, dim in shapes
        if dim
    )
    return Part("kv", Kind.KV, None, block_tokens, 1, tensors)


def grouped(layers: Sequence[int], heads: int, dim: int, block_tokens: int, dtype: str) -> Part:
    """Return the KV part of grouped-query attention: by KV head, which ranks beyond hold copies of."""
    axis = None if heads == 1 else 0
    tensors = tuple(
        Tensor(f"{layer}.{what}", dtype, (heads, dim), ("head", "dim"), axis)
        for layer in layers
        for what in ("keys", "values")
    )
    return Part("kv", Kind.KV, None, block_tokens, heads, tensors)


def _conv(name: str, columns: Columns, pieces: tuple[int, ...], units: int) -> Part:
    if any(piece % units for piece in pieces):
        raise LayoutError(f"convolution pieces {pieces} do not split into {units} units")
    axis = None if units == 1 else 0
    segments = pieces if len(pieces) > 1 and units > 1 else ()
    tensors = tuple(
        Tensor(
            f"{layer}.{name}",
            columns.dtype,
            (sum(pieces), columns.count),
            ("channel", "column"),
            axis,
            segments,
        )
        for layer in columns.layers
    )
    return Part(name, Kind.CONV, 1, 0, units, tensors)
