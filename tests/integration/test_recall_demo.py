"""The demo is a test: real processes, real models, every check bitwise."""

import io
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tiercache_transformers.demo import Played, Row, run, table
from tiercache_transformers.demo_engine import Answer


@pytest.mark.slow
def test_the_demo_holds() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=80, color_system=None)
    with tempfile.TemporaryDirectory(prefix="tiercache-") as directory:  # Short: it holds a socket.
        played = run(console, Path(directory))
    assert played.holds, shown.getvalue()
    lines = shown.getvalue().splitlines()
    assert len([line for line in lines if "bit for bit" in line]) == 10
    assert len([line for line in lines if "no reuse" in line]) == 8
    assert max(len(line) for line in lines) <= 80
    assert "Every check holds." in shown.getvalue()
    told = played.told()
    assert told.holds
    assert len(told.cases) == 18
    assert {case.outcome for case in told.cases} == {"bit for bit", "no reuse"}


ANSWER = Answer(
    reused=8, recomputed=1, ttft_s=0.001, waited=True, reason="", tokens=(1, 2), logits=b"\x00\x01"
)


def answer(**changed: object) -> Answer:
    return msgspec.structs.replace(ANSWER, **changed)


ROW = Row("B: a case", ANSWER, 1, 8, ANSWER, stored=True)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (replace(ROW, expected=9), "9 expected"),
        (replace(ROW, answer=answer(tokens=(1, 3))), "tokens differ"),
        (replace(ROW, answer=answer(logits=b"\x00\x02")), "logits differ"),
        (replace(ROW, answer=answer(waited=False)), "not from NVMe"),
        (replace(ROW, reference=None, expected=0), "0 expected"),
    ],
)
def test_a_check_that_fails_is_seen(row: Row, shown: str) -> None:
    assert not row.holds
    assert not Played({"m": [ROW, row]}, stored=True).holds
    console = Console(file=io.StringIO(), width=100, color_system=None, record=True)
    console.print(table("mla1_kda2", [row]))
    assert shown in console.export_text()


def test_what_holds_is_seen() -> None:
    assert ROW.holds
    assert Played({"m": [ROW]}, stored=True).holds
    assert not Played({"m": [ROW]}, stored=False).holds
    assert replace(ROW, stored=False).holds
