"""Where a sequence can be resumed: the fast answer against its definition, and the cases that burn."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiercache.state import Kind, Part, Tensor, resolve, resumable
from tiercache.testing.strategies import Held, held

BLOCK = 4
KV = Part("kv", Kind.KV, None, BLOCK, 1, (Tensor("k", "int8", (1,), ("d",)),))
SLIDING = replace(KV, name="sliding", window=2)
COARSE = replace(KV, name="coarse", block_tokens=2 * BLOCK)
STATE = replace(KV, name="state", kind=Kind.RECURRENT, window=1, block_tokens=0)
CONV = replace(STATE, name="conv", kind=Kind.CONV)


def can_resume(part: Part, positions: Sequence[int], flags: Sequence[bool], at: int) -> bool:
    """The definition, word for word."""
    there = dict(zip(positions, flags, strict=True))
    tokens = positions[at]
    if part.is_snapshot:
        return there[tokens]
    edges = range(part.block_tokens, tokens + 1, part.block_tokens)
    last = edges if part.window is None else edges[-part.window :]
    inside = tokens % part.block_tokens != 0
    return all(there[edge] for edge in last) and (there[tokens] or not inside)


def by_definition(
    parts: Sequence[Part], positions: Sequence[int], table: Sequence[Sequence[bool]]
) -> int:
    for at in reversed(range(len(positions))):
        pairs = zip(parts, table, strict=True)
        if all(can_resume(part, positions, flags, at) for part, flags in pairs):
            return at
    return -1


@settings(max_examples=500, deadline=None)
@given(held())
def test_it_is_what_its_definition_says(case: Held) -> None:
    parts, positions = case.layout.parts, case.positions
    assert resolve(parts, positions, case.held) == by_definition(parts, positions, case.held)


@settings(max_examples=300, deadline=None)
@given(held())
def test_every_boundary_is_one_by_definition(case: Held) -> None:
    """Those that can be resumed, all of them, the deepest first; of bytes as of flags."""
    parts, positions = case.layout.parts, case.positions
    pairs = [*zip(parts, case.held, strict=True)]
    expected = [
        at
        for at in reversed(range(len(positions)))
        if all(can_resume(part, positions, flags, at) for part, flags in pairs)
    ]
    assert list(resumable(parts, positions, case.held)) == expected
    packed = [bytes(flags) for flags in case.held]
    assert list(resumable(parts, positions, packed)) == expected


@settings(max_examples=200, deadline=None)
@given(held(), st.data())
def test_one_object_more_never_leads_less_far(case: Held, data: st.DataObject) -> None:
    parts, positions = case.layout.parts, case.positions
    assume(positions)
    before = resolve(parts, positions, case.held)
    part = data.draw(st.integers(0, len(parts) - 1))
    at = data.draw(st.integers(0, len(positions) - 1))
    more = [list(flags) for flags in case.held]
    more[part][at] = True
    assert resolve(parts, positions, more) >= before


def flags(positions: Sequence[int], missing: Sequence[int] = ()) -> list[bool]:
    return [position not in missing for position in positions]


POSITIONS = [4, 8, 12, 14, 16]


@pytest.mark.parametrize(
    ("kv", "state", "conv", "boundary"),
    [
        ([], [], [], 16),
        ([16], [], [], 14),  # The last block is missing; the one before is partial and there.
        ([14, 16], [], [], 12),
        ([8], [], [], 4),  # A hole: nothing beyond it, whatever else is held.
        ([4], [], [], None),
        ([], [16], [], 14),
        ([], [16, 14], [], 12),
        ([], [], [16, 14, 12], 8),
        ([], [16], [14], 12),  # State at one boundary and convolution at another are no pair.
        ([], [4, 8, 12, 14, 16], [], None),
    ],
)
def test_all_parts_must_meet(
    kv: list[int], state: list[int], conv: list[int], boundary: int | None
) -> None:
    found = resolve(
        [KV, STATE, CONV],
        POSITIONS,
        [flags(POSITIONS, kv), flags(POSITIONS, state), flags(POSITIONS, conv)],
    )
    assert (POSITIONS[found] if found >= 0 else None) == boundary


def test_a_sliding_window_needs_its_last_blocks_only() -> None:
    positions = [4, 8, 12, 16]
    assert resolve([SLIDING], positions, [flags(positions, [4])]) == 3
    assert resolve([SLIDING], positions, [flags(positions, [12])]) == 1
    assert resolve([SLIDING], positions, [flags(positions, [4, 12])]) == -1


def test_inside_a_block_the_whole_ones_before_it_count() -> None:
    positions = [4, 8, 10]
    assert resolve([KV], positions, [flags(positions, [8])]) == 0
    assert resolve([SLIDING], positions, [flags(positions, [4])]) == -1
    assert resolve([SLIDING], positions, [flags(positions)]) == 2


def test_parts_may_have_blocks_of_their_own_size() -> None:
    positions = [4, 8, 12]
    # At 12 the coarse part is inside its second block: the partial one must be there.
    assert resolve([KV, COARSE], positions, [flags(positions), [False, True, True]]) == 2
    assert resolve([KV, COARSE], positions, [flags(positions), [False, True, False]]) == 1


def test_nothing_is_nowhere() -> None:
    assert resolve([KV], [], [[]]) == -1
