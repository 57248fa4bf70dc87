"""How large the states of released models are, from their configurations: the arithmetic of layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import transformers
from transformers import PretrainedConfig

from tiercache.device.codecs import CODECS, codec_in, encoded
from tiercache.device.kinds import (
    Columns,
    Heads,
    conv_channels,
    conv_groups,
    conv_qkv,
    grouped,
    latent,
    recurrent,
    recurrent_channels,
)
from tiercache.errors import LayoutError
from tiercache.state import Kind, Layout, Part, Tensor
from tiercache.testing.families import build
from tiercache_transformers.hf import text_config
from tiercache_transformers.layout import layout_of

MIB = 2**20
BLOCK = 64

Numbers = dict[str, int]


@dataclass(frozen=True)
class Dtypes:
    """How an engine keeps each kind."""

    recurrent: str = "float32"
    conv: str = "bfloat16"
    kv: str = "bfloat16"


def layers(config: PretrainedConfig, *kinds: str) -> list[int]:
    named = getattr(config, "layer_types", None) or config.layers_block_type
    return [number for number, kind in enumerate(named) if kind in kinds]


def numbers(config: PretrainedConfig, *names: str) -> tuple[int, ...]:
    return tuple(int(getattr(config, name)) for name in names)


def kda(config: PretrainedConfig, dtypes: Dtypes) -> list[Part]:
    heads, dim, wide, low, rope = numbers(
        config, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "kv_lora_rank",
        "qk_rope_head_dim",
    )  # fmt: skip
    linear = layers(config, "linear_attention")
    full = layers(config, "full_attention", "indexed_attention")
    columns = Columns(linear, wide - 1, dtypes.conv)
    return [
        latent(full, low, rope, BLOCK, dtypes.kv),
        recurrent(Heads(linear, heads, dim, dim, dtypes.recurrent)),
        conv_qkv(columns, (heads, dim), (heads, dim)),
    ]


def gdn(config: PretrainedConfig, dtypes: Dtypes) -> list[Part]:
    keys, key, values, value, wide, kv_heads, dim = numbers(
        config, "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
        "linear_value_head_dim", "linear_conv_kernel_dim", "num_key_value_heads", "head_dim",
    )  # fmt: skip
    linear, full = layers(config, "linear_attention"), layers(config, "full_attention")
    columns = Columns(linear, wide - 1, dtypes.conv)
    return [
        grouped(full, kv_heads, dim, BLOCK, dtypes.kv),
        recurrent(Heads(linear, values, value, key, dtypes.recurrent)),
        conv_qkv(columns, (keys, key), (values, value)),
    ]


@dataclass(frozen=True)
class Mamba2Names:
    """What each family calls the numbers of Mamba2."""

    heads: str = "mamba_n_heads"
    value: str = "mamba_d_head"
    state: str = "mamba_d_state"
    groups: str = "mamba_n_groups"
    wide: str = "mamba_d_conv"


NEMOTRON = Mamba2Names(
    "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"
)


def mamba2(
    config: PretrainedConfig, dtypes: Dtypes, names: Mamba2Names, linear: list[int], full: list[int]
) -> list[Part]:
    heads, value, state, groups, wide, kv_heads = numbers(
        config, names.heads, names.value, names.state, names.groups, names.wide,
        "num_key_value_heads",
    )  # fmt: skip
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    columns = Columns(linear, wide - 1, dtypes.conv)
    return [
        grouped(full, kv_heads, dim, BLOCK, dtypes.kv),
        recurrent(Heads(linear, heads, value, state, dtypes.recurrent)),
        conv_channels(columns, heads * value, heads),
        conv_groups(columns, groups, state),
    ]


def nemotron(config: PretrainedConfig, dtypes: Dtypes) -> list[Part]:
    linear, full = layers(config, "linear_attention"), layers(config, "full_attention")
    return mamba2(config, dtypes, NEMOTRON, linear, full)


def granite(config: PretrainedConfig, dtypes: Dtypes) -> list[Part]:
    linear, full = layers(config, "linear_attention"), layers(config, "full_attention")
    return mamba2(config, dtypes, Mamba2Names(), linear, full)


def falcon(config: PretrainedConfig, dtypes: Dtypes) -> list[Part]:
    every = list(range(config.num_hidden_layers))
    return mamba2(config, dtypes, Mamba2Names(), every, every)


def jamba(config: PretrainedConfig, dtypes: Dtypes) -> list[Part]:
    period, offset, state, wide, expand, width, kv_heads, heads = numbers(
        config, "attn_layer_period", "attn_layer_offset", "mamba_d_state", "mamba_d_conv",
        "mamba_expand", "hidden_size", "num_key_value_heads", "num_attention_heads",
    )  # fmt: skip
    full = [n for n in range(config.num_hidden_layers) if n % period == offset]
    linear = [n for n in range(config.num_hidden_layers) if n not in full]
    columns, channels = Columns(linear, wide - 1, dtypes.conv), expand * width
    return [
        grouped(full, kv_heads, width // heads, BLOCK, dtypes.kv),
        recurrent_channels(linear, channels, state, dtypes.recurrent),
        conv_channels(columns, channels, channels),
    ]


Describe = Callable[[PretrainedConfig, Dtypes], list[Part]]
Row = tuple[float, float, float, float, int, int]
"""MiB of the recurrent state in fp32, bf16 and INT8 with scales; MiB of the convolution in bf16; bytes
of KV per token; tokens whose KV is as large as one bf16 checkpoint."""


@dataclass(frozen=True)
class Released:
    """A released model: transformers' class for it, what it sets, and the published row."""

    config: str
    describe: Describe
    row: Row
    settings: Mapping[str, object] = field(default_factory=dict)


