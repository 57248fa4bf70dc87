"""The command against real nodes: what it shows is so, and what it does is done."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tiercache.cli.app import app
from tiercache.cli.documents import Object, Statistics, Verification
from tiercache.cli.exits import Exit
from tiercache.cli.replies import Evicted
from tiercache.client import Client, Options, Plan
from tiercache.errors import RefusedError
from tiercache.state import Namespace
from tiercache.testing import toy
from tiercache.testing.nodes import NodeProcess, eventually

BLOCKS = 3
TOKENS = BLOCKS * toy.BLOCK_TOKENS
CHAIN = toy.chain(1, TOKENS + 1)
OBJECTS = len(toy.state(CHAIN, TOKENS))
HOSTILE = "kimi\x1b]0;own\x07[bold]"
NAMESPACE = Namespace.of(toy.LAYOUT, model=HOSTILE, weights="w1", tokenizer="t1")
OPTIONS = Options(name="engine-0", deadline_s=10.0, required=True)

NewNode = Callable[..., NodeProcess]
Told = TypeVar("Told")


def run(node: NodeProcess, *args: str) -> Result:
    """Run a command as somebody would whose environment names the node's settings."""
    settings = str(node.folder / "settings.toml")
    return CliRunner().invoke(app, list(args), env={"TIERCACHE_CONFIG": settings})


def tell(node: NodeProcess, kind: type[Told], *args: str) -> Told:
    """Return the document that a command prints."""
    result = run(node, *args, "--json")
    assert result.exit_code == Exit.OK, f"{result.stderr}\n{node.said()}"
    return msgspec.json.decode(result.stdout, type=kind)


def objects(node: NodeProcess, *args: str) -> list[Object]:
    return tell(node, list[Object], "ls", *args)


@contextmanager
def attached(node: NodeProcess, namespace: Namespace = NAMESPACE) -> Iterator[Client]:
    client = Client.attach(node.socket, namespace, toy.LAYOUT, options=OPTIONS)
    try:
        yield client
    finally:
        client.close()


def fill(node: NodeProcess, namespace: Namespace = NAMESPACE, *, durable: bool = False) -> None:
    """Have the node hold the toy's state at TOKENS, once its disk is there."""
    assert eventually(lambda: tell(node, Statistics, "stats").node.nvme == "ready")
    with attached(node, namespace) as client:
        for request in ("first", "second"):  # A second visit earns a place on disk.
            client.plan(request, CHAIN).__exit__(None, None, None)
        saved = client.save("second", CHAIN, toy.state(CHAIN, TOKENS))
        assert (saved.stored, saved.declined) == (OBJECTS, {})
        assert client.flush(durable=durable).waiting == 0


def test_what_is_held_is_shown(node: NodeProcess) -> None:
    fill(node, durable=True)
    found = objects(node)
    assert len(found) == OBJECTS
    assert {item.kind for item in found} == {"kv", "recurrent", "conv"}
    assert {item.model for item in found} == {HOSTILE}
    assert all(item.tiers == ["host", "nvme"] for item in found)
    key = found[0].key
    assert [item.key for item in objects(node, key)] == [key]
    lines = run(node, "ls").stdout.splitlines()
    assert len(lines) == 1 + OBJECTS
    for line, item in zip(lines[1:], found, strict=True):
        assert item.key.startswith(line.split()[0])
    shown = run(node, "inspect", key)
    assert shown.exit_code == Exit.OK, shown.stderr
    first = found[0]
    for said in (first.namespace, first.digest, first.layout, first.checksum, first.writer):
        assert said in shown.stdout
    assert "\x1b" not in shown.stdout
    assert r"kimi\x1b]0;own\x07[bold]" in shown.stdout


def test_the_figures_are_those_of_the_work_done(node: NodeProcess) -> None:
    fill(node, durable=True)
    with attached(node) as client, client.plan("third", CHAIN) as plan:
        assert plan.boundary == TOKENS
        found = tell(node, Statistics, "stats")
        assert found.gauges["leases"][""] == OBJECTS
    assert found.counters["lookups"] == {
        "hit_host": 1, "hit_nvme": 0, "miss": 2, "declined": 0, "aborted": 0
    }  # fmt: skip
    assert found.hit_rate.lookups == pytest.approx(1 / 3)
    assert found.gauges["objects"] == {"host": OBJECTS, "nvme": OBJECTS}
    shown = run(node, "stats").stdout
    assert "33.3% of lookups" in shown
    assert NAMESPACE.digest.hex()[:12] in shown


def test_evict_spares_what_is_leased(node: NodeProcess) -> None:
    fill(node, durable=True)
    with attached(node) as client, client.plan("third", CHAIN) as plan:
        kept = tell(node, Evicted, "evict", "--tier", "host")
        assert kept == Evicted(0, 0, OBJECTS)
        assert list(toy.wrong(plan, CHAIN)) == []
    assert tell(node, Evicted, "evict", "--tier", "host", "--bytes", "1").objects == 1
    assert tell(node, Evicted, "evict", "--tier", "host").objects == OBJECTS - 1
    assert all(item.tiers == ["nvme"] for item in objects(node))
    assert loaded(node).boundary == TOKENS
    part = objects(node)[0].key
    assert tell(node, Evicted, "evict", part).objects == 1
    assert run(node, "inspect", part).exit_code == Exit.CONTENT


