"""The canonical layout of a transformers model, and how its cache holds each tensor of it.

Canonical means the same for every engine:

    kv         per token: keys and values [head, dim], or an MLA latent [latent] and rope part [rope]
    indexer    per token: sparse-attention indexer keys [dim] and positions [axis]
    recurrent  at a boundary: [head, value, key], as SGLang, vLLM and Mamba2 have it; transformers'
               KDA and GDN have [head, key, value] and are transposed
    conv       at a boundary: [channel, column], channels as q|k|v or x|B|C, without the oldest
               column of transformers' state 0, which no kernel reads again; further states of a
               layer (short convolutions, token ids) are kept whole and in their own dtype

Tensors are named `<layer>.<what>` and stand in layer order. A part splits by head when all of its
tensors do; otherwise it has one unit.
"""

from dataclasses import dataclass, replace
from math import gcd

import torch
from transformers import PreTrainedModel

from tiercache.errors import LayoutError
from tiercache.state import Kind, Layout, Part, Tensor
from tiercache_transformers import hf
from tiercache_transformers.hf import Place
from tiercache_transformers.recurrence import DEAD_COLUMNS, Recurrence, recurrence_of

BLOCK_TOKENS = 64

_PARTS = (
    ("kv", Kind.KV, (hf.KEYS, hf.VALUES)),
    ("indexer", Kind.KV, (hf.INDEXER, hf.POSITIONS)),
    ("recurrent", Kind.RECURRENT, (hf.RECURRENT,)),
    ("conv", Kind.CONV, (hf.CONV,)),
)
_TOKEN_AXIS = {hf.KEYS: 2, hf.VALUES: 2, hf.INDEXER: 1, hf.POSITIONS: 2}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one canonical tensor is in a cache, on which device, and what differs there.

    `transposed`: its last two axes are the other way round there. `dead`: leading columns there that
    the canonical form leaves out; they come back as zeros.
    """

    place: Place
    tensor: Tensor
    device: torch.device
    transposed: bool = False
    dead: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype in torch."""
        found = getattr(torch, self.tensor.dtype)
        if not isinstance(found, torch.dtype):
            raise LayoutError(f"torch has no dtype {self.tensor.dtype!r}")
        return found