def three_to_one(count: int, full: set[int]) -> list[str]:
    return ["full_attention" if n in full else "linear_attention" for n in range(count)]


def pattern(text: str) -> list[str]:
    named = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    return [named[letter] for letter in text]


KIMI = [3, 7, 11, 15, 19, 23, 26]  # From 0; the default of the class is not what was released.
K3 = {*range(3, 92, 4), 92}
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON_56B = "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + 5 * "M-"

MODELS: Mapping[str, Released] = {
    "Kimi-Linear-48B-A3B": Released(
        "KimiLinearConfig", kda, (40.0, 20.0, 10.3, 1.41, 8064, 2783),
        {"layer_types": three_to_one(27, set(KIMI))},
    ),
    "Kimi K3": Released(
        "KimiLinearConfig", kda, (414.0, 207.0, 106.7, 14.55, 27648, 8403),
        {"num_hidden_layers": 93, "layer_types": three_to_one(93, K3), "linear_num_heads": 96,
         "mlp_layer_types": ["dense"] + ["sparse"] * 92},
    ),
    "GLM-5.3-Flash": Released("Glm5NextTextConfig", kda, (136.0, 68.0, 35.1, 4.78, 11264, 6775)),
    "Ling-3.0-Flash": Released("BailingHybridConfig", kda, (70.0, 35.0, 18.0, 2.46, 8064, 4871)),
    "Qwen3-Next-80B-A3B": Released("Qwen3NextConfig", gdn, (72.0, 36.0, 18.6, 1.69, 24576, 1608)),
    "Qwen3.5-35B-A3B": Released("Qwen3_5MoeTextConfig", gdn, (60.0, 30.0, 15.5, 1.41, 20480, 1608)),
    "Qwen3.5-27B": Released(
        "Qwen3_5TextConfig", gdn, (144.0, 72.0, 37.1, 2.81, 65536, 1197),
        {"num_hidden_layers": 64, "layer_types": None, "linear_num_value_heads": 48},
    ),
    "Qwen3.5-397B-A17B": Released(
        "Qwen3_5MoeTextConfig", gdn, (180.0, 90.0, 46.4, 3.16, 30720, 3180),
        {"num_hidden_layers": 60, "layer_types": None, "linear_num_value_heads": 64},
    ),
    "Nemotron-H-56B": Released(
        "NemotronHConfig", nemotron, (864.0, 432.0, 229.5, 6.33, 40960, 11221),
        {"layers_block_type": pattern(NEMOTRON_56B), "mamba_num_heads": 256, "ssm_state_size": 256},
    ),
    "Nemotron-3-Nano-30B": Released(
        "NemotronHConfig", nemotron, (46.0, 23.0, 12.2, 0.81, 6144, 4063),
        {"layers_block_type": pattern(NANO), "mamba_num_heads": 64, "num_key_value_heads": 2},
    ),
    "Nemotron-3-Super-120B": Released(
        "NemotronHConfig", nemotron, (160.0, 80.0, 42.5, 2.34, 8192, 10540),
        {"layers_block_type": pattern(SUPER), "num_key_value_heads": 2},
    ),
    "Granite-4.0-H-Small": Released(
        "GraniteMoeHybridConfig", granite, (144.0, 72.0, 38.2, 1.74, 16384, 4719),
        {"num_hidden_layers": 40, "layer_types": three_to_one(40, {5, 15, 25, 35}),
         "hidden_size": 4096, "num_key_value_heads": 8, "mamba_d_state": 128},
    ),
    "Falcon-H1-34B": Released(
        "FalconH1Config", falcon, (288.0, 144.0, 74.2, 2.11, 147456, 1039),
        {"num_hidden_layers": 72, "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128,
         "mamba_n_groups": 2, "num_key_value_heads": 4, "num_attention_heads": 20,
         "hidden_size": 5120, "head_dim": 128},
    ),
    "Jamba2-Mini": Released("JambaConfig", jamba, (14.0, 7.0, 4.4, 1.31, 16384, 532)),
    "Jamba-1.5-Large": Released(
        "JambaConfig", jamba, (63.0, 31.5, 19.7, 5.91, 36864, 1064),
        {"num_hidden_layers": 72, "hidden_size": 8192, "num_attention_heads": 64},
    ),
}  # fmt: skip


