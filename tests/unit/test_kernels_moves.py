"""Copies between slots, pages and ranges: every element where it belongs, and no other touched."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiercache_kernels import (
    Segment,
    Segments,
    copy_slots,
    gather_pages,
    join_conv,
    join_heads,
    scatter_pages,
    slice_conv,
    slice_heads,
)
from tiercache_kernels.testing import poisoned, same, spaced

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int64, torch.bool)
CASTS = [(dtype, dtype) for dtype in DTYPES]
CASTS += [(old, new) for old in FLOATS for new in FLOATS if old != new]
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def filled(tensor: Tensor, seed: int) -> Tensor:
    """Fill a tensor with numbers that a cast must round, or with any bytes."""
    dice = torch.Generator().manual_seed(seed)
    if tensor.dtype.is_floating_point:
        values = torch.randn(tensor.shape, generator=dice)
        values *= torch.exp2(torch.randint(-30, 30, tensor.shape, generator=dice).float())
    else:
        high = 2 if tensor.dtype == torch.bool else 128
        values = torch.randint(0, high, tensor.shape, generator=dice)
    return tensor.copy_(values)


def picked(data: st.DataObject, seed: int, *counts: int) -> list[Tensor]:
    """Return lists of one length, each of different numbers below its count, in any order."""
    dice = torch.Generator().manual_seed(seed)
    length = data.draw(st.integers(0, min(counts)))
    return [torch.randperm(count, generator=dice)[:length] for count in counts]


@settings(deadline=None, max_examples=60)
@given(st.data(), SHAPES, st.sampled_from(CASTS), st.integers(0, 2**32))
def test_slots(
    data: st.DataObject,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    layers, old_count, new_count = (data.draw(st.integers(1, 4)) for _ in range(3))
    device = data.draw(st.sampled_from(DEVICES))
    source = filled(spaced(layers, old_count, *shape, dtype=dtypes[0], device=device), seed)
    target = spaced(layers, new_count, *shape, dtype=dtypes[1], device=device)
    old, new = picked(data, seed, old_count, new_count)
    expected = target.clone()
    for layer in range(layers):
        for i in range(len(old)):
            expected[layer, new[i]] = source[layer, old[i]].to(dtypes[1])
    copy_slots(source, old, target, new)
    assert same(target, expected)


def test_slots_within_one_pool() -> None:
    pool = filled(spaced(2, 4, 3, dtype=torch.float32, device=DEVICES[-1]), 1)
    before = pool.clone()
    copy_slots(pool, torch.tensor([0, 1]), pool, torch.tensor([3, 2]))
    assert same(pool, before[:, [0, 1, 1, 0]])
    with pytest.raises(ValueError, match=r"are source and target of one copy"):
        copy_slots(pool, torch.tensor([0, 1]), pool, torch.tensor([1, 2]))


@settings(deadline=None, max_examples=60)
@given(st.data(), SHAPES, st.sampled_from(CASTS), st.integers(0, 2**32))
def test_pages(
    data: st.DataObject,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    count, room = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    device = data.draw(st.sampled_from(DEVICES))
    paged = filled(spaced(1, count, *shape, dtype=dtypes[0], device=device)[0], seed)
    staging = poisoned(room, *shape, dtype=dtypes[1], device=device)
    (pages, _) = picked(data, seed, count, room)
    expected = staging.clone()
    expected[: len(pages)] = paged[pages].to(dtypes[1])
    gather_pages(paged, pages, staging)
    assert same(staging, expected)

    back = spaced(1, count, *shape, dtype=dtypes[0], device=device)[0]
    expected = back.clone()
    expected[pages] = staging[: len(pages)].to(dtypes[0])
    scatter_pages(staging, back, pages)
    assert same(back, expected)


def test_a_page_is_gathered_twice_and_scattered_once() -> None:
    paged = filled(poisoned(3, 5, dtype=torch.int64, device=DEVICES[-1]), 3)
    staging = poisoned(4, 5, dtype=torch.int64, device=DEVICES[-1])
    twice = torch.tensor([2, 2, 0])
    gather_pages(paged, twice, staging)
    assert same(staging[:3], paged[[2, 2, 0]])
    with pytest.raises(ValueError, match="twice"):
        scatter_pages(staging, paged, twice)


@pytest.mark.parametrize("far_axis", ["layers", "slots"])
def test_a_pool_may_be_larger_than_32_bits_count(far_axis: str) -> None:
    """Its memory is only reserved: a few pages of it are touched."""
    far, size = 2**30 + 4096, 64
    buffer = torch.empty(2 * far + 3 * size, dtype=torch.int8, device=DEVICES[-1])
    strides = (far, size) if far_axis == "layers" else (size, far)
    pool = buffer.as_strided((3, 3, size), (*strides, 1))
    values = filled(poisoned(3, 1, size, dtype=torch.int8, device=DEVICES[-1]), 5)
    first, last = torch.tensor([0]), torch.tensor([2])
    copy_slots(values, first, pool, last)
    for layer in range(3):
        found = poisoned(1, size, dtype=torch.int8, device=DEVICES[-1])
        gather_pages(pool[layer], last, found)
        assert same(found, values[layer])


# --- other tensor-parallel sizes

HEADS = [  # (axis, shape of the whole): heads of state, of its scales, of paged keys
    (-3, (2, 8, 3, 5)),
    (-3, (2, 3, 8, 4, 7)),
    (-3, (8, 1, 6)),
    (-2, (2, 2, 3, 8, 5)),
    (-1, (3, 8)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("axis", "shape"), HEADS)
def test_heads_go_to_ranks_and_back(axis: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Saved by the ranks of one size, restored by those of another."""
    whole = filled(poisoned(*shape, dtype=dtype, device=DEVICES[-1]), 11)
    for saved, restored in ((1, 2), (2, 8), (4, 1), (4, 2), (8, 4)):
        kept = torch.full_like(whole, 0).copy_(poisoned(*shape, dtype=dtype))
        for rank, piece in enumerate(whole.chunk(saved, axis)):
            width = 8 // saved
            join_heads(piece.contiguous(), rank * width, (rank + 1) * width, kept, axis)
        assert same(kept, whole)
        for rank, piece in enumerate(whole.chunk(restored, axis)):
            width = 8 // restored
            out = poisoned(*piece.shape, dtype=dtype, device=DEVICES[-1])
            slice_heads(kept, rank * width, (rank + 1) * width, out, axis)
            assert same(out, piece)


