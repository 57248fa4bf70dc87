"""The arena's bookkeeping: nothing overlaps, nothing leaks, and free space serves every size."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.core.space import Space
from tiercache.state import Extent

PAGE = 4096
MIB = 1 << 20


def overlaps(extents: list[Extent]) -> bool:
    end = Extent(-1, 0, 0)
    for extent in sorted(extents):
        if extent.segment == end.segment and extent.offset < end.offset + end.size:
            return True
        end = extent
    return False


@pytest.mark.parametrize("segments", [(0,), (-PAGE,), (PAGE + 1,), (PAGE, 100)])
def test_segments_are_whole_pages(segments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiples of 4096"):
        Space(segments, PAGE)


def test_an_alignment_is_positive() -> None:
    with pytest.raises(ValueError, match="multiples of 0"):
        Space((1,), 0)


def test_no_segments_no_space() -> None:
    space = Space((), PAGE)
    assert (space.capacity, space.largest_free(), space.object_bytes_max) == (0, 0, 0)
    assert space.allocate(1) is None


def test_sizes_are_rounded_up_to_pages() -> None:
    space = Space((4 * PAGE,), PAGE)
    assert space.allocate(1) == Extent(0, 0, PAGE)
    assert space.allocate(PAGE + 1) == Extent(0, PAGE, 2 * PAGE)
    assert space.free_bytes == PAGE
    assert space.allocate(PAGE + 1) is None
    assert space.allocate(0) is None
    assert space.allocate(-PAGE) is None
    assert space.allocate(PAGE) == Extent(0, 3 * PAGE, PAGE)
    assert (space.free_bytes, space.largest_free()) == (0, 0)


def test_an_exact_fit_is_taken_before_a_larger_run_is_cut() -> None:
    space = Space((20 * PAGE,), PAGE)
    first, second, _ = (space.allocate(size * PAGE) for size in (9, 1, 1))
    assert first is not None
    assert second is not None
    space.free(second)  # One page before the rest: nine free pages stay whole.
    assert space.allocate(PAGE) == second


def test_a_run_is_found_behind_smaller_ones_of_its_bin() -> None:
    """Sizes of 16 and 17 pages share a bin."""
    space = Space((100 * PAGE,), PAGE)
    taken = [space.allocate(size * PAGE) for size in (16, 1, 16, 1, 17, 1, 48)]
    for extent in taken[0:6:2]:
        assert extent is not None
        space.free(extent)
    assert space.allocate(17 * PAGE) == taken[4]
    assert space.allocate(17 * PAGE) is None
    assert space.allocate(16 * PAGE) in (taken[0], taken[2])


def test_a_longer_run_of_its_bin_is_cut() -> None:
    space = Space((34 * PAGE,), PAGE)
    taken = [space.allocate(17 * PAGE) for _ in range(2)]
    assert taken[0] is not None
    space.free(taken[0])
    assert space.allocate(16 * PAGE) == Extent(0, 0, 16 * PAGE)
    assert space.largest_free() == PAGE


def test_neighbours_of_other_segments_are_not_merged() -> None:
    space = Space((2 * PAGE, 2 * PAGE), PAGE)
    taken = [space.allocate(2 * PAGE), space.allocate(2 * PAGE)]
    for extent in taken:
        assert extent is not None
        space.free(extent)
    assert space.largest_free() == 2 * PAGE
    assert space.allocate(3 * PAGE) is None
    assert sorted(space.free_runs()) == [Extent(0, 0, 2 * PAGE), Extent(1, 0, 2 * PAGE)]


def test_tiny_runs_have_bins_too() -> None:
    space = Space((40,), 1)
    taken = [space.allocate(size) for size in (1, 7, 8, 15, 9)]
    assert [extent.size for extent in taken if extent is not None] == [1, 7, 8, 15, 9]
    assert taken[3] is not None
    space.free(taken[3])
    assert space.allocate(16) is None
    assert space.allocate(15) == taken[3]


def test_freeing_twice_is_a_bug() -> None:
    space = Space((2 * PAGE,), PAGE)
    extent = space.allocate(PAGE)
    assert extent is not None
    space.free(extent)
    with pytest.raises(AssertionError, match="free already"):
        space.free(extent)


def test_freed_space_serves_every_size() -> None:
    """Objects of 4 KiB to 8 MiB come and go, ten times the pool of them; then all go."""
    chance = random.Random(41)
    space = Space((64 * MIB, 64 * MIB), PAGE)
    taken: list[Extent] = []
    passed = 0
    while passed < 10 * space.capacity:
        nbytes = min(8 * MIB, int(PAGE * 2 ** (chance.random() * 11)))
        extent = space.allocate(nbytes)
        if extent is None:
            for _ in range(chance.randint(1, len(taken))):
                space.free(taken.pop(chance.randrange(len(taken))))
            continue
        assert extent.size >= nbytes
        taken.append(extent)
        passed += nbytes
    assert not overlaps([*taken, *space.free_runs()])
    assert sum(extent.size for extent in taken) + space.free_bytes == space.capacity
    for extent in taken:
        space.free(extent)
    assert space.largest_free() == 64 * MIB
    assert {space.allocate(64 * MIB), space.allocate(64 * MIB)} == {
        Extent(0, 0, 64 * MIB),
        Extent(1, 0, 64 * MIB),
    }


class SpaceMachine(RuleBasedStateMachine):
    """Against the plainest model: a list of what is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Space((40 * PAGE, 24 * PAGE), PAGE)
        self.taken: list[Extent] = []

    @rule(nbytes=st.integers(1, 30 * PAGE))
    def allocate(self, nbytes: int) -> None:
        largest = self.space.largest_free()
        extent = self.space.allocate(nbytes)
        assert (extent is not None) == (nbytes <= largest)
        if extent is not None:
            assert extent.size == self.space.rounded(nbytes)
            self.taken.append(extent)

    @precondition(lambda self: self.taken)
    @rule(choice=st.integers(0, 1 << 30))
    def free(self, choice: int) -> None:
        self.space.free(self.taken.pop(choice % len(self.taken)))

    @invariant()
    def adds_up(self) -> None:
        runs = list(self.space.free_runs())
        assert not overlaps([*self.taken, *runs])
        free = sum(run.size for run in runs)
        assert free == self.space.free_bytes
        assert free + sum(extent.size for extent in self.taken) == self.space.capacity
        assert self.space.largest_free() == max((run.size for run in runs), default=0)
        starts = {(run.segment, run.offset) for run in runs}
        assert not any((run.segment, run.offset + run.size) in starts for run in runs)


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