def described(name: str, dtypes: Dtypes | None = None) -> Layout:
    released = MODELS[name]
    config = getattr(transformers, released.config)(**released.settings)
    return Layout(tuple(released.describe(config, dtypes or Dtypes())), BLOCK)


def nbytes(layout: Layout, kind: Kind, codec: str = "native") -> int:
    parts = [encoded(CODECS[codec], p) if p.is_snapshot else p for p in layout.parts]
    return sum(part.nbytes(1, part.whole) for part in parts if part.kind is kind)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_state_sizes(name: str) -> None:
    layout = described(name)
    half = described(name, Dtypes("bfloat16"))
    conv, kv = nbytes(layout, Kind.CONV), nbytes(layout, Kind.KV)
    checkpoint = nbytes(half, Kind.RECURRENT) + conv
    assert (
        round(nbytes(layout, Kind.RECURRENT) / MIB, 1),
        round(nbytes(half, Kind.RECURRENT) / MIB, 1),
        round(nbytes(layout, Kind.RECURRENT, "int8") / MIB, 1),
        round(conv / MIB, 2),
        kv,
        round(checkpoint / kv),
    ) == MODELS[name].row


@pytest.mark.parametrize(
    ("kv", "row"),
    [
        (latent(range(10), 512, 64, BLOCK, "bfloat16"), (280.0, 140.0, 72.2, 11520, 12743)),
        (grouped(range(10), 8, 128, BLOCK, "bfloat16"), (280.0, 140.0, 72.2, 40960, 3584)),
    ],
    ids=["Ling-2.5-1T", "MiniMax-Text-01"],
)
def test_lightning_attention_has_no_convolution(kv: Part, row: tuple[float, ...]) -> None:
    """Two models of the table whose form transformers does not have."""
    wide, half = (recurrent(Heads(range(70), 64, 128, 128, d)) for d in ("float32", "bfloat16"))
    layout = Layout((kv, wide), BLOCK)
    small = half.nbytes(0, half.whole)
    assert (
        round(nbytes(layout, Kind.RECURRENT) / MIB, 1),
        round(small / MIB, 1),
        round(nbytes(layout, Kind.RECURRENT, "int8") / MIB, 1),
        nbytes(layout, Kind.KV),
        round(small / nbytes(layout, Kind.KV)),
    ) == row


@pytest.mark.parametrize("name", ["Kimi K3", "Kimi-Linear-48B-A3B", "Qwen3-Next-80B-A3B"])
def test_int8_saves_what_it_should(name: str) -> None:
    for dtype, state, whole in (("float32", 0.26, 0.29), ("bfloat16", 0.52, 0.55)):
        layout = described(name, Dtypes(dtype))
        full, small = (nbytes(layout, Kind.RECURRENT, codec) for codec in ("native", "int8"))
        conv = nbytes(layout, Kind.CONV)
        assert nbytes(layout, Kind.CONV, "int8") == conv
        assert small / full <= state
        assert (small + conv) / (full + conv) <= whole


