"""What routers are told, as bytes: the frames of batches and questions."""

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import ProtocolError
from tiercache.wire.residency import Ask, Batch, ask_frames, ask_of, batch_frames, batch_of

BATCH = Batch("n1", "b" * 16, 4, 7, whole=False, host=bytes(8), nvme=bytes(16), removed=b"r" * 8)


def changed(**fields: object) -> list[bytes]:
    """The frames of `BATCH` with a body in which some fields are others."""
    body = {**msgpack.unpackb(batch_frames(BATCH)[2]), **fields}
    return [*batch_frames(BATCH)[:2], msgpack.packb(body)]


def test_a_batch_is_a_topic_its_version_and_a_plain_map() -> None:
    topic, sequence, body = batch_frames(BATCH)
    assert (topic, sequence) == (b"residency@n1", bytes([0, 0, 0, 0, 0, 0, 0, 7]))
    assert msgpack.unpackb(body) == {
        "node": "n1",
        "boot": "b" * 16,
        "since": 4,
        "version": 7,
        "whole": False,
        "host": bytes(8),
        "nvme": bytes(16),
        "removed": b"r" * 8,
        "format": 1,
    }
    assert batch_of([topic, sequence, memoryview(body)]) == BATCH


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"since": 8},
        {"since": -2},
        {"since": -1, "version": -1},
        {"version": 1 << 63},
        {"host": bytes(7)},
        {"nvme": bytes(9)},
        {"removed": b"r"},
        {"whole": True},
        {"node": ""},
        {"node": "n" * 257},
        {"boot": ""},
        {"boot": 1},
        {"more": 1},
    ],
)
def test_a_body_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="not a batch"):
        batch_of(changed(**fields))


def test_all_there_is_needs_no_version_before() -> None:
    whole = msgspec.structs.replace(BATCH, whole=True, removed=b"", since=-1, version=0)
    assert batch_of(batch_frames(whole)) == whole


def test_frames_that_belong_to_another_batch_are_refused() -> None:
    topic, sequence, body = batch_frames(BATCH)
    other = batch_frames(msgspec.structs.replace(BATCH, node="n2", version=8))
    for frames in ([other[0], sequence, body], [topic, other[1], body]):
        with pytest.raises(ProtocolError, match="not its own"):
            batch_of(frames)
    for count in (0, 2, 4):
        with pytest.raises(ProtocolError, match=f"3 frames, not {count}"):
            batch_of([topic] * count)


def test_a_question_is_a_version_and_a_boot_token() -> None:
    assert ask_frames(Ask(-1, "ab")) == [b"\xff" * 8, b"ab"]
    assert ask_of([b"\xff" * 8, b"ab"]) == Ask(-1, "ab")
    assert ask_of(ask_frames(Ask(3, ""))) == Ask(3, "")
    # Before everything is before everything.
    assert ask_of([b"\x80" + bytes(7), b""]).version == -1


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [bytes(8)],
        [bytes(7), b""],
        [bytes(8), b"x" * 65],
        [bytes(8), b"", b""],
        [bytes(8), b"\xff"],
    ],
)
def test_a_question_that_is_none_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        ask_of(frames)


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_any_bytes_are_a_message_or_an_error(frames: list[bytes]) -> None:
    for read in (batch_of, ask_of):
        try:
            read(frames)
        except ProtocolError:
            continue
