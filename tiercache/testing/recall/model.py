"""The recall models: transformers' own KimiLinearForCausalLM, tiny, with trained weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import KimiLinearConfig, PreTrainedModel

_LINEAR, _FULL = "linear_attention", "full_attention"

MODELS: Mapping[str, tuple[str, ...]] = {
    "mla1_kda2": (_FULL, _LINEAR, _LINEAR),
    "kda3_mla1": (_LINEAR, _LINEAR, _LINEAR, _FULL),
}
"""Layer types by model. In the first, an MLA before any KDA cannot bind a key to its value, so what is
recalled must be in the KDA states; the second has the order of the released models."""

VOCABULARY = 192
_WIDTH, _HEADS, _HEAD_DIM = 64, 2, 32


def weights_path(name: str) -> Path:
    """Return the file of trained weights of model `name`, one of `MODELS`."""
    return Path(__file__).parent / f"recall_{name}.safetensors"


def fixture_path() -> Path:
    """Return the golden file: states of "mla1_kda2" at token 128 of 8 sequences, and what follows."""
    return Path(__file__).parent / "recall_fixture_A.safetensors"


def load_model(
    name: str, *, weights: Path | None = None, dtype: "torch.dtype | None" = None
) -> "PreTrainedModel":
    """Return model `name` in evaluation mode, with `weights` (its own by default), in `dtype` (float32)."""
    import torch
    from safetensors.torch import load_file
    from transformers import KimiLinearForCausalLM

    model = KimiLinearForCausalLM(_config(name))
    model.load_state_dict(load_file(weights or weights_path(name)))
    module: torch.nn.Module = model
    module.to(dtype or torch.float32).eval()
    return model


def _config(name: str) -> "KimiLinearConfig":
    from transformers import KimiLinearConfig

    layers = list(MODELS[name])
    return KimiLinearConfig(
        vocab_size=VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        moe_intermediate_size=_WIDTH,
        num_hidden_layers=len(layers),
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        linear_head_dim=_HEAD_DIM,
        linear_num_heads=_HEADS,
        linear_conv_kernel_dim=4,
        layer_types=layers,
        mlp_layer_types=["dense"] * len(layers),
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
