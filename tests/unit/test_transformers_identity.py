"""What counts as the same model: everything that could change a state."""

import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tiercache.testing.families import build
from tiercache.testing.recall import load_model
from tiercache_transformers.identity import (
    arithmetic_fingerprint,
    namespace_of,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from tiercache_transformers.layout import layout_of

torch.set_num_threads(1)


@pytest.fixture
def model() -> PreTrainedModel:
    return build("kimi_linear")


def tokenizer(words: str = "a b c", template: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(("[UNK]", *words.split()))}
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="[UNK]")), unk_token="[UNK]"
    )
    made.chat_template = template
    return made


def test_the_same_weights_have_the_same_fingerprint(model: PreTrainedModel) -> None:
    assert weights_fingerprint(model) == weights_fingerprint(build("kimi_linear"))


def test_one_bit_of_one_weight_is_another_model(model: PreTrainedModel) -> None:
    before = weights_fingerprint(model)
    weight = next(model.parameters()).data.view(-1)
    weight[-1] = torch.nextafter(weight[-1], torch.tensor(9.0))
    assert weights_fingerprint(model) != before


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from tiercache.testing.recall import load_model\n"
        "from tiercache_transformers.identity import namespace_of\n"
        "from tiercache_transformers.layout import layout_of\n"
        "m = load_model('mla1_kda2')\n"
        "import sys; sys.stdout.write(namespace_of(m, layout_of(m), 't', name='n').digest.hex())\n"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    model = load_model("mla1_kda2")
    assert other.stdout == namespace_of(model, layout_of(model), "t", name="n").digest.hex()


def test_the_dtype_is_identity(model: PreTrainedModel) -> None:
    half = build("kimi_linear", torch.bfloat16)
    assert layout_of(half).fingerprint != layout_of(model).fingerprint
    assert weights_fingerprint(half) != weights_fingerprint(model)
    assert arithmetic_fingerprint(half) != arithmetic_fingerprint(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 1e6),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        ("_attn_implementation", "sdpa"),
        ("_experts_implementation", "eager"),
        ("rms_norm_eps", 1e-3),
        ("num_experts_per_tok", 1),
    ],
)
def test_arithmetic_without_weights_is_identity(
    model: PreTrainedModel, key: str, value: object
) -> None:
    before = arithmetic_fingerprint(model)
    setattr(model.config, key, value)
    assert arithmetic_fingerprint(model) != before


def test_where_a_model_was_loaded_from_is_not(model: PreTrainedModel) -> None:
    before = arithmetic_fingerprint(model)
    model.config._name_or_path = "/some/where"
    assert arithmetic_fingerprint(model) == before


def test_tokenizers_are_told_apart() -> None:
    fingerprints = {
        tokenizer_fingerprint(one)
        for one in (
            tokenizer(),
            tokenizer("a c b"),
            tokenizer("a b c d"),
            tokenizer(template="{{ messages }}"),
        )
    }
    assert len(fingerprints) == 4
    special = tokenizer()
    special.add_special_tokens({"eos_token": "[END]"})
    assert tokenizer_fingerprint(special) not in fingerprints


def test_how_a_tokenizer_was_last_called_does_not_matter() -> None:
    used = tokenizer()
    used.add_special_tokens({"pad_token": "[PAD]"})
    before = tokenizer_fingerprint(used)
    used(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == before


def test_a_namespace_names_all_of_it(model: PreTrainedModel) -> None:
    layout = layout_of(model)
    whole = namespace_of(model, layout, tokenizer(), name="kimi")
    assert whole.weights == f"{weights_fingerprint(model)}/{arithmetic_fingerprint(model)}"
    assert whole.tokenizer == tokenizer_fingerprint(tokenizer())
    assert whole.layout == layout.fingerprint
    named = namespace_of(model, layout, "ids", name="kimi", revision="abc")
    assert named.weights == f"abc/{arithmetic_fingerprint(model)}"
    assert len({whole.digest, named.digest}) == 2
