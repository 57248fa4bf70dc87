"""Saved by ranks of one tensor-parallel size, restored by ranks of another: bit for bit.

What a rank holds is written down here once more, from the engines' own rules and with torch's slicing,
so that the code under test is not its own witness.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.device.codecs import CODECS, encoded
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
from tiercache.device.resharding import Held, assemble, cover, split, writes
from tiercache.errors import LayoutError
from tiercache.state import Kind, Part, Shard, Tensor

SIZES = (1, 2, 4, 8)
LAYERS = range(3)
TOKENS = 5

Whole = dict[str, torch.Tensor]
Slice = Callable[[str, torch.Tensor, int, int], torch.Tensor]


def evenly(axis: int) -> Slice:
    """Each rank holds its equal share of an axis."""
    return lambda _, tensor, ranks, rank: tensor.chunk(ranks, axis)[rank]


def segments(*sizes: int) -> Slice:
    """Each rank holds its share of each segment, joined again."""

    def cut(_: str, tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
        return torch.cat(
            [piece.chunk(ranks, 0)[rank] for piece in torch.split(tensor, list(sizes))], 0
        )

    return cut


def groups(count: int, width: int) -> Slice:
    """B|C of Mamba2: with fewer groups than ranks, neighbouring ranks hold copies of a group."""

    def cut(_: str, tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
        per_rank = max(count // ranks, 1)
        first = rank * count // ranks
        b, c = tensor.chunk(2, 0)
        rows = slice(first * width, (first + per_rank) * width)
        return torch.cat([b[rows], c[rows]], 0)

    return cut


def everything(_: str, tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Every rank holds all of it."""
    del ranks, rank
    return tensor


