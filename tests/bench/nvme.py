"""The NVMe tier by itself: speed beside plain direct I/O, bytes written, bytes per object, reopening.

    python tests/bench/nvme.py FOLDER      FOLDER lies on the disk in question

Rounds of the tier and of the plain file alternate, so that a slow moment of the disk meets both.
"""

import os
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import xxhash

from tiercache.state import Extent, Key, Record, Shard
from tiercache.tiers.base import Read, Write
from tiercache.tiers.direct import IOV_BUFFERS_MAX
from tiercache.tiers.host import HostArena
from tiercache.tiers.nvme import RUN_BYTES_MAX, NvmeTier, index_reserve_bytes
from tiercache.tiers.nvme_entry import encode_entry
from tiercache.tiers.nvme_index import Index
from tiercache.tiers.segments import segment_name

Call = Callable[[int, list[memoryview], int], int]

MIB = 1 << 20
TOTAL_BYTES = 256 * MIB
BATCH_BYTES = 16 * MIB
CAP_BYTES = 8 << 30
ROUNDS = 7
READ_THREADS = 2
"""As the settings have it: one thread checks sums while the other reads."""

SIZES = (64 << 10, MIB, 16 * MIB)
OBJECTS = (1_000, 100_000)


def main(folder: Path) -> None:
    """Print one table."""
    arena = HostArena([TOTAL_BYTES, TOTAL_BYTES])
    arena.prefault(lambda: False)
    source = arena.view(Extent(0, 0, TOTAL_BYTES))
    source[:] = random.Random(1).randbytes(16 * MIB) * (TOTAL_BYTES // (16 * MIB))
    print(f"{'size':>8} {'':6} {'tier GB/s':>10} {'plain GB/s':>11} {'ratio':>6} {'written':>8}")
    for size in SIZES:
        speeds: dict[str, list[float]] = {}
        amplification = 0.0
        for turn in range(ROUNDS):
            for name, seconds in plain(folder, arena, size):
                speeds.setdefault(f"plain {name}", []).append(TOTAL_BYTES / seconds / 1e9)
            before = written_bytes()
            for name, seconds in tier(folder, arena, size, turn):
                speeds.setdefault(f"tier {name}", []).append(TOTAL_BYTES / seconds / 1e9)
            amplification = (written_bytes() - before) / TOTAL_BYTES
        for name in ("write", "read"):
            ours, theirs = (statistics.median(speeds[f"{who} {name}"]) for who in ("tier", "plain"))
            written = f"{amplification:8.3f}" if name == "write" else ""
            print(
                f"{size >> 10:>4} KiB {name:6} {ours:10.2f} {theirs:11.2f} {ours / theirs:6.2f} {written}"
            )
    print(
        f"{'objects':>8} {'index bytes/object':>19} {'open ms':>8} {'first page ms':>14} {'scan s':>7}"
    )
    for count in OBJECTS:
        print(f"{count:8} " + reopening(folder, count))
    arena.close()


def batches(size: int) -> Iterator[list[int]]:
    """Yield the offsets of objects that go in one call."""
    step = max(1, BATCH_BYTES // size)
    offsets = range(0, TOTAL_BYTES, size)
    for at in range(0, len(offsets), step):
        yield list(offsets[at : at + step])


def timed(work: Callable[[list[int]], None], size: int, threads: int) -> float:
    """Return the seconds that `work` takes for all batches."""
    with ThreadPoolExecutor(threads) as pool:
        begun = perf_counter()
        list(pool.map(work, batches(size)))
        return perf_counter() - begun


def plain(folder: Path, arena: HostArena, size: int) -> Iterator[tuple[str, float]]:
    """One preallocated file; the same calls, and no index, no sums."""
    path = folder / "plain"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(file, 0, TOTAL_BYTES)
    together = max(1, min(RUN_BYTES_MAX // size, IOV_BUFFERS_MAX))

    def move(offsets: list[int], call: Call, segment: int) -> None:
        for at in range(0, len(offsets), together):
            some = offsets[at : at + together]
            views = [arena.view(Extent(segment, offset, size)) for offset in some]
            assert call(file, views, some[0]) == size * len(some)

    yield "write", timed(lambda offsets: move(offsets, os.pwritev, 0), size, 1)
    yield "read", timed(lambda offsets: move(offsets, os.preadv, 1), size, READ_THREADS)
    os.close(file)
    path.unlink()


def tier(folder: Path, arena: HostArena, size: int, turn: int) -> Iterator[tuple[str, float]]:
    """The tier, as the core calls it; objects are sealed before the clock starts."""
    place = folder / "tier"
    made = NvmeTier(place, cap_bytes=CAP_BYTES, segment_bytes=TOTAL_BYTES)
    labels = {
        offset: label(turn << 32 | offset, arena.view(Extent(0, offset, size)))
        for offset in range(0, TOTAL_BYTES, size)
    }

    def write(offsets: list[int]) -> None:
        batch = [
            Write(labels[at], Extent(1, at, size), arena.view(Extent(0, at, size)))
            for at in offsets
        ]
        assert not any(made.write(batch))

    def read(offsets: list[int]) -> None:
        batch = [
            Read(labels[at], Extent(1, at, size), arena.view(Extent(1, at, size))) for at in offsets
        ]
        assert not any(made.read(batch))

    yield "write", timed(write, size, 1)
    yield "read", timed(read, size, READ_THREADS)
    made.close()
    shutil.rmtree(place)


def label(number: int, payload: memoryview) -> Record:
    dice = random.Random(number)
    key = Key(b"n" * 32, "kv", Shard(0, 1), "native", dice.randbytes(32))
    checksum = xxhash.xxh3_128_digest(payload)
    parent = dice.randbytes(32)
    return Record(key, 0, 64, len(payload), checksum, "engine-0/rank-0", 1.7e9, parent)


def reopening(folder: Path, count: int) -> str:
    """Return what an index of `count` objects takes, and how long a start with it does."""
    place = folder / "many"
    segment_bytes = 64 * MIB
    NvmeTier(place, cap_bytes=CAP_BYTES, segment_bytes=segment_bytes).close()
    for segment in range(1, 2 + count * 4096 // segment_bytes):
        with (place / "segments" / segment_name(segment)).open("wb") as file:
            file.truncate(segment_bytes)
    index = Index(place / "index", index_reserve_bytes(CAP_BYTES), sync=False)
    for start in range(0, count, 500):
        index.write(
            encode_entry(
                label(number, memoryview(b"")),
                Extent(1 + number * 4096 // segment_bytes, number * 4096 % segment_bytes, 4096),
                1,
            )
            for number in range(start, min(start + 500, count))
        )
    index.close()
    begun = perf_counter()
    made = NvmeTier(place, cap_bytes=CAP_BYTES, segment_bytes=segment_bytes)
    opened = perf_counter()
    scan = made.scan(1024)
    found = len(next(scan))
    first = perf_counter()
    found += sum(map(len, scan))
    ended = perf_counter()
    assert found == count, found
    taken = sum(file.stat().st_size for file in (place / "index").glob("*.sst"))
    made.close()
    shutil.rmtree(place)
    return (
        f"{taken / count:19.0f} {(opened - begun) * 1e3:8.1f} {(first - opened) * 1e3:14.1f} "
        f"{ended - first:7.2f}"
    )


def written_bytes() -> int:
    """Return what this process has sent to disks so far, page cache included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