@dataclass(frozen=True)
class Form:
    """A layout together with the slot of each of its tensors, by part and in the layout's order."""

    layout: Layout
    slots: tuple[tuple[Slot, ...], ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """A slot, and into how many units its tensor can be split (1: it cannot)."""

    slot: Slot
    units: int = 1


def layout_of(model: PreTrainedModel, block_tokens: int = BLOCK_TOKENS) -> Layout:
    """Return the canonical layout of `model`; see `form_of`."""
    return form_of(model, block_tokens).layout


def form_of(model: PreTrainedModel, block_tokens: int = BLOCK_TOKENS) -> Form:
    """Return the layout of `model` and where its cache holds each part of it.

    Runs a forward pass of a few tokens and reads what the cache then holds. Raises LayoutError for a
    model that keeps anything not understood here: it must run uncached, for a guess would be silently
    wrong.
    """
    config = hf.text_config(model)
    linear = hf.has_linear_layers(hf.new_cache(model))
    recurrence = recurrence_of(config.model_type) if linear else None
    cache = hf.primed_cache(model)
    tensors = hf.tensors_of(cache)
    _check_known(tensors)
    idle = hf.keeping_layers(cache) - {place.layer for place in tensors}
    if idle:
        raise LayoutError(f"layers {sorted(idle)} keep nothing in the cache; run uncached")
    look = _Look(tensors, recurrence, bool(getattr(config, "kv_lora_rank", None)))
    parts: list[Part] = []
    slots: list[tuple[Slot, ...]] = []
    for name, kind, attributes in _PARTS:
        places = [place for place in sorted(tensors) if place.attribute in attributes]
        found = [look.at(place) for place in places if tensors[place].numel()]
        if not found:
            continue
        units = gcd(*(one.units for one in found))
        chosen = tuple(_split(one.slot, units) for one in found)
        block = block_tokens if kind is Kind.KV else 0
        window = None if block else 1
        parts.append(Part(name, kind, window, block, units, tuple(s.tensor for s in chosen)))
        slots.append(chosen)
    return Form(Layout(tuple(parts), block_tokens), tuple(slots))


def _check_known(tensors: dict[Place, torch.Tensor]) -> None:
    for place, tensor in tensors.items():
        axis = _TOKEN_AXIS.get(place.attribute)
        if axis is None and place.attribute not in (hf.RECURRENT, hf.CONV):
            raise LayoutError(
                f"layer {place.layer} keeps {place.attribute!r}, which is not understood; to leave it "
                f"out would be silently wrong. Run uncached"
            )
        if axis is not None and tensor.shape[axis] != hf.PRIMING_TOKENS:
            raise LayoutError(
                f"layer {place.layer}: {place.attribute!r} does not grow by one per token"
            )


@dataclass(frozen=True, slots=True)
class _Look:
    """Reads the tensors of a primed cache as slots."""

    tensors: dict[Place, torch.Tensor]
    recurrence: Recurrence | None
    latent: bool

    def at(self, place: Place) -> _Found:
        """Return the slot at `place`."""
        shape = tuple(self.tensors[place].shape)
        match place.attribute:
            case hf.KEYS | hf.VALUES if self.latent and shape[1] == 1:
                what = "latent" if place.attribute == hf.KEYS else "rope"
                return _Found(self._slot(place, what, (shape[3],), (what,)))
            case hf.KEYS | hf.VALUES:
                slot = self._slot(place, place.attribute, (shape[1], shape[3]), ("head", "dim"))
                return _Found(slot, shape[1])
            case hf.INDEXER:
                return _Found(self._slot(place, "indexer", (shape[2],), ("dim",)))
            case hf.POSITIONS:
                return _Found(self._slot(place, "position", (shape[0],), ("axis",)))
            case hf.RECURRENT if self.recurrence is not None:
                return self._recurrent(place, shape[1:], self.recurrence)
            case hf.CONV if self.recurrence is not None:
                return self._conv(place, shape[1:], self.recurrence)
        raise LayoutError(f"layer {place.layer} keeps {place.attribute!r} unexpectedly")

    def _recurrent(self, place: Place, shape: tuple[int, ...], recurrence: Recurrence) -> _Found:
        axes = recurrence.axes
        if len(shape) != len(axes):
            raise LayoutError(f"layer {place.layer}: recurrent state {shape} is not {axes}")
        if recurrence.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
            axes = (*axes[:-2], axes[-1], axes[-2])
        slot = self._slot(place, "recurrent", shape, axes)
        return _Found(replace(slot, transposed=recurrence.transposed), shape[0])

    def _conv(self, place: Place, shape: tuple[int, ...], recurrence: Recurrence) -> _Found:
        axes = ("channel", "column")[-len(shape) :]
        beside = self.tensors.get(place._replace(attribute=hf.RECURRENT))
        if place.state:
            return _Found(self._slot(place, "conv", shape, axes))
        if beside is None or len(shape) != len(axes):
            raise LayoutError(f"layer {place.layer}: convolution state {shape} is not {axes}")
        segments, units = recurrence.segments(tuple(beside.shape[1:]), shape[0])
        slot = self._slot(place, "conv", (shape[0], shape[1] - DEAD_COLUMNS), axes)
        tensor = replace(slot.tensor, shard_axis=0, segments=segments)
        return _Found(replace(slot, tensor=tensor, dead=DEAD_COLUMNS), units)

    def _slot(self, place: Place, what: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Slot:
        live = self.tensors[place]
        dtype = str(live.dtype).removeprefix("torch.")
        state = str(place.state) if place.state else ""
        tensor = Tensor(f"{place.layer}.{what}{state}", dtype, shape, axes)
        return Slot(place, tensor, live.device)


def _split(slot: Slot, units: int) -> Slot:
    """Return `slot` with its tensor split on its first axis, or not at all when `units` is 1."""
    if units == 1:
        return replace(slot, tensor=replace(slot.tensor, shard_axis=None, segments=()))
    return replace(slot, tensor=replace(slot.tensor, shard_axis=0))
