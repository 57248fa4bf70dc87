"""The record of codecs, by command."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.device import CodecJournal


def told(*args: str) -> Result:
    return CliRunner().invoke(app, ["codec", *args])


def test_a_choice_is_recorded_with_who_and_when(tmp_path: Path) -> None:
    path = tmp_path / "codecs.jsonl"
    record = str(path)
    assert told(record).stdout == ""
    first = told(record, "kimi", "int8", "--who", "ops")
    assert first.exit_code == Exit.OK
    assert first.stdout.endswith("ops: kimi from native to int8\n")
    assert told(record, "kimi", "int8").stdout == "kimi is kept in int8 already.\n"
    assert told(record, "kimi", "int8", "--json").stdout == "null\n"
    told(record, "qwen", "bf16", "--who", "ops")
    shown = told(record, "kimi").stdout.splitlines()
    assert len(shown) == 2
    assert shown[-1] == "kimi is kept in int8."
    assert told(record, "other").stdout == "other is kept in native.\n"
    assert len(told(record).stdout.splitlines()) == 2
    found = json.loads(told(record, "--json").stdout)
    assert [(one["who"], one["model"], one["was"], one["now"]) for one in found] == [
        ("ops", "kimi", "native", "int8"), ("ops", "qwen", "native", "bf16"),
    ]  # fmt: skip
    assert CodecJournal(path).codec_of("kimi") == "int8"


def test_without_a_name_it_is_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = str(tmp_path / "codecs.jsonl")
    told(record, "kimi", "int8")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.setattr("os.getuid", lambda: 4_711)
    told(record, "kimi", "native")
    first, second = json.loads(told(record, "--json").stdout)
    assert first["who"]
    assert second["who"] == "uid 4711"


def test_what_is_wrong_is_said_and_nothing_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "codecs.jsonl"
    wrong = told(str(path), "kimi", "zip")
    assert (wrong.exit_code, path.exists()) == (Exit.USAGE, False)
    assert "no codec 'zip'; there are native, bf16, int8" in wrong.stderr
    assert told(str(path), "", "int8").exit_code == Exit.USAGE
    assert not path.exists()
    assert told(str(tmp_path / "no" / "file"), "kimi", "int8").exit_code == Exit.USAGE
    path.write_text("nonsense\n")
    damaged = told(str(path), "kimi")
    assert damaged.exit_code == Exit.USAGE
    assert "line 1 cannot be read as a record" in damaged.stderr
    assert told(str(path), "kimi", "int8").exit_code == Exit.USAGE
    assert path.read_text() == "nonsense\n"


def test_a_line_that_was_cut_off_is_told_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "codecs.jsonl"
    told(str(path), "kimi", "int8", "--who", "ops")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    shown = told(str(path), "kimi")
    assert shown.exit_code == Exit.OK
    assert "30 bytes do not count" in shown.stderr
    assert shown.stdout.endswith("kimi is kept in int8.\n")
    assert told(str(path), "kimi", "native", "--who", "ops").exit_code == Exit.OK
    assert path.read_bytes().startswith(whole)
    assert "cut off" not in told(str(path)).stderr


def test_names_cannot_drive_a_terminal(tmp_path: Path) -> None:
    record = str(tmp_path / "codecs.jsonl")
    shown = told(record, "ki\x1b[2Jmi\n", "int8", "--who", "\u202eops").stdout
    assert r"\x1b[2J" in shown
    assert shown.count("\n") == 1
    assert r"\u202e" in told(record, "--json").stdout


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("tiercache.device")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tiercache_kernels", None)
    result = told(str(tmp_path / "codecs.jsonl"))
    assert result.exit_code == Exit.USAGE
    assert "needs tiercache_kernels" in result.stderr
