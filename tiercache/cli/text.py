"""Values as text that is safe to print and short to read."""

import datetime
import json

import msgspec

from tiercache.tables import format_size


def plain(text: str) -> str:
    r"""Return `text` with every character that does not simply print written as an escape.

    Names, keys and tenants come from other people. Control characters, terminal sequences, line
    breaks and characters that turn the direction of writing come out as `\x1b`, `\n`, `\u202e`.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def as_json(value: object) -> str:
    """Return `value` (structs, mappings, lists, numbers, texts) as one line of ASCII JSON.

    ASCII, so that nothing in it can drive a terminal.
    """
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=True).replace("\x7f", "\\u007f")


def size(nbytes: float) -> str:
    """Return a number of bytes, rounded to one decimal of its largest unit."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f}B" if unit == "B" else f"{amount:.1f}{unit}"
        amount /= 1024
    return f"{amount:.1f}TiB"


def age(seconds: float) -> str:
    """Return a span of time in its largest unit; "-" for one that cannot be (a clock was set)."""
    if seconds < 0:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def percent(part: float, whole: float) -> str:
    """Return `part` as a percentage of `whole`; "-" when there is nothing to compare with."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def when(seconds: float) -> str:
    """Return wall-clock seconds as UTC time; "-" outside the years that a calendar knows."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return "-"
    return moment.isoformat(sep=" ", timespec="seconds")


def as_toml(settings: msgspec.Struct) -> str:
    """Return settings (a struct of tables of plain values) as TOML that reads back the same."""
    lines: list[str] = []
    for name in settings.__struct_fields__:
        table = getattr(settings, name)
        lines += [f"[{name}]"]
        lines += [f"{key} = {_toml(key, getattr(table, key))}" for key in table.__struct_fields__]
        lines += [""]
    return "\n".join(lines)


def _toml(key: str, value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(key, item) for item in value)}]"
    if isinstance(value, dict):
        pairs = (f"{_toml('', name)} = {_toml(key, item)}" for name, item in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, int) and "bytes" in key.split("_"):
        value = format_size(value)
    # TOML's text, numbers and booleans are JSON's, but for one more escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
