"""Which prefixes SGLang may restore: the cases that its own file backend is tested with, and the rule."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache_sglang.geometry import CONV, KV, RECURRENT, Piece, Pools, layout_of
from tiercache_sglang.restorable import EVERY_PAGE, hits_of

PIECE = Piece("x", "int8", (1,), ("dim",))
LAYOUT = layout_of(Pools(4, "page_first", True, (PIECE,), (PIECE,), (PIECE,)), 1)
STATES = {"mamba": (RECURRENT, CONV)}


def flags(pages: Sequence[int], count: int) -> bytes:
    return bytes(at in pages for at in range(count))


@pytest.mark.parametrize(
    ("kv", "states", "window", "expected"),
    [
        ((0, 1, 2), (2,), 1, [3]),
        ((0, 1, 2), (0, 1, 2), 1, [1, 2, 3]),
        ((0, 1, 2), (3,), 1, []),
        ((0, 1, 2, 3), (0, 2), 1, [1, 3]),
        ((0, 1), (1, 4), 1, [2]),
        ((0, 1, 3, 4), (1, 4), 1, [2]),
        ((1, 2), (2,), 1, []),
        ((0, 1, 2, 3, 4), (0, 1, 3, 4), 2, [1, 2, 5]),
        ((0, 1, 2, 3), (0, 1, 3), EVERY_PAGE, [1, 2]),
        ((0, 1, 2, 3), (), EVERY_PAGE, []),
        ((), (0,), 1, []),
    ],
)
def test_cases(
    kv: Sequence[int], states: Sequence[int], window: int | None, expected: list[int]
) -> None:
    found = [flags(kv, 6), flags(states, 6), flags(states, 6)]
    hits = hits_of(LAYOUT, found, STATES, {"mamba": window})
    assert hits.prefixes == expected
    assert hits.longest == max(expected, default=0)
    assert hits.kv == next((at for at in range(7) if at not in kv), 6)
    assert hits.pools == {"mamba": max(expected, default=0)}


def test_a_state_needs_all_its_parts() -> None:
    found = [b"\1\1\1", b"\1\1\1", b"\0\1\0"]
    assert hits_of(LAYOUT, found, STATES, {"mamba": 1}).prefixes == [2]


def test_kv_alone() -> None:
    found = [b"\1\1\0", b"\0\0\0", b"\0\0\0"]
    hits = hits_of(LAYOUT, found, {}, {})
    assert (hits.kv, hits.longest, hits.prefixes) == (2, 2, [1, 2])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=9), st.integers(1, 4))
def test_the_rule(pages: list[tuple[bool, bool]], window: int) -> None:
    """A length can be restored when all its KV is there, and the last `window` pages of the pool."""
    kv, pool = [page[0] for page in pages], [page[1] for page in pages]
    expected = [
        length
        for length in range(1, len(pages) + 1)
        if all(kv[:length]) and all(pool[max(0, length - window) : length])
    ]
    layout = replace(LAYOUT, parts=LAYOUT.parts[:2])
    found = [bytes(kv), bytes(pool)]
    assert hits_of(layout, found, {"p": (RECURRENT,)}, {"p": window}).prefixes == expected
    assert layout.part(KV).window is None
