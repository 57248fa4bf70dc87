"""A record of every change of codec: who, when, from what to what.

Compression is a choice that changes what a model computes, if only a little. A file that is only ever
appended to, one JSON object per line, says which choices were made, and which one holds.

A writer that is killed leaves part of a last line. That choice was never acknowledged: reading passes over
it, and the next choice takes its place. Damage anywhere else is an error, and nothing is written then.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from tiercache.errors import ConfigError
from tiercache.state import NATIVE


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change. `at`: seconds since 1970. `model`: as in the namespace."""

    at: float
    who: str
    model: str
    was: str
    now: str


_decoder = msgspec.json.Decoder(Change)


@dataclass(frozen=True, slots=True)
class Read:
    """What a file holds: its changes, oldest first, and the bytes of a last line that is not whole."""

    changes: tuple[Change, ...]
    torn: bytes

    def codec_of(self, model: str) -> str:
        """Return the codec that was chosen last; "native" when none ever was."""
        chosen = [change.now for change in self.changes if change.model == model]
        return chosen[-1] if chosen else NATIVE


class CodecJournal:
    """The changes recorded in one file; not there yet means none. Processes may share the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Read:
        """Return what is recorded; ConfigError, with the line, when the file is not such a record."""
        try:
            return self._parsed(self._path.read_bytes())
        except FileNotFoundError:
            return Read((), b"")
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read as a record: {error}") from error

    def changes(self) -> list[Change]:
        """Return all changes, oldest first. Raises as `read` does."""
        return list(self.read().changes)

    def codec_of(self, model: str) -> str:
        """Return the codec that holds for `model`; "native" when none was ever chosen."""
        return self.read().codec_of(model)

    def choose(self, model: str, codec: str, *, who: str, at: float) -> Change | None:
        """Record that `model` is kept in `codec` from now on; None when it was already.

        On disk when this returns. Raises ConfigError when it cannot be written, or the file is damaged:
        a choice that cannot be recorded must not be made.
        """
        try:
            with self._locked() as file:
                content = file.read()
                found = self._parsed(content)
                was = found.codec_of(model)
                if was == codec:
                    return None
                change = Change(at, who, model, was, codec)
                file.truncate(file.seek(len(content) - len(found.torn)))
                whole = content.removesuffix(found.torn) if found.torn else content
                newline = b"" if whole.endswith(b"\n") or not whole else b"\n"
                file.write(newline + msgspec.json.encode(change) + b"\n")
                file.flush()
                os.fsync(file.fileno())
                return change
        except OSError as error:
            raise ConfigError(f"{self._path}: the change cannot be recorded: {error}") from error

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Open the file for one writer at a time, made if it is not there."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with open(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Until it is closed.
            yield file
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # A file that was made just now has a name only in memory.
            finally:
                os.close(folder)

    def _parsed(self, content: bytes) -> Read:
        *lines, last = content.split(b"\n")
        changes = []
        for number, line in enumerate(lines, 1):
            try:
                changes.append(_decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{self._path}: line {number} cannot be read as a record: {error}"
                ) from error
        try:
            # An editor may have taken the last newline off.
            changes.append(_decoder.decode(last))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Read(tuple(changes), last)
        return Read(tuple(changes), b"")
