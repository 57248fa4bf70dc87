"""Memory that a network card may touch: registered once, and a way through it for all other memory."""

import mmap
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tiercache.errors import Fault, StorageFault
from tiercache.tiers.remote import Blob
from tiercache.tiers.remote_mooncake_client import Native

LANE_BYTES = 512 << 10
"""Registered memory of each call, for headers and for small objects in memory that is not."""


NOT_REGISTERED = "memory could not be registered with the network: see `ulimit -l`"


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


class Staging:
    """The memory that is registered with one client, and as many lanes as calls can be under way: none
    ever waits for one."""

    def __init__(self, lanes: int) -> None:
        self._lock = threading.Lock()
        self._client: Native | None = None
        self._all_lanes = [Region(memoryview(mmap.mmap(-1, LANE_BYTES))) for _ in range(lanes)]
        self._regions = list(self._all_lanes)
        self._lanes: queue.SimpleQueue[Region] = queue.SimpleQueue()
        for lane in self._all_lanes:
            self._lanes.put(lane)

    def add(self, memory: memoryview) -> None:
        """Register memory, now or when there is a client. What is refused goes through a lane, as all
        other memory does."""
        region = Region(memory)
        with self._lock:
            client = self._client
            if client is None:
                self._regions.append(region)
                return
        if not registered(client, region):
            return
        with self._lock:
            if self._client is client:
                self._regions.append(region)
                return
        client.unregister_buffer(region.address)  # It was left meanwhile.

    def use(self, client: Native) -> None:
        """Register all memory with a client. That takes long: nothing else waits for it. Raises
        StorageFault when it refuses a lane: then there is no way for what is not registered."""
        taken: list[Region] = []
        while True:
            with self._lock:
                regions = self._regions[len(taken) :]
                if not regions:
                    self._client = client
                    return
            accepted = [region for region in regions if registered(client, region)]
            refused = set(regions) - set(accepted)
            taken += accepted
            if not refused.isdisjoint(self._all_lanes):
                for region in taken:
                    client.unregister_buffer(region.address)
                raise StorageFault(Fault.IO, NOT_REGISTERED)
            with self._lock:
                self._regions = [each for each in self._regions if each not in refused]

    def leave(self) -> None:
        """Take all of it back from the client, if there is one, and keep none of it. No call may be under
        way."""
        with self._lock:
            client, self._client = self._client, None
            regions, self._regions = self._regions, []
        if client is not None:
            for region in regions:
                client.unregister_buffer(region.address)

    @contextmanager
    def staged(
        self, client: Native, blobs: Sequence[Blob], *, with_bodies: bool
    ) -> Iterator[Staged]:
        """Give every piece a registered place: its own, or one in a lane, or in fresh memory. Raises
        StorageFault when that is refused."""
        with self._lock:
            regions = tuple(self._regions)
        pieces = [(blob.header, blob.body) if with_bodies else (blob.header,) for blob in blobs]
        homes = [[home_of(piece, regions) for piece in each if len(piece)] for each in pieces]
        views = [[piece for piece in each if len(piece)] for each in pieces]
        if not with_bodies:
            homes = [[0] * len(each) for each in homes]  # All in one region: they are ranges of it.
        nbytes = sum(
            len(view)
            for each, places in zip(views, homes, strict=True)
            for view, home in zip(each, places, strict=True)
            if not home
        )
        if nbytes <= LANE_BYTES:
            lane = self._lanes.get()
            try:
                yield Staged(views, homes, lane)
            finally:
                self._lanes.put(lane)
            return
        fresh = Region(memoryview(mmap.mmap(-1, nbytes)))
        if not registered(client, fresh):
            raise StorageFault(Fault.IO, NOT_REGISTERED)
        try:
            yield Staged(views, homes, fresh)
        finally:
            client.unregister_buffer(fresh.address)


def registered(client: Native, region: Region) -> bool:
    """Register a region; False when the client refuses it."""
    return client.register_buffer(region.address, region.nbytes) == 0


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
