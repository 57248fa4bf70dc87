"""How the channels of a convolution state are cut: each segment by itself.

The channels of a short convolution are several projections joined: q, k and v, or x, B and C. A rank holds
its share of each, joined again. A flat cut of the joined axis gives a rank other ranks' channels, in a
tensor of the right shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """`channels` channels in `groups` equal groups that are never cut: heads of q, groups of B."""

    channels: int
    groups: int

    def __post_init__(self) -> None:
        if self.groups < 1 or self.channels < 1 or self.channels % self.groups:
            raise ValueError(f"{self.channels} channels do not make {self.groups} equal groups")


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one channel axis, in order. `axis` counts from the end: -2 is `[channels, K-1]`."""

    of: tuple[Segment, ...]
    axis: int = -2

    def __post_init__(self) -> None:
        if not self.of or self.axis >= 0:
            raise ValueError("a convolution has segments, on an axis counted from the end")

    @property
    def channels(self) -> int:
        """The length of the whole axis."""
        return sum(segment.channels for segment in self.of)

    def ranges(self, start_unit: int, stop_unit: int, units: int) -> Iterator[tuple[int, int]]:
        """Yield (first channel, count) of each segment's share of units `[start_unit, stop_unit)`.

        `units` is into how many equal parts the model is cut: usually the tensor-parallel size. A segment
        with fewer groups than units is replicated: neighbouring units share a group, and a range of units
        takes every group that one of them needs, once. ValueError when groups and units do not divide
        one another.
        """
        if not 0 <= start_unit < stop_unit <= units:
            raise ValueError(f"no units [{start_unit}, {stop_unit}) of {units}")
        first = 0
        for segment in self.of:
            if segment.groups % units and units % segment.groups:
                raise ValueError(f"{segment.groups} groups do not split over {units} units")
            size = segment.channels // segment.groups
            start = start_unit * segment.groups // units
            stop = -(-stop_unit * segment.groups // units)
            yield first + start * size, (stop - start) * size
            first += segment.channels

    def width(self, start_unit: int, stop_unit: int, units: int) -> int:
        """Return how many channels units `[start_unit, stop_unit)` hold."""
        return sum(count for _, count in self.ranges(start_unit, stop_unit, units))
