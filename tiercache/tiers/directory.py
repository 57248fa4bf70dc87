"""A directory that one process owns: refused when it is another's, or of a format not known here.

    <path>/LOCK        held (flock) by the owner, with its pid; a dead owner holds nothing
    <path>/FORMAT      one line: what made the directory, and the version of its format
    <path>/index/      RocksDB: what is where
    <path>/segments/   the bytes

Anything else in it is somebody else's and is left alone.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from tiercache.errors import ConfigError
from tiercache.tiers.direct import storage_fault

FORMAT_VERSION = 1
_FORMAT_NAME = "tiercache-nvme"
_FORMAT_BYTES_MAX = 256
_HARMLESS = frozenset({"LOCK", "FORMAT.new", "lost+found"})
"""What may be there before `FORMAT` is: a first start that died, a fresh filesystem."""


class Directory:
    """Owns `path` from construction to `close`. Raises ConfigError when it cannot be had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = path / "index"
        self.segments = path / "segments"
        self._lock = -1
        try:
            self._claim()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"nvme.path {path} cannot be used: {error.strerror}. Give a directory on a local "
                f"disk that this user may write"
            ) from error
        except ConfigError:
            self.close()
            raise

    def used_bytes(self) -> int:
        """Return the space that the directory takes on its filesystem, like `du`.

        Raises StorageFault when the device fails.
        """
        return _used_bytes(self.path)

    def index_bytes(self) -> int:
        """Return the space that the index takes; raises StorageFault."""
        return _used_bytes(self.index)

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._refuse_strangers()  # Before anything is written into what may be another's.
        self._lock = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"nvme.path {self.path} is in use by process {owner}. One node owns a directory: "
                f"stop that one, or give this one its own directory"
            ) from error
        # For the message above only, so a full disk is no reason not to start.
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, f"{os.getpid():<20}\n".encode(), 0)
        if not (self.path / "FORMAT").exists():
            self._refuse_strangers()
            self._write_format()
        self.index.mkdir(mode=0o700, exist_ok=True)
        self.segments.mkdir(mode=0o700, exist_ok=True)

    def _refuse_strangers(self) -> None:
        names = {entry.name for entry in os.scandir(self.path)}
        if "FORMAT" in names:
            self._check_format()
            return
        strangers = sorted(names - _HARMLESS)
        if strangers:
            raise ConfigError(
                f"nvme.path {self.path} is not empty ({strangers[0]!r}) and was not made by "
                f"tiercache. Give an empty directory, or one that does not exist yet"
            )

    def _check_format(self) -> None:
        with (self.path / "FORMAT").open("rb") as file:
            line = file.read(_FORMAT_BYTES_MAX).decode(errors="replace").strip()
        name, _, version = line.partition(" ")
        if name != _FORMAT_NAME or not version.isdecimal():
            raise ConfigError(
                f"{self.path}/FORMAT is damaged ({line!r}). What is stored there is only a cache: "
                f"delete the directory, or give another one"
            )
        if int(version) != FORMAT_VERSION:
            raise ConfigError(
                f"nvme.path {self.path} has format {version}, this version of tiercache reads "
                f"{FORMAT_VERSION}. Use the version that made it, or give an empty directory"
            )

    def _write_format(self) -> None:
        new = self.path / "FORMAT.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{_FORMAT_NAME} {FORMAT_VERSION}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        new.rename(self.path / "FORMAT")


def _used_bytes(path: Path) -> int:
    """Files may go while we look: they no longer take space then."""
    try:
        total = path.stat().st_blocks * 512
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise storage_fault(error, path.name) from error
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                total += _used_bytes(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_fault(error, entry.name) from error
    return total
