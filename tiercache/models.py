"""What the state of well-known hybrid models weighs, and what their prefill costs.

Bytes follow from the published configurations: a checkpoint is the recurrent state of every linear
layer (float32 unless it says otherwise: heads x key dim x value dim) plus the last three columns of
every short convolution (bfloat16); KV is what the attention layers keep for one token (bfloat16).

FLOPs: two for each parameter that a token activates, and for each pair of a query and a key
`layers x 2 x heads x (query dim + value dim)`: one multiplication and one addition for the score and for
the weighted sum. Both are the usual approximations. They are compared with each other only, so a
common factor does not matter; the ratio of the two terms, and of bytes to FLOPs, does.
"""

from dataclasses import dataclass

from tiercache.core.cost import Work

_FLOAT32 = 4
_BFLOAT16 = 2
_CONV_COLUMNS = 3  # A kernel of four needs the three columns before the next token.


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model: bytes of KV for each token, bytes of one checkpoint, cost of its prefill.

    `source` says where the figures come from. Unsharded: a rank holds its part of them.
    """

    name: str
    kv_bytes: int
    state_bytes: int
    work: Work
    source: str


@dataclass(frozen=True, slots=True)
class _Linear:
    """Layers with a recurrent state: `heads` of `key` x `value`, and `channels` of convolution."""

    layers: int
    heads: int
    key: int
    value: int
    channels: int

    @property
    def nbytes(self) -> int:
        state = self.heads * self.key * self.value * _FLOAT32
        return self.layers * (state + _CONV_COLUMNS * self.channels * _BFLOAT16)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Layers with KV: `elements` kept for a token, `heads` that compare `query` and sum `value` dims."""

    layers: int
    elements: int
    heads: int
    query: int
    value: int

    @property
    def token_bytes(self) -> int:
        return self.layers * self.elements * _BFLOAT16

    @property
    def pair_flops(self) -> int:
        return self.layers * 2 * self.heads * (self.query + self.value)


def _shape(
    name: str, active: float, linear: _Linear, attention: _Attention, source: str
) -> ModelShape:
    work = Work(2 * active, attention.pair_flops)
    return ModelShape(name, attention.token_bytes, linear.nbytes, work, source)


def _glm() -> ModelShape:
    """Sparse attention: an indexer compares all keys, attention the 2,048 best; both keep keys."""
    layers, latent, index_heads, index_dim, chosen = 11, 512, 32, 128, 2048
    seen = _Attention(layers, latent + index_dim, 64, 256, 256)
    state = _Linear(34, 64, 128, 128, 3 * 64 * 128)
    work = Work(2 * 18e9 + seen.pair_flops * chosen, layers * 2 * index_heads * index_dim)
    source = "transformers Glm5NextTextConfig; 18e9 active: its model card"
    return ModelShape("glm-5.3-flash", seen.token_bytes, state.nbytes, work, source)


_SHAPES = (
    _shape(
        "kimi-k3",
        104e9,
        _Linear(69, 96, 128, 128, 3 * 96 * 128),
        _Attention(24, 512 + 64, 96, 192, 128),
        "moonshotai/Kimi-K3 config: 69 KDA and 24 MLA layers; active parameters counted from it",
    ),
    _shape(
        "kimi-linear-48b",
        3e9,
        _Linear(20, 32, 128, 128, 3 * 32 * 128),
        _Attention(7, 512 + 64, 32, 192, 128),
        "moonshotai/Kimi-Linear-48B-A3B config: 20 KDA and 7 MLA layers",
    ),
    _shape(
        "qwen3-next-80b",
        3e9,
        _Linear(36, 32, 128, 128, 2 * 16 * 128 + 32 * 128),
        _Attention(12, 2 * 2 * 256, 16, 256, 256),
        "Qwen/Qwen3-Next-80B-A3B config: 36 GDN and 12 GQA layers",
    ),
    _shape(
        "qwen3.5-27b",
        27e9,
        _Linear(48, 48, 128, 128, 2 * 16 * 128 + 48 * 128),
        _Attention(16, 2 * 4 * 256, 24, 256, 256),
        "Qwen/Qwen3.5-27B config: 48 GDN and 16 GQA layers, dense",
    ),
    _shape(
        "qwen3.5-35b",
        3e9,
        _Linear(30, 32, 128, 128, 2 * 16 * 128 + 32 * 128),
        _Attention(10, 2 * 2 * 256, 16, 256, 256),
        "Qwen/Qwen3.5-35B-A3B config: 30 GDN and 10 GQA layers",
    ),
    _shape(
        "qwen3.5-397b",
        17e9,
        _Linear(45, 64, 128, 128, 2 * 16 * 128 + 64 * 128),
        _Attention(15, 2 * 2 * 256, 32, 256, 256),
        "Qwen/Qwen3.5-397B-A17B config: 45 GDN and 15 GQA layers",
    ),
    _glm(),
    _shape(
        "ling-3.0-flash",
        5.1e9,
        _Linear(35, 32, 128, 128, 3 * 32 * 128),
        _Attention(7, 512 + 64, 32, 192, 128),
        "transformers BailingHybridConfig: 35 KDA and 7 MLA layers; active parameters counted from it",
    ),
    _shape(
        "nemotron-h-56b",
        56e9,
        _Linear(54, 256, 256, 64, 16384 + 2 * 2048),
        _Attention(10, 2 * 8 * 128, 64, 128, 128),
        "Megatron-Bridge Nemotron-H provider: 54 Mamba2 and 10 GQA layers, dense",
    ),
    _shape(
        "nemotron-3-nano",
        3.2e9,
        _Linear(23, 64, 128, 64, 4096 + 2 * 1024),
        _Attention(6, 2 * 2 * 128, 32, 128, 128),
        "Megatron-Bridge Nemotron-H provider: 23 Mamba2 and 6 GQA layers",
    ),
    _shape(
        "nemotron-3-super",
        12e9,
        _Linear(40, 128, 128, 64, 8192 + 2 * 1024),
        _Attention(8, 2 * 2 * 128, 32, 128, 128),
        "Megatron-Bridge Nemotron-H provider: 40 Mamba2 and 8 GQA layers",
    ),
    _shape(
        "granite-4.0-h-small",
        9e9,
        _Linear(36, 128, 128, 64, 8192 + 2 * 128),
        _Attention(4, 2 * 8 * 128, 32, 128, 128),
        "ibm-granite/granite-4.0-h-small card and config: 36 Mamba2 and 4 GQA layers",
    ),
    _shape(
        "falcon-h1-34b",
        34e9,
        _Linear(72, 32, 256, 128, 4096 + 2 * 512),
        _Attention(72, 2 * 4 * 128, 20, 128, 128),
        "tiiuae/Falcon-H1-34B config: 72 layers with Mamba2 and GQA side by side, dense",
    ),
)

MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
"""Every known model by name."""
