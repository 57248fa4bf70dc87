"""Where bytes are."""

import msgspec


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """A run of bytes in one segment of one tier. `size` is the space taken, at least the object's."""

    segment: int
    offset: int
    size: int


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One object of a plan, with where its bytes are in the host arena.

    `part` indexes the layout's parts; `[start, end)` are the tokens covered (see `Record`); `codec`
    names the encoding of the bytes; `nbytes` bytes lie at `offset` in `segment`. `requantised`: as in
    `Record`.
    """

    part: int
    shard_start: int
    shard_stop: int
    codec: str
    start: int
    end: int
    segment: int
    offset: int
    nbytes: int
    requantised: int = 0
