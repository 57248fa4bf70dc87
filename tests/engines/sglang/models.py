"""Tiny models whose answers depend on everything that was cached, as checkpoints that SGLang loads."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SLOW_DECAY = -5.0
"""Log of how fast a state forgets, per token: a usual one forgets a prompt within a few tokens."""

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "dtype": torch.float32,
}


def dense(folder: Path) -> Path:
    """Save a Qwen3 with two layers."""
    return _save(folder, Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **_COMMON)))


def hybrid(folder: Path) -> Path:
    """Save a Qwen3-Next with three gated-delta layers and one of attention."""
    config = Qwen3NextConfig(
        num_hidden_layers=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        **_COMMON,
    )
    return _save(folder, Qwen3NextForCausalLM(config))


def _save(folder: Path, model: PreTrainedModel) -> Path:
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                spread = 2.0 if "lm_head" in name else 1.0
                noise = torch.randn(weight.shape, generator=source)
                weight.copy_(noise * spread * weight.shape[-1] ** -0.5)
            elif name.endswith("A_log"):
                weight.fill_(SLOW_DECAY)
    model.save_pretrained(folder)
    # SGLang's own configuration classes go by what checkpoints on the Hub say.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"torch_dtype": "float32", "rope_theta": 10_000, "full_attention_interval": 4}
    path.write_text(json.dumps(config))
    return folder
