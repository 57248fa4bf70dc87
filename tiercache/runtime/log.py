"""What the node says: one line per event, `key=value` pairs, on standard error."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

Field = str | int | float | bool | None

LOG = logging.getLogger("tiercache")
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/@+,%()[]<>*")


class KeyValues(logging.Formatter):
    """Formats a record as one line of `key=value` pairs; values with odd characters are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for `record`, its traceback included as one quoted value."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Field] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        given: object = getattr(record, "fields", None)
        if isinstance(given, Mapping):
            fields.update(given)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return " ".join(f"{name}={_text(value)}" for name, value in fields.items())


def _text(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    plain = "" if value is None else str(value)
    if plain and _BARE.issuperset(plain):
        return plain
    # Plain ASCII: names come from other people, and must neither end the line nor drive a terminal.
    return json.dumps(plain).replace("\x7f", "\\u007f")


def set_up(level: str, stream: TextIO | None = None) -> None:
    """Send every log line of this process from `level` up to `stream` (standard error)."""
    out = logging.StreamHandler(stream or sys.stderr)
    out.setFormatter(KeyValues())
    root = logging.getLogger()
    root.handlers[:] = [out]
    root.setLevel(level.upper())


def say(level: int, event: str, **fields: Field) -> None:
    """Log one event."""
    LOG.log(level, event, extra={"fields": fields})


class Seldom:
    """Lets one line of a kind through per interval and counts those it holds back.

    `kinds` are few and fixed by the code that asks, so the map is bounded.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def due(self, kind: str, now: float) -> int | None:
        """Return how many lines were held back before this one; None: hold this one back too."""
        last = self._last.get(kind)
        if last is not None and now - last < self._interval_s:
            self._held[kind] = self._held.get(kind, 0) + 1
            return None
        self._last[kind] = now
        return self._held.pop(kind, 0)
