"""Reads SGLang's host pools: what a page of each is, and where.

Only attributes are read, none of SGLang's classes is imported, so that a pool of another kind is refused
by what it lacks and not mistaken for one that is known.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeGuard

import torch

from tiercache.errors import LayoutError
from tiercache_sglang.geometry import CONV, RECURRENT, Piece, Pools
from tiercache_sglang.memory import Regions, tensors_in

KV_POOL: Final = "kv"
STATE_POOL: Final = "mamba"
SUPPORTED: Final = (KV_POOL, STATE_POOL)


class Pointing(Protocol):
    """What can say where its pages are."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return pointers and sizes of the pieces of pages; `indices` are one per token."""
        ...


class HostPool(Pointing, Protocol):
    """A pool of KV in host memory."""

    @property
    def layout(self) -> str:
        """The order of axes: SGLang's memory layout."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def layer_num(self) -> int:
        """Layers."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        ...


class LatentPool(HostPool, Protocol):
    """MLA."""

    @property
    def kv_cache_dim(self) -> int:
        """Values of one token and layer."""
        ...


class HeadPool(HostPool, Protocol):
    """MHA, GQA."""

    @property
    def head_num(self) -> int:
        """Heads of this rank."""
        ...

    @property
    def head_dim(self) -> int:
        """Values of a key."""
        ...

    @property
    def v_head_dim(self) -> int:
        """Values of a value."""
        ...


class StatePool(Pointing, Protocol):
    """Recurrent and convolution states."""

    @property
    def num_mamba_layers(self) -> int:
        """Layers."""
        ...

    @property
    def temporal_state_shape(self) -> Sequence[int]:
        """Shape of one layer's recurrent state."""
        ...

    @property
    def temporal_dtype(self) -> torch.dtype:
        """Of recurrent states."""
        ...

    @property
    def temporal_state_elem_size(self) -> int:
        """Values of one layer's recurrent state, 0 for a model without."""
        ...

    @property
    def conv_state_shapes(self) -> Sequence[Sequence[int]]:
        """Shapes of one layer's convolution states."""
        ...

    @property
    def conv_dtype(self) -> torch.dtype:
        """Of convolution states."""
        ...

    @property
    def slot_state_buffers(self) -> Sequence[torch.Tensor]:
        """Whatever else a slot holds."""
        ...


def _is_latent(pool: HostPool) -> TypeGuard[LatentPool]:
    return hasattr(pool, "kv_cache_dim")


def _is_heads(pool: HostPool) -> TypeGuard[HeadPool]:
    return hasattr(pool, "head_num") and hasattr(pool, "v_head_dim")


def pools_of(kv: HostPool, states: StatePool | None, *, replicated: bool) -> Pools:
    """Return what the pools hold. Raises LayoutError for what cannot be kept, with the reason.

    `replicated`: every tensor-parallel rank holds the same KV.
    """
    if getattr(kv, "dcp_size", 1) != 1:
        raise LayoutError("decode context parallelism is not supported: pages are cut over ranks")
    return Pools(
        page_tokens=kv.page_size,
        order=kv.layout,
        replicated=replicated,
        kv=_kv_pieces(kv),
        temporal=_temporal(states) if states is not None else (),
        conv=_conv(states) if states is not None else (),
    )


def _kv_pieces(pool: HostPool) -> tuple[Piece, ...]:
    dtype, layers = _name(pool.dtype), pool.layer_num
    if _is_latent(pool):
        shape = (layers, pool.kv_cache_dim)
        return (Piece("latent", dtype, shape, ("layer", "latent")),)
    if _is_heads(pool):
        axes = ("layer", "head", "dim")
        keys, values = (
            (layers, pool.head_num, pool.head_dim),
            (layers, pool.head_num, pool.v_head_dim),
        )
        return (Piece("keys", dtype, keys, axes), Piece("values", dtype, values, axes))
    raise LayoutError(f"KV pools of type {type(pool).__name__} are not supported")


def _temporal(pool: StatePool) -> tuple[Piece, ...]:
    if pool.slot_state_buffers:
        raise LayoutError("states with further tensors in their slots are not supported")
    if not pool.temporal_state_elem_size:
        return ()
    shape = (pool.num_mamba_layers, *pool.temporal_state_shape)
    named = ("layer", "head", "value", "key")
    axes = named if len(shape) == len(named) else tuple(f"axis{at}" for at in range(len(shape)))
    return (Piece("temporal", _name(pool.temporal_dtype), shape, axes),)


def _conv(pool: StatePool) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for number, of_layer in enumerate(pool.conv_state_shapes):
        shape = (pool.num_mamba_layers, *of_layer)
        axes = ("layer", *(f"axis{at}" for at in range(len(of_layer))))
        pieces.append(Piece(f"conv{number}", _name(pool.conv_dtype), shape, axes))
    return tuple(pieces)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Pages:
    """Finds the memory of a KV pool's pages."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._regions = Regions(tensors_in(pool))

    def check(self, nbytes: int) -> None:
        """Raise LayoutError unless a page has that many bytes: a pool that keeps more than what is known
        of it (scales beside quantised values) must not lose it."""
        _, sizes = self._pool.get_page_buffer_meta(torch.arange(self._pool.page_size))
        if sum(sizes) != nbytes:
            raise LayoutError(
                f"a page of {type(self._pool).__name__} has {sum(sizes)} bytes, not the {nbytes} of its "
                "keys and values: it is not supported"
            )

    def at(self, indices: torch.Tensor, count: int) -> list[tuple[memoryview, ...]]:
        """Return the pieces of `count` pages; `indices` names their tokens. LayoutError when they
        do not fit."""
        if indices.numel() != count * self._pool.page_size:
            raise LayoutError(f"{indices.numel()} indices are not {count} pages")
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        return self._regions.pages(pointers, sizes, count)


class Slots:
    """Finds the memory of a state pool's slots."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._regions = Regions(tensors_in(pool))
        self._has_temporal = bool(pool.temporal_state_elem_size)

    def check(self, nbytes: int) -> None:
        """Raise LayoutError unless a state has that many bytes."""
        _, sizes = self._pool.get_page_buffer_meta(torch.arange(1))
        if sum(sizes) != nbytes:
            raise LayoutError(f"a state has {sum(sizes)} bytes, not the {nbytes} of its shapes")

    def at(self, indices: torch.Tensor, count: int) -> list[Mapping[str, tuple[memoryview, ...]]]:
        """Return the memory of `count` states by part. LayoutError when they do not fit."""
        if indices.numel() != count:
            raise LayoutError(f"{indices.numel()} indices are not {count} states")
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        found: list[Mapping[str, tuple[memoryview, ...]]] = []
        for pieces in self._regions.pages(pointers, sizes, count):
            split = 1 if self._has_temporal else 0
            parts = {RECURRENT: pieces[:split], CONV: pieces[split:]}
            found.append({part: views for part, views in parts.items() if views})
        return found
