"""Tiny models of every hybrid family that the transformers adapter covers, randomly initialised.

Real classes of transformers with small sizes. Needs the `transformers` extra; importing this module
does not.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

Setting: TypeAlias = "bool | int | float | str | Sequence[str] | Sequence[int] | None"

_LINEAR, _FULL = "linear_attention", "full_attention"
_THREE_TO_ONE: Mapping[str, Setting] = {
    "num_hidden_layers": 4,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
}
_BASE: Mapping[str, Setting] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
_DENSE: Mapping[str, Setting] = {**_BASE, "intermediate_size": 96}
_EXPERTS: Mapping[str, Setting] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED: Mapping[str, Setting] = {
    **_EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
}
_GQA: Mapping[str, Setting] = {"num_key_value_heads": 2, "head_dim": 16}
_MLA: Mapping[str, Setting] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_KDA: Mapping[str, Setting] = {
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
}
# The key and value sizes differ on purpose: with equal ones a missing transpose has the right shape.
_GDN: Mapping[str, Setting] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2: Mapping[str, Setting] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One family: its module and classes in transformers, and a tiny configuration.

    `chunks` is False when transformers 5.23 itself computes a chunk on top of a cache wrongly, so that
    only token-by-token runs are an oracle.
    """

    module: str
    config: str
    model: str
    settings: Mapping[str, Setting]
    chunks: bool = True


FAMILIES: Mapping[str, Family] = {
    "kimi_linear": Family(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **_DENSE,
            **_MLA,
            **_KDA,
            **_EXPERTS,
            **_THREE_TO_ONE,
            "q_lora_rank": None,
            "num_local_experts": 4,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {
            **_DENSE,
            **_MLA,
            **_EXPERTS,
            **_THREE_TO_ONE,
            "q_lora_rank": 24,
            "head_dim": 16,
            "num_local_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "glm5_next": Family(
        "glm5_next",
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        {
            **_DENSE,
            **_MLA,
            **_KDA,
            **_EXPERTS,
            **_THREE_TO_ONE,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 0,
            "n_routed_experts": 4,
            "index_topk": 32,
            "index_kpool": 4,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "hc_mult": 2,
            "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
        },
    ),
    "qwen3_next": Family(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_DENSE, **_GQA, **_GDN, **_SHARED, **_THREE_TO_ONE},
    ),
    "qwen3_5": Family(
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {**_DENSE, **_GQA, **_GDN, **_THREE_TO_ONE},
    ),
    "qwen3_5_moe": Family(
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_BASE, **_GQA, **_GDN, **_SHARED, **_THREE_TO_ONE},
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**_DENSE, **_GDN, **_THREE_TO_ONE, "num_key_value_heads": 4},
    ),
    "bamba": Family(
        "bamba",
        "BambaConfig",
        "BambaForCausalLM",
        {
            **_DENSE,
            **_MAMBA2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "attn_layer_indices": [3],
        },
    ),
    "falcon_h1": Family(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_DENSE, **_GQA, **_MAMBA2, "mamba_d_ssm": 128, "num_hidden_layers": 3},
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_DENSE,
            **_MAMBA2,
            **_THREE_TO_ONE,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_DENSE,
            **_GQA,
            **_EXPERTS,
            "ssm_state_size": 24,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            "layer_types": [_LINEAR, "moe", _LINEAR, _FULL],
        },
    ),
    "jamba": Family(
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 4,
            "attn_layer_offset": 3,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
        },
        chunks=False,
    ),
    "zamba2": Family(
        "zamba2",
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            **_DENSE,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "mamba_d_state": 24,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "chunk_size": 32,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        },
    ),
    "qwen4_exp": Family(
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **_BASE,
            **_GQA,
            **_GDN,
            **_SHARED,
            **_THREE_TO_ONE,
            "ple_layer_ids": [1],
            "ple_embed_dim": 16,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 64,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1,
            "hc_count": 2,
            "hc_lowrank": 16,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
}


def build(name: str, dtype: "torch.dtype | None" = None, seed: int = 0) -> "PreTrainedModel":
    """Return a tiny model of family `name`; the same for the same seed, dtype (None: float32).

    Its forget gates are slow: with transformers' own initialisation most heads forget within a few
    tokens, and a wrong recurrent state would hardly show in the logits.
    """
    import torch

    family = FAMILIES[name]
    base = f"transformers.models.{family.module}"
    configs = importlib.import_module(f"{base}.configuration_{family.module}")
    models = importlib.import_module(f"{base}.modeling_{family.module}")
    config = cast("PreTrainedConfig", getattr(configs, family.config)(**family.settings))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = cast("PreTrainedModel", getattr(models, family.model)(config))
    module: torch.nn.Module = model
    module.to(dtype or torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                slow = torch.rand(parameter.shape, generator=generator) * 0.1 + 0.01
                parameter.copy_(slow.log())
    return model