LIMITS = {128: (0.258, 0.516), 64: (0.266, 0.532), 16: (0.313, 0.625)}
"""Of float32 and bfloat16, by how many values share a scale: 1/4 + 1/n, and 1/2 + 2/n."""

SHARED = {
    **dict.fromkeys(MODELS, 128),
    **{name: 64 for name in MODELS if name.startswith(("Nemotron", "Granite"))},
    **dict.fromkeys(("Jamba2-Mini", "Jamba-1.5-Large"), 16),
}
"""d_v; for Mamba1, whose states are channels, d_state."""


@pytest.mark.parametrize("name", MODELS)
def test_what_int8_saves_at_most_follows_from_what_shares_a_scale(name: str) -> None:
    for dtype, item, limit in zip(
        ("float32", "bfloat16"), (4, 2), LIMITS[SHARED[name]], strict=True
    ):
        layout = described(name, Dtypes(dtype))
        full, small = (nbytes(layout, Kind.RECURRENT, codec) for codec in ("native", "int8"))
        assert small / full == pytest.approx(1 / item + 4 / item / SHARED[name])
        assert small / full <= limit


@pytest.mark.parametrize(
    ("name", "describe"),
    [("kimi_linear", kda), ("bailing_hybrid", kda), ("qwen3_next", gdn), ("qwen3_5_moe", gdn),
     ("jamba", jamba)],
)  # fmt: skip
def test_what_is_described_is_what_a_running_model_has(name: str, describe: Describe) -> None:
    model = build(name)
    found = layout_of(model, BLOCK)
    parts = describe(text_config(model), Dtypes("float32", "float32", "float32"))
    assert Layout(tuple(parts), BLOCK).fingerprint == found.fingerprint


@pytest.mark.parametrize(
    ("name", "describe"),
    [("nemotron_h", nemotron), ("granitemoehybrid", granite), ("falcon_h1", falcon)],
)
def test_mamba2_differs_only_in_its_convolution(name: str, describe: Describe) -> None:
    model = build(name)
    found = {part.name: part for part in layout_of(model, BLOCK).parts}
    parts = {
        p.name: p for p in describe(text_config(model), Dtypes("float32", "float32", "float32"))
    }
    assert (parts["kv"], parts["recurrent"]) == (found["kv"], found["recurrent"])
    both = [parts["conv"], parts["conv_groups"]]
    assert sum(p.nbytes(0, p.whole) for p in both) == found["conv"].nbytes(0, found["conv"].whole)


# --- codecs


def state(axes: tuple[str, ...], dtype: str = "float32") -> Part:
    shape = (2, 4, 4, 4)[-len(axes) :]
    return Part("s", Kind.RECURRENT, 1, 0, 1, (Tensor("0.s", dtype, shape, axes),))


def test_a_state_with_the_wrong_axis_last_is_refused_not_quantised() -> None:
    """With equal sizes nothing else would notice: quality is no worse along the other axis."""
    for codec in ("int8", "bf16"):
        with pytest.raises(LayoutError, match="along keys"):
            encoded(CODECS[codec], state(("head", "key", "value")))
    part = encoded(CODECS["int8"], state(("head", "value", "key")))
    assert [(t.dtype, t.shape) for t in part.tensors] == [
        ("int8", (4, 4, 4)),
        ("float32", (4, 1, 4)),
    ]


@pytest.mark.parametrize("codec", ["int8", "bf16"])
@pytest.mark.parametrize(
    ("axes", "dtype"),
    [
        (("channel", "column"), "float32"),
        (("channel", "column"), "bfloat16"),
        (("token",), "int64"),
        (("head", "value", "key"), "int32"),
    ],
)
def test_everything_else_stays_as_it_is(codec: str, axes: tuple[str, ...], dtype: str) -> None:
    part = state(axes, dtype)
    assert encoded(CODECS[codec], part) == part
    assert codec_in(CODECS[codec], part) == "native"


def test_what_is_bf16_already_is_native_under_that_codec() -> None:
    part = state(("head", "value", "key"), "bfloat16")
    assert codec_in(CODECS["bf16"], part) == "native"
    assert codec_in(CODECS["int8"], part) == "int8"
