"""Segment files: names, sizes, a bounded number of open ones."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.errors import Fault, StorageFault
from tiercache.testing.descriptors import open_descriptors
from tiercache.tiers import segments as module
from tiercache.tiers.segments import Segments, segment_name

PAGE = 4096
SIZE = 16 * PAGE


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Segments]:
    made = Segments(tmp_path, SIZE, 0)
    yield made
    made.close()


def make(segments: Segments, number: int, end: int = PAGE) -> None:
    with segments.writing(number, end):
        pass


def test_a_segment_is_made_at_its_full_size_and_private(segments: Segments, tmp_path: Path) -> None:
    make(segments, 3)
    make(segments, 123456789, SIZE + 1)
    assert segments.sizes() == {3: SIZE, 123456789: SIZE + PAGE}
    status = (tmp_path / "seg-00000003.bin").stat()
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (tmp_path / "seg-123456789.bin").exists()


def test_foreign_files_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    names = ["seg-1.bin", "seg-00000001.bin.bak", "notes.txt", "seg-0000000x.bin"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "seg-00000009.bin").mkdir()
    segments = Segments(tmp_path, SIZE, 0)
    assert segments.sizes() == {}
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_a_missing_segment_cannot_be_read(segments: Segments) -> None:
    with pytest.raises(StorageFault) as caught, segments.reading(5):
        pass
    assert caught.value.fault is Fault.MISSING


def test_few_files_are_open(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_OPEN_MAX", 4)
    before = open_descriptors()
    for number in range(20):
        make(segments, number)
    assert open_descriptors() == before + 4
    with segments.reading(1), segments.reading(2):
        for number in range(5, 20):
            with segments.reading(number):
                pass
        assert open_descriptors() <= before + 5
    segments.close()
    assert open_descriptors() == before


def test_files_in_use_outlive_removal_and_close(segments: Segments) -> None:
    before = open_descriptors()
    make(segments, 1)
    make(segments, 2)
    with segments.reading(1) as first, segments.reading(2) as second:
        segments.remove(1)
        segments.close()
        assert first.size() == second.size() == SIZE
    assert open_descriptors() == before
    assert segments.sizes() == {2: SIZE}
    segments.remove(1)


def test_a_segment_taken_away_is_made_anew_by_the_next_write(
    segments: Segments, tmp_path: Path
) -> None:
    make(segments, 1)
    (tmp_path / segment_name(1)).unlink()
    with segments.writing(1, PAGE) as file:
        assert file.size() == SIZE
    assert (tmp_path / segment_name(1)).stat().st_size == SIZE


def test_leftovers_are_written_over(segments: Segments, tmp_path: Path) -> None:
    (tmp_path / segment_name(1)).write_bytes(b"left" * 100_000)
    make(segments, 1)
    assert (tmp_path / segment_name(1)).read_bytes() == bytes(SIZE)


def test_inherited_segments_are_orphans_until_written(tmp_path: Path) -> None:
    first = Segments(tmp_path, SIZE, 0)
    for number in (1, 2, 3):
        make(first, number)
    first.close()
    second = Segments(tmp_path, SIZE, 0)
    assert second.inherited() == {1: SIZE, 2: SIZE, 3: SIZE}
    make(second, 2)
    make(second, 4)
    second.remove(3)
    assert second.inherited() == {1: SIZE, 2: SIZE}
    assert [number for number in range(1, 5) if second.remove_orphan(number)] == [1]
    assert second.sizes() == {2: SIZE, 4: SIZE}
    second.close()


def test_space_is_left_for_others(tmp_path: Path) -> None:
    segments = Segments(tmp_path, SIZE, 1 << 60)
    with pytest.raises(StorageFault) as caught:
        make(segments, 1)
    assert caught.value.fault is Fault.NO_SPACE
    assert list(tmp_path.iterdir()) == []


def test_a_failed_allocation_leaves_nothing(
    segments: Segments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_descriptors()
    with pytest.raises(StorageFault) as caught:
        make(segments, 1)
    assert caught.value.fault is Fault.NO_SPACE
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before
    assert segments.sizes() == {}


def test_a_filesystem_that_cannot_allocate(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    make(segments, 1)
    assert segments.sizes() == {1: SIZE}
    segments.sync_folder()


@pytest.mark.parametrize("call", ["statvfs", "open"])
def test_a_device_that_fails_while_a_segment_is_made_is_a_fault(
    segments: Segments, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageFault) as caught:
        make(segments, 1)
    assert caught.value.fault is Fault.IO
    assert segments.sizes() == {}
