"""What a measurement says: values of several repetitions, beside the goal they should reach."""

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np


class Goal(msgspec.Struct, frozen=True):
    """A bound on the median: `at_most`, or else at least, `bound`."""

    at_most: bool
    bound: float

    def met(self, value: float) -> bool:
        """Return whether `value` reaches the goal."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {number(self.bound)}"


class Figure(msgspec.Struct, frozen=True):
    """One measured quantity, a value per repetition. `note` says what it is to be read with."""

    part: str
    name: str
    unit: str
    values: tuple[float, ...]
    goal: Goal | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """The value that counts."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the largest value."""
        return min(self.values), max(self.values)

    @property
    def verdict(self) -> str:
        """ "met", "missed", or "" without a goal."""
        if self.goal is None:
            return ""
        return "met" if self.goal.met(self.median) else "missed"


class Verdict(msgspec.Struct, frozen=True):
    """A figure with what follows from it: one line of JSON."""

    figure: Figure
    median: float
    least: float
    largest: float
    verdict: str


def at_most(bound: float) -> Goal:
    """Return the goal to be no more than `bound`."""
    return Goal(True, bound)


def at_least(bound: float) -> Goal:
    """Return the goal to be no less than `bound`."""
    return Goal(False, bound)


def number(value: float) -> str:
    """Return `value` as a person reads it: three digits that count, thousands separated."""
    if value == 0 or not np.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 2 - int(np.floor(np.log10(abs(value))))
    return f"{round(value, digits):.{max(0, digits)}f}"


def percentile(nanoseconds: Sequence[int], share: float) -> float:
    """Return a percentile of latencies in microseconds."""
    return float(np.percentile(np.asarray(nanoseconds), share)) / 1e3


def size_label(nbytes: int) -> str:
    """Return 65536 as 64K, 4194304 as 4M."""
    return f"{nbytes >> 20}M" if nbytes >= 1 << 20 else f"{nbytes >> 10}K"
