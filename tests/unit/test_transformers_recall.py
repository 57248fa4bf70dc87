"""The recall task and its models: what was remembered is what comes out."""

import pytest
import torch
from safetensors.torch import load_file

from tiercache.client import Blob
from tiercache.testing.local import LocalClient, LocalNode
from tiercache.testing.recall import (
    MODELS,
    VOCABULARY,
    episode,
    fixture_path,
    load_model,
    weights_path,
)
from tiercache_transformers.identity import namespace_of
from tiercache_transformers.layout import Form, form_of
from tiercache_transformers.session import CachedModel, Pace
from tiercache_transformers.state import restore

torch.set_num_threads(1)


def test_an_episode_asks_for_what_it_told() -> None:
    task = episode(3, tokens=200, pairs=32, spread=128)
    told = dict(zip(task.context, task.context[1:], strict=False))
    assert len(task.context) == 200
    assert len(set(task.questions)) == len(task.questions) == len(task.answers) == 32
    assert all(told[key] == value for key, value in zip(task.questions, task.answers, strict=True))
    assert max(task.context.index(key) for key in task.questions) < 128
    assert max(*task.context, *task.questions, *task.answers) < VOCABULARY


def test_a_prompt_ends_with_its_question() -> None:
    task = episode(3, tokens=100, pairs=4)
    assert task.asked(1) == (*task.context, task.questions[0])
    assert task.asked(2) == (
        *task.context, task.questions[0], task.answers[0], task.questions[1],
    )  # fmt: skip
    assert task.asked(2)[: len(task.asked(1))] == task.asked(1)


def test_a_seed_is_an_episode() -> None:
    assert episode(3, tokens=100, pairs=8) == episode(3, tokens=100, pairs=8)
    assert episode(3, tokens=100, pairs=8) != episode(4, tokens=100, pairs=8)


@pytest.mark.parametrize(
    ("tokens", "pairs", "spread"), [(100, 65, None), (100, 0, None), (10, 6, None), (10, 2, 12)]
)
def test_pairs_must_fit(tokens: int, pairs: int, spread: int | None) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        episode(1, tokens=tokens, pairs=pairs, spread=spread)


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_there(name: str) -> None:
    assert weights_path(name).stat().st_size > 500_000


@pytest.mark.parametrize("name", MODELS)
def test_the_resumed_model_remembers(name: str) -> None:
    model = load_model(name)
    form = form_of(model)
    namespace = namespace_of(model, form.layout, "token ids", name=name)
    node = LocalNode()
    right = 0
    for seed in range(4):
        task = episode(seed, tokens=256, pairs=32)
        for asked in (1, 2, 3):
            client = LocalClient(node, namespace, form.layout)
            engine = CachedModel(model, form, client, Pace(chunk_tokens=256, decode_end=False))
            prompt = engine.prefill(task.asked(asked))
            assert prompt.reused >= 256 or asked == 1
            right += int(prompt.logits.argmax()) == task.answers[asked - 1]
    assert right >= 10  # Of 12; by chance one in 64 would be.


def test_the_golden_state_continues_as_it_did() -> None:
    """States and logits recorded once, elsewhere: a wrong axis or column would not come out so."""
    golden = load_file(fixture_path())
    model = load_model("mla1_kda2")
    form = form_of(model)
    ids = golden["ids"].long()
    for row in range(ids.shape[0]):
        cache = restore(model, form, 128, golden_blobs(golden, form, row))
        output = model(input_ids=ids[row : row + 1, 128:], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(
            output.logits[0, ::2], golden["query_logits"][row], atol=5e-4, rtol=0
        )


def golden_blobs(golden: dict[str, torch.Tensor], form: Form, row: int) -> list[Blob]:
    """The recorded states of one sequence as objects, converted without the adapter."""
    latent, rope = (golden[f"layer0.mla_{what}"][row, 0] for what in ("latent", "rope"))
    blobs = [
        Blob("kv", end, packed(latent[end - 64 : end], rope[end - 64 : end]), end - 64)
        for end in (64, 128)
    ]
    recurrent = [golden[f"layer{layer}.recurrent"][row].transpose(-1, -2) for layer in (1, 2)]
    conv = [golden[f"layer{layer}.conv"][row, :, 1:] for layer in (1, 2)]
    assert form.layout.part("recurrent").tensors[0].axes == ("head", "value", "key")
    return [
        *blobs,
        Blob("recurrent", 128, packed(*recurrent)),
        Blob("conv", 128, packed(*conv)),
    ]


def packed(*tensors: torch.Tensor) -> memoryview:
    return memoryview(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors))
