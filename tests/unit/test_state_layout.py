"""Layouts: what is refused, sizes, and how ranks split."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tiercache.errors import LayoutError
from tiercache.state import Kind, Layout, Part, Shard, Tensor
from tiercache.state.layout import DTYPE_BYTES
from tiercache.testing.strategies import layouts

ROW = Tensor("row", "float32", (8, 3), ("head", "value"), 0)
COPY = Tensor("row", "bfloat16", (576,), ("latent",))


KV = Part("kv", Kind.KV, None, 64, 1, (COPY,))


def test_sizes_are_those_of_the_tensors() -> None:
    assert COPY.nbytes == 1152
    assert KV.nbytes(64, Shard(0, 1)) == 64 * 1152
    assert KV.nbytes(1, Shard(0, 1)) == 1152
    state = Part("recurrent", Kind.RECURRENT, 1, 0, 8, (ROW, replace(ROW, name="other")))
    assert state.nbytes(999, Shard(0, 8)) == 2 * 96  # A snapshot does not grow with its prefix.
    assert state.nbytes(1, Shard(3, 5)) == 2 * 24
    assert state.whole == Shard(0, 8)


@pytest.mark.parametrize("shard", [Shard(0, 0), Shard(-1, 1), Shard(7, 9), Shard(2, 1)])
def test_a_shard_that_cannot_be_has_no_size(shard: Shard) -> None:
    with pytest.raises(LayoutError, match="units 0-8"):
        Part("recurrent", Kind.RECURRENT, 1, 0, 8, (ROW,)).nbytes(0, shard)


@pytest.mark.parametrize(
    ("units", "ranks", "expected"),
    [
        (1, 1, ["0-1"]),
        (8, 1, ["0-8"]),
        (8, 2, ["0-4", "4-8"]),
        (8, 8, [f"{n}-{n + 1}" for n in range(8)]),
        (1, 3, ["0-1", "0-1", "0-1"]),
        (2, 4, ["0-1", "0-1", "1-2", "1-2"]),
    ],
)
def test_ranks_split_units_evenly(units: int, ranks: int, expected: list[str]) -> None:
    tensor = Tensor("row", "int8", (units,), ("head",), 0 if units > 1 else None)
    part = Part("part", Kind.RECURRENT, 1, 0, units, (tensor,))
    assert [str(shard) for shard in part.shards(ranks)] == expected


@pytest.mark.parametrize(("units", "ranks"), [(8, 3), (3, 8), (8, 0), (8, -1), (6, 4)])
def test_ranks_that_do_not_split_are_refused(units: int, ranks: int) -> None:
    tensor = Tensor("row", "int8", (units,), ("head",), 0)
    with pytest.raises(LayoutError, match="do not split"):
        Part("part", Kind.RECURRENT, 1, 0, units, (tensor,)).shards(ranks)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_the_ranks_shards_make_the_whole(layout: Layout) -> None:
    for part in layout.parts:
        whole = part.nbytes(7, part.whole)
        for ranks in (1, 2, 4):
            shards = part.shards(ranks)
            assert len(shards) == ranks
            assert {n for shard in shards for n in range(shard.start, shard.stop)} == set(
                range(part.units)
            )
            assert sum(part.nbytes(7, shard) for shard in dict.fromkeys(shards)) == whole


WRONG_TENSORS: list[Callable[[], Tensor]] = [
    lambda: Tensor("t", "float7", (1,), ("a",)),
    lambda: Tensor("t", "int8", (1, 2), ("a",)),
    lambda: Tensor("t", "int8", (0,), ("a",)),
    lambda: Tensor("t", "int8", (-1,), ("a",)),
    lambda: Tensor("t", "int8", (4,), ("a",), 1),
    lambda: Tensor("t", "int8", (4,), ("a",), -1),
    lambda: Tensor("t", "int8", (4,), ("a",), None, (2, 2)),
    lambda: Tensor("t", "int8", (4,), ("a",), 0, (2, 1)),
    lambda: Tensor("t", "int8", (4,), ("a",), 0, (6, -2)),
    lambda: Tensor("t", "int8", (4,), ("a",), 0, (4, 0)),
]


@pytest.mark.parametrize("make", WRONG_TENSORS)
def test_tensors_that_cannot_be(make: Callable[[], Tensor]) -> None:
    with pytest.raises(LayoutError, match="tensor 't'"):
        make()


WRONG_PARTS: list[Callable[[], Part]] = [
    lambda: replace(KV, name=""),
    lambda: replace(KV, name="a/b"),
    lambda: replace(KV, name="ä"),
    lambda: replace(KV, name="line\nbreak"),
    lambda: replace(KV, window=0),
    lambda: replace(KV, window=-1),
    lambda: replace(KV, block_tokens=0),  # A snapshot with the window of attention.
    lambda: replace(KV, block_tokens=0, window=2),
    lambda: replace(KV, block_tokens=-64),
    lambda: replace(KV, units=0),
    lambda: replace(KV, tensors=()),
    lambda: replace(KV, units=2),  # Its tensor names no axis to split.
    lambda: replace(KV, tensors=(ROW,)),  # One unit, but an axis to split.
    lambda: replace(KV, units=3, tensors=(ROW,)),  # 8 heads in 3 units.
    lambda: replace(
        KV, units=2, tensors=(replace(ROW, segments=(3, 5)),)
    ),  # Pieces split one by one.
]


@pytest.mark.parametrize("make", WRONG_PARTS)
def test_parts_that_cannot_be(make: Callable[[], Part]) -> None:
    with pytest.raises(LayoutError, match="part "):
        make()


def test_pieces_of_an_axis_split_one_by_one() -> None:
    part = replace(KV, units=2, tensors=(replace(ROW, segments=(2, 6)),))
    assert part.nbytes(1, Shard(0, 1)) == 48


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Layout((), 64), "parts"),
        (lambda: Layout((KV, KV), 64), "different names"),
        (lambda: Layout((KV,), 0), "block_tokens"),
        (lambda: Layout((KV,), 64, version=2), "format 2"),
        (lambda: Layout((replace(KV, block_tokens=96),), 64), "not a multiple"),
        (lambda: Layout((replace(KV, block_tokens=32),), 64), "not a multiple"),
    ],
)
def test_layouts_that_cannot_be(make: Callable[[], Layout], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        make()


def test_parts_are_found_by_name() -> None:
    layout = Layout((KV, replace(KV, name="wide", block_tokens=128)), 64)
    assert layout.part("wide").block_tokens == 128
    with pytest.raises(LayoutError, match="no part 'conv'"):
        layout.part("conv")
    assert not layout.has_snapshots
    state = Part("recurrent", Kind.RECURRENT, 1, 0, 8, (ROW,))
    assert Layout((KV, state), 64).has_snapshots


def test_every_change_changes_the_fingerprint() -> None:
    part = replace(KV, units=4, tensors=(replace(ROW, segments=(4, 4)),))
    tensor = part.tensors[0]
    plain = Layout((part,), 64)

    def of(changed: Tensor) -> Layout:
        return Layout((replace(part, tensors=(changed,)),), 64)

    changed = [
        plain,
        Layout((part,), 32),
        Layout((replace(part, name="k"),), 64),
        Layout((replace(part, kind=Kind.EMBEDDING),), 64),
        Layout((replace(part, window=1),), 64),
        Layout((replace(part, window=2),), 64),
        Layout((replace(part, block_tokens=128),), 64),
        Layout((replace(part, units=2),), 64),
        Layout((replace(part, tensors=(tensor, tensor)),), 64),
        Layout((part, replace(part, name="k")), 64),
        Layout((replace(part, name="k"), part), 64),
        of(replace(tensor, name="v")),
        of(replace(tensor, dtype="int32")),
        of(replace(tensor, shape=(8, 6))),
        of(replace(tensor, axes=("head", "key"))),
        of(replace(tensor, segments=())),
    ]
    assert len({layout.fingerprint for layout in changed}) == len(changed)
    assert Layout((part,), 64).fingerprint == plain.fingerprint


def test_all_dtypes_have_their_size() -> None:
    for dtype, nbytes in DTYPE_BYTES.items():
        assert Tensor("t", dtype, (2, 3), ("a", "b")).nbytes == 6 * nbytes
