"""One engine whose ranks sit on two machines' nodes: they resume at one boundary that both have."""

import hashlib
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from tiercache.client import Blob, Client, Options, Plan, RanksOf, Scope, Wanted
from tiercache.device.kinds import Heads, latent, recurrent
from tiercache.state import Chain, Layout, Namespace
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.nodes import Launcher, eventually
from tiercache.testing.towns import ANSWER_S, BACK_S, DEADLINE_S, SLACK_S, Town

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)"
)

BLOCK = 16
RANKS = 2
SHALLOW, DEEP = 16, 48
LAYERS = range(2)
LAYOUT = Layout(
    (latent(LAYERS, 12, 4, BLOCK, "bfloat16"), recurrent(Heads(LAYERS, 8, 4, 6))), BLOCK
)
NAMESPACE = Namespace.of(LAYOUT, model="seats", weights="w", tokenizer="t")
SEATS = Scope(all_ranks=True, seats=(RanksOf("", 0, 1), RanksOf("b", 1, 2)))
_requests = count(1)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def town(etcd: EtcdServer) -> Iterator[Town]:
    with ExitStack() as closing:
        launcher = Launcher()
        closing.callback(launcher.close)
        town = closing.enter_context(Town([etcd.url]))
        for name in ("a", "b"):
            town.add(name, launcher)
        assert town.settled("a", "b")
        yield town


@pytest.fixture
def ranks(town: Town) -> Iterator[list[Client]]:
    """Rank 0 at node a, rank 1 at node b."""
    with ExitStack() as clients:
        found = []
        for rank, name in enumerate(("a", "b")):
            options = Options(
                name="tp2", ranks=RANKS, rank=rank, deadline_s=DEADLINE_S, retry_s=0.0
            )
            node = town.nodes[name]
            client = Client.attach(node.socket, NAMESPACE, LAYOUT, options=options)
            clients.callback(client.close)
            found.append(client)
        yield found


def chain(number: int) -> Chain:
    """Return a prompt that ends inside a block."""
    return Chain([number * 7919 + at for at in range(DEEP + 5)], BLOCK)


def blobs(rank: int, number: int, end: int) -> list[Blob]:
    """Return all that a rank must hold to resume a prompt at `end`."""
    found = []
    for part in LAYOUT.parts:
        shard = part.shards(RANKS)[rank]
        for start in [0] if part.is_snapshot else range(0, end, BLOCK):
            stop = end if part.is_snapshot else start + BLOCK
            name = f"{part.name}/{shard.start}/{number}/{stop}".encode()
            held = hashlib.shake_128(name).digest(part.nbytes(stop - start, shard))
            found.append(Blob(part.name, stop, memoryview(held), start))
    return found


def save(client: Client, rank: int, number: int, *ends: int) -> None:
    prompt = chain(number)
    for end in ends:
        done = client.save(f"save-{number}-{end}", prompt, blobs(rank, number, end))
        assert not done.declined, done
    assert client.flush().waiting == 0


def plan(head: Client, number: int) -> Plan:
    """Plan as rank 0 does for all ranks; it takes no longer than it may."""
    started = time.monotonic()
    found = head.plan(f"r{next(_requests)}", chain(number), scope=SEATS)
    assert time.monotonic() - started < ANSWER_S + SLACK_S, "waits for the other node too long"
    return found


def fetched(client: Client, rank: int, found: Plan, number: int) -> bool:
    """Whether a rank gets all that it must have at a plan's boundary. AssertionError for a wrong byte."""
    expected = blobs(rank, number, found.boundary)
    prompt = chain(number)
    wanted = [
        Wanted(b.part, prompt.digest_at(b.end), LAYOUT.part(b.part).shards(RANKS)[rank])
        for b in expected
    ]
    with client.fetch(found.request, wanted, wait_s=1.0) as holding:
        for blob, there in zip(expected, holding.blobs, strict=True):
            if there is None:
                return False
            assert bytes(there.data) == bytes(blob.data)
    return True


def resumed(ranks: list[Client], number: int) -> int:
    """Return the boundary at which both ranks have what they need."""
    found = plan(ranks[0], number)
    if not found.boundary:
        return 0
    assert all(fetched(client, rank, found, number) for rank, client in enumerate(ranks))
    ranks[0].release(found)
    return found.boundary


def test_both_ranks_resume_at_the_deepest_boundary_that_both_have(ranks: list[Client]) -> None:
    for rank, client in enumerate(ranks):
        save(client, rank, 1, SHALLOW, DEEP)
    assert resumed(ranks, 1) == DEEP
    save(ranks[0], 0, 2, SHALLOW, DEEP)
    save(ranks[1], 1, 2, SHALLOW)
    assert resumed(ranks, 2) == SHALLOW
    save(ranks[0], 0, 3, DEEP)
    save(ranks[1], 1, 3, SHALLOW)
    assert plan(ranks[0], 3).reason == "elsewhere"
    assert resumed(ranks, 4) == 0


def test_an_engine_that_says_that_all_its_ranks_sit_here_asks_nobody(
    town: Town, ranks: list[Client]
) -> None:
    options = Options(name="tp2", ranks=RANKS, rank=1, deadline_s=DEADLINE_S, retry_s=0.0)
    save(ranks[0], 0, 1, DEEP)
    with Client.attach(town.nodes["a"].socket, NAMESPACE, LAYOUT, options=options) as second:
        save(second, 1, 1, DEEP)
        scope = Scope(all_ranks=True, seats=(RanksOf("", 0, RANKS),))
        assert ranks[0].plan("r", chain(1), scope=scope).boundary == DEEP


def test_a_node_that_freezes_dies_or_forgets_is_a_miss_and_comes_back(
    town: Town, ranks: list[Client]
) -> None:
    for rank, client in enumerate(ranks):
        save(client, rank, 1, DEEP)
    assert resumed(ranks, 1) == DEEP
    other = town.nodes["b"]
    other.send(signal.SIGSTOP)
    try:
        assert (plan(ranks[0], 1).boundary, plan(ranks[0], 1).reason) == (0, "elsewhere")
    finally:
        other.send(signal.SIGCONT)
    assert town.settled("a", "b")
    assert eventually(lambda: resumed(ranks, 1) == DEEP, BACK_S)
    other.kill()
    assert plan(ranks[0], 1).boundary == 0
    other.start()
    assert town.settled("a", "b")
    assert resumed(ranks, 1) in {0, DEEP}, "as far as it was on its disk by then"
    save(ranks[1], 1, 1, DEEP)
    assert eventually(lambda: resumed(ranks, 1) == DEEP, BACK_S)
