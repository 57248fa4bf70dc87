"""Where the ranks of one engine sit, when they do not all share a node."""

from collections.abc import Sequence

import msgspec

SEATS_MAX = 64


class RanksOf(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The ranks from `first` up to before `stop` keep their shards on `node`; "": on this one."""

    node: str
    first: int
    stop: int

    @property
    def ranks(self) -> range:
        """Which ranks these are."""
        return range(self.first, self.stop)


def why_not(seats: Sequence[RanksOf], ranks: int, rank: int) -> str:
    """Return what is wrong with the seats of an engine of `ranks` ranks, as `rank` says them; "" when
    nothing is. No seats at all: everybody sits on this node."""
    if not seats:
        return ""
    if len(seats) > SEATS_MAX:
        return f"the ranks of an engine sit on {SEATS_MAX} nodes at most"
    at = 0
    for seat in sorted(seats, key=lambda seat: seat.first):
        if seat.first != at or seat.stop <= at:
            return f"rank {at} must sit on one node"
        at = seat.stop
    if at != ranks:
        return f"the seats are of {at} ranks; there are {ranks}"
    if len({seat.node for seat in seats}) < len(seats):
        return "a node is named twice"
    if not any(seat.node == "" and rank in seat.ranks for seat in seats):
        return f'rank {rank} sits on this node: its seat is that of ""'
    return ""


def here(seats: Sequence[RanksOf]) -> tuple[int, int]:
    """Return the ranks of this node, from the first up to before the last; (0, 0): all of them."""
    return next(((seat.first, seat.stop) for seat in seats if seat.node == ""), (0, 0))
