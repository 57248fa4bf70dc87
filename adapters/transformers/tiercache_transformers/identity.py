"""The identity of a transformers model: what must be equal before its state may be used.

Every field errs on the side of a miss: a difference that would not have mattered costs a recomputation,
one that was left out would give wrong tokens.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.utils.import_utils import (
    is_causal_conv1d_available,
    is_flash_linear_attention_available,
)

from tiercache.state import Layout, Namespace
from tiercache.state.canonical import digest, encode
from tiercache_transformers.hf import text_config

_VOLATILE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
    }
)
"""Configuration keys that say where a model came from; its class and dtype are taken from itself."""

_VOLATILE_TOKENIZER = ("padding", "truncation")
"""Settings of one call that a tokenizer keeps until the next."""


class _Serialisable(Protocol):
    def to_str(self) -> str: ...


class FastTokenizer(Protocol):
    """A transformers tokenizer with a Rust backend."""

    @property
    def chat_template(self) -> object:
        """A template, several by name, or None."""
        ...

    @property
    def special_tokens_map(self) -> Mapping[str, object]:
        """Special tokens by role."""
        ...

    @property
    def backend_tokenizer(self) -> _Serialisable:
        """The tokenizer that `tokenizer.json` describes."""
        ...


def namespace_of(
    model: PreTrainedModel,
    layout: Layout,
    tokenizer: FastTokenizer | str,
    *,
    name: str,
    revision: str | None = None,
) -> Namespace:
    """Return the namespace of `model`.

    `tokenizer` is a fast tokenizer, or the caller's own fingerprint of one where only token ids are
    known. `revision` is an exact, immutable name of the weights (a commit, not a branch); without one
    all weights are hashed, which takes a second or two per gigabyte. The model's configuration and the
    kernels it runs are part of the identity either way.
    """
    weights = revision or weights_fingerprint(model)
    chosen = tokenizer if isinstance(tokenizer, str) else tokenizer_fingerprint(tokenizer)
    return Namespace.of(
        layout, model=name, weights=f"{weights}/{arithmetic_fingerprint(model)}", tokenizer=chosen
    )


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 (hex) of every tensor in the state dict: names, dtypes, shapes, bytes."""
    hasher = hashlib.sha256(b"tiercache/weights")
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(encode((name, str(tensor.dtype), tuple(tensor.shape))))
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        hasher.update(content.data)
    return hasher.hexdigest()


def arithmetic_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest (hex) of what changes results and is no weight: configuration and kernels."""
    config = text_config(model)
    fields = json.loads(config.to_json_string(use_diff=False))
    kept = {key: value for key, value in fields.items() if key not in _VOLATILE}
    return digest(
        "arithmetic",
        type(model).__name__,
        json.dumps(kept, sort_keys=True),
        str(model.dtype),
        str(getattr(config, "_attn_implementation", None)),
        str(getattr(config, "_experts_implementation", None)),
        bool(is_flash_linear_attention_available()),
        bool(is_causal_conv1d_available()),
    ).hex()


def tokenizer_fingerprint(tokenizer: FastTokenizer) -> str:
    """Return the SHA-256 (hex) of a tokenizer: what `tokenizer.json` holds, its chat template and
    its special tokens."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for key in _VOLATILE_TOKENIZER:
        content.pop(key, None)
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    return digest(
        "tokenizer",
        json.dumps(content, sort_keys=True),
        json.dumps(tokenizer.chat_template, sort_keys=True),
        json.dumps(special, sort_keys=True),
    ).hex()
