"""A record of every change of codec: who, when, from what to what.

Compression is a choice that changes what a model computes, if only a little. A file that is only ever
appended to, one JSON object per line, says which choices were made.
"""

import os
from pathlib import Path

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


class CodecJournal:
    """The changes recorded in one file; not there yet means none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def changes(self) -> list[Change]:
        """Return all of them, oldest first; ConfigError when the file is not such a record."""
        if not self._path.exists():
            return []
        decoder = msgspec.json.Decoder(Change)
        try:
            return [decoder.decode(line) for line in self._path.read_bytes().splitlines()]
        except (msgspec.DecodeError, OSError) as error:
            raise ConfigError(f"{self._path}: cannot be read as a record: {error}") from error

    def codec_of(self, model: str) -> str:
        """Return the codec that was chosen last; "native" when none ever was."""
        chosen = [change.now for change in self.changes() if change.model == model]
        return chosen[-1] if chosen else NATIVE

    def choose(self, model: str, codec: str, *, who: str, at: float) -> Change | None:
        """Record that `model` is kept in `codec` from now on; None when it was already.

        On disk when this returns. Raises ConfigError when it cannot be written: a choice that cannot
        be recorded must not be made.
        """
        was = self.codec_of(model)
        if was == codec:
            return None
        change = Change(at, who, model, was, codec)
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(change) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{self._path}: the change cannot be recorded: {error}") from error
        return change
