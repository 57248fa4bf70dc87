"""Where the ranks of one engine sit."""

import pytest

from tiercache.state.seats import SEATS_MAX, Seat, here, why_not

RANKS = 4
SEATS = [Seat("", 0, 2), Seat("b", 2, 4)]


@pytest.mark.parametrize(
    ("seats", "problem"),
    [
        ([], ""),
        (SEATS, ""),
        ([Seat("b", 2, 4), Seat("", 0, 2)], ""),
        ([Seat("", 0, 2), Seat("b", 3, 4)], "rank 2 must sit on one node"),
        ([Seat("", 0, 3), Seat("b", 2, 4)], "rank 3 must sit on one node"),
        ([Seat("", 0, 2), Seat("b", 2, 2)], "rank 2 must sit on one node"),
        ([Seat("", 0, 2)], "the seats are of 2 ranks; there are 4"),
        ([Seat("b", 0, 2), Seat("b", 2, 4)], "a node is named twice"),
        ([Seat("b", 0, 2), Seat("", 2, 4)], 'rank 0 sits on this node: its seat is that of ""'),
        ([Seat(str(n), n, n + 1) for n in range(SEATS_MAX + 1)], "sit on 64 nodes at most"),
    ],
)
def test_seats_name_every_rank_once(seats: list[Seat], problem: str) -> None:
    found = why_not(seats, RANKS, 0)
    assert problem in found
    assert bool(problem) == bool(found)


def test_the_ranks_of_this_node() -> None:
    assert here([]) == (0, 0)
    assert here(SEATS) == (0, 2)
