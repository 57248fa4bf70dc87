"""Checkpoints on their way out: copied to host memory, offered to the node, given back."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from tiercache.device.index import Prompt
from tiercache.device.staging import Outward


@dataclass(frozen=True, slots=True)
class Demoted:
    """A checkpoint that left the device: what to offer to the node."""

    prompt: Prompt
    tokens: int
    copy: Outward


class Outlet(Protocol):
    """Takes what leaves the device. Never blocks."""

    def offer(self, demoted: Demoted) -> bool:
        """Take it and, once it is saved, `finished` it; False to decline."""
        ...

    def finished(self) -> list[Demoted]:
        """Return what is done with since the last call; its host memory is given back then."""
        ...


class Leaving:
    """The copies that were begun and are not given back yet."""

    def __init__(self, outlet: Outlet, counters: Counter[str]) -> None:
        self._outlet = outlet
        self._counters = counters
        self._begun: list[Demoted] = []
        self._done: deque[Demoted] = deque()

    def __len__(self) -> int:
        """Copies that nobody has been offered yet."""
        return len(self._begun)

    def add(self, demoted: Demoted) -> None:
        """A copy was begun."""
        self._begun.append(demoted)
        self._counters["demoted"] += 1

    def poll(self) -> None:
        """Offer what has been copied, and give back what was saved. A mistake in the outlet is raised;
        what it was made with is given back, and all others wait for the next call."""
        for demoted in [one for one in self._begun if one.copy.done()]:
            self._begun.remove(demoted)
            try:
                taken = self._outlet.offer(demoted)
            except BaseException:
                demoted.copy.close()
                raise
            if not taken:
                self._counters["lost_declined"] += 1
                demoted.copy.close()
        self._done += self._outlet.finished()
        while self._done:
            self._done.popleft().copy.close()
