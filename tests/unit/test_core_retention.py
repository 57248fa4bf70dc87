"""Which checkpoints each retention mode takes: the whole table, and each against its definition."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.events import Capture
from tiercache.core.policy.base import Checkpoints, Prompt, Sort, Stop
from tiercache.core.policy.places import chunk_ends, ends, every, floor
from tiercache.core.policy.retention import Retention, checkpoints_of

BLOCK = 16
N = 200
"""The prompt's length; its forks lie at 96, its chunks end at 64, 128 and 192."""

EXACT = Capture(chunk_tokens=64, grain=1)


def policy_of(mode: Retention, most: int = 64, decode: int = 0) -> Checkpoints:
    return checkpoints_of(mode, interval_tokens=80, decode_interval_tokens=decode, most=most)


def place(mode: Retention, prompt: Prompt, capture: Capture = EXACT, most: int = 64) -> list[int]:
    return policy_of(mode, most).place(prompt, capture)


NEW = Prompt(N, 0, BLOCK)
FORKED = Prompt(N, 0, BLOCK, reached=96, fork=96)
AGAIN = Prompt(N, 0, BLOCK, reached=192, met=frozenset({199, 200}))
ENDS = [199, 200]
BLOCKS = list(range(16, N, 16))


@pytest.mark.parametrize(
    ("mode", "first_sight", "where_others_parted", "second_sight"),
    [
        ("marconi", ENDS, [96, *ENDS], ENDS),
        ("strict", [], [96], ENDS),
        ("minimal", [199], [96, 199], [199]),
        ("interval", [80, 160, *ENDS], [80, 96, 160, *ENDS], [80, 160, *ENDS]),
        ("chunk", [64, 128, 192, *ENDS], [64, 96, 128, 192, *ENDS], [64, 128, 192, *ENDS]),
        ("dense", [*BLOCKS, *ENDS], [*BLOCKS, *ENDS], [*BLOCKS, *ENDS]),
    ],
)
def test_the_table_of_advice(
    mode: Retention,
    first_sight: list[int],
    where_others_parted: list[int],
    second_sight: list[int],
) -> None:
    assert place(mode, NEW) == first_sight
    assert place(mode, FORKED) == where_others_parted
    assert place(mode, AGAIN) == second_sight


KEPT_AT_FIRST = {
    "marconi": {Sort.PROMPT, Sort.END, Sort.OUTPUT, Sort.FORK},
    "strict": set(),
    "minimal": {Sort.PROMPT, Sort.FORK},
    "interval": {Sort.PROMPT, Sort.END, Sort.OUTPUT, Sort.FORK},
    "chunk": {Sort.PROMPT, Sort.END, Sort.OUTPUT, Sort.FORK, Sort.INSIDE},
    "dense": set(Sort),
}
KEPT_AT_SECOND = KEPT_AT_FIRST | {"strict": set(Sort)}


@pytest.mark.parametrize("mode", get_args(Retention))
@pytest.mark.parametrize("sort", Sort)
def test_the_table_of_what_is_kept_unasked(mode: Retention, sort: Sort) -> None:
    policy = policy_of(mode)
    assert policy.keeps(Stop(150, sort, 1, last=True)) is (sort in KEPT_AT_FIRST[mode])
    assert policy.keeps(Stop(150, sort, 2, last=True)) is (sort in KEPT_AT_SECOND[mode])


def test_every_mode_has_a_policy_of_its_own() -> None:
    assert KEPT_AT_FIRST.keys() == set(get_args(Retention))
    assert len({type(policy_of(mode)) for mode in get_args(Retention)}) == len(KEPT_AT_FIRST)


@pytest.mark.parametrize(
    ("decode", "stop", "kept"),
    [
        (0, Stop(224, Sort.OUTPUT, 1, last=True), True),  # The end of what was decoded.
        (0, Stop(224, Sort.OUTPUT, 1, last=False), False),
        (32, Stop(224, Sort.OUTPUT, 1, last=False), True),
        (32, Stop(225, Sort.OUTPUT, 1, last=False), False),
        (32, Stop(192, Sort.INSIDE, 1, last=False), False),
    ],
)
def test_decode_intervals(decode: int, stop: Stop, *, kept: bool) -> None:
    assert policy_of("marconi", decode=decode).keeps(stop) is kept
    assert policy_of("chunk", decode=decode).keeps(stop) is (kept or stop.sort is Sort.INSIDE)


def test_an_interval_keeps_its_grid_in_a_prompt_only() -> None:
    policy = policy_of("interval")
    assert policy.keeps(Stop(160, Sort.INSIDE, 1, last=False))
    assert not policy.keeps(Stop(150, Sort.INSIDE, 9, last=False))
    assert not policy.keeps(Stop(160, Sort.OUTPUT, 1, last=False))


