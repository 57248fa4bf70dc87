"""Frames: any slicing of the stream gives the same bodies; an oversized one is never gathered."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import ProtocolError
from tiercache.wire.frames import HEADER_BYTES, Frames, frame

LIMIT = 64


def drain(frames: Frames, chunk: bytes) -> list[bytes]:
    frames.feed(chunk)
    bodies = []
    while (body := frames.next()) is not None:
        bodies.append(bytes(body))
    return bodies


def sliced(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in pairwise(edges)]


def test_a_frame_is_its_length_in_four_little_endian_bytes_and_the_body() -> None:
    assert frame(b"abc") == b"\x03\x00\x00\x00abc"


@pytest.mark.parametrize("body", [b"", b"x", b"y" * LIMIT])
def test_whole_then_byte_by_byte_then_glued(body: bytes) -> None:
    stream = frame(body)
    assert drain(Frames(LIMIT), stream) == [body]
    single = Frames(LIMIT)
    assert [out for byte in stream for out in drain(single, bytes([byte]))] == [body]
    assert drain(Frames(LIMIT), stream + frame(b"next") + stream) == [body, b"next", body]


def test_trailing_bytes_wait_for_the_rest_of_their_frame() -> None:
    frames = Frames(LIMIT)
    second = frame(b"second")
    assert drain(frames, frame(b"first") + second[:7]) == [b"first"]
    assert drain(frames, second[7:] + second[:2]) == [b"second"]
    assert drain(frames, second[2:]) == [b"second"]


@given(
    bodies=st.lists(st.binary(max_size=LIMIT), max_size=6),
    cuts=st.lists(st.integers(min_value=0, max_value=10_000), max_size=12),
)
def test_slicing_does_not_matter(bodies: list[bytes], cuts: list[int]) -> None:
    frames = Frames(LIMIT)
    stream = b"".join(frame(body) for body in bodies)
    assert [out for chunk in sliced(stream, cuts) for out in drain(frames, chunk)] == bodies


@given(cuts=st.lists(st.integers(min_value=0, max_value=10_000), max_size=6))
def test_frames_before_an_oversized_one_still_come_out(cuts: list[int]) -> None:
    frames = Frames(LIMIT)
    stream = frame(b"good") + struct.pack("<I", LIMIT + 1) + b"x" * (LIMIT + 1)
    out: list[bytes] = []

    def pull() -> None:
        for chunk in sliced(stream, cuts):
            frames.feed(chunk)
            while (body := frames.next()) is not None:
                out.append(bytes(body))

    with pytest.raises(ProtocolError, match=f"a frame of {LIMIT + 1} bytes"):
        pull()
    assert out == [b"good"]
    with pytest.raises(ProtocolError, match="a frame of"):
        frames.next()


def test_an_oversized_length_costs_no_memory() -> None:
    frames = Frames(LIMIT)
    frames.feed(b"\xff\xff")
    assert frames.next() is None
    frames.feed(b"\xff\xff" + b"x" * 1000)
    with pytest.raises(ProtocolError):
        frames.next()
    assert len(frames._gathered) == HEADER_BYTES


def test_a_body_in_one_chunk_is_not_copied() -> None:
    stream = bytearray(frame(b"abc"))
    frames = Frames(LIMIT)
    frames.feed(stream)
    body = frames.next()
    assert body is not None
    stream[-1:] = b"X"
    assert bytes(body) == b"abX"


def test_feeding_over_frames_that_nobody_took_is_misuse() -> None:
    frames = Frames(LIMIT)
    frames.feed(frame(b"a"))
    with pytest.raises(RuntimeError, match="take every frame"):
        frames.feed(frame(b"b"))
    body = frames.next()
    assert body is not None
    assert bytes(body) == b"a"
