"""The recorder: beside the loop, bounded, readable after any end, and telling nobody anything."""

import gzip
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tiercache.core import events as ev
from tiercache.replay.traces import read_trace
from tiercache.runtime import recording
from tiercache.runtime.recording import Recorder, Trace
from tiercache.runtime.telemetry import Tally
from tiercache.state import Chain, Kind, Layout, Part, Shard, Tensor
from tiercache.testing.tiny import LAYOUT, NAMESPACE

BLOCK = LAYOUT.block_tokens
ATTACHED = ev.Attached(1, 1, NAMESPACE, LAYOUT, 1, 0, True, "engine")
WAIT_S = 20.0


def plan(request: str, tokens: list[int], session: int = 1, salt: str = "") -> ev.PlanAsked:
    chain = Chain(tokens, BLOCK)
    return ev.PlanAsked(
        session, 2, request, "", salt, list(chain.digests[1:]), len(tokens), len(tokens) - 1, [],
        ("native",), ev.Capture(0, 1), False,
    )  # fmt: skip


def reserve(request: str, *ends: int) -> ev.ReserveAsked:
    offers = [ev.Offer(0, Shard(0, 1), "native", b"d" * 32, b"", 0, end, 8, b"", 0) for end in ends]
    return ev.ReserveAsked(1, 3, request, "", "", offers)


