"""From the shapes of SGLang's host pools to a layout.

A rank's bytes are kept as SGLang has them: one page of a pool is one object. So a pool's part has an
axis `rank`, which is what tensor parallelism splits; what one rank holds is never cut or joined, and
engines of another size share nothing. The order of the axes inside a page is SGLang's
`--hicache-mem-layout` and belongs into the namespace.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.errors import LayoutError
from tiercache.state import Kind, Layout, Part, Tensor
from tiercache.state.layout import DTYPE_BYTES

KV = "kv"
RECURRENT = "recurrent"
CONV = "conv"

ORDERS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Memory layouts whose pages SGLang can point at."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a page or a state: `shape` of one token (without the token axis) or of one slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def tensor(self, ranks: int) -> Tensor:
        """Return it for all `ranks` together; as it is when every rank holds the same (1)."""
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"the pool's dtype {self.dtype!r} is not known")
        if ranks == 1:
            return Tensor(self.name, self.dtype, self.shape, self.axes)
        return Tensor(self.name, self.dtype, (ranks, *self.shape), ("rank", *self.axes), 0)


@dataclass(frozen=True, slots=True)
class Pools:
    """What one rank's host pools hold.

    `kv`: the tensors of one token. `temporal`, `conv`: those of one recurrent state; () for a model
    without. `replicated`: every rank's KV is the same (MLA); states never are. `order`: SGLang's memory
    layout of KV pages.
    """

    page_tokens: int
    order: str
    replicated: bool
    kv: tuple[Piece, ...]
    temporal: tuple[Piece, ...] = ()
    conv: tuple[Piece, ...] = ()


def layout_of(pools: Pools, ranks: int) -> Layout:
    """Return the layout of a model with such pools on each of `ranks` ranks.

    Raises LayoutError for pools that cannot be kept.
    """
    if pools.order not in ORDERS:
        raise LayoutError(
            f"--hicache-mem-layout {pools.order} is not supported; use one of {', '.join(ORDERS)}"
        )
    kv_ranks = 1 if pools.replicated else ranks
    parts = [_part(KV, Kind.KV, pools.kv, pools.page_tokens, kv_ranks)]
    if pools.temporal:
        parts.append(_part(RECURRENT, Kind.RECURRENT, pools.temporal, 0, ranks))
    if pools.conv:
        parts.append(_part(CONV, Kind.CONV, pools.conv, 0, ranks))
    return Layout(tuple(parts), pools.page_tokens)


def _part(name: str, kind: Kind, pieces: Sequence[Piece], block_tokens: int, ranks: int) -> Part:
    tensors = tuple(piece.tensor(ranks) for piece in pieces)
    return Part(name, kind, None if block_tokens else 1, block_tokens, ranks, tensors)