def test_heads_of_one_slot_of_a_pool() -> None:
    """A slot of a pool is a view with gaps between its layers."""
    pool = filled(spaced(3, 2, 4, 5, 6, dtype=torch.float32, device=DEVICES[-1]), 2)
    out = poisoned(3, 2, 5, 6, dtype=torch.float32, device=DEVICES[-1])
    slice_heads(pool[:, 1], 1, 3, out)
    assert same(out, pool[:, 1, 1:3])
    before = pool.clone()
    join_heads(out, 0, 2, pool[:, 0])
    assert same(pool[:, 0, :2], before[:, 1, 1:3])
    assert same(pool[:, 0, 2:], before[:, 0, 2:])
    assert same(pool[:, 1], before[:, 1])


KDA = Segments((Segment(32, 8), Segment(32, 8), Segment(32, 8)))
GDN = Segments((Segment(16, 8), Segment(16, 8), Segment(48, 24)))
MAMBA2 = Segments((Segment(64, 16), Segment(6, 2), Segment(6, 2)))
ONE_GROUP = Segments((Segment(32, 8), Segment(3, 1), Segment(3, 1)))
FAMILIES = {"kda": KDA, "gdn": GDN, "mamba2": MAMBA2, "one group": ONE_GROUP}
RANKS = (1, 2, 4, 8)


def labels(segments: Segments) -> Tensor:
    """Return for each channel a number that says its segment, its group and its place in that."""
    found = []
    for number, segment in enumerate(segments.of):
        size = segment.channels // segment.groups
        for group in range(segment.groups):
            found += [number * 10000 + group * 100 + place for place in range(size)]
    return torch.tensor(found, dtype=torch.int32)


