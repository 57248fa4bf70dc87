"""One owner per directory, and never somebody else's directory."""

import os
import stat
from pathlib import Path

import pytest

from tiercache.errors import ConfigError, Fault, StorageFault
from tiercache.tiers.directory import FORMAT_VERSION, Directory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "nvme"


def refusal(path: Path) -> str:
    before = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    with pytest.raises(ConfigError) as caught:
        Directory(path)
    if path.is_dir():
        assert sorted(entry.name for entry in path.iterdir()) == before
    return str(caught.value)


def test_a_new_directory_is_private(path: Path) -> None:
    directory = Directory(path)
    for folder in (path, directory.index, directory.segments):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in (path / "LOCK", path / "FORMAT"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    directory.close()
    directory.close()


def test_a_second_owner_is_refused_with_the_first_ones_pid(path: Path) -> None:
    first = Directory(path)
    text = refusal(path)
    assert str(path) in text
    assert f"process {os.getpid()}." in text
    first.close()
    Directory(path).close()


def test_a_stale_lock_never_blocks(path: Path) -> None:
    Directory(path).close()
    (path / "LOCK").write_text("4194304999999\n")
    directory = Directory(path)
    assert str(os.getpid()) in refusal(path)
    directory.close()


def test_a_directory_of_others_is_refused_untouched(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("my life")
    assert "'thesis.tex'" in refusal(path)
    assert (path / "thesis.tex").read_text() == "my life"


def test_a_fresh_filesystem_and_a_start_that_died_are_empty(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "lost+found").mkdir()
    (path / "LOCK").touch()
    (path / "FORMAT.new").write_text("tierc")
    Directory(path).close()
    assert (path / "FORMAT").read_text() == f"tiercache-nvme {FORMAT_VERSION}\n"


def test_strangers_beside_ours_are_left_alone(path: Path) -> None:
    Directory(path).close()
    (path / "README").write_text("who put this here?")
    Directory(path).close()
    assert (path / "README").read_text() == "who put this here?"


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 99, 0])
def test_another_format_is_refused(path: Path, version: int) -> None:
    Directory(path).close()
    (path / "FORMAT").write_text(f"tiercache-nvme {version}\n")
    text = refusal(path)
    assert f"format {version}" in text
    assert "Use the version that made it, or give an empty directory" in text


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"tiercache-nvme", b"x" * 5000])
def test_a_damaged_format_is_refused(path: Path, content: bytes) -> None:
    Directory(path).close()
    (path / "FORMAT").write_bytes(content)
    assert "is damaged" in refusal(path)


def test_a_file_is_no_directory(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("a file")
    assert "cannot be used" in refusal(path)
    assert path.read_text() == "a file"


def test_used_bytes_is_what_the_filesystem_says(path: Path) -> None:
    directory = Directory(path)
    empty = directory.used_bytes()
    (directory.segments / "a").write_bytes(bytes(100_000))
    with (directory.index / "b").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 50 * 4096)
    assert directory.used_bytes() - empty == 102_400 + 50 * 4096
    assert directory.index_bytes() >= 50 * 4096
    directory.close()


def test_a_device_that_cannot_be_looked_at_is_a_fault(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(path)

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fail)
        with pytest.raises(StorageFault) as caught:
            directory.index_bytes()
    assert caught.value.fault is Fault.IO
    directory.close()
