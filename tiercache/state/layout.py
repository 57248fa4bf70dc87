"""What the state of one model consists of: its parts, as they are when no rank split them.

A layout is canonical. How an engine orders axes, sizes its pages or splits heads over ranks is not
part of it: an adapter converts to this form or refuses at attach. One number, `window`, describes
every kind of state: how many of its last blocks a part needs before a boundary.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

from tiercache.errors import LayoutError
from tiercache.state.canonical import digest

FORMAT_VERSION = 1

DTYPE_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


class Kind(StrEnum):
    """What sort of state a part is; for people and metrics, never for decisions."""

    KV = "kv"
    RECURRENT = "recurrent"
    CONV = "conv"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A range `[start, stop)` of a part's units (heads, channel groups) held by one rank."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a part, in canonical axis order.

    `shape` leaves out the token axis of a KV part (it is the first axis of the stored bytes) and the
    batch. `axes` names each axis of `shape`. `shard_axis` is the index of the axis that ranks split,
    None when every rank holds a full copy. `segments` are the lengths of the pieces of that axis
    which are split one by one (the q|k|v of a KDA convolution); () means one piece.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    shard_axis: int | None = None
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"tensor {self.name!r}: unknown dtype {self.dtype!r}")
        if len(self.axes) != len(self.shape) or any(size < 1 for size in self.shape):
            raise LayoutError(f"tensor {self.name!r}: axes {self.axes} do not name {self.shape}")
        if self.shard_axis is not None and not 0 <= self.shard_axis < len(self.shape):
            raise LayoutError(f"tensor {self.name!r}: no axis {self.shard_axis} to shard")
        if self.segments and (
            self.shard_axis is None
            or sum(self.segments) != self.shape[self.shard_axis]
            or min(self.segments) < 1
        ):
            raise LayoutError(
                f"tensor {self.name!r}: segments {self.segments} do not fill the axis"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded tensor (per token for a KV part)."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of a model's state.

    `window`: how many of its last whole blocks the part needs before a boundary; None means all of
    them (full attention), n a sliding window, 1 with `block_tokens == 0` a snapshot exactly at the
    boundary (recurrent, conv). `block_tokens`: tokens in one block, 0 for a snapshot. `units`: into
    how many equal pieces ranks may split it; 1 means every rank holds the same copy, stored once.
    """

    name: str
    kind: Kind
    window: int | None
    block_tokens: int
    units: int
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        plain = self.name.isascii() and self.name.isprintable()
        if not self.name or not plain or "/" in self.name:
            raise LayoutError(f"part name {self.name!r} must be plain ASCII without '/'")
        if self.is_snapshot and self.window != 1:
            raise LayoutError(f"part {self.name!r}: a snapshot has window 1, not {self.window}")
        if self.window is not None and self.window < 1:
            raise LayoutError(f"part {self.name!r}: window must be None or at least 1")
        if self.block_tokens < 0 or self.units < 1 or not self.tensors:
            raise LayoutError(f"part {self.name!r}: needs tensors, units >= 1, block_tokens >= 0")
        for tensor in self.tensors:
            self._check_split(tensor)

    def _check_split(self, tensor: Tensor) -> None:
        if (tensor.shard_axis is None) != (self.units == 1):
            raise LayoutError(
                f"part {self.name!r}: tensor {tensor.name!r} must name a shard axis exactly when "
                f"the part has more than one unit"
            )
        if tensor.shard_axis is not None:
            pieces = tensor.segments or (tensor.shape[tensor.shard_axis],)
            if any(piece % self.units for piece in pieces):
                raise LayoutError(
                    f"part {self.name!r}: {tensor.name!r} does not split into {self.units} units"
                )

    @property
    def is_snapshot(self) -> bool:
        """True when the part is a summary of the whole prefix, worth something at one token only."""
        return self.block_tokens == 0

    @property
    def whole(self) -> Shard:
        """The shard that covers the part."""
        return Shard(0, self.units)

    def nbytes(self, tokens: int, shard: Shard) -> int:
        """Return the native size in bytes of one object: `tokens` tokens (ignored for a snapshot)."""
        if not 0 <= shard.start < shard.stop <= self.units:
            raise LayoutError(f"part {self.name!r} has units 0-{self.units}, not {shard}")
        width = shard.stop - shard.start
        per_token = sum(tensor.nbytes // self.units * width for tensor in self.tensors)
        return per_token if self.is_snapshot else per_token * tokens

    def shards(self, ranks: int) -> tuple[Shard, ...]:
        """Return the shard of each of `ranks` tensor-parallel ranks, in rank order.

        Ranks split units evenly and contiguously. With fewer units than ranks, neighbouring ranks
        hold the same unit (grouped-query KV heads under wide tensor parallelism).
        """
        if ranks < 1 or (self.units % ranks and ranks % self.units):
            raise LayoutError(f"part {self.name!r}: {self.units} units do not split over {ranks}")
        if ranks >= self.units:
            held = ranks // self.units
            return tuple(Shard(rank // held, rank // held + 1) for rank in range(ranks))
        width = self.units // ranks
        return tuple(Shard(rank * width, (rank + 1) * width) for rank in range(ranks))


@dataclass(frozen=True)
class Layout:
    """The canonical state of one model. `block_tokens` is the block size of its digest chain."""

    parts: tuple[Part, ...]
    block_tokens: int
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise LayoutError(f"a layout needs parts with different names, not {names}")
        if self.block_tokens < 1:
            raise LayoutError("a layout's block_tokens must be at least 1")
        if self.version != FORMAT_VERSION:
            raise LayoutError(f"layout format {self.version}, this build speaks {FORMAT_VERSION}")
        for part in self.parts:
            if part.block_tokens % self.block_tokens:
                raise LayoutError(
                    f"part {part.name!r}: block of {part.block_tokens} tokens is not a multiple of "
                    f"the chain's {self.block_tokens}"
                )

    def part(self, name: str) -> Part:
        """Return the part called `name`; LayoutError when there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise LayoutError(f"no part {name!r}; there are {[part.name for part in self.parts]}")

    @cached_property
    def has_snapshots(self) -> bool:
        """True when a prefix cannot be resumed from token-addressable parts alone."""
        return any(part.is_snapshot for part in self.parts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical layout: any change of dtype, shape or axis changes it."""
        parts = tuple(
            (
                (part.name, part.kind.value, part.window, part.block_tokens, part.units),
                tuple(
                    (t.name, t.dtype, t.shape, t.axes, t.shard_axis, t.segments)
                    for t in part.tensors
                ),
            )
            for part in self.parts
        )
        return digest("layout", self.version, self.block_tokens, parts).hex()
