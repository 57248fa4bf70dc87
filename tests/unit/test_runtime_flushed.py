"""Which flushes a node carried out, over restarts."""

from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache.runtime.cluster.flushed import NAME, Flushed, is_digest

SPACES = ["aa" * 32, "bb" * 32]


def test_flushes_outlast_a_restart(tmp_path: Path) -> None:
    first = Flushed(str(tmp_path))
    first.load()
    assert first.due({SPACES[0]: 3}) == {SPACES[0]: 3}
    first.done(SPACES[0], 3)
    first.done(SPACES[0], 2)
    first.done(SPACES[1], 1)
    second = Flushed(str(tmp_path))
    second.load()
    assert second.all() == {SPACES[0]: 3, SPACES[1]: 1}
    assert second.due({SPACES[0]: 3, SPACES[1]: 2}) == {SPACES[1]: 2}


def test_a_node_without_a_disk_keeps_nothing() -> None:
    flushed = Flushed("")
    flushed.load()
    flushed.done(SPACES[0], 3)
    assert flushed.due({SPACES[0]: 3}) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"\xff", b'{"xyz": 3}', b'{"aa": 3}', b'{"' + b"AA" * 32 + b'": 3}',
        b'{"' + b"aa" * 32 + b'": -1}', b'{"' + b"aa" * 32 + b'": "3"}',
    ],
)  # fmt: skip
def test_what_is_no_account_of_a_flush_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    flushed = Flushed(str(tmp_path))
    flushed.load()
    assert flushed.all() == {}


def test_an_account_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(ConfigError, match=NAME):
        Flushed(str(tmp_path)).load()


def test_what_cannot_be_kept_is_not_done(tmp_path: Path) -> None:
    flushed = Flushed(str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="nowhere"):
        flushed.done(SPACES[0], 1)
    assert flushed.due({SPACES[0]: 1}) == {SPACES[0]: 1}


def test_what_a_digest_is() -> None:
    assert is_digest("0f" * 32)
    assert not any(map(is_digest, ("0F" * 32, "0f" * 31, "0f" * 33, "0g" * 32, "", " " * 64)))