def held(segments: Segments, rank: int, ranks: int) -> Tensor:
    """Return the labels that a rank holds, from what tensor parallelism is: groups, or copies of one."""
    found = []
    for number, segment in enumerate(segments.of):
        each = max(1, segment.groups // ranks)
        first = rank * each if segment.groups >= ranks else rank // (ranks // segment.groups)
        size = segment.channels // segment.groups
        for group in range(first, first + each):
            found += [number * 10000 + group * 100 + place for place in range(size)]
    return torch.tensor(found, dtype=torch.int32)


def conv_state(segments: Segments, axis: int) -> tuple[Tensor, Segments]:
    """Return a state of two layers and three columns whose channels tell what they are."""
    channels = labels(segments).to(DEVICES[-1])
    columns = torch.arange(3, dtype=torch.int32, device=DEVICES[-1]) * 1000000
    layers = torch.arange(2, dtype=torch.int32, device=DEVICES[-1]) * 100000000
    state = layers[:, None, None] + channels[:, None] + columns
    return (state.mT if axis == -1 else state).contiguous(), Segments(segments.of, axis)


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_segment_of_a_convolution_is_cut_by_itself(family: str, axis: int) -> None:
    state, segments = conv_state(FAMILIES[family], axis)
    for ranks in RANKS:
        for rank in range(ranks):
            shape = list(state.shape)
            shape[axis] = segments.width(rank, rank + 1, ranks)
            out = poisoned(*shape, dtype=torch.int32, device=DEVICES[-1])
            slice_conv(state, segments, rank, rank + 1, ranks, out)
            first = out.select(-1 if axis == -2 else -2, 0)[0]
            assert torch.equal(first.cpu(), held(segments, rank, ranks))


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_convolution_is_saved_at_one_size_and_restored_at_another(family: str, axis: int) -> None:
    state, segments = conv_state(FAMILIES[family], axis)
    for ranks in RANKS:
        whole = poisoned(*state.shape, dtype=torch.int32, device=DEVICES[-1])
        for rank in range(ranks):
            shape = list(state.shape)
            shape[axis] = segments.width(rank, rank + 1, ranks)
            piece = poisoned(*shape, dtype=torch.int32, device=DEVICES[-1])
            slice_conv(state, segments, rank, rank + 1, ranks, piece)
            join_conv(piece, segments, rank, rank + 1, ranks, whole)
        assert same(whole, state)


def test_a_range_of_units_takes_every_group_it_needs_once() -> None:
    state, segments = conv_state(MAMBA2, -2)
    out = poisoned(2, segments.width(2, 6, 8), 3, dtype=torch.int32, device=DEVICES[-1])
    slice_conv(state, segments, 2, 6, 8, out)
    found = [label // 100 for label in out[0, :, 0].tolist()]
    assert found == [group for group in range(4, 12) for _ in range(4)] + [
        segment * 100 + group for segment in (1, 2) for group in (0, 1) for _ in range(3)
    ]


def test_a_flat_cut_is_another_state_of_the_same_shape() -> None:
    """What the segments are for: the mistake has the right shape, and no error tells."""
    state, segments = conv_state(KDA, -2)
    out = poisoned(2, segments.width(0, 1, 2), 3, dtype=torch.int32, device=DEVICES[-1])
    slice_conv(state, segments, 0, 1, 2, out)
    flat = state[:, : out.shape[1]]
    assert flat.shape == out.shape
    assert not torch.equal(flat, out)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Segment(10, 3), "10 channels do not make 3 equal groups"),
        (lambda: Segments((), -2), "has segments"),
        (lambda: Segments((Segment(4, 2),), 1), "counted from the end"),
        (lambda: list(KDA.ranges(1, 1, 2)), r"no units \[1, 1\) of 2"),
        (lambda: list(KDA.ranges(0, 3, 2)), r"no units \[0, 3\) of 2"),
        (lambda: list(KDA.ranges(0, 1, 3)), "8 groups do not split over 3 units"),
    ],
)
def test_cuts_that_there_are_not_are_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def test_wrong_arguments_are_refused() -> None:
    pool, out = torch.zeros(2, 4, 8, 5, 6), torch.zeros(2, 4, 2, 5, 6)
    with pytest.raises(ValueError, match=r"expected \[2, 4, 3, 5, 6\]"):
        slice_heads(pool, 1, 4, out)
    with pytest.raises(ValueError, match=r"no range \[7, 9\) of 8"):
        slice_heads(pool, 7, 9, out)
    with pytest.raises(ValueError, match="count from the end"):
        slice_heads(pool, 0, 2, out, axis=2)
    with pytest.raises(TypeError, match="keeps"):
        slice_heads(pool, 0, 2, out.half())
    with pytest.raises(ValueError, match="96 channels on axis -2"):
        slice_conv(pool, KDA, 0, 1, 2, out)
    zero = torch.tensor([0])
    with pytest.raises(TypeError, match="only floats are cast"):
        copy_slots(pool, zero, pool.int(), zero)
    with pytest.raises(ValueError, match="expected"):
        copy_slots(pool, zero, out, zero)
    with pytest.raises(ValueError, match="no copy"):
        copy_slots(pool, zero, pool[0], zero)
    with pytest.raises(ValueError, match="not dense"):
        copy_slots(pool.mT, zero, pool.mT.contiguous(), zero)
    with pytest.raises(ValueError, match="2 pages, room for 1"):
        gather_pages(pool[0], torch.tensor([0, 1]), torch.zeros(1, 8, 5, 6))
    with pytest.raises(IndexError, match=r"pages \[4\], of 4"):
        gather_pages(pool[0], torch.tensor([4]), torch.zeros(1, 8, 5, 6))
    with pytest.raises(ValueError, match="several devices"):
        copy_slots(pool, zero, pool.to("meta"), zero)


