"""Reads tables of settings into frozen Structs, and describes them for people.

Knows no setting: the Structs say what may be set. Their fields carry `msgspec.Meta` with a
description; a field that counts bytes (its name says so) may also be written as a text, "8GiB".
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, inspect

from tiercache.errors import ConfigError

_UNITS = {"TiB": 1024**4, "GiB": 1024**3, "MiB": 1024**2, "KiB": 1024, "B": 1, "": 1}
_Tables = TypeVar("_Tables", bound=Struct)


def read(raw: Mapping[str, object], kind: type[_Tables], source: str) -> _Tables:
    """Return `raw`, a parsed TOML document, as `kind`, a Struct whose fields are tables.

    `source` names the document in errors. Raises ConfigError for the first thing that is wrong: it
    names the key, what was found and what would be right.
    """
    tables: dict[str, type[Struct]] = get_type_hints(kind)
    found: dict[str, object] = {}
    for name, table in raw.items():
        if name not in tables:
            raise ConfigError(f"{source}: unknown table [{name}]{_nearest(name, tables)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {name} is a table: write [{name}] and its keys below it")
        hints = get_type_hints(tables[name], include_extras=True)
        values: dict[str, object] = {}
        for key, value in table.items():
            if key not in hints:
                fix = _owner(key, tables) or _nearest(key, hints)
                raise ConfigError(f"{source}: unknown key {name}.{key}{fix}")
            values[key] = _value(f"{source}: {name}.{key}", key, value, hints[key])
        found[name] = msgspec.convert(values, tables[name])
    return msgspec.convert(found, kind)


def describe(kind: type[Struct]) -> list[str]:
    """Return Markdown lines with every table and key of `kind`, in order."""
    lines: list[str] = []
    tables: dict[str, type[Struct]] = get_type_hints(kind)
    for name, table in tables.items():
        lines += ["", f"## [{name}]", "", (table.__doc__ or "").strip(), ""]
        lines += ["| key | default | may be | meaning |", "|---|---|---|---|"]
        for item in msgspec.structs.fields(table):
            (meta,) = (part for part in get_args(item.type) if isinstance(part, Meta))
            unit = _unit(item.name)
            default = (meta.extra or {}).get("default") or f"`{_default(item.default, unit)}`"
            expected = _expected(inspect.type_info(item.type), unit)
            lines.append(f"| `{item.name}` | {default} | {expected} | {meta.description} |")
    return lines


def parse_size(text: str) -> int:
    """Return the bytes that a text such as "8GiB" or "1.5 MiB" means. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]iB|B)?", text.strip())
    size = Fraction(found[1]) * _UNITS[found[2] or ""] if found else None
    if size is None or size.denominator != 1:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 8GiB")
    return int(size)


def format_size(size: int) -> str:
    """Return `size` bytes as an exact text that `parse_size` reads back."""
    for unit, factor in _UNITS.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def toml_text(value: object) -> str:
    """Return a value as a person would write it in the file."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)  # TOML's escapes are the same.
        case list() | tuple():
            return f"[{', '.join(toml_text(item) for item in value)}]"
        case dict():
            pairs = (f"{toml_text(name)} = {toml_text(item)}" for name, item in value.items())
            return f"{{ {', '.join(pairs)} }}" if value else "{}"
    return str(value)


def _value(where: str, key: str, value: object, kind: object) -> object:
    """Return `value` as the key's type wants it, or raise an error that says what it wants."""
    unit = _unit(key)
    try:
        if unit == "bytes" and isinstance(value, str) and value[:1].isdecimal():
            value = parse_size(value)
        return _finite(msgspec.convert(value, type=kind))
    except (ValueError, msgspec.ValidationError) as error:
        expected = _expected(inspect.type_info(kind), unit)
        raise ConfigError(f"{where} = {toml_text(value)}: expected {expected}") from error


def _finite(value: object) -> object:
    """Return a value; ValueError where it is or holds a number that TOML knows and no setting does."""
    for each in value.values() if isinstance(value, dict) else [value]:
        if isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{each} is no number")
    return value


def _unit(key: str) -> str:
    """A key that has a unit says it in its name; bytes per second are bytes here."""
    words = key.split("_")
    if "bytes" in words:
        return "bytes"
    return "s" if "s" in words and "per" not in words else ""


def _expected(kind: inspect.Type, unit: str) -> str:
    """Say in words what a value of this type may be."""
    match kind:
        case inspect.Metadata(extra={"words": str(words)}):
            return words
        case inspect.Metadata(type=inner):
            return _expected(inner, unit)
        case inspect.UnionType(types=types):
            return ", or ".join(_expected(inner, unit) for inner in types)
        case inspect.LiteralType(values=values):
            return " or ".join(toml_text(value) for value in values)
        case inspect.IntType(ge=low, le=high) | inspect.FloatType(ge=low, le=high):
            units = {"bytes": 'a size such as "8GiB"', "s": "a number of seconds"}
            whole = isinstance(kind, inspect.IntType)
            text = units.get(unit, "a whole number" if whole else "a number")
            for edge, bound in (("at least", low), ("at most", high)):
                if bound is not None:
                    text += f", {edge} {_default(bound, unit)}"
            return text
        case inspect.VarTupleType(item_type=item):
            return f"a list, each {_expected(item, unit)}"
        case inspect.DictType(value_type=item):
            return f"a table of names, each with {_expected(item, unit)}"
        case inspect.BoolType():
            return "true or false"
    return "text"


def _default(value: object, unit: str) -> str:
    if unit == "bytes" and isinstance(value, int):
        return format_size(value)
    return toml_text(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _owner(key: str, tables: Mapping[str, type[Struct]]) -> str:
    for name, table in tables.items():
        if key in table.__struct_fields__:
            return f": it belongs under [{name}]"
    return ""
