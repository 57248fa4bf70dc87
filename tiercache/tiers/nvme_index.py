"""The index of the NVMe tier: RocksDB, kept small, and mended when the disk failed under it.

RocksDB does not always recover by itself: a full disk may stop it for good, space or not. So a
failed write closes it and the next call opens it again. Never fork after opening it: its threads do
not exist in the child.
"""

import logging
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import rocksdict

from tiercache.errors import Fault, StorageFault

MEMTABLE_BYTES_MAX = 4 << 20
"""What a restart replays at most twice over: a few hundredths of a second."""

LOG_BYTES_MAX = 128 << 10
SALVAGE_BATCH = 1024

_log = logging.getLogger(__name__)


class _Change(NamedTuple):
    puts: list[tuple[bytes, bytes]]
    deletes: list[bytes]

    def batch(self) -> rocksdict.WriteBatch:
        """RocksDB uses a batch up, so a second attempt needs another."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in self.puts:
            batch.put(key, value)
        for key in self.deletes:
            batch.delete(key)
        return batch


class Index:
    """Sorted bytes to bytes, durable against the death of the process. Safe for several threads.

    Raises StorageFault at construction when the device fails. A full disk is no reason to fail:
    what is there can be read, and writes are tried anew each time. A damaged index is rebuilt from
    what can still be read of it; `rebuilt` says so.
    """

    def __init__(self, folder: Path, reserve_bytes: int, *, sync: bool) -> None:
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._sync = rocksdict.WriteOptions()
        self._sync.sync = sync
        self._db: rocksdict.Rdict | None = None
        self._writable = False
        self.rebuilt = False
        with self._lock:
            self._finish_rebuild()
            self._open()

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        """Put and delete in one step; raises StorageFault and changes nothing when it fails."""
        change = _Change(list(puts), list(deletes))
        with self._lock:
            self._commit(change)

    def discard(self, seen: Iterable[tuple[bytes, bytes]]) -> None:
        """Delete the entries that are still as they were seen; raises StorageFault."""
        with self._lock:
            same = [key for key, value in seen if self._get(key) == value]
            if same:
                self._commit(_Change([], same))

    def get(self, key: bytes) -> bytes | None:
        """Return the value, or None; raises StorageFault."""
        with self._lock:
            return self._get(key)

    def page(self, prefix: bytes, after: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """Return up to `count` entries with `prefix`, in order, beyond the key `after`.

        `after` is b"" for the first ones. Fewer only at the end. Raises StorageFault.
        """
        with self._lock:
            try:
                return self._page(prefix, after, count)
            except StorageFault as fault:
                if fault.fault is not Fault.DAMAGED:
                    raise
                self._rebuild(fault)
                return self._page(prefix, after, count)

    def compact(self) -> None:
        """Give back the space of what was deleted; raises StorageFault."""
        with self._lock:
            if self._writable:
                with _translated():
                    self._opened().compact_range(None, None)

    def close(self) -> None:
        """Close the index. Idempotent."""
        with self._lock:
            self._shut()

    def _opened(self) -> rocksdict.Rdict:
        if self._db is None:
            self._open()
        assert self._db is not None
        return self._db

    def _open(self) -> None:
        """Open for writing; on a full disk for reading only."""
        self._shut()
        try:
            try:
                self._db = self._connect(self._folder)
                self._writable = True
            except StorageFault as fault:
                if fault.fault is not Fault.NO_SPACE:
                    raise
                _log.warning("the index is open for reading only: %s", fault)
                with _translated():
                    self._db = rocksdict.Rdict(
                        str(self._folder), self._options(), access_type=_read_only()
                    )
        except StorageFault as fault:
            if fault.fault is not Fault.DAMAGED:
                raise
            self._rebuild(fault)

    def _connect(self, folder: Path) -> rocksdict.Rdict:
        with _translated():
            return rocksdict.Rdict(str(folder), self._options())

    def _shut(self) -> None:
        db, self._db, self._writable = self._db, None, False
        if db is not None:
            with suppress(StorageFault), _translated():  # It repeats the failure that led here.
                db.close()

    def _commit(self, change: _Change) -> None:
        if not self._writable:
            self._open()
        if not self._writable:
            raise StorageFault(Fault.NO_SPACE, "the index cannot be opened for writing")
        try:
            with _translated():
                self._opened().write(change.batch(), self._sync)
        except StorageFault as fault:
            self._shut()
            if fault.fault is not Fault.DAMAGED:
                raise
            self._rebuild(fault)
            with _translated():
                self._opened().write(change.batch(), self._sync)

    def _get(self, key: bytes) -> bytes | None:
        with _translated():
            value: bytes | None = self._opened().get(key)
        return value

    def _page(self, prefix: bytes, after: bytes, count: int) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        with _translated():
            cursor = self._opened().iter()
            try:
                cursor.seek(after + b"\0" if after else prefix)
                while len(found) < count and cursor.valid():
                    key: bytes = cursor.key()
                    if not key.startswith(prefix):
                        return found
                    found.append((key, cursor.value()))
                    cursor.next()
                cursor.status()  # Damage looks like the end.
            finally:
                del cursor  # It keeps the database open, also from the traceback of an error.
        return found

    def _rebuild(self, cause: StorageFault) -> None:
        """Copy what can be read into a new index: writes to a damaged one would fail one day."""
        _log.error("the index is damaged and is built anew from what can be read: %s", cause)
        self._shut()
        new = self._folder.with_name("index.new")
        shutil.rmtree(new, ignore_errors=True)
        fresh = self._connect(new)
        kept = 0
        with _translated():
            for entries in self._salvage():
                fresh.write(_Change(entries, []).batch())
                kept += len(entries)
            fresh.close()
        _log.error("the index has %d entries again", kept)
        self.rebuilt = True
        self._finish_rebuild(complete=True)
        self._db = self._connect(self._folder)
        self._writable = True

    def _finish_rebuild(self, *, complete: bool = False) -> None:
        """Put a new index in the place of the old one. Repeatable at every step of it."""
        new = self._folder.with_name("index.new")
        done = self._folder.with_name("index.done")
        with _os_translated():
            if complete:
                new.rename(done)
            if done.exists():
                shutil.rmtree(self._folder)
                done.rename(self._folder)
            elif new.exists():
                shutil.rmtree(new)

    def _salvage(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield what can be read from the front and from the back, up to the damage."""
        try:
            with _translated():
                old = rocksdict.Rdict(str(self._folder), self._options(), access_type=_read_only())
        except StorageFault:
            return
        last = b""
        for entries in _readable(old, backwards=False, stop=b""):
            last = entries[-1][0]
            yield entries
        yield from _readable(old, backwards=True, stop=last)
        with _translated():
            old.close()

    def _options(self) -> rocksdict.Options:
        memtable = min(max(self._reserve_bytes // 32, 64 << 10), MEMTABLE_BYTES_MAX)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(memtable)
        options.set_max_write_buffer_number(2)
        options.set_max_total_wal_size(2 * memtable)
        options.set_target_file_size_base(max(memtable, 256 << 10))
        options.set_max_bytes_for_level_base(4 * max(memtable, 256 << 10))
        # The file system counts what is set aside in advance as taken.
        options.set_manifest_preallocation_size(4 << 10)
        options.set_max_manifest_file_size(64 << 10)
        options.set_keep_log_file_num(2)
        options.set_max_log_file_size(LOG_BYTES_MAX)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        options.set_compression_type(rocksdict.DBCompressionType.lz4())
        options.set_max_open_files(64)
        options.set_skip_stats_update_on_db_open(True)
        return options


def _read_only() -> rocksdict.AccessType:
    return rocksdict.AccessType.read_only(False)


def _readable(
    db: rocksdict.Rdict, *, backwards: bool, stop: bytes
) -> Iterator[list[tuple[bytes, bytes]]]:
    entries: list[tuple[bytes, bytes]] = []
    with suppress(StorageFault), _translated():
        cursor = db.iter()
        (cursor.seek_to_last if backwards else cursor.seek_to_first)()
        while cursor.valid():
            key: bytes = cursor.key()
            if key == stop:
                break
            entries.append((key, cursor.value()))
            if len(entries) == SALVAGE_BATCH:
                yield entries
                entries = []
            (cursor.prev if backwards else cursor.next)()
    if entries:
        yield entries


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # rocksdict raises exactly `Exception` for every status of RocksDB; a subclass is a bug.
        if type(error) is not Exception:
            raise
        raise StorageFault(_fault(str(error)), f"index: {error}") from error


@contextmanager
def _os_translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFault(Fault.IO, f"index: {error}") from error


def _fault(status: str) -> Fault:
    if "No space left" in status or "Disk quota exceeded" in status:
        return Fault.NO_SPACE
    if status.startswith("Corruption") or "No such file or directory" in status:
        return Fault.DAMAGED
    return Fault.IO
