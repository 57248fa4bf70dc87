"""Tiny models with random weights, one of each family, as folders that vLLM can load."""

import json
from pathlib import Path

VOCABULARY = 512
TOKENS = 500
"""Prompts are made of the tokens below this: the rest are special."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": VOCABULARY - 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16_384,
}
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# vLLM's CPU kernels know attention heads of 32 and 64 and more, and GDN heads of 64 and 128.
_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 2, **_SMALL}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 200,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            **_SMALL,
        },
    ),
    "qwen3next": (
        "Qwen3NextConfig",
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "granite": (
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 128,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_expand": 2,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            **_SMALL,
        },
    ),
    "deepseekv2": (
        "DeepseekV2Config",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 2,
        },
    ),
}
_KIMI_LINEAR: dict[str, object] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_experts": None,
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    **_COMMON,
}
_AUDIO_NAMES = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
AUDIO_TOKENS = (VOCABULARY - 5, VOCABULARY - 6, VOCABULARY - 4)
"""What stands in a prompt for a sound."""

_AUDIO_TOWER = {
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 1500,
}
BFLOAT16 = {"qwen3next", "kimilinear"}
SHIMMED = {"granite", "deepseekv2", "kimilinear"}
"""Families that vLLM does not run on a CPU as it is; see `shims`."""


def build(name: str, folder: Path, seed: int = 0) -> None:
    """Write a model and its tokenizer into `folder`, unless it is there."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(folder)
    if name == "qwen2audio":
        _qwen2audio(folder, seed)
        return
    if name == "kimilinear":  # Transformers has no class for it: vLLM makes its weights up.
        (folder / "config.json").write_text(json.dumps(_KIMI_LINEAR))
        return
    import torch
    import transformers

    kind, fields = _CONFIGS[name]
    config = getattr(transformers, kind)(**{**_COMMON, **fields})
    config.initializer_range = 0.15  # The usual 0.02 would make every output alike.
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    model.save_pretrained(folder)


def _qwen2audio(folder: Path, seed: int) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = transformers.Qwen2AudioConfig(
        audio_config=_AUDIO_TOWER,
        text_config={"model_type": "qwen2", "num_hidden_layers": 2, **_SMALL, **_COMMON},
        audio_token_index=AUDIO_TOKENS[1],
    )
    torch.manual_seed(seed)
    transformers.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    # Transformers nests the language model once more than vLLM expects.
    weights = folder / "model.safetensors"
    tensors = {
        name.replace("language_model.model.model.", "language_model.model."): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    transformers.Qwen2AudioProcessor(  # type: ignore[no-untyped-call]
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16),  # type: ignore[no-untyped-call]
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    ).save_pretrained(folder)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<t{token}>": token for token in range(VOCABULARY - 6)}
    vocabulary |= {name: VOCABULARY - 6 + at for at, name in enumerate(_AUDIO_NAMES)}
    vocabulary |= {"<unk>": VOCABULARY - 3, "<bos>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        additional_special_tokens=list(_AUDIO_NAMES),
    ).save_pretrained(folder)
