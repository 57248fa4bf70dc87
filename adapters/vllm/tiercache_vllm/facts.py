"""What vLLM says of a worker's cache groups, as plain values. Needs vLLM."""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tiercache.errors import LayoutError
from tiercache_vllm.geometry import Group, Pages, Substate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

_ROLES = ("conv", "recurrent")
"""What the first two states of a layer are; vLLM has the convolution first."""


def groups_of(
    config: "KVCacheConfig", tensors: Mapping[str, torch.Tensor], vllm_config: "VllmConfig"
) -> tuple[Group, ...]:
    """Return the groups that are restored by prefix, as they are on this rank.

    Raises LayoutError for anything that is not understood: the engine must then run uncached, for a guess
    would be silently wrong.
    """
    found = []
    for number in config.prefix_cacheable_group_ids:
        group = config.kv_cache_groups[number]
        if group.host_resident or str(group.role.value) != "default":
            raise LayoutError(f"cache group {number} has the role {group.role!r}; run uncached")
        spec = group.kv_cache_spec
        if spec.dcp_sharded and vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise LayoutError("context parallelism is not supported; run uncached")
        specs = (
            dict(spec.kv_cache_specs)
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else dict.fromkeys(group.layer_names, spec)
        )
        pages: list[Pages] = []
        states: list[Substate] = []
        windows: set[int | None] = set()
        for layer, one in specs.items():
            if isinstance(one, MambaSpec):
                states += _states(layer, one, vllm_config)
                windows.add(None)
            else:
                pages.append(_pages(layer, one, tensors[layer], vllm_config))
                windows.add(_window(layer, one))
        if len(windows) != 1:
            raise LayoutError(f"cache group {number} has windows {windows}; run uncached")
        (window,) = windows
        found.append(Group(number, spec.block_size, tuple(pages), tuple(states), window))
    skipped = set(config.transfer_group_ids) - set(config.prefix_cacheable_group_ids)
    if skipped:
        raise LayoutError(f"cache groups {sorted(skipped)} cannot be restored; run uncached")
    return tuple(found)


def _window(layer: str, spec: "KVCacheSpec") -> int | None:
    if isinstance(spec, SlidingWindowSpec | SlidingWindowMLASpec):
        return int(spec.sliding_window)
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, SinkFullAttentionSpec):
        return None
    raise LayoutError(f"{layer}: {type(spec).__name__} is not supported; run uncached")


def _pages(
    layer: str, spec: "AttentionSpec", tensor: torch.Tensor, vllm_config: "VllmConfig"
) -> Pages:
    if spec.tokens_per_state != 1:
        raise LayoutError(f"{layer}: {spec.tokens_per_state} tokens per entry; run uncached")
    dtype = str(tensor.dtype).removeprefix("torch.")
    heads, width = int(tensor.shape[1]), int(tensor.shape[3])
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return Pages(layer, dtype, heads, width, 1, latent=True)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    total = vllm_config.model_config.get_total_num_kv_heads()
    if max(1, total // ranks) != spec.num_kv_heads or heads != spec.num_kv_heads:
        # Packed otherwise, or a layer with heads of its own: exact for the same number of ranks.
        total = heads * ranks
    return Pages(layer, dtype, heads, width, total)


def _states(layer: str, spec: MambaSpec, vllm_config: "VllmConfig") -> list[Substate]:
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if spec.mamba_cache_mode != "align":
        raise LayoutError(
            f"{layer}: recurrent states are handed off at boundaries only with prefix caching "
            f"(mamba_cache_mode is {spec.mamba_cache_mode!r}); run uncached"
        )
    found = []
    offset = 0
    for at, (lengths, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        what = _ROLES[at] if at < len(_ROLES) and len(spec.shapes) > 1 else f"state{at}"
        name = str(dtype).removeprefix("torch.")
        shape = tuple(int(length) for length in lengths)
        order: tuple[int, ...] = tuple(range(len(shape)))
        segments: tuple[int, ...] = ()
        units = 1 if spec.tp_replicated or (ranks == 1 and len(spec.shapes) != 2) else 0
        if what == "conv" and len(shape) == 2 and not units:
            order = (0, 1) if _dim_first() else (1, 0)
            segments, units = _conv_pieces(vllm_config, shape[order[0]] * ranks, ranks)
        elif what == "recurrent" and len(shape) == 3 and not units:
            units = shape[0] * ranks
        found.append(Substate(layer, what, name, offset, shape, order, segments, units))
        offset += prod(shape) * dtype.itemsize
    return found


def _dim_first() -> bool:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def _conv_pieces(
    vllm_config: "VllmConfig", channels: int, ranks: int
) -> tuple[tuple[int, ...], int]:
    """Return the q|k|v of a convolution over all ranks and how many heads they split into; () and 0
    where they are not known."""
    config = vllm_config.model_config.hf_text_config
    keys = getattr(config, "linear_num_key_heads", None)
    linear = getattr(config, "linear_attn_config", None)
    if keys:
        key = keys * config.linear_key_head_dim
        value = config.linear_num_value_heads * config.linear_value_head_dim
        segments: tuple[int, ...] = (key, key, value)
        heads = int(keys)
    elif isinstance(linear, dict) and {"num_heads", "head_dim"} <= linear.keys():
        heads = int(linear["num_heads"])
        segments = (heads * int(linear["head_dim"]),) * 3
    else:
        return (), 0
    fits = sum(segments) == channels and not any(piece % heads for piece in segments)
    return (segments, heads) if fits and not heads % ranks else ((), 0)
