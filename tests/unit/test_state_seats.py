"""Where the ranks of one engine sit."""

import pytest

from tiercache.state.seats import SEATS_MAX, RanksOf, here, why_not

RANKS = 4
SEATS = [RanksOf("", 0, 2), RanksOf("b", 2, 4)]


@pytest.mark.parametrize(
    ("seats", "problem"),
    [
        ([], ""),
        (SEATS, ""),
        ([RanksOf("b", 2, 4), RanksOf("", 0, 2)], ""),
        ([RanksOf("", 0, 2), RanksOf("b", 3, 4)], "rank 2 must sit on one node"),
        ([RanksOf("", 0, 3), RanksOf("b", 2, 4)], "rank 3 must sit on one node"),
        ([RanksOf("", 0, 2), RanksOf("b", 2, 2)], "rank 2 must sit on one node"),
        ([RanksOf("", 0, 2)], "the seats are of 2 ranks; there are 4"),
        ([RanksOf("b", 0, 2), RanksOf("b", 2, 4)], "a node is named twice"),
        (
            [RanksOf("b", 0, 2), RanksOf("", 2, 4)],
            'rank 0 sits on this node: its seat is that of ""',
        ),
        ([RanksOf(str(n), n, n + 1) for n in range(SEATS_MAX + 1)], "sit on 64 nodes at most"),
    ],
)
def test_seats_name_every_rank_once(seats: list[RanksOf], problem: str) -> None:
    found = why_not(seats, RANKS, 0)
    assert problem in found
    assert bool(problem) == bool(found)


def test_the_ranks_of_this_node() -> None:
    assert here([]) == (0, 0)
    assert here(SEATS) == (0, 2)
