"""Direct I/O: alignment, short transfers, filesystems that refuse."""

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tiercache.errors import Fault
from tiercache.tiers.direct import (
    BOUNCE_BYTES,
    BOUNCES_MAX,
    DirectFile,
    is_aligned,
    storage_fault,
)

PAGE = 4096
Call = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGE))
    return path


@pytest.fixture
def file(path: Path) -> DirectFile:
    return DirectFile(path)


def aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def unaligned(nbytes: int) -> memoryview:
    return aligned(nbytes + PAGE)[8 : nbytes + 8]


def filled(view: memoryview, seed: int) -> memoryview:
    view[:] = random.Random(seed).randbytes(len(view))
    return view


def test_alignment_is_that_of_the_address() -> None:
    assert is_aligned(aligned(PAGE))
    assert not is_aligned(unaligned(PAGE))
    assert not is_aligned(memoryview(bytes(PAGE)))


def test_buffers_of_all_kinds_in_one_call(file: DirectFile, path: Path) -> None:
    sources = [
        filled(aligned(PAGE), 1),
        filled(aligned(2 * PAGE), 2),
        filled(unaligned(PAGE), 3),
        memoryview(random.Random(4).randbytes(3 * PAGE)),
        filled(aligned(PAGE), 5),
    ]
    assert file.write(PAGE, sources) == (8 * PAGE, None)
    expected = b"".join(sources)
    assert path.read_bytes()[PAGE : 9 * PAGE] == expected
    targets = [unaligned(3 * PAGE), aligned(4 * PAGE), unaligned(PAGE)]
    assert file.read(PAGE, targets) == (8 * PAGE, None)
    assert b"".join(targets) == expected


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    count = 2500
    path = tmp_path / "long"
    path.touch()
    file = DirectFile(path)
    whole = filled(aligned(count * PAGE), 1)
    pages = [whole[at * PAGE : (at + 1) * PAGE] for at in range(count)]
    assert file.write(0, pages) == (count * PAGE, None)
    assert path.read_bytes() == whole
    back = aligned(count * PAGE)
    assert file.read(0, [back]) == (count * PAGE, None)
    assert back == whole


def test_unaligned_larger_than_a_bounce(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    file = DirectFile(path)
    source = filled(unaligned(BOUNCE_BYTES + PAGE), 1)
    for _ in range(BOUNCES_MAX + 1):  # Each is given back.
        assert file.write(0, [source]) == (len(source), None)
    assert path.read_bytes() == source


@pytest.mark.parametrize("make", [aligned, unaligned])
@pytest.mark.parametrize("extra", [0, 100])
def test_a_read_stops_where_the_file_ends(
    file: DirectFile, path: Path, make: Callable[[int], memoryview], extra: int
) -> None:
    os.truncate(path, 3 * PAGE + extra)
    targets = [make(2 * PAGE), make(2 * PAGE), make(2 * PAGE)]
    moved = file.read(0, targets)
    assert moved == (3 * PAGE, None)
    assert file.direct
    assert file.size() == 3 * PAGE + extra


def test_short_transfers_go_on(
    file: DirectFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_page_and_a_bit(call: Call) -> Call:
        def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            call(fd, [buffers[0][:PAGE]], offset)
            return PAGE + (300 if len(buffers[0]) > PAGE else 0)

        return short

    source = filled(aligned(5 * PAGE), 1)
    monkeypatch.setattr(os, "pwritev", one_page_and_a_bit(os.pwritev))
    monkeypatch.setattr(os, "preadv", one_page_and_a_bit(os.preadv))
    assert file.write(0, [source[: 2 * PAGE], source[2 * PAGE :]]) == (5 * PAGE, None)
    assert path.read_bytes()[: 5 * PAGE] == source
    back = aligned(5 * PAGE)
    assert file.read(0, [back]) == (5 * PAGE, None)
    assert back == source


def test_a_device_that_takes_nothing_is_an_error(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    moved = file.write(0, [aligned(PAGE)])
    assert moved.nbytes == 0
    assert moved.error is not None
    assert moved.error.errno == errno.EIO


def test_an_error_says_how_far_it_came(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Iterator[int | OSError] = iter([PAGE, OSError(errno.EIO, "bad")])

    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        result = next(calls)
        if isinstance(result, OSError):
            raise result
        return result

    monkeypatch.setattr(os, "pwritev", fail)
    moved = file.write(0, [aligned(PAGE), aligned(PAGE)])
    assert moved.nbytes == PAGE
    assert moved.error is not None
    assert moved.error.errno == errno.EIO


def test_refused_at_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    file = DirectFile(path)
    assert not file.direct
    source = filled(unaligned(PAGE), 1)
    assert file.write(0, [source]) == (PAGE, None)
    assert path.read_bytes()[:PAGE] == source
    file.close()


def test_refused_at_the_first_call(
    file: DirectFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def refuse(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if file.direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    source = filled(aligned(PAGE), 1)
    assert file.write(0, [source]) == (PAGE, None)
    assert not file.direct
    assert path.read_bytes()[:PAGE] == source


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "none")


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, Fault.NO_SPACE),
        (errno.EDQUOT, Fault.NO_SPACE),
        (errno.ENOENT, Fault.MISSING),
        (errno.EIO, Fault.IO),
        (errno.EMFILE, Fault.IO),
    ],
)
def test_what_an_error_means(number: int, fault: Fault) -> None:
    translated = storage_fault(OSError(number, os.strerror(number)), "segment 7")
    assert translated.fault is fault
    assert "segment 7" in translated.detail
