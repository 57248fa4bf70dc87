"""Our own tiers and arenas keep the contract that is shipped for everybody's."""

import os
from pathlib import Path

import pytest

from tiercache.state import Extent
from tiercache.testing.arenas import ArenaContract
from tiercache.testing.tiers import TierContract
from tiercache.tiers.base import Arena, Tier
from tiercache.tiers.host import HostArena
from tiercache.tiers.memory import MemoryArena, MemoryTier, Store
from tiercache.tiers.nvme import NvmeTier
from tiercache.tiers.segments import segment_name
from tiercache.tiers.wrap import Faulty, Measured, Throttled, scripted

CAP_BYTES = 64 << 20


class TestMemoryTier(TierContract):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.store = Store()

    def open(self) -> Tier:
        return MemoryTier(self.store, segment_bytes=self.SEGMENT_BYTES)

    def alter(self, segment: int, offset: int, content: bytes) -> None:
        self.store.segments[segment][offset : offset + len(content)] = content

    def truncate(self, segment: int, size: int) -> None:
        del self.store.segments[segment][size:]

    def remove(self, segment: int) -> None:
        del self.store.segments[segment]


class TestWrappedTier(TestMemoryTier):
    def open(self) -> Tier:
        def never(seconds: float) -> None:
            raise AssertionError(seconds)

        tier = Faulty(super().open(), scripted({}), sleep=never)
        return Measured(Throttled(tier, 1 << 60, sleep=never))


class TestNvmeTier(TierContract):
    sync = False

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "nvme"

    def open(self) -> Tier:
        return NvmeTier(
            self.path, cap_bytes=CAP_BYTES, segment_bytes=self.SEGMENT_BYTES, sync=self.sync
        )

    def alter(self, segment: int, offset: int, content: bytes) -> None:
        with self.file(segment).open("r+b", buffering=0) as file:
            file.seek(offset)
            file.write(content)
            os.fsync(file.fileno())

    def truncate(self, segment: int, size: int) -> None:
        os.truncate(self.file(segment), size)

    def remove(self, segment: int) -> None:
        self.file(segment).unlink()

    def file(self, segment: int) -> Path:
        return self.path / "segments" / segment_name(segment)


class TestNvmeTierSynced(TestNvmeTier):
    sync = True


class TestMemoryArena(ArenaContract):
    def open(self) -> Arena:
        return MemoryArena(self.SIZES)


class TestHostArena(ArenaContract):
    def open(self) -> Arena:
        return HostArena(self.SIZES)

    def test_views_are_page_aligned(self) -> None:
        from tiercache.tiers.direct import is_aligned

        arena = self.open()
        assert is_aligned(arena.view(Extent(0, 4096, 4096)))
        arena.close()
