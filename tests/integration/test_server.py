"""The socket of a real node: who gets in, what it makes of nonsense, how it starts and ends."""

import os
import random
import socket
import subprocess

import msgspec
import pytest

from tiercache.state import Kind, Layout, Namespace, Part, Tensor
from tiercache.testing import toy
from tiercache.testing.nodes import NewNode, NodeProcess, eventually
from tiercache.testing.speaker import Speaker
from tiercache.wire import ClientSide
from tiercache.wire import messages as wire
from tiercache.wire.frames import frame

SEED = 20261129
AS_NOBODY = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect(sys.argv[1])
if said := sys.stdin.buffer.read():  # Whoever is refused may be so before the first byte.
    sock.sendall(said)
sys.stdout.buffer.write(sock.recv(65536))
"""


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
        assert 'event="attach refused"' in node.said()
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


def test_nonsense_closes_that_connection_and_no_other(node: NodeProcess) -> None:
    cases = nonsense()
    with Speaker(node.socket) as other:
        for name, content in cases.items():
            with Speaker(node.socket, hello=False) as speaker:
                speaker.sock.sendall(content)
                if name.startswith("random"):
                    speaker.sock.shutdown(socket.SHUT_WR)  # It may look like the start of a frame.
                speaker.until_hung_up()
            assert isinstance(other.ask(wire.Stats(other.call())), wire.Report), name
    assert node.counter("protocol_errors") >= len(cases) - 40
    assert node.said().count("protocol error") < len(cases), "lines of one kind are held back"


def test_nonsense_after_the_handshake_closes_the_connection(node: NodeProcess) -> None:
    for content in (frame(b"\xc1"), frame(msgspec.msgpack.encode(["stats", 0]))):
        with Speaker(node.socket) as speaker:
            speaker.attach(toy.NAMESPACE, toy.LAYOUT)
            speaker.sock.sendall(content)
            assert b"protocol" in speaker.until_hung_up()
    assert node.gauge("sessions") == 0


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


def test_a_notice_that_names_too_much_ends_the_connection(new_node: NewNode) -> None:
    node = new_node(limits={"batch_max": 100})
    node.start()
    with Speaker(node.socket) as speaker:
        speaker.attach(toy.NAMESPACE, toy.LAYOUT)
        speaker.tell(wire.Commit([*range(100)]))
        assert isinstance(speaker.ask(wire.Stats(speaker.call())), wire.Report)
        speaker.tell(wire.Commit([*range(101)]))
        with pytest.raises(ConnectionError):
            speaker.read()
    assert "101 items at once, 100 at most" in node.said()


# --- limits


def as_nobody(node: NodeProcess, said: bytes = b"") -> bytes:
    """Connect as the user 65534, say something, and return what the node answers."""
    command = ["/usr/bin/env", "python3", "-S", "-c", AS_NOBODY, str(node.socket)]
    return subprocess.run(
        command,
        input=said,
        user=65534,
        group=65534,
        capture_output=True,
        timeout=30,
        check=True,
        cwd="/",
    ).stdout


def test_other_users_are_refused_by_the_node_too(new_node: NewNode) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    node = new_node()
    node.start()
    # As if the operator had opened the path to all: the node itself must refuse.
    node.folder.chmod(0o755)
    node.socket.chmod(0o666)
    assert b"user 65534 may not use this node" in as_nobody(node)


def test_users_that_the_settings_name_are_served_at_the_same_socket(new_node: NewNode) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    node = new_node(node={"admin_uids": (65534,)})
    node.start()
    node.folder.chmod(0o711)
    hello = ClientSide(1 << 16).send(wire.Hello(1, wire.PROTOCOL, "nobody"))
    assert b"welcome" in as_nobody(node, hello)


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
    assert "slow reader" in node.said()


def test_descriptors_stay_flat_over_many_connections(node: NodeProcess) -> None:
    with Speaker(node.socket) as speaker:
        speaker.attach(toy.NAMESPACE, toy.LAYOUT)
    for _ in range(50):
        Speaker(node.socket).close()
    assert eventually(lambda: node.gauge("sessions") == 0)
    before = node.open_files()
    for number in range(2000):
        with Speaker(node.socket) as speaker:
            if number % 20 == 0:
                speaker.attach(toy.NAMESPACE, toy.LAYOUT)
    assert eventually(lambda: node.open_files() <= before + 1)


def test_a_node_out_of_descriptors_rests_and_goes_on(new_node: NewNode) -> None:
    node = new_node()
    node.start()
    node.wait_scanned()
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
