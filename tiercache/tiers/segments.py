"""The segment files of a directory: their names, their making, a bounded number of open ones."""

import errno
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiercache.errors import Fault, StorageFault
from tiercache.tiers import crash
from tiercache.tiers.base import ALIGNMENT
from tiercache.tiers.direct import DirectFile, storage_fault

FILES_OPEN_MAX = 128
_NAME = re.compile(r"seg-(\d{8,})\.bin")


def segment_name(number: int) -> str:
    """Return the file name of a segment: a number, never anything a user typed."""
    return f"seg-{number:08d}.bin"


class Segments:
    """Segment files of one folder. Safe for several threads.

    Files that are not named like a segment are neither counted nor touched. `free_bytes_min` of the
    filesystem are left for others when a segment is made.
    """

    def __init__(self, folder: Path, segment_bytes: int, free_bytes_min: int) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._free_bytes_min = free_bytes_min
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Opened] = OrderedDict()  # Used longest ago first.
        try:
            self._sizes = {
                int(match[1]): entry.stat().st_size
                for entry in os.scandir(folder)
                if (match := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
            }
        except OSError as error:
            raise storage_fault(error, folder.name) from error
        self._inherited = dict(self._sizes)
        self._written: set[int] = set()

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each segment that exists."""
        with self._lock:
            return dict(self._sizes)

    def inherited(self) -> dict[int, int]:
        """Return the sizes of the segments that were there at the start and are still there."""
        with self._lock:
            return dict(self._inherited)

    @contextmanager
    def reading(self, number: int) -> Iterator[DirectFile]:
        """Lend the open file of a segment; raises StorageFault when it cannot be opened."""
        with self._lock:
            opened = self._take(number)
        try:
            yield opened.file
        finally:
            self._give(opened)

    @contextmanager
    def writing(self, number: int, end: int) -> Iterator[DirectFile]:
        """Lend the open file of a segment that is to be written up to `end`, made if need be."""
        with self._lock:
            if number in self._inherited:
                self._written.add(number)
            exists = number in self._sizes and self._is_there(number)
            if not exists:
                self._forget(number)
        if not exists:  # Outside the lock, for readers: one thread writes, so nobody else makes it.
            size = max(self._segment_bytes, -(-end // ALIGNMENT) * ALIGNMENT)
            self._make(number, size)
        with self._lock:
            if not exists:
                self._sizes[number] = size
            opened = self._take(number)
        try:
            yield opened.file
        finally:
            self._give(opened)

    def remove(self, number: int) -> None:
        """Delete a segment; a missing one is no error. Calls that hold it open finish."""
        with self._lock:
            self._forget(number)
        self._unlink(number)  # Freeing many blocks takes a while: readers do not wait for it.

    def remove_orphan(self, number: int) -> bool:
        """Delete an inherited segment unless it was written since; return whether it was."""
        with self._lock:
            if number not in self._inherited or number in self._written:
                return False
            self._forget(number)
            self._unlink(number)
            return True

    def sync_folder(self) -> None:
        """Make the names of new segments durable; raises StorageFault."""
        try:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise storage_fault(error, self.folder.name) from error

    def close(self) -> None:
        """Close every file; those in use close when their call ends."""
        with self._lock:
            while self._open:
                _, opened = self._open.popitem()
                self._drop(opened)

    def _take(self, number: int) -> "_Opened":
        opened = self._open.get(number)
        if opened is None:
            try:
                opened = _Opened(DirectFile(self.folder / segment_name(number)))
            except OSError as error:
                raise storage_fault(error, segment_name(number)) from error
            self._open[number] = opened
            self._shrink()
        self._open.move_to_end(number)
        opened.users += 1
        return opened

    def _give(self, opened: "_Opened") -> None:
        with self._lock:
            opened.users -= 1
            if opened.dropped and not opened.users:
                opened.file.close()

    def _shrink(self) -> None:
        idle = [number for number, opened in self._open.items() if not opened.users]
        for number in idle[: max(0, len(self._open) - FILES_OPEN_MAX)]:
            self._drop(self._open.pop(number))

    def _drop(self, opened: "_Opened") -> None:
        opened.dropped = True
        if not opened.users:
            opened.file.close()

    def _forget(self, number: int) -> None:
        self._inherited.pop(number, None)
        self._written.discard(number)
        self._sizes.pop(number, None)
        opened = self._open.pop(number, None)
        if opened is not None:
            self._drop(opened)

    def _is_there(self, number: int) -> bool:
        try:
            return (self.folder / segment_name(number)).exists()
        except OSError as error:
            raise storage_fault(error, segment_name(number)) from error

    def _unlink(self, number: int) -> None:
        try:
            (self.folder / segment_name(number)).unlink(missing_ok=True)
        except OSError as error:
            raise storage_fault(error, segment_name(number)) from error

    def _make(self, number: int, size: int) -> None:
        path = self.folder / segment_name(number)
        try:
            room = os.statvfs(self.folder)
        except OSError as error:
            raise storage_fault(error, path.name) from error
        if room.f_bavail * room.f_frsize < size + self._free_bytes_min:
            raise StorageFault(
                Fault.NO_SPACE, f"{path.name} needs {size} bytes and some for the index"
            )
        # A file left by a deletion that failed is written over: nothing refers to it any more.
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise storage_fault(error, path.name) from error
        try:
            _allocate(descriptor, size)
        except OSError as error:
            with suppress(OSError):  # What stays is written over by the next try.
                path.unlink(missing_ok=True)
            raise storage_fault(error, path.name) from error
        finally:
            os.close(descriptor)
        crash.reach("nvme.segment_created")


class _Opened:
    """One open file, with the number of calls that use it."""

    __slots__ = ("dropped", "file", "users")

    def __init__(self, file: DirectFile) -> None:
        self.file = file
        self.users = 0
        self.dropped = False


def _allocate(descriptor: int, size: int) -> None:
    """Take the space now: a full disk is met here, not in the middle of an object."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            raise
        os.ftruncate(descriptor, size)
