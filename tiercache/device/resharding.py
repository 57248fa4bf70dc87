"""Objects between tensor-parallel sizes: stored by range of units, read by any other range.

What is stored names a range of a part's units (heads, groups, channel groups) and not a rank, so a
reader of any size takes what it needs from whatever pieces cover it. A tensor with segments (the q|k|v
of a convolution) is cut segment by segment: its pieces lie side by side inside each segment, never one
after the other. Scales of INT8 states belong to heads and are cut with them: nothing is quantised
again, and every conversion is bit for bit.

Plain bytes, no torch: `part` says what they are (for another codec than native, `codecs.encoded`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import LayoutError
from tiercache.state import Part, Shard, Tensor
from tiercache.state.layout import DTYPE_BYTES

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes of one object of a part, for one shard."""

    shard: Shard
    data: memoryview


def cover(held: Sequence[Shard], wanted: Shard) -> tuple[Shard, ...] | None:
    """Return as few shards as can be that together hold all units of `wanted`, ascending; None if none.

    Of shards that reach equally far, the one that starts last is taken: fewest bytes.
    """
    chosen: list[Shard] = []
    at = wanted.start
    while at < wanted.stop:
        reach = [shard for shard in held if shard.start <= at < shard.stop]
        if not reach:
            return None
        best = max(reach, key=lambda shard: (min(shard.stop, wanted.stop), shard.start))
        chosen.append(best)
        at = best.stop
    return tuple(chosen)


def writes(part: Part, ranks: int, rank: int) -> bool:
    """Return whether this rank stores its shard of `part`: of ranks that hold the same, the first."""
    shards = part.shards(ranks)
    return shards.index(shards[rank]) == rank


def assemble(part: Part, tokens: int, pieces: Sequence[Held], wanted: Shard) -> memoryview:
    """Return the bytes of the object of `wanted` from pieces that cover it; they may overlap.

    `tokens` is 0 for a snapshot. Raises LayoutError when the pieces do not cover it, one has another
    size than its shard's, or two of one shard have different bytes: which is right, nobody can say.
    """
    by_shard: dict[Shard, memoryview] = {}
    for piece in pieces:
        first = by_shard.setdefault(piece.shard, piece.data)
        if first is not piece.data and first.cast("B") != piece.data.cast("B"):
            raise LayoutError(f"part {part.name!r}: units {piece.shard} come with different bytes")
    chosen = cover(list(by_shard), wanted)
    if chosen is None:
        ranges = ", ".join(str(shard) for shard in sorted(by_shard))
        raise LayoutError(
            f"part {part.name!r}: units {wanted} are not covered by {ranges or 'none'}"
        )
    for shard in chosen:
        nbytes = part.nbytes(tokens, shard)
        if by_shard[shard].nbytes != nbytes:
            raise LayoutError(
                f"part {part.name!r}: {by_shard[shard].nbytes} bytes for units {shard}, not {nbytes}"
            )
    target = np.empty(part.nbytes(tokens, wanted), np.uint8)
    done = wanted.start
    for shard in chosen:
        span = Shard(done, min(shard.stop, wanted.stop))
        source: Bytes = np.frombuffer(by_shard[shard], np.uint8)
        _copy(part, tokens, (source, shard), (target, wanted), span)
        done = span.stop
    return target.data


def split(part: Part, tokens: int, whole: Held, wanted: Sequence[Shard]) -> list[Held]:
    """Return the objects of several shards from one that covers them all."""
    return [Held(shard, assemble(part, tokens, [whole], shard)) for shard in wanted]


def _copy(
    part: Part, tokens: int, source: tuple[Bytes, Shard], target: tuple[Bytes, Shard], span: Shard
) -> None:
    """Copy the units of `span` from the bytes of one shard into those of another."""
    theirs = _rows(part, tokens, *source)
    ours = _rows(part, tokens, *target)
    for (tensor, read), (_, write) in zip(theirs, ours, strict=True):
        if tensor.shard_axis is None:
            write[...] = read
            continue
        for pieces_in, pieces_out in zip(
            _segments(part, tensor, source[1], span),
            _segments(part, tensor, target[1], span),
            strict=True,
        ):
            write[:, pieces_out] = read[:, pieces_in]


def _rows(part: Part, tokens: int, flat: Bytes, shard: Shard) -> Iterator[tuple[Tensor, Bytes]]:
    """Yield each tensor with a view of its bytes as `[before the sharded axis, on it, after it]`."""
    width = shard.stop - shard.start
    offset = 0
    for tensor in part.tensors:
        shape = tensor.shape if part.is_snapshot else (tokens, *tensor.shape)
        size = DTYPE_BYTES[tensor.dtype]
        if tensor.shard_axis is None:
            rows, columns, inner = 1, 1, prod(shape) * size
        else:
            axis = tensor.shard_axis + (0 if part.is_snapshot else 1)
            rows, inner = prod(shape[:axis]), prod(shape[axis + 1 :]) * size
            columns = shape[axis] // part.units * width
        nbytes = rows * columns * inner
        yield tensor, flat[offset : offset + nbytes].reshape(rows, columns, inner)
        offset += nbytes


def _segments(part: Part, tensor: Tensor, shard: Shard, span: Shard) -> Iterator[slice]:
    """Yield where the units of `span` are on the sharded axis of what `shard` holds, by segment."""
    assert tensor.shard_axis is not None
    start = 0
    for length in tensor.segments or (tensor.shape[tensor.shard_axis],):
        unit = length // part.units
        yield slice(
            start + (span.start - shard.start) * unit, start + (span.stop - shard.start) * unit
        )
        start += unit * (shard.stop - shard.start)
