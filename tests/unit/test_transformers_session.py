"""A model that resumes: the same tokens and bits, from the deepest state that is whole."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from tiercache.client import Blob, Saved, Scope
from tiercache.errors import LayoutError, ProtocolError
from tiercache.state import Chain
from tiercache.testing.local import LocalClient, LocalNode, LocalPlan
from tiercache.testing.recall import MODELS, episode, load_model
from tiercache_transformers import hf
from tiercache_transformers.identity import namespace_of
from tiercache_transformers.layout import Form, form_of
from tiercache_transformers.session import CachedModel, Generated, Pace, cuts

torch.set_num_threads(1)

CHUNK = 64
PROMPT = episode(1, tokens=300, pairs=32).asked(9)
SHARED = 150
SIBLING = PROMPT[:SHARED] + episode(2, tokens=100, pairs=32).asked(4)
COUNT = 6
PACE = Pace(chunk_tokens=CHUNK)

Subject = tuple[PreTrainedModel, Form]


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> Subject:
    model = load_model(str(request.param))
    return model, form_of(model, 16)


@dataclass
class Stage:
    """A node and engines on it."""

    subject: Subject
    node: LocalNode

    def client(self) -> LocalClient:
        model, form = self.subject
        namespace = namespace_of(model, form.layout, "token ids", name="recall", revision="1")
        return LocalClient(self.node, namespace, form.layout)

    def engine(self, pace: Pace = PACE) -> CachedModel[LocalPlan]:
        return CachedModel(*self.subject, self.client(), pace)

    def alone(self, tokens: Sequence[int], pace: Pace = PACE) -> Generated:
        engine: CachedModel[LocalPlan] = CachedModel(*self.subject, None, pace)
        return engine.generate(tokens, COUNT)


@pytest.fixture
def stage(subject: Subject) -> Stage:
    return Stage(subject, LocalNode())


def same(one: Generated, other: Generated) -> bool:
    return one.tokens == other.tokens and torch.equal(one.logits, other.logits)


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [
        (0, 1, [1]),
        (0, 2, [1, 2]),
        (0, 64, [63, 64]),
        (0, 65, [64, 65]),
        (0, 200, [64, 128, 192, 199, 200]),
        (128, 200, [192, 199, 200]),
        (130, 200, [192, 199, 200]),
        (199, 200, [200]),
    ],
)
def test_a_prefill_is_cut_at_chunk_ends_and_prompt_ends(
    start: int, tokens: int, expected: list[int]
) -> None:
    assert cuts(start, tokens, CHUNK) == expected


def test_the_same_prompt_resumes_at_its_last_token(stage: Stage) -> None:
    reference = stage.alone(PROMPT)
    cold = stage.engine().generate(PROMPT, COUNT)
    assert (cold.prompt.reused, cold.prompt.recomputed) == (0, len(PROMPT))
    assert same(cold, reference)
    again = stage.engine().generate(PROMPT, COUNT)
    assert (again.prompt.reused, again.prompt.recomputed) == (len(PROMPT) - 1, 1)
    assert same(again, reference)
    assert again.prompt.unfollowed == cold.prompt.unfollowed == 0


def test_a_sibling_resumes_at_the_deepest_chunk_end_in_common(stage: Stage) -> None:
    stage.engine().prefill(PROMPT)
    resumed = stage.engine().generate(SIBLING, COUNT)
    assert resumed.prompt.reused == SHARED // CHUNK * CHUNK
    assert same(resumed, stage.alone(SIBLING))


def test_a_chunk_end_may_lie_inside_a_block(stage: Stage) -> None:
    pace = Pace(chunk_tokens=40)
    stage.engine(pace).prefill(PROMPT)
    resumed = stage.engine(pace).generate(SIBLING, COUNT)
    assert resumed.prompt.reused == 120  # Blocks have 16 tokens.
    assert same(resumed, stage.alone(SIBLING, pace))


def test_a_conversation_goes_on_where_the_last_turn_ended(stage: Stage) -> None:
    said = stage.engine().generate(PROMPT, COUNT)
    seen = PROMPT + said.tokens[:-1]
    turn = (*seen, 140, 141, 5)
    resumed = stage.engine().generate(turn, COUNT)
    assert resumed.prompt.reused == len(seen)
    # The run that was never interrupted: the same calls on the cache of the first turn.
    for end in cuts(len(seen), len(turn), CHUNK):
        logits = hf.forward(
            stage.subject[0],
            list(turn[said.prompt.cache.get_seq_length() : end]),
            said.prompt.cache,
        )
    assert torch.equal(resumed.prompt.logits, logits)


def test_a_prompt_that_goes_on_resumes_at_its_end_not_before(stage: Stage) -> None:
    stage.engine(Pace(chunk_tokens=CHUNK, decode_end=False)).generate(PROMPT, COUNT)
    assert stage.engine().prefill((*PROMPT, 7, 8, 9)).reused == len(PROMPT)


# --- pieces that are gone


def lost(stage: Stage, part: str, tokens: int) -> None:
    digest = Chain(PROMPT, 16).digest_at(tokens)
    assert stage.node.drop(part, digest) == 1


LAST = len(PROMPT) - 1
CHUNK_ENDS = range(CHUNK, len(PROMPT), CHUNK)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("conv", LAST)], CHUNK_ENDS[-1]),
        ([("recurrent", LAST)], CHUNK_ENDS[-1]),
        ([("kv", LAST)], CHUNK_ENDS[-1]),
        ([("conv", LAST), ("recurrent", CHUNK_ENDS[-1])], CHUNK_ENDS[-2]),
        ([("kv", CHUNK_ENDS[1])], CHUNK_ENDS[0]),
        ([("kv", CHUNK_ENDS[1] + 16)], CHUNK_ENDS[1]),
        ([("kv", 16)], 0),
        ([("conv", end) for end in (*CHUNK_ENDS, LAST)], 0),
    ],
)
def test_a_lost_piece_means_the_next_lower_boundary(
    stage: Stage, pieces: list[tuple[str, int]], expected: int
) -> None:
    stage.engine().prefill(PROMPT)
    for part, tokens in pieces:
        lost(stage, part, tokens)
    resumed = stage.engine().generate(PROMPT, COUNT)
    assert resumed.prompt.reused == expected
    assert same(resumed, stage.alone(PROMPT))


def test_what_was_lost_is_saved_again(stage: Stage) -> None:
    engine = stage.engine(Pace(chunk_tokens=CHUNK, decode_end=False))
    engine.prefill(PROMPT)
    before = set(stage.node.objects)
    lost(stage, "kv", 16)
    lost(stage, "conv", LAST)
    engine.prefill(PROMPT)
    assert set(stage.node.objects) == before
    assert engine.prefill(PROMPT).reused == LAST


def test_only_what_is_new_is_saved(stage: Stage) -> None:
    stage.engine().prefill(PROMPT)
    again = stage.engine().prefill(PROMPT)
    assert again.saved == Saved(stored=0, held=3, declined={})  # The prompt's end: three parts.


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_lost_the_output_is_the_same(stage: Stage, seed: int) -> None:
    pace = Pace(chunk_tokens=CHUNK, decode_end=False)
    stage.engine(pace).prefill(PROMPT)
    whole = dict(stage.node.objects)
    source = random.Random(seed)
    for key in source.sample(sorted(whole, key=str), source.randint(1, 8)):
        del stage.node.objects[key]
    resumed = stage.engine(pace).generate(PROMPT, COUNT)
    assert resumed.prompt.reused in (0, *CHUNK_ENDS, LAST)
    assert same(resumed, stage.alone(PROMPT))
    assert stage.engine(pace).prefill(PROMPT).reused == LAST


# --- identity


def test_another_salt_or_adapter_finds_nothing(stage: Stage) -> None:
    stage.engine().prefill(PROMPT)
    for pace in (replace(PACE, salt="another tenant"), replace(PACE, lora="an adapter")):
        assert stage.engine(pace).prefill(PROMPT).reused == 0
    assert stage.engine().prefill(PROMPT).reused == LAST


# --- a client that is no help


class Unhelpful(LocalClient):
    """Answers as told, however wrong."""

    def __init__(self, stage: Stage, answer: Callable[[LocalPlan], LocalPlan]) -> None:
        model, form = stage.subject
        namespace = namespace_of(model, form.layout, "token ids", name="recall", revision="1")
        super().__init__(stage.node, namespace, form.layout)
        self._answer = answer

    def plan(
        self, request: str, chain: Chain, *, limit: int | None = None, scope: Scope | None = None
    ) -> LocalPlan:
        return self._answer(super().plan(request, chain, limit=limit, scope=scope))


def without_conv(plan: LocalPlan) -> LocalPlan:
    return replace(plan, blobs=tuple(blob for blob in plan.blobs if blob.part != "conv"))


def one_token_on(plan: LocalPlan) -> LocalPlan:
    return replace(plan, boundary=plan.boundary + 1)


def lapsed(plan: LocalPlan) -> LocalPlan:
    plan.node.leases.clear()
    return plan


class Impossible:
    """A plan whose places cannot be."""

    def __init__(self, plan: LocalPlan) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> object:
        if name == "blobs":
            raise ProtocolError("no such place")
        return getattr(self._plan, name)


def impossible(plan: LocalPlan) -> LocalPlan:
    return cast("LocalPlan", Impossible(plan))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (without_conv, "part 'conv' does not end at"),
        (one_token_on, "does not end at"),
        (lapsed, "the lease was lost"),
        (impossible, "no such place"),
    ],
)
def test_an_answer_that_cannot_be_used_costs_only_time(
    stage: Stage, answer: Callable[[LocalPlan], LocalPlan], why: str
) -> None:
    stage.engine().prefill(PROMPT)
    engine = CachedModel(*stage.subject, Unhelpful(stage, answer), PACE)
    computed = engine.generate(PROMPT, COUNT)
    assert computed.prompt.reused == 0
    assert why in computed.prompt.reason
    assert same(computed, stage.alone(PROMPT))


class Away(LocalClient):
    """A client whose node is away."""

    def plan(
        self, request: str, chain: Chain, *, limit: int | None = None, scope: Scope | None = None
    ) -> LocalPlan:
        return LocalPlan(request, 0, b"", (), "unavailable: no such socket", (), LocalNode())

    def save(
        self,
        request: str,
        chain: Chain,
        blobs: Sequence[Blob],
        *,
        scope: Scope | None = None,
        parent: bytes = b"",
    ) -> Saved:
        return Saved(0, 0, {"unavailable": len(blobs)})


def test_without_a_node_everything_is_computed(stage: Stage) -> None:
    model, form = stage.subject
    namespace = namespace_of(model, form.layout, "token ids", name="recall", revision="1")
    engine = CachedModel(model, form, Away(stage.node, namespace, form.layout), PACE)
    computed = engine.generate(PROMPT, COUNT)
    assert (computed.prompt.reused, computed.prompt.saved) == (0, None)
    assert computed.prompt.reason == "unavailable: no such socket"
    assert same(computed, stage.alone(PROMPT))


def test_leases_end_on_every_path(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stage.engine()
    engine.prefill(PROMPT)
    engine.prefill(PROMPT)
    assert not stage.node.leases

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tiercache_transformers.session.restore", fail)
    with pytest.raises(MemoryError):
        engine.prefill(PROMPT)
    assert not stage.node.leases


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, CHUNK, CHUNK + 1])
def test_short_prompts(stage: Stage, tokens: int) -> None:
    reference = stage.alone(PROMPT[:tokens])
    for expected in (0, tokens - 1):
        run = stage.engine().generate(PROMPT[:tokens], COUNT)
        assert run.prompt.reused == expected
        assert same(run, reference)


def test_what_makes_no_sense_is_said(stage: Stage) -> None:
    engine = stage.engine()
    with pytest.raises(ValueError, match="at least one token"):
        engine.prefill([])
    with pytest.raises(ValueError, match="nothing to generate"):
        engine.generate(PROMPT, 0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        Pace(chunk_tokens=0)


def test_the_double_refuses_what_a_client_refuses(stage: Stage) -> None:
    client = stage.client()
    with pytest.raises(LayoutError):
        client.save("x", Chain(PROMPT, 16), [Blob("kv", 16, memoryview(b"short"))])
    assert not stage.node.objects
