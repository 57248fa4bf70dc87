"""What the adapter says a transformers model keeps."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer

from tiercache.errors import LayoutError
from tiercache.state import Kind, Layout
from tiercache.testing.families import FAMILIES, build
from tiercache_transformers import hf
from tiercache_transformers.layout import form_of, layout_of

torch.set_num_threads(1)

# family -> (units of each part, bytes of each part: per token, or at a boundary)
EXPECTED: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "kimi_linear": {"kv": (1, 192), "recurrent": (4, 12288), "conv": (4, 6912)},
    "bailing_hybrid": {"kv": (1, 192), "recurrent": (4, 12288), "conv": (4, 6912)},
    "glm5_next": {
        "kv": (1, 128),
        "indexer": (1, 132),
        "recurrent": (4, 12288),
        "conv": (4, 6912),
    },
    "qwen3_next": {"kv": (2, 256), "recurrent": (4, 24576), "conv": (2, 6912)},
    "qwen3_5": {"kv": (2, 256), "recurrent": (4, 24576), "conv": (2, 6912)},
    "qwen3_5_moe": {"kv": (2, 256), "recurrent": (4, 24576), "conv": (2, 6912)},
    "olmo_hybrid": {"kv": (4, 512), "recurrent": (4, 24576), "conv": (2, 6912)},
    "bamba": {"kv": (2, 256), "recurrent": (8, 36864), "conv": (2, 8064)},
    "falcon_h1": {"kv": (2, 768), "recurrent": (8, 36864), "conv": (2, 8064)},
    "granitemoehybrid": {"kv": (2, 256), "recurrent": (8, 36864), "conv": (2, 8064)},
    "nemotron_h": {"kv": (2, 256), "recurrent": (8, 24576), "conv": (2, 5376)},
    "jamba": {"kv": (2, 256), "recurrent": (128, 12288), "conv": (128, 4608)},
    "zamba2": {"kv": (4, 1024), "recurrent": (8, 49152), "conv": (2, 10752)},
    "qwen4_exp": {
        "kv": (2, 256),
        "indexer": (1, 88),
        "recurrent": (4, 24576),
        "conv": (1, 11536),
    },
}


def shape(layout: Layout, part: str, tensor: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    found = next(t for t in layout.part(part).tensors if t.name == tensor)
    return found.shape, found.axes


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_parts(name: str) -> None:
    layout = layout_of(build(name), 16)
    found = {part.name: (part.units, part.nbytes(1, part.whole)) for part in layout.parts}
    assert found == EXPECTED[name]
    assert layout.block_tokens == 16
    for part in layout.parts:
        token_addressable = part.kind is Kind.KV
        assert part.is_snapshot != token_addressable
        assert (part.window, part.block_tokens) == ((None, 16) if token_addressable else (1, 0))


def test_recurrent_states_have_the_value_axis_before_the_key_axis() -> None:
    # The sizes differ, so that a missing transpose cannot have the right shape.
    assert shape(layout_of(build("qwen3_next")), "recurrent", "0.recurrent") == (
        (4, 32, 16),
        ("head", "value", "key"),
    )
    assert shape(layout_of(build("granitemoehybrid")), "recurrent", "0.recurrent") == (
        (8, 16, 24),
        ("head", "value", "key"),
    )
    assert shape(layout_of(build("jamba")), "recurrent", "0.recurrent") == (
        (128, 8),
        ("channel", "key"),
    )


@pytest.mark.parametrize(
    ("name", "segments"),
    [
        ("kimi_linear", (64, 64, 64)),
        ("qwen3_next", (32, 32, 128)),
        ("granitemoehybrid", (128, 48, 48)),
        ("jamba", ()),
    ],
)
def test_convolutions_say_where_their_pieces_are(name: str, segments: tuple[int, ...]) -> None:
    conv = layout_of(build(name)).part("conv").tensors[0]
    assert conv.segments == segments
    assert conv.shape[1] == 3  # One column less than the kernel is wide.


def test_latents_are_not_keys_and_values() -> None:
    layout = layout_of(build("kimi_linear"))
    assert [(t.name, t.shape, t.axes) for t in layout.part("kv").tensors] == [
        ("3.latent", (32,), ("latent",)),
        ("3.rope", (16,), ("rope",)),
    ]


def test_values_without_width_are_left_out() -> None:
    layout = layout_of(build("glm5_next"))
    assert [tensor.name for tensor in layout.part("kv").tensors] == ["3.latent"]


def test_every_state_of_a_layer_is_there() -> None:
    layout = layout_of(build("qwen4_exp"))
    conv = {tensor.name: tensor for tensor in layout.part("conv").tensors}
    assert (conv["0.conv1"].shape, conv["0.conv1"].dtype) == ((128, 9), "float32")
    assert (conv["0.conv2"].shape, conv["0.conv2"].dtype) == ((2,), "int64")  # Token ids.
    assert [(t.name, t.dtype) for t in layout.part("indexer").tensors] == [
        ("3.indexer", "float32"),
        ("3.position", "int64"),
    ]


def test_layers_that_hold_both_kinds_are_in_both_parts() -> None:
    layout = layout_of(build("zamba2"))
    assert [tensor.name for tensor in layout.part("kv").tensors] == ["2.keys", "2.values"]
    assert "2.recurrent" in [tensor.name for tensor in layout.part("recurrent").tensors]


def test_the_fingerprint_is_the_models_and_changes_with_its_dtype() -> None:
    one = layout_of(build("kimi_linear", seed=1)).fingerprint
    assert layout_of(build("kimi_linear", seed=2)).fingerprint == one
    half = layout_of(build("kimi_linear", torch.bfloat16))
    assert half.fingerprint != one
    assert half.part("recurrent").tensors[0].dtype == "float32"
    assert half.part("conv").tensors[0].dtype == "bfloat16"


def test_a_model_of_attention_only_has_no_snapshots() -> None:
    layout = layout_of(LlamaForCausalLM(small(LlamaConfig)))
    assert [part.name for part in layout.parts] == ["kv"]
    assert not layout.has_snapshots


SMALL: dict[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


Config = TypeVar("Config", bound=PretrainedConfig)


def small(config: Callable[..., Config], **more: object) -> Config:
    return config(**SMALL, **more)


def sliding() -> PreTrainedModel:
    return MistralForCausalLM(small(MistralConfig, sliding_window=8))


def short_convolutions() -> PreTrainedModel:
    return Lfm2ForCausalLM(small(Lfm2Config, layer_types=["conv", "full_attention"]))


def lightning() -> PreTrainedModel:
    layers = ["linear_attention", "full_attention"]
    return MiniMaxForCausalLM(small(MiniMaxConfig, layer_types=layers, num_local_experts=2))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (sliding, "DynamicSlidingWindowLayer"),
        (short_convolutions, "'lfm2' has not been verified"),
        (lightning, "'minimax' has not been verified"),
    ],
)
def test_what_is_not_understood_is_refused(model: Callable[[], PreTrainedModel], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        form_of(model())


def test_a_state_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(
        layer: DynamicLayer, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer.running_mean = keys.mean()  # type: ignore[attr-defined]
        return usual(layer, keys, values)

    usual = DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", update)
    with pytest.raises(LayoutError, match="'running_mean'"):
        form_of(build("kimi_linear"))


def test_keys_that_do_not_grow_by_one_per_token_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = hf.primed_cache(build("kimi_linear"))
    keys = hf.tensor_at(cache, hf.Place(3, hf.KEYS))
    assert keys is not None
    monkeypatch.setattr(cache.layers[3], hf.KEYS, keys[:, :, :-1])
    monkeypatch.setattr(hf, "primed_cache", lambda model: cache)
    with pytest.raises(LayoutError, match="does not grow by one per token"):
        form_of(build("kimi_linear"))
