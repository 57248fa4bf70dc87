"""The identity of a model as vLLM runs it: its namespace, and who this engine is. Needs vLLM."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import vllm

from tiercache.errors import ConfigError
from tiercache.state import Layout, Namespace
from tiercache_vllm.identity import arithmetic_of, revision_in, tokenizer_of, weights_of
from tiercache_vllm.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig


def engine_name(config: "VllmConfig") -> str:
    """Return what the ranks of one engine share, and no other engine has."""
    return f"vllm-{config.kv_transfer_config.engine_id}"


def namespace_of(
    config: "VllmConfig", layout: Layout, settings: Settings, facts: Sequence[str]
) -> Namespace:
    """Return the namespace of an engine's model. Reads files; hashing weights takes its time.

    Raises ConfigError when something about the model has no identity.
    """
    model = config.model_config
    folder = _folder(model.model, model.revision)
    weights = weights_of(
        folder,
        stated=settings.weights,
        load_format=str(
            getattr(config.load_config.load_format, "value", config.load_config.load_format)
        ),
        hash_bytes_max=settings.weights_hash_bytes_max,
        revision=revision_in(folder),
    )
    tokenizer = tokenizer_of(
        _folder(model.tokenizer, model.tokenizer_revision), stated=settings.tokenizer
    )
    cache = config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "scales that are computed while serving (calculate_kv_scales) differ in "
            "each process: the model is not cached"
        )
    ran = (
        *facts,
        f"dtype {model.dtype}",
        f"quantization {model.quantization}",
        f"cache dtype {cache.cache_dtype}",
        f"state dtypes {cache.mamba_cache_dtype} {cache.mamba_ssm_cache_dtype}",
        f"speculative blocks {_speculative(config) if layout.has_snapshots else ''}",
        f"longest {model.max_model_len if _stretches(model.hf_text_config) else ''}",
    )
    arithmetic = arithmetic_of(model.hf_config.to_dict(), ran)
    name = settings.model or "/".join(
        model.hf_config.architectures or (model.hf_config.model_type,)
    )
    return Namespace.of(layout, model=name, weights=f"{weights}/{arithmetic}", tokenizer=tokenizer)


def backends_of(config: "VllmConfig", tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return what decides how bytes lie inside a page: the kernels, their version and their machine."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    layers = config.compilation_config.static_forward_context
    backends = set()
    for name in tensors:
        layer = layers.get(name)
        if layer is not None:
            backend = getattr(layer, "attn_backend", None) or layer.get_attn_backend()
            backends.add(backend.get_name())
    device = next(iter(tensors.values())).device
    if device.type == "cuda":
        machine = f"cuda {torch.cuda.get_device_capability(device)}"
    else:
        machine = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    release = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
    return (
        f"vllm {release}",
        f"backends {sorted(backends)}",
        f"machine {machine}",
        f"convolution {get_conv_state_layout()}",
        f"layout {config.cache_config.block_size}",
    )


def _speculative(config: "VllmConfig") -> int:
    """Return how many tokens are guessed at most: recurrent states have rows for them."""
    return int(getattr(config, "num_speculative_tokens", 0) or 0)


def _stretches(config: "PretrainedConfig") -> bool:
    """Whether positions are encoded by the longest sequence that may come."""
    scaling = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    return any(kind in str(scaling) for kind in ("longrope", "dynamic", "su"))


def _folder(name: str, revision: str | None) -> str:
    """Return the folder that a model's or tokenizer's files are in; the name itself when none is known."""
    from pathlib import Path

    if Path(name).is_dir():
        return name
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        found = try_to_load_from_cache(name, file, revision=revision or "main")
        if isinstance(found, str):
            return str(Path(found).parent)
    return name