@pytest.mark.parametrize(
    ("tokens", "capture", "expected"),
    [
        (200, Capture(0, 1), (199, 200)),  # For the identical prompt, and for its continuation.
        (200, Capture(0, 64), (192, 192)),
        (192, Capture(0, 64), (128, 192)),
        (193, Capture(0, 64), (192, 192)),
        (63, Capture(0, 64), (0, 0)),
        (1, Capture(0, 1), (0, 1)),
        (200, Capture(64, 0), (199, 200)),
        (200, Capture(-5, -5), (199, 200)),
    ],
)
def test_the_ends_of_a_prompt(tokens: int, capture: Capture, expected: tuple[int, int]) -> None:
    assert ends(Prompt(tokens, 0, BLOCK), capture) == expected


@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        (Capture(64, 1), 100),
        (Capture(64, 16), 96),
        (Capture(64, 0), 64),
        (Capture(0, 0), 0),
        (Capture(-1, -1), 0),
    ],
)
def test_the_nearest_boundary_before_a_fork(capture: Capture, expected: int) -> None:
    assert floor(100, capture) == expected


@pytest.mark.parametrize(
    ("resumed", "capture", "expected"),
    [
        (0, Capture(64, 1), [64, 128, 192]),
        (64, Capture(64, 1), [128, 192]),
        (65, Capture(64, 0), [128, 192]),
        (0, Capture(0, 1), []),
        (0, Capture(-1, 1), []),
        (0, Capture(40, 16), [80, 160]),  # 40 and 120 cannot be captured.
    ],
)
def test_chunk_ends(resumed: int, capture: Capture, expected: list[int]) -> None:
    assert chunk_ends(Prompt(N, resumed, BLOCK), capture) == expected


def test_every_so_many_tokens_as_near_as_it_gets() -> None:
    assert every(50, NEW, Capture(0, 16)) == [48, 96, 144, 192]
    assert every(5, Prompt(40, 20, BLOCK), Capture(0, 16)) == [16, 32]


@pytest.mark.parametrize(
    ("most", "held", "expected"),
    [
        (64, 0, [64, 128, 192, 199, 200]),
        (4, 0, [128, 192, 199, 200]),  # The deepest ones.
        (4, 1, [192, 199, 200]),
        (4, 2, [199, 200]),
        (4, 9, [199, 200]),
        (0, 0, [199, 200]),
    ],
)
def test_the_budget_of_a_way(most: int, held: int, expected: list[int]) -> None:
    assert place("chunk", Prompt(N, 0, BLOCK, held=held), most=most) == expected


def test_strict_knows_blocks_by_how_far_others_came_and_ends_inside_them_by_name() -> None:
    at_blocks = Capture(0, 16)
    assert place("strict", Prompt(192, 0, BLOCK, reached=176), at_blocks) == [176]
    assert place("strict", Prompt(192, 0, BLOCK, reached=192), at_blocks) == [176, 192]
    assert place("strict", Prompt(N, 0, BLOCK, reached=192, met=frozenset({200}))) == [200]


modes = st.sampled_from(get_args(Retention))


@settings(max_examples=400, deadline=None)
@given(
    modes,
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(0, 20),
    st.integers(-2, 90),
    st.integers(-2, 40),
    st.integers(0, 12),
)
def test_advice_is_that_of_the_definition(
    mode: Retention, tokens: int, resumed: int, reached: int, chunk: int, grain: int, most: int
) -> None:
    """The definition asks every token count whether it belongs."""
    capture = Capture(chunk, grain)
    fork = min(reached * BLOCK, tokens // BLOCK * BLOCK)
    prompt = Prompt(tokens, resumed, BLOCK, reached=fork, fork=fork, held=1)
    able = [
        end
        for end in range(1, tokens + 1)
        if (end % grain == 0 if grain >= 1 else chunk >= 1 and end % chunk == 0)
    ]
    either = able if grain >= 1 else sorted({*able, *(e for e in (tokens - 1, tokens) if e)})

    def nearest(limit: int, among: list[int]) -> int:
        return max((end for end in among if end <= limit), default=0)

    first = {nearest(fork, able)}
    two = (nearest(tokens - 1, either), nearest(tokens, either))
    if mode == "strict":
        first |= {end for end in two if end % BLOCK == 0 and end <= fork}
    else:
        first |= {two[0]} if mode == "minimal" else set(two)
    first = {end for end in first if end > resumed}
    wanted = {
        "interval": {nearest(end, able) for end in range(80, tokens + 1, 80)},
        "chunk": {end for end in able if chunk >= 1 and end % chunk == 0},
        "dense": {nearest(end, able) for end in range(BLOCK, tokens + 1, BLOCK)},
    }.get(mode, set())
    others = sorted(end for end in wanted - first if end > resumed)
    room = max(0, most - 1 - len(first))
    expected = sorted(first.union(others[len(others) - room :] if room < len(others) else others))
    assert place(mode, prompt, capture, most) == expected