def test_places_that_share_memory_are_not_written() -> None:
    pool, both = torch.zeros(2, 4, 8), torch.tensor([0, 1])
    one = torch.zeros(2, 1, 8).expand(2, 4, 8)
    with pytest.raises(ValueError, match="overlaps itself"):
        copy_slots(pool, both, one, both)
    with pytest.raises(ValueError, match="overlaps itself"):
        copy_slots(pool, both, torch.zeros(100).as_strided((2, 4, 8), (40, 7, 1)), both)
    with pytest.raises(ValueError, match="overlaps itself"):
        gather_pages(pool[0], both, one[0])
    with pytest.raises(ValueError, match="overlaps itself"):
        scatter_pages(pool[0], one[0], both)
    copy_slots(one, both, pool.transpose(0, 1).contiguous().transpose(0, 1), both)


def test_what_is_read_is_not_written() -> None:
    """Two views of one buffer, place by place: the order of a copy must not decide what it leaves."""
    buffer = torch.arange(240.0)
    pages = buffer[:96].view(12, 8)
    overlapping = r"are source and target of one copy"
    with pytest.raises(ValueError, match=overlapping):
        gather_pages(pages, torch.tensor([3, 1]), pages)
    with pytest.raises(ValueError, match=overlapping):
        scatter_pages(pages, pages, torch.tensor([5, 0]))
    with pytest.raises(ValueError, match=overlapping):
        gather_pages(pages, torch.tensor([0]), buffer[4:12].view(1, 8))
    with pytest.raises(ValueError, match=overlapping):
        scatter_pages(buffer[95:103].view(1, 8), pages, torch.tensor([11]))
    slots = buffer[:96].view(2, 6, 8)
    with pytest.raises(ValueError, match=overlapping):
        copy_slots(slots[:, 1:], torch.tensor([0]), slots, torch.tensor([1]))
    assert torch.equal(buffer, torch.arange(240.0))
    # Pages and staging between one another in one buffer, as in a unified pool: nothing meets.
    interleaved = buffer.as_strided((6, 8), (40, 1))
    gather_pages(interleaved, torch.tensor([0, 5]), buffer.as_strided((2, 8), (40, 1), 8))
    assert buffer[8:16].tolist() == list(range(8))
    assert buffer[48:56].tolist() == list(range(200, 208))
    gather_pages(pages, torch.tensor([3]), pages)  # Row 0 is written, and page 3 is read.
    assert torch.equal(pages[0], pages[3])
    none = torch.zeros(0, dtype=torch.int64)
    gather_pages(pages, none, pages)
    copy_slots(slots[:, :0], none, slots, none)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs numbers on a device")
def test_numbers_on_the_device_are_trusted_but_for_pages_into_themselves() -> None:
    pages = torch.zeros(4, 8, device="cuda")
    with pytest.raises(ValueError, match="source and target of one copy"):
        gather_pages(pages, torch.tensor([3], device="cuda"), pages)
