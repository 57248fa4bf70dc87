"""The shared arena: sizes, seals, descriptors, closing."""

import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache.state import Extent
from tiercache.testing.descriptors import open_descriptors
from tiercache.tiers import host as module
from tiercache.tiers.host import SEGMENTS_MAX, HostArena, segment_sizes

PAGE = 4096
MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena([4 * PAGE, 2 * PAGE])
    yield arena
    arena.close()


@pytest.mark.parametrize(
    ("total", "segment", "expected"),
    [
        (PAGE, GIB, [PAGE]),
        (3 * GIB, GIB, [GIB] * 3),
        (3 * GIB + 5 * PAGE + 17, GIB, [GIB] * 3 + [5 * PAGE]),
        (10 * PAGE, 4 * PAGE, [4 * PAGE, 4 * PAGE, 2 * PAGE]),
        (10 * PAGE, 3 * PAGE + 1, [4 * PAGE, 4 * PAGE, 2 * PAGE]),
        (120 * GIB, GIB, [GIB] * 120),
    ],
)
def test_segment_sizes(total: int, segment: int, expected: list[int]) -> None:
    assert segment_sizes(total, segment) == expected


@pytest.mark.parametrize("total", [121 * GIB, 997 * GIB + 4097, 4096 * GIB, 121 * PAGE])
def test_segments_are_few_whole_pages_and_lose_nothing(total: int) -> None:
    sizes = segment_sizes(total, PAGE)
    assert len(sizes) <= SEGMENTS_MAX
    assert all(size > 0 and size % PAGE == 0 for size in sizes)
    assert sum(sizes) == total // PAGE * PAGE


@pytest.mark.parametrize("total", [0, PAGE - 1, -5])
def test_no_arena_is_an_error(total: int) -> None:
    with pytest.raises(ConfigError, match=r"host\.bytes"):
        segment_sizes(total, GIB)


@pytest.mark.parametrize("sizes", [[], [PAGE] * (SEGMENTS_MAX + 1), [PAGE, 100]])
def test_misuse_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        HostArena(sizes)


def test_sizes_are_sealed(arena: HostArena) -> None:
    for descriptor in arena.fds(write=True):
        for size in (0, 100 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_readers_see_and_cannot_write(arena: HostArena) -> None:
    arena.view(Extent(1, PAGE, PAGE))[:5] = b"state"
    reader = arena.fds(write=False)[1]
    with mmap.mmap(reader, 2 * PAGE, prot=mmap.PROT_READ) as mapped:
        assert mapped[PAGE : PAGE + 5] == b"state"
    with pytest.raises(PermissionError):
        mmap.mmap(reader, 2 * PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader, b"x", 0)


def test_writers_share_the_memory(arena: HostArena) -> None:
    with mmap.mmap(arena.fds(write=True)[0], 4 * PAGE) as mapped:
        mapped[3 * PAGE : 3 * PAGE + 5] = b"state"
    assert bytes(arena.view(Extent(0, 3 * PAGE, PAGE))[:5]) == b"state"


def test_no_descriptor_is_inherited_or_left(arena: HostArena) -> None:
    assert not any(os.get_inheritable(each) for each in arena.fds(write=True))
    assert not any(os.get_inheritable(each) for each in arena.fds(write=False))
    before = open_descriptors()
    for _ in range(3):
        other = HostArena([PAGE] * 10)
        other.close()
    assert open_descriptors() == before


def test_close_with_a_view_leaves_no_descriptor_once_the_view_is_gone() -> None:
    before = open_descriptors()
    arena = HostArena([PAGE])
    view = arena.view(Extent(0, 0, PAGE))
    arena.close()
    view[:1] = b"x"
    view.release()
    assert open_descriptors() == before


def test_too_few_descriptors_are_said_at_start() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(ConfigError, match="120 segments needs 424 open files and the limit is"):
            HostArena([PAGE] * 120)
        HostArena([PAGE] * 10).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_refused_memory_is_said_at_start_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = mmap.mmap
    made = iter(range(2))

    def refuse(*args: int) -> mmap.mmap:
        if next(made, None) is None:
            raise OSError(12, "Cannot allocate memory")
        return real(*args)

    monkeypatch.setattr(mmap, "mmap", refuse)
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"Cannot allocate memory.*host\.bytes smaller"):
        HostArena([PAGE] * 5)
    assert open_descriptors() == before


def resident(arena: HostArena) -> int:
    return sum(os.fstat(each).st_blocks * 512 for each in arena.fds(write=True))


def test_prefault_takes_the_memory_and_keeps_what_is_there() -> None:
    arena = HostArena([4 * MIB, MIB])
    arena.view(Extent(0, 0, PAGE))[:] = b"\x11" * PAGE
    assert resident(arena) < MIB
    assert arena.prefault(lambda: False, step_bytes=MIB) == 5 * MIB
    assert resident(arena) >= 5 * MIB
    assert arena.view(Extent(0, 0, PAGE)) == b"\x11" * PAGE
    arena.close()


def test_prefault_on_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, like an old kernel.
    arena = HostArena([2 * MIB])
    arena.view(Extent(0, PAGE, PAGE))[:] = b"\x11" * PAGE
    assert arena.prefault(lambda: False, step_bytes=MIB) == 2 * MIB
    assert resident(arena) >= 2 * MIB
    assert arena.view(Extent(0, PAGE, PAGE)) == b"\x11" * PAGE
    arena.close()


def test_prefault_stops_when_asked() -> None:
    arena = HostArena([8 * MIB])
    answers = iter([False, False, True])
    assert arena.prefault(lambda: next(answers), step_bytes=MIB) == 2 * MIB
    arena.close()


def test_prefault_ends_when_the_arena_is_closed() -> None:
    arena = HostArena([MIB] * 4)
    steps: list[None] = []

    def close_after_two() -> bool:
        steps.append(None)
        if len(steps) == 3:
            arena.close()
        return False

    assert arena.prefault(close_after_two, step_bytes=MIB) == 2 * MIB


def test_prefault_leaves_the_interpreter_to_others() -> None:
    arena = HostArena([64 * MIB])
    turns = 0
    turns_before: list[int] = []

    def started() -> bool:
        turns_before.append(turns)
        return False

    thread = threading.Thread(target=arena.prefault, args=(started, 64 * MIB))
    thread.start()
    while thread.is_alive():
        turns += 1
    thread.join()
    # Holding the lock for the one long call would leave next to none.
    assert turns - turns_before[0] > 200
    arena.close()


def test_nothing_is_left_in_shared_memory() -> None:
    before = set(Path("/dev/shm").iterdir())
    arena = HostArena([MIB])
    assert set(Path("/dev/shm").iterdir()) == before
    arena.close()
