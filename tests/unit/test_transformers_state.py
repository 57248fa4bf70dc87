"""From a transformers cache to bytes and back: exactly the state at one boundary, or a refusal."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from tiercache.client import Blob
from tiercache.errors import LayoutError
from tiercache.state import Shard
from tiercache.testing.families import build
from tiercache_transformers import hf
from tiercache_transformers.layout import Form, form_of
from tiercache_transformers.state import (
    restore,
    snapshot,
    take_blocks,
    take_states,
    tokens_in,
)

torch.set_num_threads(1)

BLOCK = 16
BOUNDARY = 37
TOKENS = torch.randint(3, 256, (48,), generator=torch.Generator().manual_seed(7)).tolist()

Subject = tuple[PreTrainedModel, Form]


@pytest.fixture(scope="module", params=["kimi_linear", "qwen3_next"])
def subject(request: pytest.FixtureRequest) -> Subject:
    model = build(str(request.param))
    return model, form_of(model, BLOCK)


def run(model: PreTrainedModel, end: int, cache: DynamicCache | None = None) -> DynamicCache:
    """Run the tokens up to `end`, in one call."""
    cache = hf.new_cache(model) if cache is None else cache
    hf.forward(model, TOKENS[cache.get_seq_length() : end], cache)
    return cache


def live(cache: DynamicCache, layer: int, attribute: str) -> torch.Tensor:
    """A tensor of the cache itself."""
    found = hf.tensor_at(cache, hf.Place(layer, attribute))
    assert found is not None
    return found


def at(subject: Subject, boundary: int) -> list[Blob]:
    """All of the state at `boundary`, in memory of its own."""
    model, form = subject
    return snapshot(run(model, boundary), form, 0, boundary)


def rest(model: PreTrainedModel, cache: DynamicCache) -> torch.Tensor:
    """The logits of all tokens after the boundary, one call each."""
    return torch.stack([hf.forward(model, [token], cache) for token in TOKENS[BOUNDARY:]])


def test_blocks_are_cut_at_edges_and_the_last_is_partial(subject: Subject) -> None:
    blobs = [blob for blob in at(subject, BOUNDARY) if blob.part == "kv"]
    assert [(blob.start, blob.end) for blob in blobs] == [(0, 16), (16, 32), (32, 37)]
    part = subject[1].layout.part("kv")
    assert [blob.data.nbytes for blob in blobs] == [
        part.nbytes(blob.end - blob.start, part.whole) for blob in blobs
    ]


def test_bytes_are_the_tensors_in_order_tokens_first() -> None:
    model = build("qwen3_next")
    cache = run(model, BOUNDARY)
    blobs = snapshot(cache, form_of(model, BLOCK), 0, BOUNDARY)
    pair = [live(cache, 3, attribute) for attribute in (hf.KEYS, hf.VALUES)]
    block = torch.cat([tensor[0, :, 16:32].transpose(0, 1).reshape(-1) for tensor in pair])
    assert bytes(blobs[1].data) == block.numpy().tobytes()
    recurrent = torch.cat(
        [live(cache, n, hf.RECURRENT)[0].transpose(-1, -2).reshape(-1) for n in range(3)]
    )
    assert bytes(blobs[3].data) == recurrent.numpy().tobytes()
    conv = torch.cat([live(cache, n, hf.CONV)[0, :, 1:].reshape(-1) for n in range(3)])
    assert bytes(blobs[4].data) == conv.numpy().tobytes()


def test_a_restored_cache_is_the_one_that_was_taken(subject: Subject) -> None:
    model, form = subject
    taken = hf.tensors_of(run(model, BOUNDARY))
    restored = hf.tensors_of(restore(model, form, BOUNDARY, at(subject, BOUNDARY)))
    assert restored.keys() == taken.keys()
    for place, tensor in taken.items():
        used = slice(1, None) if place.attribute == hf.CONV else slice(None)
        assert torch.equal(restored[place][..., used], tensor[..., used]), place
        assert restored[place].is_contiguous() == tensor.is_contiguous()


def test_restored_blocks_may_come_in_any_order(subject: Subject) -> None:
    model, form = subject
    blobs = at(subject, BOUNDARY)
    reference = rest(model, restore(model, form, BOUNDARY, blobs))
    assert torch.equal(rest(model, restore(model, form, BOUNDARY, blobs[::-1])), reference)


def test_what_was_taken_does_not_change_with_the_model(subject: Subject) -> None:
    model, form = subject
    cache = run(model, BOUNDARY)
    blobs = snapshot(cache, form, 0, BOUNDARY)
    before = [bytes(blob.data) for blob in blobs]
    run(model, len(TOKENS), cache)
    assert [bytes(blob.data) for blob in blobs] == before


def test_what_was_restored_does_not_change_with_the_bytes(subject: Subject) -> None:
    model, form = subject
    blobs = at(subject, BOUNDARY)
    memory = [bytearray(blob.data) for blob in blobs]
    views = [
        replace(blob, data=memoryview(copy).toreadonly())
        for blob, copy in zip(blobs, memory, strict=True)
    ]
    cache = restore(model, form, BOUNDARY, views)
    for copy in memory:
        copy[:] = b"\xff" * len(copy)
    assert torch.equal(rest(model, cache), rest(model, restore(model, form, BOUNDARY, blobs)))


def test_two_restored_caches_are_apart(subject: Subject) -> None:
    model, form = subject
    blobs = at(subject, BOUNDARY)
    one, other = (restore(model, form, BOUNDARY, blobs) for _ in range(2))
    reference = rest(model, one)
    assert torch.equal(rest(model, other), reference)


# --- a set that is not exactly the state at the boundary


def shorter_kv(subject: Subject) -> list[Blob]:
    return [*only(at(subject, BOUNDARY - 1), "kv"), *but(at(subject, BOUNDARY), "kv")]


def older(part: str) -> Callable[[Subject], list[Blob]]:
    def build_set(subject: Subject) -> list[Blob]:
        return [*but(at(subject, BOUNDARY), part), *only(at(subject, BOUNDARY - 1), part)]

    return build_set


def missing(part: str) -> Callable[[Subject], list[Blob]]:
    return lambda subject: but(at(subject, BOUNDARY), part)


def changed(index: int, **what: object) -> Callable[[Subject], list[Blob]]:
    def build_set(subject: Subject) -> list[Blob]:
        blobs = at(subject, BOUNDARY)
        blobs[index] = replace(blobs[index], **what)  # type: ignore[arg-type]
        return blobs

    return build_set


def cut(index: int) -> Callable[[Subject], list[Blob]]:
    def build_set(subject: Subject) -> list[Blob]:
        blobs = at(subject, BOUNDARY)
        blobs[index] = replace(blobs[index], data=blobs[index].data[:-4])
        return blobs

    return build_set


def only(blobs: list[Blob], part: str) -> list[Blob]:
    return [blob for blob in blobs if blob.part == part]


def but(blobs: list[Blob], part: str) -> list[Blob]:
    return [blob for blob in blobs if blob.part != part]


@pytest.mark.parametrize(
    "blobs",
    [
        pytest.param(shorter_kv, id="kv one token short"),
        pytest.param(older("recurrent"), id="recurrent one token older"),
        pytest.param(older("conv"), id="conv one token older"),
        pytest.param(missing("recurrent"), id="recurrent missing"),
        pytest.param(missing("conv"), id="conv missing"),
        pytest.param(missing("kv"), id="kv missing"),
        pytest.param(lambda subject: at(subject, BOUNDARY)[1:], id="first block missing"),
        pytest.param(lambda subject: at(subject, BOUNDARY)[:1] * 2, id="block twice"),
        pytest.param(
            lambda subject: [*at(subject, BOUNDARY), at(subject, BOUNDARY)[-1]], id="twice"
        ),
        pytest.param(lambda subject: at(subject, BOUNDARY - 1), id="all one token short"),
        pytest.param(lambda subject: at(subject, BOUNDARY + 1), id="all one token long"),
        pytest.param(changed(0, part="other"), id="unknown part"),
        pytest.param(changed(-1, shard=Shard(0, 1)), id="one shard of several"),
        pytest.param(changed(-1, codec="int8"), id="another codec"),
        pytest.param(cut(0), id="block cut short"),
        pytest.param(cut(-1), id="snapshot cut short"),
        pytest.param(lambda subject: [], id="nothing"),
    ],
)
def test_anything_else_is_refused(subject: Subject, blobs: Callable[[Subject], list[Blob]]) -> None:
    model, form = subject
    with pytest.raises(LayoutError):
        restore(model, form, BOUNDARY, blobs(subject))


@pytest.mark.parametrize("part", ["recurrent", "conv"])
def test_a_state_that_lies_about_its_boundary_would_show(subject: Subject, part: str) -> None:
    """The comparison of these tests can fail: one token's difference is not bitwise equal."""
    model, form = subject
    exact = at(subject, BOUNDARY)
    lie = [replace(blob, end=BOUNDARY) for blob in only(at(subject, BOUNDARY - 1), part)]
    wrong = restore(model, form, BOUNDARY, [*but(exact, part), *lie])
    right = restore(model, form, BOUNDARY, exact)
    assert (rest(model, wrong)[0] - rest(model, right)[0]).abs().max() > 1e-2


