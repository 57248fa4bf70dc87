"""Where a sequence can be resumed. Nothing else decides what a hit is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiercache.state.layout import Part


@dataclass(frozen=True, slots=True)
class Boundary:
    """An exact token count and the chain digest there."""

    tokens: int
    digest: bytes


def resolve(parts: Sequence[Part], positions: Sequence[int], held: Sequence[Sequence[bool]]) -> int:
    """Return the index of the deepest position that can be resumed, or -1.

    `positions` are token counts, ascending; every block edge of every part up to the last one must be
    among them. `held[part][position]` says whether the object of that part *ending* at that position
    is complete for every shard: a whole block at a block edge, a partial block elsewhere, a snapshot
    anywhere.

    A position can be resumed when each part holds its window there: a snapshot at the position itself;
    otherwise its last `window` whole blocks (all when None) and, inside a block, the partial block.
    """
    return next(resumable(parts, positions, held), -1)


def resumable(
    parts: Sequence[Part], positions: Sequence[int], held: Sequence[Sequence[int]]
) -> Iterator[int]:
    """Yield the index of every position that can be resumed, the deepest first; see `resolve`.

    `held` may be of anything true or false: bytes, for instance."""
    depth = len(positions)
    windows: list[Sequence[int]] = []
    for part, flags in zip(parts, held, strict=True):
        if part.window is None:
            depth = _first_gap(part, positions, flags, depth)
        elif not part.is_snapshot:
            windows.append(_windows(part.window, part.block_tokens, positions, flags))
    # Whatever the window, what ends at the position itself is part of it.
    needed = [*held, *windows]
    for position in range(depth - 1, -1, -1):
        for flags in needed:
            if not flags[position]:
                break
        else:
            yield position


def _first_gap(part: Part, positions: Sequence[int], flags: Sequence[int], depth: int) -> int:
    """Return the first position at which a whole block is missing: nothing from there on can be
    resumed by a part that needs all its blocks."""
    block = part.block_tokens
    for position in range(depth):
        if not flags[position] and positions[position] % block == 0:
            return position
    return depth


def _windows(window: int, block: int, positions: Sequence[int], flags: Sequence[int]) -> list[bool]:
    """Return for each position whether the last `window` whole blocks before it are held."""
    found: list[bool] = []
    unbroken = 0
    for tokens, flag in zip(positions, flags, strict=True):
        if tokens % block == 0:
            unbroken = unbroken + 1 if flag else 0
        found.append(unbroken >= min(window, tokens // block))
    return found
