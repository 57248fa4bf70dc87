"""Between a transformers cache and the bytes of tiercache objects.

Bytes are the layout's tensors one after the other, each contiguous: `[tokens, *shape]` for a block,
`shape` for a snapshot. Copies are private both ways: what was taken does not change with the next
forward pass, and what was restored is the model's own.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from tiercache.client import Blob
from tiercache.errors import LayoutError
from tiercache.state import NATIVE, Part
from tiercache_transformers import hf
from tiercache_transformers.layout import Form, Slot


def tokens_in(cache: DynamicCache, form: Form) -> int | None:
    """Return how many tokens every attention layer of `cache` holds; None when there is none.

    Raises LayoutError when they differ. Nothing in a cache says how many tokens its recurrent and
    convolution states contain.
    """
    counts = {
        _native(cache, slot).shape[0]
        for part, slots in zip(form.layout.parts, form.slots, strict=True)
        for slot in slots
        if not part.is_snapshot
    }
    if len(counts) > 1:
        raise LayoutError(f"the layers hold different numbers of tokens: {sorted(counts)}")
    return counts.pop() if counts else None


def snapshot(cache: DynamicCache, form: Form, start: int, end: int) -> list[Blob]:
    """Return everything that a later resume at `end` needs beyond the whole blocks before `start`.

    `cache` must hold exactly `end` tokens; `start` must be a block edge. See `take_blocks` and
    `take_states`.
    """
    return [*take_blocks(cache, form, start, end), *take_states(cache, form, end)]


def take_blocks(cache: DynamicCache, form: Form, start: int, end: int) -> list[Blob]:
    """Return the token-addressable parts of `[start, end)`, cut at block edges.

    `start` must be a block edge; the last block is partial when `end` lies inside one. `cache` may hold
    more tokens than `end`. Raises LayoutError when it holds fewer.
    """
    held = tokens_in(cache, form)
    if held is not None and not 0 <= start < end <= held:
        raise LayoutError(f"the cache holds {held} tokens, not [{start}, {end})")
    blobs = []
    for part, slots in zip(form.layout.parts, form.slots, strict=True):
        if part.is_snapshot:
            continue
        if start % part.block_tokens:
            raise LayoutError(f"part {part.name!r}: {start} is not an edge of its blocks")
        natives = [_native(cache, slot) for slot in slots]
        for first in range(start, end, part.block_tokens):
            last = min(first + part.block_tokens, end)
            content = _pack([native[first:last] for native in natives])
            blobs.append(Blob(part=part.name, start=first, end=last, data=content))
    return blobs


def take_states(cache: DynamicCache, form: Form, boundary: int) -> list[Blob]:
    """Return the snapshot parts as they are now, which must be after exactly `boundary` tokens.

    The caller vouches for the recurrent states, which cannot be asked; the attention layers are
    checked, and LayoutError is raised when they hold another number of tokens.
    """
    held = tokens_in(cache, form)
    if boundary < 1 or held not in (None, boundary):
        raise LayoutError(f"the cache holds {held} tokens, not {boundary}")
    return [
        Blob(part=part.name, end=boundary, data=_pack([_native(cache, slot) for slot in slots]))
        for part, slots in zip(form.layout.parts, form.slots, strict=True)
        if part.is_snapshot
    ]


def restore(
    model: PreTrainedModel, form: Form, boundary: int, blobs: Iterable[Blob]
) -> DynamicCache:
    """Return a fresh cache of `model` that holds exactly the first `boundary` tokens.

    `blobs` must be all of it and nothing else: for each part the blocks that tile `[0, boundary)`, or
    one snapshot at `boundary`, native and unsharded. Raises LayoutError otherwise, before anything is
    built. The blobs' memory is not referred to afterwards.
    """
    if boundary < 1:
        raise LayoutError(f"nothing can be restored at {boundary}")
    by_part: dict[str, list[Blob]] = {part.name: [] for part in form.layout.parts}
    for blob in blobs:
        if blob.part not in by_part:
            raise LayoutError(f"the model has no part {blob.part!r}")
        by_part[blob.part].append(blob)
    ordered = [_ordered(part, boundary, by_part[part.name]) for part in form.layout.parts]
    canonical: dict[hf.Place, tuple[Slot, torch.Tensor]] = {}
    for part, slots, pieces in zip(form.layout.parts, form.slots, ordered, strict=True):
        tokens = 0 if part.is_snapshot else boundary
        for slot, tensor in zip(slots, _unpack(slots, pieces, tokens), strict=True):
            canonical[slot.place] = (slot, tensor)
    cache = hf.new_cache(model)
    for place, (slot, tensor) in sorted(canonical.items(), key=lambda item: item[0]):
        if place.attribute == hf.VALUES:
            continue  # Enters together with its keys.
        ours = _to_native(slot, tensor).to(slot.device)
        beside = canonical.get(place._replace(attribute=hf.VALUES))
        values = None if beside is None else _to_native(*beside).to(slot.device)
        hf.put(cache, place, ours, values)
    return cache


def _ordered(part: Part, boundary: int, blobs: list[Blob]) -> list[Blob]:
    """Return the blobs of `part` in token order, after checking that they are exactly its window."""
    if part.is_snapshot:
        expected = [(0, boundary)]
    else:
        size = part.block_tokens
        expected = [(edge, min(edge + size, boundary)) for edge in range(0, boundary, size)]
    found = sorted(blobs, key=lambda blob: blob.start)
    ranges = [(blob.start, blob.end) for blob in found]
    if ranges != expected:
        odd = sorted(set(ranges) ^ set(expected)) or ranges
        raise LayoutError(f"part {part.name!r} does not end at {boundary}: {odd[:4]}")
    for blob in found:
        shard = part.whole if blob.shard is None else blob.shard
        if blob.codec != NATIVE or shard != part.whole:
            raise LayoutError(f"part {part.name!r}: codec {blob.codec!r}, shard {shard}")
        nbytes = part.nbytes(blob.end - blob.start, shard)
        if blob.data.nbytes != nbytes:
            raise LayoutError(
                f"part {part.name!r}: {blob.data.nbytes} bytes for [{blob.start}, {blob.end}), "
                f"not {nbytes}"
            )
    return found


def _pack(tensors: Sequence[torch.Tensor]) -> memoryview:
    """Return the bytes of `tensors`, each contiguous, one after the other."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat).cpu().numpy().data


