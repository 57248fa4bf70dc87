"""What routers hear of a real node over real sockets, whatever is lost on the way."""

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
import zmq
from typer.testing import CliRunner, Result

from tiercache.cli.admin import Admin
from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.client import Scope
from tiercache.client.residency import Residency
from tiercache.client.subscribing import Source, Subscriber
from tiercache.testing import towns, toy
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.nodes import START_S, Launcher, NewClient, NewNode, NodeProcess, eventually
from tiercache.testing.towns import Town
from tiercache.wire.residency import Ask, ask_frames, batch_of

TOKENS = 32
"""Two whole blocks: boundaries inside blocks are not told."""


class Listen(Protocol):
    def __call__(self, node: NodeProcess) -> Subscriber: ...


def source(node: NodeProcess) -> Source:
    return Source(f"ipc://{node.folder}/events", f"ipc://{node.folder}/replay")


@pytest.fixture
def node(new_node: NewNode) -> NodeProcess:
    """A node with a name that tells routers often."""
    made = new_node(cluster={"node": "n1"}, nvme={"write_back": "eager"})
    events, replay = source(made)
    made.set(events={"bind": events, "replay_bind": replay, "interval_s": 0.01})
    made.start()
    return made


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Make a subscriber to a node."""
    with ExitStack() as all_of_them:

        def make(node: NodeProcess) -> Subscriber:
            return all_of_them.enter_context(Subscriber([source(node)], Residency()))

        yield make


def found(router: Subscriber, number: int, *, memory: bool = False) -> int:
    """How deep the node can resume a prompt, as the router knows; after it heard what has come."""
    router.poll(0.01)
    router.index.check()
    prompt = toy.chain(number, TOKENS)
    digests = prompt.digests[1:]
    namespace = toy.NAMESPACE.digest
    return router.index.deepest(namespace, digests, toy.BLOCK_TOKENS, memory=memory).get("n1", 0)


def test_a_router_learns_what_is_stored_and_what_is_cleared(
    node: NodeProcess, new_client: NewClient, listen: Listen
) -> None:
    router, client = listen(node), new_client(node)
    toy.save(client, 1, TOKENS)
    assert eventually(lambda: found(router, 1) == TOKENS)
    assert found(router, 1, memory=True) == TOKENS
    assert found(router, 2) == 0
    # Who comes late knows as much.
    late = listen(node)
    assert eventually(lambda: found(late, 1) == TOKENS)
    assert toy.put(client, 1, TOKENS).lost == 0
    client.clear()
    for each in (router, late):
        assert eventually(lambda each=each: found(each, 1) == 0)  # type: ignore[misc]
        assert each.index.nodes() == {"n1": 0}
        assert each.invalid == 0


def test_what_leaves_memory_for_the_disk_is_told_as_slower(
    node: NodeProcess, new_client: NewClient, listen: Listen
) -> None:
    router, client = listen(node), new_client(node)
    toy.put(client, 1, TOKENS)
    assert eventually(lambda: found(router, 1, memory=True) == TOKENS)
    with Admin(str(node.socket), START_S) as admin:
        assert admin.evict("", "host", 0).objects
    assert eventually(lambda: found(router, 1, memory=True) == 0)
    assert found(router, 1) == TOKENS


def test_a_restart_is_seen_and_what_the_disk_kept_is_found_again(
    node: NodeProcess, new_client: NewClient, listen: Listen
) -> None:
    router, client = listen(node), new_client(node)
    toy.put(client, 1, TOKENS)
    assert eventually(lambda: found(router, 1) == TOKENS)
    node.kill()
    node.start()
    node.wait_scanned()
    # Until the new start has said something, what the earlier one said still counts.
    assert eventually(lambda: found(router, 1, memory=True) == 0 and found(router, 1) == TOKENS)
    assert node.stop() == 0
    # A node that stops in good order says so.
    assert eventually(lambda: found(router, 1) == 0)


def test_a_subscriber_that_reads_nothing_for_long_finds_what_it_missed(
    node: NodeProcess, new_client: NewClient, listen: Listen
) -> None:
    router, client = listen(node), new_client(node)
    assert eventually(lambda: bool(router.poll(0.01)))
    # More batches than wait for one subscriber anywhere.
    for number in range(200):
        toy.save(client, number, TOKENS)
        told = node.counter("told")
        assert eventually(lambda told=told: node.counter("told") > told)  # type: ignore[misc]
    client.clear()
    toy.save(client, 500, TOKENS)
    assert eventually(lambda: found(router, 500) == TOKENS)
    assert router.index.nodes() == {"n1": 1}


# --- where


def cli(node: NodeProcess, *args: str, stdin: str = "") -> Result:
    settings = str(node.folder / "settings.toml")
    return CliRunner().invoke(
        app, ["where", *args], env={"TIERCACHE_CONFIG": settings}, input=stdin
    )


def test_where_a_prompt_lies_is_told_without_a_trace(
    node: NodeProcess, new_client: NewClient
) -> None:
    client, prompt = new_client(node), toy.chain(1, TOKENS + 1)
    assert client.where(prompt).reason == "unknown_prefix"
    toy.put(client, 1, TOKENS)
    before = node.figures()
    found = client.where(prompt)
    assert [(place.boundary, place.tier) for place in found.places] == [(TOKENS, "host")]
    assert found.places[0].absent_bytes == 0
    assert client.where(prompt, scope=Scope(salt="other")).places[0].boundary == 0
    after = node.figures()
    for name in ("lookups", "lookup_tokens", "misses"):
        assert after.counters[name] == before.counters[name]
    for gauge in ("leases", "sights", "namespaces"):
        assert after.gauges[gauge] == before.gauges[gauge]
    with Admin(str(node.socket), START_S) as admin:
        assert admin.evict("", "host", 0).objects
    (place,) = client.where(prompt).places
    assert (place.boundary, place.tier) == (TOKENS, "nvme")
    assert place.absent_bytes == place.nbytes > 0


def test_the_command_takes_tokens_or_digests(
    node: NodeProcess, new_client: NewClient, tmp_path: Path
) -> None:
    assert toy.put(new_client(node), 1, TOKENS).waiting == 0
    tokens = [1 * 7919 + position for position in range(TOKENS + 1)]
    file = tmp_path / "prompt"
    file.write_text(json.dumps(tokens))
    namespace = toy.NAMESPACE.digest.hex()[:12]
    shown = cli(node, namespace, str(file))
    assert shown.exit_code == Exit.OK, shown.stderr
    assert shown.stdout.splitlines()[1].split()[:4] == ["(this", "one)", str(TOKENS), "host"]
    digests = "\n".join(digest.hex() for digest in toy.chain(1, TOKENS).digests[1:])
    told = json.loads(cli(node, namespace, "--digests", "--json", stdin=digests).stdout)
    assert told["block_tokens"] == toy.BLOCK_TOKENS
    assert [place["boundary"] for place in told["places"]] == [TOKENS]
    # With all its tokens the engine would have nothing to compute.
    exact = cli(node, namespace, "--json", stdin=" ".join(map(str, tokens[:TOKENS])))
    assert exact.exit_code == Exit.CONTENT
    assert "deeper than the limit" in exact.stderr
    assert cli(node, namespace, "--limit", "32", stdin=" ".join(map(str, tokens))).exit_code == 0
    assert cli(node, namespace, stdin="1 2 3").exit_code == Exit.CONTENT


@pytest.mark.parametrize(
    ("args", "stdin", "complaint"),
    [
        (["{namespace}"], "1 2 x", "x is no token"),
        (["{namespace}"], str(1 << 32), "is no token"),
        (["{namespace}", "--digests"], "ab" * 31, "is no digest"),
        (["{namespace}", "no/such/file"], "", "cannot be read"),
        (["{namespace}", "--codec", "x" * 20_000_000], "", "cannot be sent"),
        (["ffff"], "1", "0 namespaces of this node start with ffff"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    node: NodeProcess, new_client: NewClient, args: list[str], stdin: str, complaint: str
) -> None:
    assert new_client(node).status == "attached"
    namespace = toy.NAMESPACE.digest.hex()
    result = cli(node, *(arg.format(namespace=namespace) for arg in args), stdin=stdin)
    assert result.exit_code == Exit.USAGE
    assert result.stderr.count("\n") == 1
    assert complaint in result.stderr


def test_other_nodes_are_told_of_as_far_as_they_have_told(
    launcher: Launcher, tmp_path: Path
) -> None:
    etcd = EtcdServer(tmp_path)
    with ExitStack() as closing:
        closing.callback(etcd.kill)
        etcd.start()
        town = closing.enter_context(Town([etcd.url]))
        for name in "ab":
            town.add(name, launcher)
        assert town.settled("a", "b")
        town.saved("a", 1)
        assert town.heard("b", 1)
        prompt = toy.chain(1, towns.TOKENS + 1)
        here, there = town.client("b").where(prompt).places
        assert (here.node, here.boundary) == ("", 0)
        assert (there.node, there.boundary, there.tier) == ("a", towns.TOKENS, "peer")
        assert there.absent_bytes == there.nbytes > 0
        assert there.health == "well"
        assert town.nodes["b"].counter("peer_asked", "found") == 0, "nobody was asked"
        assert town.comes_to_resume("b", 1)
        here, there = town.client("b").where(prompt).places
        assert (here.boundary, here.tier, here.absent_bytes) == (towns.TOKENS, "host", 0)
        assert (there.absent_bytes, there.seconds) == (0, 0.0), "what it has is here by now"
        town.saved("a", 2)
        assert town.heard("b", 2)
        _, there = town.client("b").where(toy.chain(2, towns.TOKENS + 1)).places
        assert there.seconds > 0, "it has given something by now, so it is known how fast"


# --- whoever means harm


@pytest.mark.parametrize("delimited", [False, True])
def test_nonsense_asked_of_a_node_harms_nobody(
    node: NodeProcess, new_client: NewClient, listen: Listen, *, delimited: bool
) -> None:
    assert toy.put(new_client(node), 1, TOKENS).waiting == 0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(source(node).replay)
        start = [b""] if delimited else []
        for frames in (
            [b""],
            [bytes(8)],
            [bytes(7), b""],
            [bytes(8), b"\xff"],
            [b"", b"", b"", b""],
            [secrets.token_bytes(60) for _ in range(100)],
        ):
            asking.send_multipart([*start, *frames])
        asking.send_multipart([*start, *ask_frames(Ask(1 << 60, "another start"))])
        assert asking.poll(20_000)
        answer = asking.recv_multipart()
        assert answer[: len(start)] == start
        batch = batch_of(answer[len(start) :])
        assert (batch.node, batch.whole, len(batch.host)) == ("n1", True, 8)
        assert not asking.poll(50)
        # The node hangs up on who sends more than a question takes.
        asking.send_multipart([bytes(8), bytes(100_000)])
    finally:
        context.destroy(linger=0)
    assert node.counter("replays", "refused") == 6
    router = listen(node)
    assert eventually(lambda: found(router, 1) == TOKENS)


def test_whoever_asks_and_never_reads_costs_a_bounded_amount(
    node: NodeProcess, new_client: NewClient, listen: Listen
) -> None:
    assert toy.put(new_client(node), 1, TOKENS).waiting == 0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVHWM, 1)
        asking.connect(source(node).replay)
        for version in range(-1, 3000):
            if not asking.poll(1000, zmq.POLLOUT):
                break
            asking.send_multipart(ask_frames(Ask(version, "")))
        router = listen(node)
        assert eventually(lambda: found(router, 1) == TOKENS)
    finally:
        context.destroy(linger=0)


def test_an_address_that_is_taken_is_an_error_that_names_it(
    node: NodeProcess, new_node: NewNode
) -> None:
    other = new_node(metrics={"bind": ""})
    address = f"ipc://{other.folder}/missing/events"
    other.set(events={"bind": address, "replay_bind": source(other).replay})
    other.start(listening=False)
    assert other.wait() == 2
    assert f'events.bind "{address}" cannot be used' in other.said()
    assert node.running
