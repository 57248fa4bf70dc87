"""Log lines can be read by people and taken apart by programs."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from tiercache.runtime.log import LOG, Seldom, say, set_up


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    set_up("info", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def test_one_event_is_one_line_of_pairs(lines: io.StringIO) -> None:
    say(logging.INFO, "started", socket="/run/x.sock", segments=2, ratio=0.25, nothing=None)
    line = lines.getvalue()
    assert line.endswith(
        ' level=info event=started socket=/run/x.sock segments=2 ratio=0.25 nothing=""\n'
    )
    assert line.startswith("time=2")


@pytest.mark.parametrize(
    "value", ["a b", 'quo"te', "new\nline", "a=b", "é", "", "\u2028", "\x9b31m", "\x7f", "\udcff"]
)
def test_odd_values_are_quoted_and_stay_on_the_line(lines: io.StringIO, value: str) -> None:
    say(logging.WARNING, "refused", reason=value)
    text = lines.getvalue()
    assert text.count("\n") == 1
    assert text[:-1].isascii()
    assert text[:-1].isprintable()
    assert json.loads(text.split(" reason=", 1)[1]) == value


def test_less_serious_events_are_left_out(lines: io.StringIO) -> None:
    say(logging.DEBUG, "disconnected")
    assert lines.getvalue() == ""


def test_an_error_brings_its_traceback_on_the_same_line(lines: io.StringIO) -> None:
    try:
        raise KeyError("odd\nkey")
    except KeyError:
        LOG.error("thread failed", exc_info=sys.exc_info())
    text = lines.getvalue()
    assert text.count("\n") == 1
    assert "KeyError" in text


def test_lines_of_one_kind_come_once_per_interval() -> None:
    seldom = Seldom(1.0)
    assert seldom.due("refused", 10.0) == 0
    assert seldom.due("refused", 10.5) is None
    assert seldom.due("refused", 10.9) is None
    assert seldom.due("other", 10.9) == 0
    assert seldom.due("refused", 11.0) == 2
    assert seldom.due("refused", 12.5) == 0
