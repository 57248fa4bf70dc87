"""How a real node starts, is observed, and ends."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tiercache.testing import toy
from tiercache.testing.nodes import NewNode, NodeProcess, eventually
from tiercache.testing.speaker import Speaker
from tiercache.wire import messages as wire

SEED = 20261129


def metric(url: str, name: str) -> float:
    """Return one series of a scrape."""
    with urlopen(f"{url}/metrics", timeout=20) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no series {name}")


def url_of(node: NodeProcess) -> str:
    """Return where the node's last start serves metrics, once it does."""
    node.wait_until(lambda: "metrics=" in node.said())
    address = node.said().rsplit("metrics=", 1)[1].split()[0]
    host, port = address.rsplit(":", 1)
    node.wait_until(lambda: answers(host, int(port)))
    return f"http://{address}"


def answers(host: str, port: int) -> bool:
    """Whether HTTP is served there: the port is taken before anybody answers."""
    with socket.create_connection((host, port), 20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return sock.recv(12) == b"HTTP/1.1 200"


# --- HTTP


def test_metrics_are_there_before_any_traffic(new_node: NewNode) -> None:
    node = new_node(metrics={"bind": "127.0.0.1:0"})
    node.start()
    url = url_of(node)
    assert metric(url, 'tiercache_lookups_total{result="hit_host"}') == 0
    assert metric(url, "tiercache_ready") == 1
    assert metric(url, "tiercache_arena_bytes") == 8 << 20
    assert eventually(lambda: metric(url, "tiercache_nvme_scanned") == 1)
    assert eventually(lambda: metric(url, "tiercache_arena_prefaulted_bytes") == 8 << 20)
    with urlopen(f"{url}/ready", timeout=20) as answer:
        assert answer.read().startswith(b"ready: true\nnvme: ready\n")
    with Speaker(node.socket):
        assert metric(url, "tiercache_open_connections") == 1


@pytest.mark.parametrize("path", ["/", "/run_script", "/env", "/metrics/../../etc/passwd"])
def test_nothing_else_is_served_over_http(new_node: NewNode, path: str) -> None:
    node = new_node(metrics={"bind": "127.0.0.1:0"})
    node.start()
    with pytest.raises(HTTPError) as caught:
        urlopen(f"{url_of(node)}{path}", timeout=20)
    assert caught.value.code == 404
    caught.value.close()


def test_nonsense_over_http_does_not_hurt_the_cache(new_node: NewNode) -> None:
    node = new_node(metrics={"bind": "127.0.0.1:0"})
    node.start()
    host, port = url_of(node).removeprefix("http://").split(":")
    chance = random.Random(SEED)
    cases = [chance.randbytes(chance.randrange(1, 5000)) for _ in range(20)]
    cases += [
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1",
        b"POST /metrics HTTP/1.1\r\nHost: x",
        b"\x80\x04.",
    ]
    for content in cases:
        with socket.create_connection((host, int(port)), 20) as sock:
            sock.sendall(content + b"\r\n\r\n")
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(65536):
                    pass
    with Speaker(node.socket) as speaker:
        assert isinstance(speaker.ask(wire.Stats(speaker.call())), wire.Report)


def test_a_port_in_use_stops_the_start_with_its_name(new_node: NewNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        bind = f"127.0.0.1:{other.getsockname()[1]}"
        node = new_node(metrics={"bind": bind})
        node.start(listening=False)
        assert node.wait() == 2
        assert f'metrics.bind "{bind}" cannot be used' in node.said()
        assert not node.socket.exists()


# --- starting and ending


def test_one_node_per_socket_and_per_directory(node: NodeProcess, new_node: NewNode) -> None:
    same_socket = new_node(node={"socket": str(node.socket)}, nvme={"path": ""})
    same_socket.start(listening=False)
    assert same_socket.wait() == 2
    assert f"{node.socket} belongs to a node that is running" in same_socket.said()
    node.wait_scanned()
    same_disk = new_node(nvme={"path": str(node.nvme)})
    same_disk.start(listening=False)
    assert same_disk.wait() == 2
    assert f"{node.nvme} is in use by process {node.pid}" in same_disk.said()
    assert not same_disk.socket.exists()
    with Speaker(node.socket) as speaker:
        assert isinstance(speaker.ask(wire.Stats(speaker.call())), wire.Report)


def test_a_disk_that_cannot_be_had_ends_the_start_with_its_name(
    new_node: NewNode, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").touch()
    for path in (tmp_path / "file", tmp_path / "theirs", Path("/proc/tiercache")):
        node = new_node(nvme={"path": str(path)})
        node.start(listening=False)
        assert node.wait() == 2
        assert f"nvme.path {path}" in node.said()
        assert not node.socket.exists()
    assert sorted(tmp_path.rglob("*")) == [
        tmp_path / "file",
        tmp_path / "theirs",
        tmp_path / "theirs" / "precious",
    ]


@pytest.mark.parametrize("seed", range(2))
def test_any_signal_leaves_nothing_that_blocks_the_next_start(node: NodeProcess, seed: int) -> None:
    chance = random.Random(seed)
    for round_number in range(10):
        if not node.running:
            node.start()
        number = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM][round_number % 4]
        if chance.random() < 0.5:
            with Speaker(node.socket) as speaker:
                speaker.attach(toy.NAMESPACE, toy.LAYOUT)
        node.send(number)
        if round_number % 4 == 3:
            node.send(signal.SIGTERM)
            assert node.wait(5) in {0, 128 + signal.SIGTERM, -signal.SIGTERM}
        else:
            assert node.wait(5) == (-number if number is signal.SIGKILL else 0)
        assert number is signal.SIGKILL or not node.socket.exists()
    assert not [name for name in os.listdir("/dev/shm") if "tiercache" in name]


def test_the_start_says_what_was_decided(node: NodeProcess) -> None:
    node.wait_until(lambda: "event=started" in node.said())
    line = next(line for line in node.said().splitlines() if "event=started" in line)
    fields = dict(pair.split("=", 1) for pair in line.split())
    assert fields["socket"] == str(node.socket)
    assert fields["arena_bytes"] == str(8 << 20)
    assert fields["segments"] == "2"
    assert fields["nvme_cap_bytes"] == str(64 << 20)
    assert int(fields["memory_limit_bytes"]) > 8 << 20
    with Speaker(node.socket) as speaker:
        assert speaker.boot == fields["boot"]


def test_an_idle_node_is_idle(new_node: NewNode) -> None:
    node = new_node(metrics={"bind": "127.0.0.1:0"})
    node.start()
    url_of(node)
    with Speaker(node.socket) as speaker:
        speaker.attach(toy.NAMESPACE, toy.LAYOUT)
        node.wait_scanned()
        before = node.cpu_s()
        assert not eventually(lambda: False, timeout_s=3)
        assert node.cpu_s() - before <= 0.03


def test_the_command_line_starts_a_node(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[host]\nbytes = 7\n")
    ended = subprocess.run(
        [sys.executable, "-m", "tiercache", "serve", "--config", str(settings)],
        capture_output=True,
        timeout=60,
        check=False,
        cwd=Path(toy.__file__).parents[2],
    )
    assert ended.returncode == 2
    assert b"host.bytes" in ended.stderr