# --- a cache that is not where it is said to be


def test_states_are_taken_only_where_the_attention_layers_are(subject: Subject) -> None:
    model, form = subject
    cache = run(model, BOUNDARY)
    assert tokens_in(cache, form) == BOUNDARY
    for boundary in (0, BOUNDARY - 1, BOUNDARY + 1):
        with pytest.raises(LayoutError):
            take_states(cache, form, boundary)


@pytest.mark.parametrize(("start", "end"), [(8, 37), (0, 38), (32, 32), (-16, 16)])
def test_blocks_are_taken_only_from_edges_and_from_what_is_there(
    subject: Subject, start: int, end: int
) -> None:
    model, form = subject
    with pytest.raises(LayoutError):
        take_blocks(run(model, BOUNDARY), form, start, end)


def test_blocks_before_the_end_can_be_taken_later(subject: Subject) -> None:
    model, form = subject
    early = take_blocks(run(model, BOUNDARY), form, 32, BOUNDARY)
    late = take_blocks(run(model, 48, run(model, BOUNDARY)), form, 32, BOUNDARY)
    assert [bytes(blob.data) for blob in late] == [bytes(blob.data) for blob in early]


def test_layers_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("falcon_h1")
    form = form_of(model, BLOCK)
    cache = run(model, BOUNDARY)
    shorter = live(cache, 1, hf.KEYS)[:, :, :-1]
    monkeypatch.setattr(cache.layers[1], hf.KEYS, shorter)
    with pytest.raises(LayoutError, match="different numbers of tokens"):
        take_states(cache, form, BOUNDARY)


def test_a_batch_is_refused(subject: Subject) -> None:
    model, form = subject
    cache = run(model, BOUNDARY)
    cache.reorder_cache(torch.LongTensor([0, 0]))
    with pytest.raises(LayoutError, match="in the cache"):
        snapshot(cache, form, 0, BOUNDARY)


def test_another_dtype_is_refused(subject: Subject) -> None:
    model, form = subject
    cache = run(model, BOUNDARY)
    linear = next(layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer))
    linear.recurrent_states[0] = live(cache, 0, hf.RECURRENT).to(torch.bfloat16)
    with pytest.raises(LayoutError, match=r"is torch\.bfloat16, not float32"):
        take_states(cache, form, BOUNDARY)


def test_an_empty_cache_holds_nothing_to_take(subject: Subject) -> None:
    model, form = subject
    with pytest.raises(LayoutError, match="the cache has no"):
        take_states(hf.new_cache(model), form, 1)
