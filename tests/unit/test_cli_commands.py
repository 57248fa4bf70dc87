"""The commands that need no node, and how every command fails without one."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from tiercache import __version__
from tiercache.cli import text
from tiercache.cli.admin import unconnected
from tiercache.cli.app import app
from tiercache.cli.exits import ContentError, Exit, exit_code
from tiercache.config import Settings, document, parse
from tiercache.errors import (
    ConfigError,
    Fault,
    LayoutError,
    RefusedError,
    StorageFault,
    TiercacheError,
    UnavailableError,
)

EVERY_QUESTION = (
    ["stats"],
    ["ls"],
    ["inspect", "ab"],
    ["evict", "ab"],
    ["clear", "--yes"],
    ["verify"],
    ["where", "ab"],
    ["pin", "ab"],
    ["unpin", "1"],
    ["pins"],
    ["quota", "get"],
    ["quota", "set", "-", "--host", "0.5"],
)


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(args), env=env)


def complaint(result: Result) -> str:
    """The one line that a failed command leaves on stderr."""
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("tiercache: ")
    return result.stderr


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiercache.toml"
    path.write_text(
        f'[node]\nsocket = "{tmp_path}/own.sock"\n[host]\nbytes = "64MiB"\n'
        '[nvme]\npath = "/a \\"quoted\\" \\u007f place"\n',
        encoding="utf-8",
    )
    return path


def test_no_command_shows_the_commands() -> None:
    result = run()
    assert result.exit_code == Exit.USAGE
    assert "verify" in result.stderr
    assert result.stdout == ""
    assert run("--help").exit_code == Exit.OK


def test_the_version() -> None:
    assert run("--version").stdout == f"tiercache {__version__}\n"


@pytest.mark.parametrize("command", ["", "stats", "ls", "inspect", "evict", "clear", "verify"])
def test_every_command_explains_itself(command: str) -> None:
    result = run(*command.split(), "--help")
    assert (result.exit_code, result.stderr) == (Exit.OK, "")


def test_help_loads_neither_rich_nor_a_node() -> None:
    code = (
        "import sys, tiercache\n"
        "assert not {'typer', 'rich'} & set(sys.modules)\n"
        "import tiercache.cli.app\n"
        "print(sorted({'rich', 'asyncio', 'torch', 'rocksdict', 'aiohttp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["stat"], "stats"),
        (["stats", "--jason"], "--json"),
        (["stats", "--deadline", "nan"], "--deadline"),
        (["stats", "--watch", "-1"], "--watch"),
        (["stats", "--socket", ""], "no node"),
        (["ls", "--limit", "-1"], "--limit"),
        (["ls", "--limit", "0"], "--limit"),
        (["inspect"], "key"),
        (["inspect", ""], "tiercache ls"),
        (["evict"], "PREFIX"),
        (["evict", "--tier", "gpu"], "nvme"),
        (["evict", "--bytes", "5Gb"], "512MiB"),
        (["evict", "--bytes", "0"], "--bytes"),
        (["clear"], "--yes"),
        (["clear", "xyz", "--yes"], "hexadecimal"),
        (["clear", "a" * 65, "--yes"], "hexadecimal"),
        (["config", "--document", "--json"], "--json"),
        (["config", "--config", "nowhere.toml"], "nowhere.toml"),
        (["serve", "--config", "nowhere.toml"], "nowhere.toml"),
        (["ls", "--socket", "/" + "x" * 200], "cannot be a socket"),
    ],
)
def test_wrong_usage_is_one_line_that_helps(args: list[str], expected: str, tmp_path: Path) -> None:
    nobody = tmp_path / "nobody.toml"
    nobody.write_text(f'[node]\nsocket = "{tmp_path}/nobody.sock"\n', encoding="utf-8")
    result = run(*args, env={"TIERCACHE_CONFIG": str(nobody)})
    assert result.exit_code in {Exit.USAGE, Exit.UNREACHABLE}
    assert (result.exit_code == Exit.UNREACHABLE) == (expected == "no node")
    assert expected in complaint(result)


@pytest.mark.parametrize("args", EVERY_QUESTION)
def test_no_node_says_how_to_start_one(args: list[str], tmp_path: Path) -> None:
    result = run(*args, "--socket", str(tmp_path / "none.sock"))
    assert result.exit_code == Exit.UNREACHABLE
    assert result.stdout == ""
    assert "tiercache serve" in complaint(result)


@pytest.mark.parametrize("args", EVERY_QUESTION)
def test_the_socket_comes_from_the_settings(args: list[str], settings_file: Path) -> None:
    result = run(*args, env={"TIERCACHE_CONFIG": str(settings_file)})
    assert str(settings_file.with_name("own.sock")) in complaint(result)
    settings_file.write_text("[node]\nsockt = 1\n", encoding="utf-8")
    result = run(*args, env={"TIERCACHE_CONFIG": str(settings_file)})
    assert result.exit_code == Exit.USAGE
    assert "node.sockt" in complaint(result)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(13, "no"), Exit.REFUSED),
        (FileNotFoundError(2, "no"), Exit.UNREACHABLE),
        (ConnectionRefusedError(111, "no"), Exit.UNREACHABLE),
        (NotADirectoryError(20, "no"), Exit.UNREACHABLE),
        (TimeoutError("timed out"), Exit.UNREACHABLE),
        (BlockingIOError(11, "no"), Exit.UNREACHABLE),
        (OSError("AF_UNIX path too long"), Exit.USAGE),
    ],
)
def test_what_a_failed_connection_means(error: OSError, expected: Exit) -> None:
    meant = unconnected("a.socket", error)
    assert exit_code(meant) == expected
    assert "a.socket" in str(meant)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError(""), Exit.USAGE),
        (LayoutError(""), Exit.USAGE),
        (UnavailableError(""), Exit.UNREACHABLE),
        (RefusedError(""), Exit.REFUSED),
        (ContentError(""), Exit.CONTENT),
        (StorageFault(Fault.IO, ""), Exit.CONTENT),
    ],
)
def test_every_error_has_its_code(error: TiercacheError, expected: Exit) -> None:
    assert exit_code(error) == expected


def test_config_prints_what_it_would_read(settings_file: Path) -> None:
    shown = run("config", "--config", str(settings_file))
    read_back = parse(tomllib.loads(shown.stdout), "stdout")
    assert read_back == parse(tomllib.loads(settings_file.read_text("utf-8")), "file")
    assert read_back.host.bytes == 64 << 20
    assert 'bytes = "64MiB"' in shown.stdout
    defaults = run("config", env={"TIERCACHE_CONFIG": ""})
    assert parse(tomllib.loads(defaults.stdout), "stdout") == Settings()


def test_config_as_json_and_as_a_document(settings_file: Path) -> None:
    shown = run("config", "--json", env={"TIERCACHE_CONFIG": str(settings_file)})
    expected = parse(tomllib.loads(settings_file.read_text("utf-8")), "file")
    assert parse(json.loads(shown.stdout), "stdout") == expected
    assert run("config", "--document").stdout == document()


def test_serve_runs_a_node_with_the_settings(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Settings] = []

    def run_node(settings: Settings) -> int:
        ran.append(settings)
        return 7

    serving = ModuleType("tiercache.runtime.serve")
    monkeypatch.setattr(serving, "run", run_node, raising=False)
    monkeypatch.setitem(sys.modules, "tiercache.runtime.serve", serving)
    assert run("serve", "--config", str(settings_file)).exit_code == 7
    assert ran[0].host.bytes == 64 << 20


class Played(NamedTuple):
    """What the CLI asks of a demo that was played."""

    holds: bool

    def told(self) -> dict[str, bool]:
        return {"holds": self.holds}


@pytest.mark.parametrize(("holds", "code"), [(True, Exit.OK), (False, Exit.CONTENT)])
def test_the_demo_ends_as_it_went(monkeypatch: pytest.MonkeyPatch, holds: bool, code: Exit) -> None:  # noqa: FBT001
    def play(console: Console) -> Played:
        console.print("the table")
        return Played(holds)

    demo = ModuleType("tiercache_transformers.demo")
    monkeypatch.setattr(demo, "play", play, raising=False)
    monkeypatch.setitem(sys.modules, "tiercache_transformers", ModuleType("tiercache_transformers"))
    monkeypatch.setitem(sys.modules, "tiercache_transformers.demo", demo)
    shown = run("demo")
    assert (shown.exit_code, shown.stdout) == (code, "the table\n")
    told = run("demo", "--json")
    assert (told.exit_code, json.loads(told.stdout)) == (code, {"holds": holds})
    assert run("demo", "--fast").exit_code == Exit.USAGE


def test_the_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python marks a module that must not be found.
    monkeypatch.setitem(sys.modules, "tiercache_transformers", None)
    monkeypatch.delitem(sys.modules, "tiercache_transformers.demo", raising=False)
    result = run("demo")
    assert result.exit_code == Exit.USAGE
    assert "make demo" in complaint(result)
    assert "transformers" in complaint(result)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "tiercache", "config", "--document"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (Exit.PIPE_CLOSED, "")


def test_a_disk_full_of_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tiercache", "config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode != Exit.OK
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


@given(st.text())
def test_plain_text_only_prints(name: str) -> None:
    shown = text.plain(name)
    assert shown.isprintable()
    if name.isprintable():
        assert shown == name


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
def test_json_is_plain_ascii_and_reads_back(value: object) -> None:
    shown = text.as_json(value)
    assert shown.isascii()
    assert shown.isprintable()
    assert json.loads(shown) == value


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (1 << 30, "1.0GiB"), (3 << 40, "3.0TiB")],
)
def test_sizes(nbytes: int, expected: str) -> None:
    assert text.size(nbytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-1, "-"), (0.4, "0s"), (59.9, "60s"), (90, "2m"), (7200, "2h"), (86_400, "1d")],
)
def test_ages(seconds: float, expected: str) -> None:
    assert text.age(seconds) == expected


def test_moments() -> None:
    assert text.when(0) == "1970-01-01 00:00:00+00:00"
    assert text.when(1e300) == "-"
