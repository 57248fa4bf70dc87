"""Canonical bytes: different values never give the same."""

from collections.abc import Sequence
from enum import IntEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.state.canonical import Value, digest, encode
from tiercache.testing.strategies import values


def typed(value: Value) -> object:
    """The value with its types spelled out, so that 1, True and "1" differ; lists equal tuples."""
    if isinstance(value, list | tuple):
        return ("list", tuple(typed(item) for item in value))
    return (type(value).__name__, value)


@settings(max_examples=300, deadline=None)
@given(values(), values())
def test_equal_bytes_mean_equal_values(one: Value, other: Value) -> None:
    assert (encode(one) == encode(other)) == (typed(one) == typed(other))


@settings(max_examples=200, deadline=None)
@given(st.lists(values(), max_size=3), st.lists(values(), max_size=3))
def test_joined_bytes_do_not_run_into_each_other(one: list[Value], other: list[Value]) -> None:
    joined = b"".join(map(encode, one)) == b"".join(map(encode, other))
    assert joined == (typed(one) == typed(other))


LOOKALIKES: Sequence[Value] = [
    None, "", b"", 0, False, (), "0", b"0", "None", (None,), ("",), ((),), (0,), 1, True, "1", -1,
    "-1", ("a", "b"), ("ab",), ("a", ("b",)), (("a",), "b"), "a", b"a", "l0:", ("l0:",), 10, "n0:",
]  # fmt: skip


def test_lookalikes_all_differ() -> None:
    assert len({encode(value) for value in LOOKALIKES}) == len(LOOKALIKES)


def test_sequences_are_their_items() -> None:
    assert encode([1, "a"]) == encode((1, "a")) == b"l8:i1:1s1:a"


@pytest.mark.parametrize("value", [1.0, {"a": 1}, {1}, object(), bytearray(b"a"), 1j])
def test_nothing_else_has_canonical_bytes(value: object) -> None:
    with pytest.raises(TypeError, match="no canonical bytes"):
        encode(value)  # type: ignore[arg-type]


def test_text_is_utf8_and_enums_are_their_numbers() -> None:
    class Level(IntEnum):
        HIGH = 3

    assert encode("ü") == b"s2:\xc3\xbc"
    assert encode(Level.HIGH) == encode(3)


def test_domains_never_meet() -> None:
    assert digest("a", "b") != digest("ab", "") != digest("", "ab")
    assert digest("a", "b", "c") != digest("a", ("b", "c"))
    assert len(digest("a")) == 32
