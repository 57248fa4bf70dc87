"""One live owner per socket, and nothing left that blocks the next start."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache.runtime.listening import Listener, listen_http

DIES = """
import os, sys
from pathlib import Path
from tiercache.runtime.listening import Listener
Listener(Path(sys.argv[1]))
os._exit(0)
"""


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def test_only_this_user_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "new" / "node.sock"
    listener = Listener(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert connects(path)
    listener.close()
    assert not path.exists()


def test_a_shared_socket_lets_everybody_connect_and_nobody_look_around(tmp_path: Path) -> None:
    path = tmp_path / "new" / "node.sock"
    listener = Listener(path, shared=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    assert stat.S_IMODE(path.with_name("node.sock.lock").stat().st_mode) == 0o600
    listener.close()


@pytest.mark.parametrize("shared", [False, True])
def test_the_umask_is_as_before(tmp_path: Path, shared: bool) -> None:  # noqa: FBT001
    before = os.umask(0o022)
    Listener(tmp_path / "s", shared=shared).close()
    assert os.umask(before) == 0o022


def test_a_path_in_use_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = Listener(path)
    with pytest.raises(ConfigError, match=f"{path} belongs to a node that is running"):
        Listener(path)
    assert connects(path)
    listener.close()
    listener.close()
    Listener(path).close()


def test_what_a_dead_node_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    subprocess.run([sys.executable, "-c", DIES, str(path)], check=True, timeout=30)
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert not connects(path)
    listener = Listener(path)
    assert connects(path)
    listener.close()


def test_another_program_that_listens_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="another program listens there"):
            Listener(path)
        assert connects(path)


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        Listener(path)
    assert path.read_text() == "mine"


def test_a_refused_path_is_not_kept_locked(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError):
        Listener(path)
    path.unlink()
    Listener(path).close()


def test_a_path_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "s"
    with pytest.raises(ConfigError, match=r"node\.socket .*/file/s cannot be used"):
        Listener(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        Listener(tmp_path / "theirs" / "s")


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf'metrics\.bind "127\.0\.0\.1:{port}"'):
            listen_http(f"127.0.0.1:{port}")


def test_no_bind_is_no_metrics_and_port_0_a_free_one() -> None:
    assert listen_http("") is None
    sock = listen_http("127.0.0.1:0")
    assert sock is not None
    assert sock.getsockname()[1] > 0
    sock.close()