def _unpack(slots: Sequence[Slot], blobs: Sequence[Blob], tokens: int) -> list[torch.Tensor]:
    """Return each slot's canonical tensor in private memory; `tokens` is 0 for a snapshot."""
    sources = [np.frombuffer(blob.data, np.uint8) for blob in blobs]
    at = [0] * len(blobs)
    tensors = []
    for slot in slots:
        shape = (tokens, *slot.tensor.shape) if tokens else slot.tensor.shape
        tensor = torch.empty(shape, dtype=slot.dtype)
        target = tensor.view(-1).view(torch.uint8).numpy()
        position = 0
        for index, blob in enumerate(blobs):
            size = slot.tensor.nbytes * (blob.end - blob.start if tokens else 1)
            target[position : position + size] = sources[index][at[index] : at[index] + size]
            position += size
            at[index] += size
        tensors.append(tensor)
    return tensors


def _native(cache: DynamicCache, slot: Slot) -> torch.Tensor:
    """Return a live view of the slot's tensor in canonical axes: tokens first where it has tokens."""
    live = hf.tensor_at(cache, slot.place)
    if live is None:
        raise LayoutError(f"the cache has no {slot.tensor.name!r}")
    if live.dtype != slot.dtype:
        raise LayoutError(f"{slot.tensor.name!r} is {live.dtype}, not {slot.tensor.dtype}")
    match slot.place.attribute:
        case hf.KEYS | hf.VALUES:
            view = live[0].transpose(0, 1)
            view = view if len(slot.tensor.shape) > 1 else view.flatten(1)
        case hf.INDEXER:
            view = live[0]
        case hf.POSITIONS:
            view = live[:, 0].transpose(0, 1)
        case _:
            view = live[0].transpose(-1, -2) if slot.transposed else live[0][..., slot.dead :]
            if live.shape[0] != 1 or tuple(view.shape) != slot.tensor.shape:
                raise LayoutError(f"{slot.tensor.name!r} is {tuple(live.shape)} in the cache")
            return view
    batch = live.shape[1 if slot.place.attribute == hf.POSITIONS else 0]
    if batch != 1 or tuple(view.shape[1:]) != slot.tensor.shape:
        raise LayoutError(f"{slot.tensor.name!r} is {tuple(live.shape)} in the cache")
    return view


def _to_native(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a cache holds it, contiguous, with the batch axis."""
    match slot.place.attribute:
        case hf.KEYS | hf.VALUES:
            heads = tensor if len(slot.tensor.shape) > 1 else tensor[:, None]
            return heads.transpose(0, 1).contiguous()[None]
        case hf.INDEXER:
            return tensor[None]
        case hf.POSITIONS:
            return tensor.transpose(0, 1).contiguous()[:, None]
    if slot.transposed:
        tensor = tensor.transpose(-1, -2).contiguous()
    if slot.dead:
        tensor = torch.nn.functional.pad(tensor, (slot.dead, 0))
    return tensor[None]