def rows(folder: Path) -> list[list[object]]:
    (file,) = folder.iterdir()
    with gzip.open(file, "rt") as text:
        head, *lines = text.read().splitlines()
    assert json.loads(head)["block"] == BLOCK
    return [json.loads(one) for one in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def recorder(folder: Path, tally: Tally) -> Iterator[Recorder]:
    made = Recorder(folder, 1 << 20, tally)
    yield made
    assert made.close(WAIT_S)


TOKENS = list(range(4 * BLOCK + 1))


def test_requests_are_recorded_once_and_with_what_they_decoded(
    recorder: Recorder, folder: Path, tally: Tally
) -> None:
    now = recorder._started
    recorder.hear(ATTACHED, now)
    recorder.hear(plan("a", TOKENS), now + 0.5)
    recorder.hear(plan("a", TOKENS), now + 0.6)  # The same one, asking again.
    recorder.hear(reserve("a", 4, len(TOKENS) + 9, len(TOKENS) + 2), now + 0.7)
    recorder.hear(reserve("a"), now + 0.8)
    recorder.hear(reserve("unheard of", 4), now + 0.8)
    recorder.hear(plan("b", [*TOKENS[: 2 * BLOCK], *range(500, 530)]), now + 1.0)
    recorder.hear(plan("b", TOKENS, salt="tenant"), now + 1.0)
    recorder.hear(ev.Released(1, ["a"]), now + 2.0)  # Not its business.
    assert recorder.close(WAIT_S)
    first, second, third = rows(folder)
    assert first == [500, len(TOKENS), 9, -1, -1, 0, [0, 4], 0]
    assert second[:6] == [1000, 2 * BLOCK + 30, 0, -1, 0, 2]
    assert third[4:6] == [-1, 0]  # Another tenant's blocks are others.
    assert tally.counters["recorded"]["left_out"] == 0


def test_what_replays_read_is_what_was_asked(recorder: Recorder, folder: Path) -> None:
    now = recorder._started
    recorder.hear(ATTACHED, now)
    for number in range(5):
        recorder.hear(plan(str(number), TOKENS[: BLOCK * (number + 1)]), now + number)
    recorder.close(WAIT_S)
    (file,) = folder.iterdir()
    trace = read_trace(file)
    assert trace.page == BLOCK
    assert [request.tokens for request in trace.requests] == [4, 8, 12, 16, 17]
    assert [len(request.pages) for request in trace.requests] == [1, 2, 3, 4, 4]
    assert trace.requests[3].pages[:3] == trace.requests[2].pages


def test_no_text_that_could_be_recognised_is_written(recorder: Recorder, folder: Path) -> None:
    recorder.hear(ATTACHED, 0.0)
    recorder.hear(plan("secret-request", TOKENS, salt="secret-salt"), 0.0)
    recorder.close(WAIT_S)
    (file,) = folder.iterdir()
    with gzip.open(file, "rb") as text:
        written = text.read()
    assert b"secret" not in written
    assert set(written) <= set(b'{}[],:-_." 0123456789\n') | set(range(97, 123)) | set(b"TZ")
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_surveys_are_requests_too(recorder: Recorder, folder: Path) -> None:
    digests = list(Chain(TOKENS, BLOCK).digests[1:])
    recorder.hear(ATTACHED, 0.0)
    recorder.hear(ev.SurveyAsked(1, 2, "r", "", "", digests, ("native",), 0.0), 0.0)
    recorder.close(WAIT_S)
    assert [row[1] for row in rows(folder)] == [4 * BLOCK]


def test_who_never_attached_or_left_is_not_heard(recorder: Recorder, folder: Path) -> None:
    recorder.hear(plan("a", TOKENS), 0.0)
    recorder.hear(ATTACHED, 0.0)
    recorder.hear(ev.Closed(1, True), 0.0)
    recorder.hear(ev.Closed(2, True), 0.0)
    recorder.hear(plan("b", TOKENS), 0.0)
    recorder.close(WAIT_S)
    assert list(folder.iterdir()) == []


def test_a_full_trace_ends_and_says_so(
    folder: Path, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(folder, 1000, tally)
    recorder.hear(ATTACHED, 0.0)
    with caplog.at_level(logging.INFO):
        number = 0
        while recorder._thread.is_alive():
            recorder.hear(plan(f"{number}", [number, *TOKENS]), float(number))
            number += 1
    assert [record.message for record in caplog.records] == ["recording", "recording is full"]
    recorder.hear(plan("late", TOKENS), 0.0)
    assert recorder._heard.qsize() <= recording.EVENTS_MAX
    assert recorder.close(WAIT_S)
    (file,) = folder.iterdir()
    read_trace(file)


def test_a_slow_recorder_leaves_out_and_counts(folder: Path, tally: Tally) -> None:
    recorder = Recorder(folder, 1 << 20, tally)
    recorder.close(WAIT_S)
    recorder._over = False
    for _ in range(recording.EVENTS_MAX + 3):
        recorder.hear(ATTACHED, 0.0)
    assert tally.counters["recorded"]["left_out"] == 3


def test_a_directory_that_cannot_be_made_is_no_reason_to_stop(
    tmp_path: Path, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "traces", 1 << 20, tally)
    recorder._thread.join(WAIT_S)
    assert [record.message for record in caplog.records] == ["recording failed"]
    recorder.hear(ATTACHED, 0.0)
    assert recorder._heard.empty()
    assert recorder.close(WAIT_S)


def test_a_disk_that_is_full_ends_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int, __: object) -> int:
        raise OSError(28, "No space left on device")

    recorder.hear(ATTACHED, 0.0)
    monkeypatch.setattr(os, "write", full)
    recorder.hear(plan("a", TOKENS), 0.0)
    assert recorder.close(WAIT_S)
    assert [record.message for record in caplog.records] == ["recording failed"]


def test_sessions_and_traces_are_bounded(
    folder: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SESSIONS_MAX", 2)
    monkeypatch.setattr(recording, "TRACES_MAX", 1)
    recorder = Recorder(folder, 1 << 20, tally)
    for session in (1, 2, 3):
        recorder.hear(msgspec.structs.replace(ATTACHED, session=session), 0.0)
    recorder.hear(plan("forgotten", TOKENS, session=1), 0.0)
    recorder.hear(plan("known", TOKENS, session=3), 0.0)
    kv = Part("kv", Kind.KV, None, 2 * BLOCK, 1, (Tensor("v", "int64", (1,), ("c",)),))
    other = Layout((kv,), 2 * BLOCK)
    recorder.hear(msgspec.structs.replace(ATTACHED, session=4, layout=other), 0.0)
    recorder.hear(plan("one file too many", TOKENS, session=4), 0.0)
    recorder.close(WAIT_S)
    assert [row[1] for row in rows(folder)] == [len(TOKENS)]


# --- one file


def test_lines_are_written_in_order_when_their_time_is_up(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t", 4, 100.0)
    for number in range(3):
        trace.asked((b"n", "e", str(number)), [], 10, 100.0 + number)
    trace.due(102.0)
    with gzip.open(tmp_path / "t", "rt") as text:
        assert [json.loads(one)[0] for one in text.read().splitlines()[1:]] == [0, 1000]
    trace.saved((b"n", "e", "2"), 15)
    trace.close()
    with gzip.open(tmp_path / "t", "rt") as text:
        assert json.loads(text.read().splitlines()[-1])[:3] == [2000, 10, 5]


def test_what_was_written_can_be_read_though_the_end_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "BATCH_BYTES", 100)
    monkeypatch.setattr(recording, "OPEN_MAX", 2)
    trace = Trace(tmp_path / "t", 4, 0.0)
    for number in range(50):
        trace.asked((b"n", "e", str(number)), [], 10, float(number))
    with gzip.open(tmp_path / "t", "rt") as text:
        written = text.read().splitlines()
    assert 40 < len(written) < 50
    trace.close()


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(FileExistsError):
        Trace(tmp_path / "t", 4, 0.0)
    assert (tmp_path / "t").read_text() == "mine"
