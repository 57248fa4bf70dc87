"""The door for engines with pools of their own: states go in from their slots, and come back into them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tiercache.client import Scope
from tiercache.device import (
    CODECS,
    PLACEMENTS,
    Cabinet,
    DirectOutlet,
    EngineStates,
    Prompt,
    Seat,
    Skipped,
    Terms,
)
from tiercache.device.kinds import Columns, Heads, conv_qkv, latent, recurrent
from tiercache.errors import LayoutError
from tiercache.state import Chain, Layout, Namespace
from tiercache.testing.devices import SavingNode

torch.set_num_threads(1)

LAYERS = range(3)
BLOCKS = 6
PAD = 1_024
"""Bytes of a page beyond the state: attention pages are larger."""


@dataclass(frozen=True)
class Shape:
    """A model's dimensions: heads, d_v and d_k, the columns of its convolution, and how it is split."""

    heads: int = 4
    value: int = 32
    key: int = 16
    dtype: str = "float32"
    ranks: int = 1
    rank: int = 0

    @property
    def layout(self) -> Layout:
        return Layout(
            (
                latent(range(1), 8, 4, 16, "bfloat16"),
                recurrent(Heads(LAYERS, self.heads, self.value, self.key, self.dtype)),
                conv_qkv(Columns(LAYERS, 3), (self.heads, self.key), (self.heads, self.value)),
            ),
            16,
        )

    @property
    def seat(self) -> Seat:
        return Seat(self.layout, self.ranks, self.rank)


SHAPES = (
    Shape(),
    Shape(2, 24, 5),
    Shape(1, 10, 3),
    Shape(4, 64, 8, "bfloat16"),
    Shape(8, 9, 11, ranks=4, rank=3),
)
"""d_v no multiple of 16, one head, odd sizes, a rank of four."""


