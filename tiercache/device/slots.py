"""Which slots are taken, by whom, and since when: numbers only, no tensors.

A slot is taken by one owner, who may give it back at any moment. What else still reads or writes it (a
copy under way) has a hold: the slot is free again only when the owner and every hold have let go. Every
taking has a generation of its own, so that a handle kept too long is recognised: it is *stale*, and
nothing is done with it. Not thread-safe: one thread owns a table and all that is built on it.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Slot:
    """One taking of one slot: its number in the tensors, and the generation of this taking."""

    number: int
    generation: int


class Private(Slot):
    """A slot that one run owns: it may be written."""

    __slots__ = ()


class Shared(Slot):
    """A slot that a checkpoint owns: it is read-only."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something optional was not done; the engine goes on. `reason` is one of the counted ones."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stale:
    """The handle is of something that has ended; nothing was done."""

    what: str


class Room(Protocol):
    """Where free slot numbers come from."""

    def take(self) -> int | None:
        """Return a free number, taken; None when there is none."""
        ...

    def give(self, number: int) -> None:
        """Take a number back."""
        ...


class Numbers:
    """Room of a fixed size: the numbers `0 .. slots - 1`, the lowest free one first."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError("a pool needs at least one slot")
        self._free = list(range(slots))

    def take(self) -> int | None:
        """Return the lowest free number, taken; None when there is none."""
        return heapq.heappop(self._free) if self._free else None

    def give(self, number: int) -> None:
        """Take a number back."""
        heapq.heappush(self._free, number)


class Hold:
    """Keeps one slot from being used again until `release`, whatever its owner does."""

    __slots__ = ("_table", "slot")

    def __init__(self, table: "SlotTable", slot: Slot) -> None:
        self.slot = slot
        self._table: SlotTable | None = table

    def release(self) -> None:
        """Let go. Idempotent."""
        table, self._table = self._table, None
        if table is not None:
            table.let_go(self.slot)


class _Taking:
    """One slot that is not free."""

    __slots__ = ("generation", "holds", "owned")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.holds = 0
        self.owned = True


def _nothing(number: int) -> None:
    """What happens to a freed slot: nothing."""


_generations = count(1)
"""Of all tables together: a handle of one pool is stale in every other."""


class SlotTable:
    """The slots of one pool. `freed` is called with the number of every slot that becomes free."""

    def __init__(self, room: Room, freed: Callable[[int], None] = _nothing) -> None:
        self._room = room
        self._freed = freed
        self._taken: dict[int, _Taking] = {}

    def __len__(self) -> int:
        """Slots that are not free, those that only a hold keeps included."""
        return len(self._taken)

    @property
    def lingering(self) -> int:
        """Slots whose owner has let go and that a hold still keeps."""
        return sum(not taking.owned for taking in self._taken.values())

    def take(self) -> Private | None:
        """Return a free slot, now the caller's; None when there is none."""
        number = self._room.take()
        if number is None:
            return None
        assert number not in self._taken, f"slot {number} is taken already"
        generation = next(_generations)
        self._taken[number] = _Taking(generation)
        return Private(number, generation)

    def valid(self, slot: Slot) -> bool:
        """Whether `slot` is still its owner's."""
        taking = self._taken.get(slot.number)
        return taking is not None and taking.owned and taking.generation == slot.generation

    def share(self, slot: Private) -> Shared | Stale:
        """Change the owner: the slot stays taken, under a new, read-only handle; `slot` is stale."""
        if not self.valid(slot):
            return Stale("slot")
        generation = next(_generations)
        self._taken[slot.number].generation = generation
        return Shared(slot.number, generation)

    def reclaim(self, slot: Shared) -> Private | Stale:
        """Change the owner back: the slot is one run's again, under a new handle; `slot` is stale."""
        if not self.valid(slot):
            return Stale("slot")
        generation = next(_generations)
        self._taken[slot.number].generation = generation
        return Private(slot.number, generation)

    def held(self, slot: Slot) -> bool:
        """Whether anybody has a hold on the slot."""
        taking = self._taken.get(slot.number)
        return taking is not None and taking.holds > 0

    def give(self, slot: Slot) -> Stale | None:
        """The owner lets go. The slot is free at once, or with its last hold."""
        if not self.valid(slot):
            return Stale("slot")
        self._taken[slot.number].owned = False
        self._settle(slot.number)
        return None

    def hold(self, slot: Slot) -> Hold | Stale:
        """Keep the slot from being used again until the hold is released."""
        if not self.valid(slot):
            return Stale("slot")
        self._taken[slot.number].holds += 1
        return Hold(self, slot)

    def let_go(self, slot: Slot) -> None:
        """One hold ends; `Hold.release` calls this."""
        taking = self._taken[slot.number]
        assert taking.holds > 0
        taking.holds -= 1
        self._settle(slot.number)

    def _settle(self, number: int) -> None:
        taking = self._taken[number]
        if not taking.owned and not taking.holds:
            del self._taken[number]
            self._freed(number)
            self._room.give(number)
