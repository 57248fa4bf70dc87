"""What the connector makes of vLLM's own descriptions of caches, in this process."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.engines.vllm.engines import Json
from tiercache.errors import LayoutError
from tiercache_vllm.facts import groups_of
from tiercache_vllm.gate import refuse_unknown
from tiercache_vllm.geometry import Group, geometry_of

BLOCKS = 4
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=40
)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
MAMBA = MambaSpec(
    block_size=16,
    shapes=((3, 96), (4, 8, 8)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_cache_mode="align",
)


def engine(ranks: int = 1, **text: Json) -> Json:
    """Return as much of an engine's configuration as is looked at."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, decode_context_parallel_size=1),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 2 * ranks, hf_text_config=SimpleNamespace(**text)
        ),
    )


def described(*specs: Json, config: Json = None, **changed: Json) -> tuple[Group, ...]:
    """Return the groups of layers with these specs, one layer each."""
    groups = [
        dataclasses.replace(KVCacheGroupSpec([f"layer{at}"], spec), **changed)
        for at, spec in enumerate(specs)
    ]
    caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    tensors = {f"layer{at}": tensor_of(spec) for at, spec in enumerate(specs)}
    return groups_of(caches, tensors, config or engine())


def tensor_of(spec: Json) -> torch.Tensor:
    if isinstance(spec, MambaSpec):
        return torch.zeros(BLOCKS, 1, 1, spec.state_content_size_bytes, dtype=torch.int8)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    width = spec.state_content_size_bytes // 2
    return torch.zeros(BLOCKS, spec.num_heads, 16, width, dtype=torch.bfloat16)


def test_this_vllm_is_understood() -> None:
    refuse_unknown()


def test_every_kind_has_its_part() -> None:
    geometry = geometry_of(described(FULL, WINDOW, LATENT, MAMBA), 1)
    assert {part.name: part.window for part in geometry.layout.parts} == {
        "conv": 1,
        "kv16": None,
        "kv16_window40": 3,
        "latent16": None,
        "recurrent": 1,
    }


def test_layers_of_one_type_may_differ() -> None:
    uniform = UniformTypeKVCacheSpecs.from_specs({"layer0": FULL})
    assert described(uniform) == described(FULL)


def test_convolutions_split_as_their_model_says() -> None:
    kimi = engine(linear_attn_config={"num_heads": 4, "head_dim": 8})
    gdn = engine(
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_num_value_heads=4,
        linear_value_head_dim=8,
    )
    for config, segments, units in ((kimi, (32, 32, 32), 4), (gdn, (32, 32, 32), 2)):
        ((conv, recurrent),) = [group.states for group in described(MAMBA, config=config)]
        assert (conv.segments, conv.units, conv.order) == (segments, units, (1, 0))
        assert (recurrent.units, recurrent.order) == (4, (0, 1, 2))
    ((conv, _),) = [group.states for group in described(MAMBA)]
    assert (conv.segments, conv.units) == ((), 0), "of a model that is not known"


@pytest.mark.parametrize(
    ("spec", "changed", "said"),
    [
        (
            ChunkedLocalAttentionSpec(
                block_size=16,
                num_kv_heads=2,
                head_size=8,
                dtype=torch.bfloat16,
                attention_chunk_size=64,
            ),
            {},
            "ChunkedLocalAttentionSpec is not supported",
        ),
        (dataclasses.replace(LATENT, tokens_per_state=4), {}, "4 tokens per entry"),
        (FULL, {"host_resident": True}, "has the role"),
        (dataclasses.replace(MAMBA, mamba_cache_mode="none"), {}, "only with prefix caching"),
    ],
)
def test_what_is_not_understood_runs_uncached(spec: Json, changed: Json, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        described(spec, **changed)