def kv_heads(count: int) -> Slice:
    """Grouped-query heads; with fewer than ranks, neighbouring ranks hold copies of a head."""

    def cut(_: str, tensor: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
        per_rank = max(count // ranks, 1)
        first = rank * count // ranks
        return tensor[:, first : first + per_rank]

    return cut


@dataclass(frozen=True)
class Case:
    """A part, and what the engines' rules say that a rank holds of each of its tensors."""

    part: Part
    held: Slice


COLUMNS = Columns(LAYERS, 3)
CASES = {
    "kda recurrent": Case(recurrent(Heads(LAYERS, 8, 4, 6)), evenly(0)),
    "kda conv": Case(conv_qkv(COLUMNS, (8, 6), (8, 4)), segments(48, 48, 32)),
    "gdn recurrent": Case(recurrent(Heads(LAYERS, 16, 4, 6)), evenly(0)),
    "gdn conv": Case(conv_qkv(COLUMNS, (8, 6), (16, 4)), segments(48, 48, 64)),
    "mamba2 recurrent": Case(recurrent(Heads(LAYERS, 16, 4, 6)), evenly(0)),
    "mamba2 conv x": Case(conv_channels(COLUMNS, 64, 16), evenly(0)),
    "mamba2 conv, 8 groups": Case(conv_groups(COLUMNS, 8, 6), groups(8, 6)),
    "mamba2 conv, 2 groups": Case(conv_groups(COLUMNS, 2, 6), groups(2, 6)),
    "mamba2 conv, 1 group": Case(conv_groups(COLUMNS, 1, 6), groups(1, 6)),
    "mamba1 recurrent": Case(recurrent_channels(LAYERS, 32, 4, "float32"), evenly(0)),
    "mla": Case(latent(LAYERS, 16, 4, 8, "bfloat16"), everything),
    "gqa, 8 heads": Case(grouped(LAYERS, 8, 4, 8, "bfloat16"), kv_heads(8)),
    "gqa, 2 heads": Case(grouped(LAYERS, 2, 4, 8, "bfloat16"), kv_heads(2)),
    "gqa, 1 head": Case(grouped(LAYERS, 1, 4, 8, "bfloat16"), kv_heads(1)),
}
INT8 = CODECS["int8"]


def whole_state(part: Part) -> Whole:
    """Random bytes for every tensor of an unsharded object."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for tensor in part.tensors:
        shape = tensor.shape if part.is_snapshot else (TOKENS, *tensor.shape)
        nbytes = int(np.prod(shape)) * getattr(torch, tensor.dtype).itemsize
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        found[tensor.name] = data.view(getattr(torch, tensor.dtype)).view(shape)
    return found


def engine_bytes(case: Case, part: Part, whole: Whole, ranks: int, rank: int) -> bytes:
    """What rank `rank` of `ranks` holds, by the engines' rules, as an object's bytes."""
    pieces = [case.held(t.name, whole[t.name], ranks, rank) for t in part.tensors]
    return b"".join(raw(piece) for piece in pieces)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def stored(case: Case, part: Part, whole: Whole, ranks: int) -> list[Held]:
    """What an engine of that size leaves behind: of equal copies, one."""
    return [
        Held(part.shards(ranks)[rank], memoryview(engine_bytes(case, part, whole, ranks, rank)))
        for rank in range(ranks)
        if writes(part, ranks, rank)
    ]


@pytest.mark.parametrize("loaded", SIZES)
@pytest.mark.parametrize("saved", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_any_size_restores_what_any_size_saved(name: str, saved: int, loaded: int) -> None:
    case = CASES[name]
    tokens = 0 if case.part.is_snapshot else TOKENS
    for part in {case.part, encoded(INT8, case.part) if case.part.is_snapshot else case.part}:
        whole = whole_state(part)
        pieces = stored(case, part, whole, saved)
        assert len({piece.shard for piece in pieces}) == len(pieces) == min(saved, part.units)
        for rank in range(loaded):
            wanted = part.shards(loaded)[rank]
            found = assemble(part, tokens, pieces, wanted)
            assert bytes(found) == engine_bytes(case, part, whole, loaded, rank)


def test_scales_travel_with_their_heads() -> None:
    """Quantised by four ranks, read by eight: the same numbers as if eight had quantised."""
    part = CASES["kda recurrent"].part
    small = encoded(INT8, part)
    state = torch.randn(len(LAYERS), 1, 8, 4, 6, generator=torch.Generator().manual_seed(1))

    def object_of(shard: Shard) -> Held:
        heads = state[:, :, shard.start : shard.stop]
        qdata = torch.empty(heads.shape, dtype=torch.int8)
        scale = torch.empty((*heads.shape[:3], 1, 6), dtype=torch.float32)
        slot = torch.zeros(1, dtype=torch.int64)
        INT8.encode(heads, slot, [qdata, scale], slot)
        return Held(shard, memoryview(raw(qdata) + raw(scale)))

    saved = [object_of(shard) for shard in part.shards(4)]
    for shard in part.shards(8) + part.shards(1):
        assert assemble(small, 0, saved, shard) == object_of(shard).data


def test_a_flat_cut_of_a_convolution_is_something_else() -> None:
    """The mistake that segments are there for has the right size and the wrong channels."""
    case = CASES["kda conv"]
    whole = whole_state(case.part)
    flat = [whole[t.name].chunk(2, 0)[0] for t in case.part.tensors]
    right = assemble(case.part, 0, stored(case, case.part, whole, 1), Shard(0, 4))
    wrong = b"".join(raw(piece) for piece in flat)
    assert len(wrong) == right.nbytes
    assert wrong != bytes(right)


def test_what_is_not_covered_is_said() -> None:
    case = CASES["kda recurrent"]
    pieces = stored(case, case.part, whole_state(case.part), 4)
    with pytest.raises(LayoutError, match="units 0-8 are not covered by 0-2, 4-6, 6-8"):
        assemble(case.part, 0, [pieces[0], pieces[2], pieces[3]], Shard(0, 8))
    with pytest.raises(LayoutError, match="not covered by none"):
        assemble(case.part, 0, [], Shard(0, 1))
    short = Held(pieces[0].shard, pieces[0].data[:-1])
    with pytest.raises(LayoutError, match="bytes for units 0-2"):
        assemble(case.part, 0, [short], Shard(0, 1))


def test_copies_of_one_piece_must_be_equal() -> None:
    """Of two that differ, one is damaged or of another state: neither is as good as the other."""
    case = CASES["kda recurrent"]
    (piece,) = stored(case, case.part, whole_state(case.part), 1)
    copy = bytearray(piece.data)
    twice = [piece, Held(piece.shard, memoryview(copy))]
    assert assemble(case.part, 0, twice, piece.shard) == piece.data
    copy[-1] ^= 1
    for pieces in (twice, [piece, Held(piece.shard, piece.data[1:])]):
        for order in (pieces, pieces[::-1]):
            with pytest.raises(LayoutError, match="come with different bytes"):
                assemble(case.part, 0, order, Shard(0, 1))


def test_a_whole_object_splits_for_any_size() -> None:
    case = CASES["gdn conv"]
    whole = whole_state(case.part)
    (one,) = stored(case, case.part, whole, 1)
    pieces = split(case.part, 0, one, case.part.shards(4))
    assert pieces == stored(case, case.part, whole, 4)


def test_of_equal_copies_the_first_rank_writes() -> None:
    part = CASES["gqa, 2 heads"].part
    assert [writes(part, 8, rank) for rank in range(8)] == [
        True, False, False, False, True, False, False, False,
    ]  # fmt: skip
    assert all(writes(part, 2, rank) for rank in range(2))


PART = Part(
    "s", Kind.CONV, 1, 0, 12, (Tensor("t", "int16", (2, 36, 3), ("a", "b", "c"), 1, (12, 24)),)
)
ranges = st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda r: r[0] < r[1])


@given(held=st.lists(ranges, max_size=8), wanted=ranges)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_covering_set_will_do(held: list[tuple[int, int]], wanted: tuple[int, int]) -> None:
    shards, want = [Shard(*one) for one in held], Shard(*wanted)
    found = cover(shards, want)
    units = {unit for shard in shards for unit in range(shard.start, shard.stop)}
    assert (found is not None) == (set(range(want.start, want.stop)) <= units)
    if found is None:
        return
    assert len(found) == fewest(shards, want)
    full = np.arange(2 * 36 * 3, dtype=np.int16).reshape(2, 36, 3)

    def cut(shard: Shard) -> bytes:
        pieces = [
            full[:, at + shard.start * unit : at + shard.stop * unit]
            for at, unit in ((0, 1), (12, 2))
        ]
        return np.concatenate(pieces, axis=1).tobytes()

    pieces = [Held(shard, memoryview(cut(shard))) for shard in shards]
    assert bytes(assemble(PART, 0, pieces, want)) == cut(want)


def fewest(shards: list[Shard], wanted: Shard) -> int:
    """The smallest covering set, by trying."""
    reached, count = {wanted.start}, 0
    while wanted.stop not in reached:
        count += 1
        reached |= {
            min(shard.stop, wanted.stop)
            for shard in shards
            for at in reached
            if shard.start <= at < shard.stop
        }
    return count
