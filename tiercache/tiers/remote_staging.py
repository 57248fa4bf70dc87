"""Memory that a network card may touch: registered once, and a way through it for all other memory."""

from collections.abc import Sequence

import numpy as np


class Region:
    """Registered memory; the view keeps it."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self.address = address_of(memory)


class Staged:
    """The addresses and sizes of all pieces of a batch, some of them in a region of ours."""

    def __init__(
        self, pieces: Sequence[Sequence[memoryview]], homes: Sequence[Sequence[int]], lane: Region
    ) -> None:
        self.base = lane.address
        self.sizes = [[len(piece) for piece in each] for each in pieces]
        self.addresses: list[list[int]] = []
        self._moved: list[tuple[memoryview, memoryview]] = []
        used = 0
        for each, places in zip(pieces, homes, strict=True):
            row = []
            for piece, home in zip(each, places, strict=True):
                if home:
                    row.append(home)
                    continue
                self._moved.append((piece, lane.memory[used : used + len(piece)]))
                row.append(lane.address + used)
                used += len(piece)
            self.addresses.append(row)

    def take_in(self) -> None:
        """Copy what is not in registered memory to where it is."""
        for piece, place in self._moved:
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(piece, np.uint8))

    def give_out(self) -> None:
        """Copy it back."""
        for piece, place in self._moved:
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(place, np.uint8))


def home_of(piece: memoryview, regions: Sequence[Region]) -> int:
    """Return the address of a piece of registered memory, 0 when it lies elsewhere."""
    address = address_of(piece)
    for region in regions:
        if region.address <= address and address + len(piece) <= region.address + region.nbytes:
            return address
    return 0


def address_of(memory: memoryview) -> int:
    """Return where memory begins; it must be contiguous."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
