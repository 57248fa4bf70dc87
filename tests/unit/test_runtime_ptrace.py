"""Traces: what was asked can be read back, and nothing else can."""

import hashlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.runtime.ptrace import REST_BLOCKS, Numbering, Path, header, line


def digests(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


def read(text: str) -> list[list[int]]:
    """Return the path of each request, as the format's description says."""
    head, *rows = text.splitlines()
    assert json.loads(head)["format"] == "ptrace1"
    paths: list[list[int]] = []
    for row in rows:
        _, _, _, session, ref, common, tail, shared = json.loads(row)
        assert (session, shared) == (-1, 0)
        path = paths[ref][:common] if ref >= 0 else []
        assert len(path) == common
        for start, count in zip(tail[::2], tail[1::2], strict=True):
            path += range(start, start + count)
        paths.append(path)
    return paths


def test_a_trace_by_hand() -> None:
    numbering = Numbering(100)
    assert numbering.path(b"n", digests(1, 2, 3)) == Path(-1, 0, (0, 3))
    assert numbering.path(b"n", digests(1, 2, 9)) == Path(0, 2, (3, 1))
    assert numbering.path(b"n", digests(1, 2)) == Path(1, 2, ())  # The last one that had them.
    assert numbering.path(b"n", []) == Path(-1, 0, ())
    assert numbering.path(b"other", digests(1, 2)) == Path(-1, 0, (4, 2))
    assert header(64, "x") == '{"format": "ptrace1", "block": 64, "name": "x"}\n'
    assert line(5, 200, 7, Path(0, 2, (3, 1))) == "[5,200,7,-1,0,2,[3,1],0]\n"


def test_it_rests_in_long_prompts() -> None:
    rests: list[int] = []
    numbering = Numbering(10_000, lambda: rests.append(len(numbering)))
    long = digests(*range(4 * REST_BLOCKS))
    numbering.path(b"n", long)
    assert len(rests) == 4
    numbering.path(b"n", long)
    assert len(rests) == 8


prompts = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=20)


def chain(prompt: list[int]) -> list[bytes]:
    return [hashlib.sha256(bytes(prompt[:depth])).digest() for depth in range(1, len(prompt) + 1)]


@settings(max_examples=200, deadline=None)
@given(prompts)
def test_equal_numbers_are_equal_ways(asked: list[list[int]]) -> None:
    numbering = Numbering(10_000)
    text = header(1, "t")
    for at, prompt in enumerate(asked):
        text += line(at, len(prompt), 0, numbering.path(b"n", chain(prompt)))
    names: dict[int, bytes] = {}
    numbers: dict[bytes, int] = {}
    for prompt, path in zip(asked, read(text), strict=True):
        assert len(path) == len(prompt)
        for number, digest in zip(path, chain(prompt), strict=True):
            assert names.setdefault(number, digest) == digest
            assert numbers.setdefault(digest, number) == number


@settings(max_examples=200, deadline=None)
@given(prompts, st.integers(1, 5))
def test_what_is_forgotten_makes_less_in_common_never_more(
    asked: list[list[int]], blocks_max: int
) -> None:
    numbering = Numbering(blocks_max)
    text = header(1, "t")
    for at, prompt in enumerate(asked):
        text += line(at, len(prompt), 0, numbering.path(b"n", chain(prompt)))
        assert len(numbering) <= blocks_max
    names: dict[int, tuple[bytes, int]] = {}
    for prompt, path in zip(asked, read(text), strict=True):
        before = -1
        for number, digest in zip(path, chain(prompt), strict=True):
            assert names.setdefault(number, (digest, before)) == (digest, before)
            before = number
