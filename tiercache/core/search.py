"""Whom one call has asked at other nodes, one after another, and until when it waits for them."""

from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

SOURCES_MAX: Final = 4
"""Questions that one call asks. What one node has may be gone, and another one may go on where it ends."""

NEXT_SHARE: Final = 1 / 3
"""What is left of the time for the next one, if there is anybody: from memory, an answer needs little."""

SEATED_SHARE: Final = 0.5
"""What a plan that also has to agree with other nodes may spend of its wait before that."""


class Seat(NamedTuple):
    """The ranks that count, of so many: from `first` up to before `stop`; 0, 0: all of them."""

    ranks: int
    first: int = 0
    stop: int = 0


class _Asked(NamedTuple):
    """A node that was asked: what is shallower than `below` blocks it may be asked again, and anything once
    the blocks of more than `whole` tokens are held here."""

    below: int = 0
    whole: float = inf


class Search:
    """The questions of one call. All of them together have as long as the slowest of those who are asked
    may take for one, or `share` of that, and until `until`. `last`: nodes that are asked when no others
    are left, since they have ranks of their own. `ends`: the boundaries of use; None: any.

    `job`: the question that waits for its answer, if any does.
    """

    def __init__(
        self,
        now: float,
        seat: Seat,
        *,
        last: frozenset[str] = frozenset(),
        ends: frozenset[int] | None = None,
        until: float = inf,
        share: float = 1.0,
    ) -> None:
        self.began = now
        self.seat = seat
        self.last = last
        self.ends = ends
        self.job = 0
        self._until = until
        self._share = share
        self._left = SOURCES_MAX
        self._wait_s = 0.0
        self._whole = 0
        self._asked: dict[str, _Asked] = {}

    def has_time(self, now: float, within_s: float) -> bool:
        """Return whether one more may be asked, who may take `within_s`."""
        return self._left > 0 and now < self._end(within_s)

    def _end(self, within_s: float) -> float:
        """Return when this is over, if somebody is asked who may take `within_s`."""
        wait_s = max(self._wait_s, within_s)
        return min(self.began + self._share * wait_s, self._until)

    def over(self) -> None:
        """Nobody else is asked, whatever becomes known."""
        self._left = 0

    def below(self, name: str, whole: Callable[[], int]) -> float:
        """Return for what is shallower than how many blocks a node may be asked; `whole` is what is held
        here."""
        known = self._asked.get(name)
        return inf if known is None or whole() > known.whole else known.below

    def has_asked(self, name: str) -> bool:
        """Return whether a node was asked before."""
        return name in self._asked

    def asks(self, name: str, whole: int, within_s: float) -> None:
        """A node is asked next, who may take `within_s`; the blocks of `whole` tokens are held here."""
        self._left -= 1
        self._whole = whole
        self._wait_s = max(self._wait_s, within_s)
        self._asked[name] = _Asked()

    def fell_short(self, name: str, boundary: int, below: int) -> None:
        """A node answered less than it had told, `boundary` tokens of the prompt: what it lacks may be
        held here later, and then it may go on from there. `below`: of how many blocks that is, if it is
        of no use and only what is shallower may be."""
        self._asked[name] = _Asked(below, max(self._whole, boundary))

    def waits(self, now: float, within_s: float, next_s: float) -> float:
        """Return until when the answer of whom is asked now is waited for, who may take `within_s`.
        `next_s`: what the next one might take, 0 without one; it is left some of the time."""
        until = min(self._end(0.0), now + within_s)
        if next_s and self._end(next_s) <= until:
            until -= NEXT_SHARE * (until - now)
        return until
