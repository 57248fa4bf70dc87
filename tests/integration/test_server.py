"""The socket of a real node: who gets in, what it makes of nonsense, how it starts and ends."""

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest

from tests.integration.conftest import NewNode
from tiercache.cli.admin import Admin
from tiercache.state import Kind, Layout, Namespace, Part, Tensor
from tiercache.testing import toy
from tiercache.testing.nodes import NodeProcess, eventually
from tiercache.testing.speaker import Speaker
from tiercache.wire import messages as wire
from tiercache.wire.frames import frame

SEED = 20261129
AS_NOBODY = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect(sys.argv[1])
sys.stdout.buffer.write(sock.recv(65536))
"""


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


# --- attaching


def test_a_client_gets_the_arena_and_only_a_writer_may_write(node: NodeProcess) -> None:
    with Speaker(node.socket) as reader, Speaker(node.socket) as writer:
        attached = reader.attach(toy.NAMESPACE, toy.LAYOUT, write=False)
        assert attached == wire.Attached(2, [4 << 20, 4 << 20])
        assert len(reader.descriptors) == 2
        for descriptor in reader.descriptors:
            assert os.fstat(descriptor).st_size == 4 << 20
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(descriptor, b"x", 0)
        writer.attach(toy.NAMESPACE, toy.LAYOUT, write=True)
        assert len(writer.descriptors) == 4
        os.pwrite(writer.descriptors[3], b"through", 100)
        assert os.pread(reader.descriptors[1], 7, 100) == b"through"
        with pytest.raises(PermissionError):
            os.ftruncate(writer.descriptors[2], 0)


def test_a_layout_that_is_not_the_namespaces_is_refused(node: NodeProcess) -> None:
    part = Part("kv", Kind.KV, None, 16, 1, (Tensor("k", "float32", (64,), ("dim",)),))
    other = Layout((part, toy.STATE, toy.CONV), 16)
    with Speaker(node.socket) as speaker:
        refused = speaker.attach(toy.NAMESPACE, other)
        assert isinstance(refused, wire.Failed)
        assert refused.kind == "refused"
        assert "layout" in refused.text
        assert not speaker.descriptors
        again = speaker.attach(toy.NAMESPACE, toy.LAYOUT)
        assert isinstance(again, wire.Attached), "it may try with the right one"
        twice = speaker.attach(toy.NAMESPACE, toy.LAYOUT)
        assert isinstance(twice, wire.Failed)
        assert "already" in twice.text


def test_ranks_that_cannot_split_the_model_are_refused(node: NodeProcess) -> None:
    part = Part("kv", Kind.KV, None, 16, 6, (Tensor("k", "int8", (6, 4), ("head", "dim"), 0),))
    layout = Layout((part,), 16)
    namespace = Namespace.of(layout, model="m", weights="w", tokenizer="t")
    with Speaker(node.socket) as speaker:
        refused = speaker.ask(wire.Attach(speaker.call(), namespace, layout, 4, 0, False))
        assert isinstance(refused, wire.Failed)
        assert "'kv' has 6 units" in refused.text


def test_nothing_is_served_before_attaching_but_the_operators_questions(node: NodeProcess) -> None:
    with Speaker(node.socket) as speaker:
        refused = speaker.ask(wire.Reserve(speaker.call(), "r", "", "", []))
        assert isinstance(refused, wire.Failed)
        assert refused.kind == "refused"
        speaker.tell(wire.Commit([1]), wire.Release(["r"]))
        assert isinstance(speaker.ask(wire.Stats(speaker.call())), wire.Report)


def test_another_protocol_is_refused_by_name(node: NodeProcess) -> None:
    with Speaker(node.socket, hello=False) as speaker:
        refused = speaker.ask(wire.Hello(1, 99, "from the future"))
        assert isinstance(refused, wire.Failed)
        assert refused.kind == "refused"
        assert "99" in refused.text
        assert str(wire.PROTOCOL) in refused.text
        assert speaker.until_hung_up() == b""
    newer = msgspec.msgpack.encode(["hello", 1, 99, "a", "field", "more"])
    with Speaker(node.socket, hello=False) as speaker:
        speaker.sock.sendall(frame(newer))
        assert b"protocol 99" in speaker.until_hung_up()


# --- nonsense


def nonsense() -> dict[str, bytes]:
    """Return what may arrive on a socket that is not the protocol."""
    chance = random.Random(SEED)
    hello = frame(msgspec.msgpack.encode(wire.Hello(1, wire.PROTOCOL, "x")))
    cases = {f"random {n}": chance.randbytes(chance.randrange(1, 5000)) for n in range(40)}
    cases["http"] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    cases["pickle"] = frame(b"cos\nsystem\n(S'touch /tmp/canary'\ntR.")
    cases["huge frame"] = b"\xff\xff\xff\xff" + b"x" * 1000
    cases["empty frame"] = frame(b"")
    cases["no hello"] = frame(msgspec.msgpack.encode(wire.Stats(1)))
    cases["hello twice"] = hello + hello
    cases["deep nesting"] = frame(b"\x91" * 100_000)
    cases["number as text"] = frame(msgspec.msgpack.encode(["hello", "1", 1, "x"]))
    return cases


def test_nonsense_closes_that_connection_and_no_other(new_node: NewNode) -> None:
    node = new_node(metrics={"bind": "127.0.0.1:0"})
    node.start()
    url = url_of(node)
    cases = nonsense()
    with Speaker(node.socket) as other:
        for name, content in cases.items():
            with Speaker(node.socket, hello=False) as speaker:
                speaker.sock.sendall(content)
                if name.startswith("random"):
                    speaker.sock.shutdown(socket.SHUT_WR)  # It may look like the start of a frame.
                speaker.until_hung_up()
            assert isinstance(other.ask(wire.Stats(other.call())), wire.Report), name
    assert metric(url, "tiercache_protocol_errors_total") >= len(cases) - 40
    assert node.said().count("protocol error") < len(cases), "lines of one kind are held back"


def test_nonsense_after_the_handshake_closes_the_connection(node: NodeProcess) -> None:
    for content in (frame(b"\xc1"), frame(msgspec.msgpack.encode(["stats", 0]))):
        with Speaker(node.socket) as speaker:
            speaker.attach(toy.NAMESPACE, toy.LAYOUT)
            speaker.sock.sendall(content)
            assert b"protocol" in speaker.until_hung_up()
    with Admin(str(node.socket), 20) as admin:
        assert admin.stats().gauges["sessions"][""] == 0


def test_a_frame_in_single_bytes_is_understood(node: NodeProcess) -> None:
    with Speaker(node.socket, hello=False) as speaker:
        hello = msgspec.msgpack.encode(wire.Hello(1, wire.PROTOCOL, "slow"))
        for byte in frame(hello):
            speaker.sock.sendall(bytes([byte]))
        assert speaker.sock.recv(4096)


def test_values_out_of_range_are_answered_not_fatal(node: NodeProcess) -> None:
    odd = ["../../etc/passwd", "a" * 256, "\x00", "ключ", "%n%s", "a/b@c"]
    far = 2**63 - 1
    with Speaker(node.socket) as speaker:
        speaker.attach(toy.NAMESPACE, toy.LAYOUT)
        for name in [*odd, "", "b" * 257]:
            call = speaker.call()
            offers = [wire.Offer(-1, far, -far, name, b"", b"x", far, -far, far, b"", far)]
            assert speaker.ask(wire.Reserve(call, name, name, name, offers)).call == call
            call = speaker.call()
            wanted = [wire.Wanted(far, 0, 1, name, b"")]
            assert speaker.ask(wire.Fetch(call, name, name, name, wanted, -far)).call == call
            call = speaker.call()
            capture = wire.Capture(-far, -far)
            plan = wire.Plan(call, name, "", "", b"", far, -1, [], [name], capture, True)
            assert speaker.ask(plan).call == call
            call = speaker.call()
            plan = wire.Plan(call, name, "", "", b"x", 1, 1, [], [], capture, False)
            assert speaker.ask(plan).call == call
            speaker.tell(wire.Commit([far, -1]), wire.Cancel([0]), wire.Release([name, name]))
            for request in (
                wire.List(speaker.call(), -far, far, name),
                wire.Inspect(speaker.call(), name),
                wire.Evict(speaker.call(), "no such " + name, name, -far),
                wire.Clear(speaker.call(), "no such " + name),
                wire.Verify(speaker.call(), far, -far),
            ):
                assert speaker.ask(request).call == request.call
        assert isinstance(speaker.ask(wire.Stats(speaker.call())), wire.Report)


# --- limits


def test_other_users_are_refused_by_the_node_too(new_node: NewNode) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    node = new_node()
    node.start()
    # As if the operator had opened the path to all: the node itself must refuse.
    node.folder.chmod(0o755)
    node.socket.chmod(0o666)
    command = ["/usr/bin/env", "python3", "-S", "-c", AS_NOBODY, str(node.socket)]
    said = subprocess.run(
        command, user=65534, group=65534, capture_output=True, timeout=30, check=True, cwd="/"
    ).stdout
    assert b"user 65534 may not use this node" in said
    allowed = new_node(node={"admin_uids": "65534"})
    assert not allowed.running


def test_sessions_are_bounded_and_the_bound_frees_itself(new_node: NewNode) -> None:
    node = new_node(limits={"sessions_max": 3})
    node.start()
    speakers = [Speaker(node.socket) for _ in range(3)]
    with Speaker(node.socket, hello=False) as fourth:
        assert b"limits.sessions_max" in fourth.until_hung_up()
    speakers.pop().close()

    def let_in() -> bool:
        with Speaker(node.socket, hello=False) as speaker:
            speaker.tell(wire.Hello(1, wire.PROTOCOL, "x"))
            try:
                return isinstance(speaker.read(), wire.Welcome)
            except ConnectionError:
                return False

    assert eventually(let_in)
    for speaker in speakers:
        speaker.close()


def test_who_asks_and_does_not_read_is_let_go(new_node: NewNode) -> None:
    node = new_node(limits={"frame_bytes_max": 65536})
    node.start()
    with Speaker(node.socket) as slow, Speaker(node.socket) as other:
        slow.sock.settimeout(5)
        try:
            while True:
                slow.tell(*[wire.Stats(slow.call()) for _ in range(20)])
        except (OSError, RuntimeError):
            slow.until_hung_up()
        assert isinstance(other.ask(wire.Stats(other.call())), wire.Report)
    assert "slow reader" in node.said() or "protocol error" in node.said()


def test_descriptors_stay_flat_over_many_connections(node: NodeProcess) -> None:
    with Speaker(node.socket) as speaker:
        speaker.attach(toy.NAMESPACE, toy.LAYOUT)
    for _ in range(50):
        Speaker(node.socket).close()
    assert eventually(lambda: quiet(node))
    before = node.open_files()
    for number in range(2000):
        with Speaker(node.socket) as speaker:
            if number % 20 == 0:
                speaker.attach(toy.NAMESPACE, toy.LAYOUT)
    assert eventually(lambda: quiet(node) and node.open_files() <= before + 1)


def quiet(node: NodeProcess) -> bool:
    """Whether the node has noticed that everybody left but whoever asks."""
    with Admin(str(node.socket), 20) as admin:
        return admin.stats().gauges["sessions"][""] == 0


def test_a_node_out_of_descriptors_rests_and_goes_on(new_node: NewNode) -> None:
    node = new_node()
    node.start()
    node.wait_until(lambda: "nvme scanned" in node.said())
    limit = node.open_files() + 4
    subprocess.run(["prlimit", f"--nofile={limit}:", "--pid", str(node.pid)], check=True)
    before = node.cpu_s()
    crowd = [Speaker(node.socket, hello=False) for _ in range(20)]
    node.wait_until(lambda: "cannot accept" in node.said())
    for speaker in crowd:
        speaker.close()
    subprocess.run(["prlimit", "--nofile=20000:", "--pid", str(node.pid)], check=True)
    with Speaker(node.socket) as speaker:
        assert isinstance(speaker.ask(wire.Stats(speaker.call())), wire.Report)
    assert node.cpu_s() - before < 1.0, "it must not spin"


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
    for name, content in nonsense().items():
        with socket.create_connection((host, int(port)), 20) as sock:
            sock.sendall(content + b"\r\n\r\n")
            sock.shutdown(socket.SHUT_WR)
            try:
                while sock.recv(65536):
                    pass
            except ConnectionResetError:
                assert name, "it hung up at once"
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
    node.wait_until(lambda: "nvme scanned" in node.said())
    same_disk = new_node(nvme={"path": str(node.nvme)})
    same_disk.start(listening=False)
    assert same_disk.wait() == 2
    assert f"{node.nvme} is in use by process {node.pid}" in same_disk.said()
    assert not same_disk.socket.exists()
    with Speaker(node.socket) as speaker:
        assert isinstance(speaker.ask(wire.Stats(speaker.call())), wire.Report)


@pytest.mark.parametrize("seed", range(2))
def test_any_signal_leaves_nothing_that_blocks_the_next_start(node: NodeProcess, seed: int) -> None:
    chance = random.Random(seed)
    shared = set(os.listdir("/dev/shm"))
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
    assert set(os.listdir("/dev/shm")) == shared


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
        eventually(lambda: "nvme scanned" in node.said())
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