def loaded(node: NodeProcess) -> Plan:
    """Resume in a session of its own; the plan is released, and was right."""
    with attached(node) as client, client.load(client.plan("again", CHAIN), wait_s=10.0) as plan:
        assert list(toy.wrong(plan, CHAIN)) == []
        return plan


def test_clear_drops_one_namespace_for_good(node: NodeProcess) -> None:
    other = Namespace.of(toy.LAYOUT, model="other", weights="w1", tokenizer="t1")
    fill(node, durable=True)
    fill(node, other, durable=True)
    assert run(node, "clear", other.digest.hex()).exit_code == Exit.USAGE
    assert len(objects(node)) == 2 * OBJECTS
    assert tell(node, Evicted, "clear", other.digest.hex()[:16], "--yes").objects == OBJECTS
    node.kill()
    node.start()
    assert eventually(lambda: len(objects(node)) == OBJECTS)
    assert {item.namespace for item in objects(node)} == {NAMESPACE.digest.hex()}
    assert run(node, "clear", other.digest.hex(), "--yes").exit_code == Exit.CONTENT
    assert run(node, "clear", "--yes").exit_code == Exit.OK
    assert objects(node) == []


def test_verify_finds_the_flipped_bit(node: NodeProcess) -> None:
    fill(node, durable=True)
    whole = tell(node, Verification, "verify")
    assert (whole.checked, whole.failed) == (2 * OBJECTS, [])
    flip_stored_bytes(node)
    result = run(node, "verify", "--json")
    assert result.exit_code == Exit.CONTENT
    assert "not what was sealed" in result.stderr
    failed = msgspec.json.decode(result.stdout, type=Verification).failed
    assert failed
    assert {(copy.tier, copy.fault) for copy in failed} == {("nvme", "damaged")}
    assert tell(node, Statistics, "stats").counters["damaged"]["nvme"] == len(failed)
    assert loaded(node).boundary == TOKENS  # The copies in memory are as good as ever.
    assert tell(node, Verification, "verify").failed == []


def flip_stored_bytes(node: NodeProcess) -> None:
    """Damage the first byte of every object on disk, at the places that `ls` names."""
    places = [item.nvme for item in objects(node)]
    files = {path.stat().st_size: path for path in node.nvme.rglob("*") if path.is_file()}
    (segment,) = [path for size, path in files.items() if size >= 1 << 20]
    with segment.open("r+b") as file:
        for place in places:
            assert place is not None
            file.seek(place.offset)
            byte = file.read(1)[0]
            file.seek(place.offset)
            file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def test_a_node_that_stands_still_costs_its_deadline(node: NodeProcess) -> None:
    node.send(signal.SIGSTOP)
    result = run(node, "stats", "--deadline", "0.1")
    assert result.exit_code == Exit.UNREACHABLE
    assert result.stderr.count("\n") == 1
    node.send(signal.SIGCONT)
    assert run(node, "stats").exit_code == Exit.OK
    node.kill()
    assert run(node, "stats").exit_code == Exit.UNREACHABLE


def test_a_full_node_says_which_limit(new_node: NewNode) -> None:
    node = new_node(limits={"sessions_max": 1})
    node.start()
    with ExitStack() as clients:

        def occupy() -> bool:
            # The probe that found the node listening may not have been let go of yet.
            try:
                clients.enter_context(attached(node))
            except RefusedError:
                return False
            return True

        assert eventually(occupy)
        result = run(node, "stats")
    assert result.exit_code == Exit.REFUSED
    assert "limits.sessions_max" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_serve_from_the_command_line(tmp_path: Path, new_node: NewNode) -> None:
    """As an operator does it: two processes, signals and exit codes."""
    socket = new_node().folder / "own"
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[node]\nsocket = "{socket}"\n[host]\nbytes = "8MiB"\n[metrics]\nbind = ""\n',
        encoding="utf-8",
    )
    environment = {**os.environ, "TIERCACHE_CONFIG": str(settings)}

    def command(*args: str) -> list[str]:
        return [sys.executable, "-m", "tiercache", *args]

    def ask(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*args), env=environment, capture_output=True, text=True, check=False
        )

    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command("serve"), env=environment, stderr=log, stdout=log) as serving,
    ):
        try:
            assert eventually(lambda: ask("stats").returncode == Exit.OK)
            second = ask("serve")
            assert second.returncode == Exit.USAGE, second.stderr
            assert "Traceback" not in second.stderr
            assert json.loads(ask("stats", "--json").stdout)["node"]["pid"] == serving.pid
            assert json.loads(ask("ls", "--json").stdout) == []
        finally:
            serving.terminate()
        assert serving.wait(20) == Exit.OK
    assert ask("stats").returncode == Exit.UNREACHABLE
