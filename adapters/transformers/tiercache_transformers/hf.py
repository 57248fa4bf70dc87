"""The few things of transformers that this package touches, with types.

A cache layer's tensors are attributes, or entries of a dict by state index. This is the only file
that knows.
"""

from typing import NamedTuple

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from tiercache.errors import LayoutError

KEYS = "keys"
VALUES = "values"
INDEXER = "indexer_keys"
POSITIONS = "indexer_position_ids"
RECURRENT = "recurrent_states"
CONV = "conv_states"

PRIMING_TOKENS = 5
"""Tokens of the forward pass that shows what a model keeps."""

_LAYERS = (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
_LINEAR = (LinearAttentionAndFullAttentionLayer, LinearAttentionLayer)


class Place(NamedTuple):
    """Where one tensor is in a cache: layer, attribute, and which of the layer's states it is."""

    layer: int
    attribute: str
    state: int = 0


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the configuration of the part of `model` that decodes text."""
    config: PretrainedConfig = model.config.get_text_config(decoder=True)
    return config


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache for `model`; LayoutError when it has a kind of layer not known here."""
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _LAYERS:
            raise LayoutError(
                f"layer {index} is cached by {type(layer).__name__}, which is not supported "
                f"(sliding windows and model-specific caches are not); run uncached"
            )
    return cache


def has_linear_layers(cache: DynamicCache) -> bool:
    """Return whether any layer keeps per-slot states."""
    return any(isinstance(layer, _LINEAR) for layer in cache.layers)


def keeping_layers(cache: DynamicCache) -> set[int]:
    """Return the numbers of the layers that should keep something."""
    return {
        number for number, layer in enumerate(cache.layers) if not isinstance(layer, DummyLayer)
    }


def tensors_of(cache: DynamicCache) -> dict[Place, torch.Tensor]:
    """Return every tensor that `cache` holds, live: the next forward pass changes them in place."""
    found: dict[Place, torch.Tensor] = {}
    for number, layer in enumerate(cache.layers):
        for attribute, value in sorted(vars(layer).items()):
            entries = value.items() if isinstance(value, dict) else ((0, value),)
            for state, tensor in entries:
                if isinstance(tensor, torch.Tensor):
                    found[Place(number, attribute, state)] = tensor
    return found


def tensor_at(cache: DynamicCache, place: Place) -> torch.Tensor | None:
    """Return the live tensor at `place`, or None when the cache has none there."""
    value = getattr(cache.layers[place.layer], place.attribute, None)
    found = value.get(place.state) if isinstance(value, dict) else value
    return found if isinstance(found, torch.Tensor) else None


@torch.no_grad()
def forward(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
    """Run `tokens` on top of `cache`, in one call; return the last token's logits, shape [vocab].

    A model without a language head gives its last hidden state, shape [hidden].
    """
    ids = torch.tensor([tokens], dtype=torch.long, device=model.device)
    output = model(input_ids=ids, past_key_values=cache, use_cache=True)
    last = output.logits if hasattr(output, "logits") else output.last_hidden_state
    if not isinstance(last, torch.Tensor):
        raise TypeError(f"{type(model).__name__} returned no logits")
    return last[0, -1]


def primed_cache(model: PreTrainedModel) -> DynamicCache:
    """Return a cache after a few tokens: the honest way to learn what a model keeps."""
    cache = new_cache(model)
    forward(model, list(range(PRIMING_TOKENS)), cache)
    return cache


def put(
    cache: DynamicCache, place: Place, tensor: torch.Tensor, values: torch.Tensor | None
) -> None:
    """Put one restored tensor into a fresh cache; `values` go with keys (None: they have no width).

    The cache copies what it is given, except indexer positions, which it keeps.
    """
    match place.attribute:
        case "keys":
            beside = tensor[..., :0] if values is None else values
            cache.update(tensor, beside, place.layer)
        case "indexer_keys":
            cache.update_indexer(tensor, place.layer)
        case "indexer_position_ids":
            layer = cache.layers[place.layer]
            if not isinstance(layer, DynamicIndexedLayer):
                raise LayoutError(f"layer {place.layer} has no indexer")
            layer.indexer_position_ids = tensor
        case "recurrent_states":
            cache.update_recurrent_state(tensor, place.layer, place.state)
        case "conv_states":
            # Without a convolution state transformers silently ignores the recurrent one.
            columns = tensor.shape[-1]
            cache.update_conv_state(tensor, place.layer, place.state, conv_kernel_size=columns)
        case _:
            raise LayoutError(f"layer {place.layer}: cannot restore {place.attribute!r}")
