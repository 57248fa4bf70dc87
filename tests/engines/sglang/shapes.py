"""The shapes of engine that are tested, and the device pools that such an engine has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)

FULL_LAYERS = (1, 3)
STATE_LAYERS = (0, 2)
LAYERS = 4


@dataclass(frozen=True)
class Shape:
    """What kind of tree. `core`: "rust" or "python". `latent`: MLA instead of heads."""

    core: str = "rust"
    latent: bool = False
    hybrid: bool = True
    page: int = 4
    order: str = "page_first"
    memory: str = "cache"
    write: str = "write_through"

    def __str__(self) -> str:
        kind = ("mla" if self.latent else "mha") + ("+mamba" if self.hybrid else "")
        return f"{self.core}-{kind}-{self.order}-{self.page}-{self.memory}"


def request_pool(shape: Shape) -> Any:
    """Return the pool of requests, which holds the states of running ones."""
    if not shape.hybrid:
        return ReqToTokenPool(size=16, max_context_len=512, device="cpu", enable_memory_saver=False)
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("float32"):
        state = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=32,
            n_groups=1,
            num_heads=2,
            head_dim=16,
            state_size=16,
            conv_kernel=4,
        )
        params = Mamba2CacheParams(shape=state, layers=list(STATE_LAYERS))
    return HybridReqToTokenPool(
        size=16,
        mamba_size=48,
        mamba_spec_state_size=16,
        max_context_len=512,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=list(STATE_LAYERS),
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=3,
    )


def kv_pool(shape: Shape, requests: Any) -> Any:
    """Return the pool of KV on the device."""
    common: dict[str, Any] = {
        "size": 512, "page_size": shape.page, "dtype": torch.bfloat16, "device": "cpu",
        "enable_memory_saver": False,
    }  # fmt: skip
    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
    if shape.hybrid:
        return HybridLinearKVPool(
            head_num=2,
            head_dim=16,
            full_attention_layer_ids=list(FULL_LAYERS),
            mamba_pool=requests.mamba_pool,
            use_mla=shape.latent,
            **(latent if shape.latent else {}),
            **common,
        )
    if shape.latent:
        return MLATokenToKVPool(layer_num=LAYERS, **latent, **common)
    return MHATokenToKVPool(head_num=2, head_dim=16, layer_num=LAYERS, **common)


def shapes(every: Sequence[str] = ("rust", "python")) -> list[Shape]:
    """Return the shapes that are tested throughout."""
    return [
        Shape(core, latent, hybrid)
        for core in every
        for latent in (False, True)
        for hybrid in (False, True)
    ]
