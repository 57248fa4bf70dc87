"""The NVMe tier's own promises: the cap, the start, what it makes of strange directories."""

import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import xxhash

from tiercache.errors import ConfigError, Fault
from tiercache.state import Extent, Key, Record, Shard
from tiercache.testing.descriptors import open_descriptors
from tiercache.testing.objects import (
    NAMESPACE,
    content,
    faults,
    found_in,
    read_of,
    record_of,
    row,
    write_of,
)
from tiercache.tiers.base import Write
from tiercache.tiers.nvme import (
    RUN_BYTES_MAX,
    NvmeTier,
    Recovery,
    _runs,
    index_reserve_bytes,
)
from tiercache.tiers.nvme_entry import NAMESPACES, OBJECTS, encode_entry, object_key
from tiercache.tiers.nvme_index import Index
from tiercache.tiers.segments import segment_name

PAGE = 4096
MIB = 1 << 20
CAP = 64 * MIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
def tier(path: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
    yield tier
    tier.close()


def reopened(tier: NvmeTier, path: Path) -> NvmeTier:
    tier.close()
    return NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)


@pytest.mark.parametrize(
    ("cap", "segment"), [(5 * MIB, 2 * MIB), (64 * MIB, 100), (64 * MIB, 0), (3 * MIB, PAGE)]
)
def test_sizes_that_cannot_be_kept_are_refused(path: Path, cap: int, segment: int) -> None:
    with pytest.raises(ConfigError, match=r"nvme\.cap_bytes.*nvme\.segment_bytes"):
        NvmeTier(path, cap_bytes=cap, segment_bytes=segment)
    assert not path.exists()


def test_a_second_tier_on_the_directory_is_refused(tier: NvmeTier, path: Path) -> None:
    with pytest.raises(ConfigError, match="is in use by process"):
        NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
    tier.write(row(range(3)))
    assert len(found_in(reopened(tier, path))) == 3


def test_runs_are_neighbours_and_not_too_long() -> None:
    half = RUN_BYTES_MAX // 2
    extents = [
        Extent(1, 0, PAGE),
        Extent(1, PAGE, PAGE),
        Extent(1, 3 * PAGE, PAGE),
        Extent(2, 4 * PAGE, PAGE),
        Extent(3, 0, half),
        Extent(3, half, half),
        Extent(3, 2 * half, PAGE),
        Extent(4, 0, 3 * half),
        Extent(4, 3 * half, PAGE),
    ]
    runs = [(run.start, run.stop) for run in _runs(extents)]
    assert runs == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7), (7, 8), (8, 9)]
    assert list(_runs([])) == []


def test_orphans_go_with_the_scan_and_not_before(tier: NvmeTier, path: Path) -> None:
    tier.write(row(range(3)))
    orphan = path / "segments" / segment_name(7)
    orphan.write_bytes(bytes(PAGE))
    foreign = path / "segments" / "seg-1.txt"
    foreign.write_text("mine")
    tier = reopened(tier, path)
    assert tier.segment_bytes() == {1: MIB, 7: PAGE}
    scan = tier.scan(1)
    next(scan)
    assert orphan.exists()
    list(scan)
    assert not orphan.exists()
    assert tier.segment_bytes() == {1: MIB}
    assert foreign.read_text() == "mine"
    assert tier.recovery == Recovery(dropped=0, orphans=1, rebuilt=False)
    tier.close()


def test_a_segment_written_beside_the_scan_is_no_orphan(tier: NvmeTier, path: Path) -> None:
    tier.write(row(range(3)))
    (path / "segments" / segment_name(7)).write_bytes(bytes(PAGE))
    tier = reopened(tier, path)
    scan = tier.scan(1)
    next(scan)
    late = row(range(10, 12), segment=7)
    assert tier.write(late) == [None, None]
    list(scan)
    tier = reopened(tier, path)
    assert len(found_in(tier)) == 5
    assert tier.read([read_of(write) for write in late]) == [None, None]
    tier.close()


def test_planted_entries_are_dropped_or_damage(tier: NvmeTier, path: Path) -> None:
    batch = row(range(3))
    tier.write(batch)
    tier.close()
    index = Index(path / "index", index_reserve_bytes(CAP), sync=False)
    nowhere = record_of(10, b"no segment")
    beyond = record_of(11, b"beyond the end")
    stranger = record_of(12, b"bytes of another")
    index.write(
        [
            encode_entry(nowhere, Extent(5, 0, PAGE), 1),
            encode_entry(beyond, Extent(1, MIB, PAGE), 1),
            encode_entry(stranger, batch[0].extent, 1),
            (OBJECTS + b"\x00" * 80, b"rubbish"),
            (object_key(record_of(13, b"").key), index.get(object_key(batch[1].record.key)) or b""),
        ]
    )
    index.close()
    tier = NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
    found = found_in(tier)
    assert found.keys() == {stranger.key, *(write.record.key for write in batch)}
    assert faults(tier.read([read_of(found[stranger.key])])) == [Fault.DAMAGED]
    assert tier.recovery.dropped == 4
    tier = reopened(tier, path)
    assert len(found_in(tier)) == 4
    assert tier.recovery.dropped == 0
    tier.close()


