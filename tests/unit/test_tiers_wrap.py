"""The wrappers: they count, pace and break what they say, and nothing else."""

from collections.abc import Sequence

import pytest

from tiercache.errors import Fault, StorageFault
from tiercache.testing.objects import faults, read_of, row
from tiercache.tiers.base import Read, Write
from tiercache.tiers.memory import MemoryTier
from tiercache.tiers.wrap import (
    NOTHING,
    Delay,
    Fail,
    Faulty,
    Flip,
    Lose,
    Measured,
    Throttled,
    Trouble,
    Wrapped,
    scripted,
    seeded,
)

PAGE = 4096


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Slow(Wrapped):
    """Takes a second per object, and fails the second of each batch."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(MemoryTier())
        self._clock = clock

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        self._clock.now += len(batch)
        outcomes = self.inner.write(batch)
        outcomes[1] = StorageFault(Fault.NO_SPACE, "full")
        return outcomes

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        self._clock.now += len(batch)
        return self.inner.read(batch)


def test_measured_counts_what_succeeded_and_what_did_not() -> None:
    clock = Clock()
    tier = Measured(Slow(clock), clock)
    assert tier.written == tier.read_back == NOTHING
    batch = row(range(3))
    tier.write(batch)
    tier.write(batch)
    tier.read([read_of(batch[0]), read_of(row([9])[0])])
    written = tier.written
    assert (written.calls, written.objects, written.nbytes) == (2, 6, 4 * PAGE)
    assert written.seconds == 6.0
    assert written.faults == {**NOTHING.faults, Fault.NO_SPACE: 2}
    read = tier.read_back
    assert (read.calls, read.objects, read.nbytes, read.seconds) == (1, 2, PAGE, 2.0)
    assert read.faults == {**NOTHING.faults, Fault.DAMAGED: 1}
    assert set(NOTHING.faults.values()) == {0}


def test_throttled_pays_for_one_write_before_the_next() -> None:
    clock = Clock()
    tier = Throttled(MemoryTier(), 2 * PAGE, clock=clock, sleep=clock.sleep)
    tier.write(row(range(10)))  # Of any size, at once: 5 s of debt.
    assert clock.slept == []
    clock.now += 2
    tier.write(row([1]))
    assert clock.slept == [3.0]
    tier.write(row([2]))
    assert clock.slept == [3.0, 0.5]
    clock.now += 100  # Idle time saves nothing up.
    tier.write(row(range(4)))
    tier.write(row([3]))
    assert clock.slept == [3.0, 0.5, 2.0]


def test_throttled_keeps_its_rate() -> None:
    clock = Clock()
    tier = Throttled(MemoryTier(), 10 * PAGE, clock=clock, sleep=clock.sleep)
    for count in (1, 7, 3, 20, 1, 1, 12):
        tier.write(row(range(count)))
    assert clock.now - 100 == pytest.approx((1 + 7 + 3 + 20 + 1 + 1) / 10)


def test_throttled_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Throttled(MemoryTier(), 0)


def test_faulty_does_what_its_script_says_to_that_object() -> None:
    clock = Clock()
    inner = MemoryTier()
    script = scripted(
        {
            ("write", 1): Fail(Fault.NO_SPACE),
            ("write", 2): Lose(),
            ("write", 3): Flip(13),
            ("write", 4): Delay(2.0),
            ("read", 6): Fail(Fault.IO),
            ("read", 7): Flip(5),
            ("read", 8): Delay(3.0),
            ("read", 9): Lose(),
        }
    )
    tier = Faulty(inner, script, clock.sleep)
    batch = row(range(6))
    assert faults(tier.write(batch)) == [None, Fault.NO_SPACE, None, None, None, None]
    assert clock.slept == [2.0]
    reads = [read_of(write) for write in batch]
    lost = [None, Fault.DAMAGED, Fault.DAMAGED, Fault.DAMAGED, None, None]
    assert faults(tier.read(reads)) == lost
    again = [read_of(batch[0]) for _ in range(5)]
    assert faults(tier.read(again)) == [Fault.IO, Fault.DAMAGED, None, None, None]
    assert clock.slept == [2.0, 3.0]
    assert batch[1].record.key not in inner.store.objects
    assert len(inner.store.objects) == 5


def test_seeded_scripts_repeat_and_hit_their_share() -> None:
    troubles: list[Trouble] = [Fail(Fault.IO), Lose(), Flip(3)]
    first, same = seeded(7, 0.1, troubles), seeded(7, 0.1, troubles)
    drawn = [first("write", nth) for nth in range(3000)]
    assert drawn == [same("write", nth) for nth in reversed(range(3000))][::-1]
    assert 200 < sum(trouble is not None for trouble in drawn) < 400
    assert {type(trouble) for trouble in drawn if trouble} == {Fail, Lose, Flip}
    assert drawn != [seeded(8, 0.1, troubles)("write", nth) for nth in range(3000)]
    assert drawn != [first("read", nth) for nth in range(3000)]