class Engine:
    """Blocks as vLLM registers them: int8 `[blocks, 1, 1, C]`, the convolution, then the recurrent state.

    All layers lie in one buffer, whose bytes are poison at first.
    """

    def __init__(self, shape: Shape, *, reverse: bool = False) -> None:
        seat = shape.seat
        units = shape.seat.shards[0]
        share = (units.stop - units.start) / shape.heads
        self.conv = (int(shape.heads * share) * (2 * shape.key + shape.value), 3)
        self.recurrent = (int(shape.heads * share), shape.value, shape.key)
        self.dtype = getattr(torch, shape.dtype)
        conv_bytes = self.conv[0] * 3 * 2
        self.nbytes = conv_bytes + int(np.prod(self.recurrent)) * self.dtype.itemsize
        page = -(-(self.nbytes + PAD) // 64) * 64
        self.buffer = torch.full((len(LAYERS) * BLOCKS * page,), 0x5A, dtype=torch.int8)
        self.blocks = [
            self.buffer[layer * BLOCKS * page :].as_strided(
                (BLOCKS, 1, 1, self.nbytes),
                (page, self.nbytes, self.nbytes, 1),
                layer * BLOCKS * page,
            )
            for layer in LAYERS
        ]
        self.states = EngineStates.packed(
            seat,
            [
                (block, (f"{n}.conv", f"{n}.recurrent"))
                for n, block in zip(LAYERS, self.blocks, strict=True)
            ],
            reversed_axes=[f"{n}.conv" for n in LAYERS] if reverse else (),
        )

    def raw(self, block: int) -> bytes:
        return b"".join(layer[block].numpy().tobytes() for layer in self.blocks)

    def compute(self, block: int, seed: int) -> bytes:
        """Write a state into a block, as kernels do; return its bytes."""
        dice = torch.Generator().manual_seed(seed)
        for layer in self.blocks:
            conv = torch.randn(self.conv[0] * 3, generator=dice).to(torch.bfloat16)
            state = torch.randn(self.recurrent, generator=dice).to(self.dtype)
            parts = [part.contiguous().view(-1).view(torch.int8) for part in (conv, state)]
            layer[block, 0, 0].copy_(torch.cat(parts))
        return self.raw(block)

    def decoded(self, block: int) -> list[torch.Tensor]:
        """The recurrent states of a block, read plainly."""
        start = self.conv[0] * 6
        return [
            layer[block, 0, 0, start:].clone().view(self.dtype).view(self.recurrent).float()
            for layer in self.blocks
        ]


def namespace_of(shape: Shape) -> Namespace:
    return Namespace.of(shape.layout, model="m", weights="w", tokenizer="t")


def cabinet_of(shape: Shape, terms: Terms, outlet: DirectOutlet | None = None) -> Cabinet:
    return Cabinet(shape.seat, namespace_of(shape), terms, outlet)


NO_STATE = Layout((latent(range(1), 8, 4, 16, "bfloat16"),), 16)
PROMPT = Prompt("r", Chain(range(100), 16))
ROOM = Terms(budget_bytes=1 << 20)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_native_state_comes_back_bit_for_bit_into_another_block(
    shape: Shape, *, reverse: bool
) -> None:
    engine, cabinet = Engine(shape, reverse=reverse), cabinet_of(shape, ROOM)
    before = engine.compute(1, 7)
    assert cabinet.save(PROMPT, 40, engine.states, 1) is None
    engine.compute(1, 8)
    outside = engine.buffer.clone()
    assert cabinet.find(PROMPT, 100) == 40
    assert cabinet.restore(PROMPT, 40, engine.states, 4) == 0
    assert engine.raw(4) == before
    for block, now in zip(engine.blocks, LAYERS, strict=True):
        page = block.stride(0)
        at = now * BLOCKS * page + 4 * page
        outside[at : at + engine.nbytes] = engine.buffer[at : at + engine.nbytes]
    assert torch.equal(outside, engine.buffer), "something else was written"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_half_a_step_off_and_the_convolution_is_exact(
    shape: Shape, *, reverse: bool
) -> None:
    terms = replace(ROOM, codec="int8")
    engine, cabinet = Engine(shape, reverse=reverse), cabinet_of(shape, terms)
    before = engine.compute(0, 3)
    cabinet.save(PROMPT, 33, engine.states, 0)
    assert cabinet.restore(PROMPT, 33, engine.states, 5) == 1
    conv = engine.conv[0] * 6
    for layer in LAYERS:
        at = layer * engine.nbytes
        assert engine.raw(5)[at : at + conv] == before[at : at + conv]
    for exact, found in zip(engine.decoded(0), engine.decoded(5), strict=True):
        step = exact.abs().amax(-2, keepdim=True) / 127
        slack = exact.abs() / 128 if engine.dtype == torch.bfloat16 else 0
        assert bool(((exact - found).abs() <= step * 0.5001 + slack).all())
        assert not torch.equal(exact, found)


def test_int8_takes_about_a_quarter_of_the_recurrent_bytes() -> None:
    shape = Shape(8, 128, 128)
    native, small = (
        cabinet_of(shape, Terms(8 << 20, codec)).stats() for codec in ("native", "int8")
    )
    assert small.nbytes < 0.3 * native.nbytes
    assert small.slots > 3 * native.slots
    assert small.slots * small.nbytes <= small.budget_bytes == 8 << 20


@pytest.mark.parametrize("codec", CODECS)
def test_equal_tokens_of_others_never_meet(codec: str) -> None:
    engine, cabinet = Engine(SHAPES[0]), cabinet_of(SHAPES[0], replace(ROOM, codec=codec))
    others = [replace(PROMPT, scope=scope) for scope in (Scope(salt="x"), Scope(lora="x"))]
    engine.compute(0, 1)
    cabinet.save(PROMPT, 16, engine.states, 0)
    untouched = engine.raw(3)
    for prompt in others:
        assert cabinet.find(prompt, 100) == 0
        assert cabinet.restore(prompt, 16, engine.states, 3) == Skipped("not_here")
        assert not cabinet.drop(prompt, 16)
    assert engine.raw(3) == untouched
    for number, prompt in enumerate(others):
        engine.compute(1, 50 + number)
        cabinet.save(prompt, 16, engine.states, 1)
    kept = []
    for prompt in (PROMPT, *others):
        cabinet.restore(prompt, 16, engine.states, 2)
        kept.append(engine.raw(2))
    assert len(set(kept)) == cabinet.stats().checkpoints == 3


def test_without_an_outlet_what_must_go_is_dropped() -> None:
    engine = Engine(SHAPES[0])
    one = cabinet_of(SHAPES[0], ROOM).stats().nbytes
    cabinet = cabinet_of(SHAPES[0], Terms(2 * one + one // 2))
    for tokens in (10, 20, 30):
        engine.compute(0, tokens)
        assert cabinet.save(PROMPT, tokens, engine.states, 0) is None
    assert [cabinet.find(PROMPT, limit) for limit in (10, 25, 100)] == [0, 20, 30]
    cabinet.find(PROMPT, 20)
    expected = engine.compute(0, 20)
    cabinet.save(PROMPT, 20, engine.states, 0)
    cabinet.save(PROMPT, 40, engine.states, 0)
    assert [cabinet.find(PROMPT, limit) for limit in (20, 39, 100)] == [20, 20, 40]
    cabinet.restore(PROMPT, 20, engine.states, 2)
    assert engine.raw(2) == expected
    stats = cabinet.stats()
    assert (stats.checkpoints, stats.used, stats.slots) == (2, 2, 2)
    assert stats.counters == {"saved": 4, "dropped": 2, "held": 1, "restored": 1}
    assert cabinet.clear() == 2
    assert (cabinet.stats().used, cabinet.find(PROMPT, 100)) == (0, 0)


def test_an_outlet_is_offered_what_must_go() -> None:
    node, shape = SavingNode(), SHAPES[0]
    outlet = DirectOutlet(node)
    engine = Engine(shape)
    one = cabinet_of(shape, replace(ROOM, codec="int8")).stats().nbytes
    terms = Terms(one, "int8", host_bytes_max=1 << 20)
    cabinet = cabinet_of(shape, terms, outlet)
    prompt = replace(PROMPT, scope=Scope(salt="s"))
    engine.compute(0, 1)
    cabinet.save(prompt, 10, engine.states, 0, rounded=2)
    assert cabinet.save(prompt, 20, engine.states, 0) is None
    assert node.scopes == {10: prompt.scope}
    assert {(b.part, b.codec, b.requantised) for b in node.saved[10]} == {
        ("recurrent", "int8", 2), ("conv", "native", 2),
    }  # fmt: skip
    cabinet.poll()
    assert cabinet.counters["demoted"] == 1
    poor = cabinet_of(shape, replace(terms, host_bytes_max=3), outlet)
    poor.save(prompt, 10, engine.states, 0)
    poor.save(prompt, 20, engine.states, 0)
    assert poor.counters["lost_no_staging_memory"] == 1
    assert poor.find(prompt, 100) == 20


def test_pinned_and_too_often_quantised_are_skipped() -> None:
    engine, one = (
        Engine(SHAPES[0]),
        cabinet_of(SHAPES[0], replace(ROOM, codec="int8")).stats().nbytes,
    )
    cabinet = cabinet_of(SHAPES[0], Terms(one, "int8", "pinned", requantised_max=3))
    cabinet.poll()
    assert cabinet.save(PROMPT, 9, engine.states, 0, rounded=4) == Skipped("requantised_max")
    assert cabinet.save(PROMPT, 9, engine.states, 0, rounded=3) is None
    assert cabinet.save(PROMPT, 10, engine.states, 0) == Skipped("no_checkpoint_slot")
    assert cabinet.restore(PROMPT, 9, engine.states, 1) == 4
    assert cabinet.drop(PROMPT, 9)
    assert cabinet.save(PROMPT, 10, engine.states, 0) is None


def test_mistakes_change_nothing() -> None:
    engine, cabinet = Engine(SHAPES[0]), cabinet_of(SHAPES[0], ROOM)
    other = Engine(SHAPES[1])
    none = {name: view[0, :0] for name, view in engine.states._views.items()}
    empty = EngineStates(SHAPES[0].seat, none)
    calls: Sequence[tuple[Callable[[], object], type[Exception], str]] = (
        (lambda: cabinet.save(PROMPT, 0, engine.states, 0), ValueError, "at least one token"),
        (lambda: cabinet.save(PROMPT, 101, engine.states, 0), ValueError, "101"),
        (lambda: cabinet.save(PROMPT, 5, engine.states, BLOCKS), IndexError, "slot 6, of 6"),
        (lambda: cabinet.save(PROMPT, 5, engine.states, -1), IndexError, "slot -1"),
        (lambda: cabinet.restore(PROMPT, 5, engine.states, -1), IndexError, "slot -1"),
        (lambda: cabinet.save(PROMPT, 5, other.states, 0), LayoutError, "another layout or rank"),
        (lambda: cabinet_of(SHAPES[0], Terms(100)), ValueError, "100 bytes hold no checkpoint"),
        (lambda: cabinet_of(SHAPES[0], Terms(0)), ValueError, "hold no checkpoint"),
        (lambda: cabinet_of(SHAPES[0], replace(ROOM, codec="zip")), LayoutError, "no codec 'zip'"),
        (lambda: cabinet_of(SHAPES[0], replace(ROOM, placement="x")), ValueError, "no placement"),
        (lambda: Cabinet(SHAPES[0].seat, namespace_of(SHAPES[1]), ROOM), LayoutError, "layout"),
        (lambda: EngineStates(Seat(NO_STATE), {}), LayoutError, "no snapshot parts"),
        (lambda: cabinet.save(PROMPT, 5, empty, 0), IndexError, "slot 0, of 0"),
    )  # fmt: skip
    for call, error, why in calls:
        with pytest.raises(error, match=why):
            call()
    assert cabinet.stats().used == 0
    assert cabinet.stats().counters == {}


def test_blocks_that_hold_something_else_are_refused() -> None:
    shape = SHAPES[0]
    engine = Engine(shape)
    whole = [(f"{n}.conv", f"{n}.recurrent") for n in LAYERS]
    pairs = list(zip(engine.blocks, whole, strict=True))

    def packed(first: tuple[torch.Tensor, Sequence[str]]) -> Callable[[], EngineStates]:
        return lambda: EngineStates.packed(shape.seat, [first, *pairs[1:]])

    block, names = pairs[0]
    shifted = torch.zeros(BLOCKS * (engine.nbytes + 6), dtype=torch.int8)
    views = {name: view[0] for name, view in engine.states._views.items()}
    for make, why in (
        (packed((block, names[:1])), "a block has .* bytes, its states"),
        (packed((block[..., :-4], names)), "'0.recurrent' ends beyond"),
        (packed((block, ("0.conv", "9.recurrent"))), "no state '9.recurrent'"),
        (packed((block.view(torch.int16), names)), "not bytes of one axis"),
        (packed((block[0], names)), "different numbers of slots"),
        (packed((shifted.view(BLOCKS, -1)[:, 1 : 1 + engine.nbytes], names)), "whole items"),
        (lambda: EngineStates.packed(shape.seat, pairs[1:]), "states are"),
        (lambda: EngineStates(shape.seat, {**views, "0.conv": views["0.conv"].float()}), "float32"),
        (
            lambda: EngineStates(shape.seat, {**views, "0.conv": views["0.conv"].mT}),
            "in a slot, not",
        ),
        (lambda: EngineStates(shape.seat, {**views, "0.conv": views["0.conv"][:2]}), "different"),
    ):
        with pytest.raises(LayoutError, match=why):
            make()


def test_an_engine_with_a_tensor_for_each_state_needs_no_packing() -> None:
    """As SGLang keeps them: `[slots, *shape]` for every layer, or a view of `[layers, slots, *shape]`."""
    shape = SHAPES[0]
    conv = torch.randn(len(LAYERS), 4, 4 * (2 * 16 + 32), 3).to(torch.bfloat16)
    state = torch.randn(len(LAYERS), 4, 4, 32, 16)
    views = {f"{n}.conv": conv[n] for n in LAYERS} | {f"{n}.recurrent": state[n] for n in LAYERS}
    states, cabinet = EngineStates(shape.seat, views), cabinet_of(shape, ROOM)
    before = (conv[:, 1].clone(), state[:, 1].clone())
    cabinet.save(PROMPT, 50, states, 1)
    conv[:, 1], state[:, 1] = 0, 0
    cabinet.restore(PROMPT, 50, states, 1)
    assert torch.equal(conv[:, 1], before[0])
    assert torch.equal(state[:, 1], before[1])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_any_history_restores_the_right_state(codec: str, placement: str) -> None:
    """States are one number each, which follows from whose tokens they are after."""
    shape = Shape(1, 2, 3)
    one = cabinet_of(shape, replace(ROOM, codec=codec)).stats().nbytes
    prompts = [
        Prompt("r", Chain([*range(cut), *[cut] * (40 - cut)], 16), Scope(salt=salt))
        for cut in (40, 20, 5)
        for salt in ("", "x")
    ]
    for seed in range(100):
        source = random.Random(seed)
        engine = Engine(shape)
        outlet = DirectOutlet(SavingNode()) if seed % 2 else None
        terms = Terms(3 * one, codec, placement, host_bytes_max=1 << 16)
        cabinet = cabinet_of(shape, terms, outlet)
        for _ in range(40):
            prompt, tokens = source.choice(prompts), source.choice((4, 8, 20, 39))
            name = namespace_of(shape).narrow(salt=prompt.scope.salt).digest
            value = 1 + (name + prompt.chain.digest_at(tokens))[33] % 100
            block = source.randrange(BLOCKS)
            action = source.random()
            if action < 0.5:
                fill(engine, block, value)
                cabinet.save(prompt, tokens, engine.states, block)
                fill(engine, block, -77)
            elif action < 0.9:
                deepest = cabinet.find(prompt, tokens)
                fill(engine, block, -77)
                found = cabinet.restore(prompt, tokens, engine.states, block)
                here = not isinstance(found, Skipped)
                assert here == (deepest == tokens)
                read = {round(float(x)) for t in engine.decoded(block) for x in t.flatten()}
                assert read == {value if here else -77}
            elif action < 0.97:
                cabinet.drop(prompt, tokens)
            else:
                cabinet.clear()
            cabinet.poll()
            stats = cabinet.stats()
            assert stats.checkpoints == stats.used <= stats.slots == 3


def fill(engine: Engine, block: int, value: int) -> None:
    for view in engine.states._views.values():
        view[0, block] = value