def test_swapped_files_are_damage(tier: NvmeTier, path: Path) -> None:
    first, second = row(range(3), segment=1), row(range(3, 6), segment=2)
    tier.write(first)
    tier.write(second)
    tier.close()
    one, two, aside = (path / "segments" / name for name in map(segment_name, (1, 2, 3)))
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    tier = NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
    reads = [read_of(each) for each in found_in(tier).values()]
    assert faults(tier.read(reads)) == [Fault.DAMAGED] * 6
    tier.close()


def test_namespaces_that_cannot_be_read_are_left_out(
    tier: NvmeTier, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier.close()
    index = Index(path / "index", index_reserve_bytes(CAP), sync=False)
    index.write([(NAMESPACES + NAMESPACE, b"rubbish"), (NAMESPACES + bytes(32), b"\x92\xc0\xc0")])
    index.close()
    tier = NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
    assert tier.namespaces() == []
    assert caplog.text.count("cannot be read") == 2
    tier.close()


class Filler:
    """Writes for ever and stays within the cap as the core does: whole segments, oldest first."""

    def __init__(self, tier: NvmeTier, cap: int, segment_bytes: int) -> None:
        self.tier = tier
        self.room = cap - index_reserve_bytes(cap)
        self.segment_bytes = segment_bytes
        self.segments: dict[int, tuple[int, list[Key]]] = {}
        self.number = 0
        self.used = segment_bytes
        self.blob = content(0, 16 * MIB)
        self.count = 0

    def place(self, size: int) -> Extent:
        if size > self.segment_bytes or self.used + size > self.segment_bytes:
            own = max(size, self.segment_bytes)
            while sum(taken for taken, _ in self.segments.values()) + own > self.room:
                oldest = min(self.segments)
                assert self.tier.reclaim([oldest], self.segments.pop(oldest)[1]) is None
            self.number += 1
            self.segments[self.number] = (own, [])
            self.used = 0
        extent = Extent(self.number, self.used, size)
        self.used = self.used + size if size <= self.segment_bytes else self.segment_bytes
        return extent

    def writes(self, sizes: list[int]) -> list[Write]:
        """Return writes of one object per size; each must be in the tier before the next call."""
        writes = []
        for size in sizes:
            extent = self.place(size)
            self.count += 1
            source = memoryview(bytearray(self.blob[self.count : self.count + size]))
            digest, parent, base = (sha256(b"%d %d" % (self.count, n)).digest() for n in range(3))
            key = Key(NAMESPACE, "kv", Shard(0, 1), "native", digest)
            checksum = xxhash.xxh3_128_digest(source)
            record = Record(key, 0, 64, size, checksum, "engine", 1.0, parent, base)
            writes.append(Write(record, extent, source))
            self.segments[extent.segment][1].append(key)
        return writes


def test_mixed_sizes_for_ten_times_the_cap_stay_within_it(path: Path) -> None:
    cap = 32 * MIB
    tier = NvmeTier(path, cap_bytes=cap, segment_bytes=2 * MIB)
    filler = Filler(tier, cap, 2 * MIB)
    dice = random.Random(1)
    written = most = 0
    while written < 10 * cap:
        size = PAGE * dice.choice([1, 2, 5, 16, 64, 300, 513, 2048])
        write = filler.writes([size])
        assert tier.write(write) == [None]
        written += size
        most = max(most, tier.used_bytes())
    assert most <= cap
    assert most > cap // 2
    assert tier.read([read_of(write[0])]) == [None]
    tier.close()
    tier = NvmeTier(path, cap_bytes=cap, segment_bytes=2 * MIB)
    found = found_in(tier)
    assert found.keys() == {key for _, keys in filler.segments.values() for key in keys}
    assert tier.read([read_of(each) for each in found.values()]) == [None] * len(found)
    assert tier.used_bytes() <= cap
    tier.close()


def test_tiny_objects_fill_the_index_and_not_the_disk(path: Path) -> None:
    """The share of the index is a cap too: NO_SPACE, until the core makes room."""
    cap = 64 * MIB
    tier = NvmeTier(path, cap_bytes=cap, segment_bytes=4 * MIB)
    filler = Filler(tier, cap, 4 * MIB)
    refused = 0
    for _ in range(100):
        batch = filler.writes([PAGE] * 256)
        outcomes = set(faults(tier.write(batch)))
        assert tier.used_bytes() <= cap
        if outcomes != {None}:
            assert outcomes == {Fault.NO_SPACE}
            refused += 1
            kept = sorted(filler.segments)[-2:]
            for segment in sorted(filler.segments)[:-2]:
                tier.reclaim([segment], filler.segments.pop(segment)[1])
            assert tier.write(batch) == [None] * 256
            assert sorted(tier.segment_bytes()) == kept
    tier.close()
    assert refused > 0


def test_no_descriptor_is_left(path: Path) -> None:
    before = open_descriptors()
    for turn in range(3):
        tier = NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
        tier.write([write_of(turn, b"x", turn + 1, 0)])
        found_in(tier)
        tier.close()
    assert open_descriptors() == before


def test_failing_to_start_leaves_nothing_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    tier = NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
    tier.close()
    monkeypatch.setattr("tiercache.tiers.nvme.Segments", fail)
    with pytest.raises(OSError, match="Input/output"):
        NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB)
    monkeypatch.undo()
    NvmeTier(path, cap_bytes=CAP, segment_bytes=MIB).close()
