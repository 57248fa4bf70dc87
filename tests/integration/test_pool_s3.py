"""Nodes that share an object store and nothing else: real nodes, a real server, and all that can happen to
it: no wrong byte, no call beyond its deadline, and reuse is back."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.testing import toy
from tiercache.testing.nodes import Launcher, Table, eventually
from tiercache.testing.recall import episode
from tiercache.testing.s3 import BUCKET, Change, Gate, S3Server, why_not
from tiercache.testing.towns import BACK_S, SLACK_S, TOKENS, Town
from tiercache.tiers.remote_sealed import HEADER_BYTES
from tiercache_transformers.demo_engine import Open
from tiercache_transformers.demo_processes import EngineProcess

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    made = S3Server(tmp_path_factory.mktemp("s3"))
    made.start()
    yield made
    made.kill()


@pytest.fixture
def gate(server: S3Server) -> Iterator[Gate]:
    made = Gate(server.port)
    yield made
    made.close()


@pytest.fixture
def town(gate: Gate, launcher: Launcher, tmp_path: Path) -> Iterator[Town]:
    """Nodes a and b, which have nothing in common but the pool."""
    secret = tmp_path / "secret"
    secret.write_text("AKIASECRETSECRET")
    pool: Table = {
        "kind": "s3",
        "s3_bucket": BUCKET,
        "s3_endpoint": gate.url,
        "s3_access_key_file": str(secret),
        "s3_secret_key_file": str(secret),
        "secret_file": str(secret),
        "answer_s_max": 1.0,  # Shorter than a client's deadline: a plan waits for it.
        "transfer_s_max": 2.0,
    }
    with Town([], pool=pool) as made:
        made.add("a", launcher)
        made.add("b", launcher)
        yield made


STATE_BYTES = toy.STATE.nbytes(0, toy.STATE.whole) + HEADER_BYTES
"""What the recurrent state of a boundary takes there; nothing else is as large."""


def stored(server: S3Server, nbytes: int) -> list[str]:
    """Return the names of the objects of that size that are there."""
    import obstore

    pages = obstore.list(bucket(server))
    return [each["path"] for page in pages for each in page if each["size"] == nbytes]


def bucket(server: S3Server) -> "S3Store":
    from obstore.store import S3Store

    config: S3Config = {
        "endpoint": server.url, "access_key_id": "any", "secret_access_key": "any",
        "region": "us-east-1",
    }  # fmt: skip
    return S3Store(BUCKET, config=config, client_options={"allow_http": True})


def flipped(answer: bytes) -> bytes:
    """The last bit of each body is another one."""
    return answer[:-1] + bytes([answer[-1] ^ 1])


def cut(answer: bytes) -> bytes:
    """The connection breaks in the middle of the body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n" + body[: len(body) // 2]


def silent(answer: bytes) -> None:
    """No answer ever comes."""
    del answer


def test_what_a_node_that_died_put_there_another_one_resumes(town: Town) -> None:
    town.pooled("a", 1)
    town.nodes["a"].kill()
    assert town.comes_to_resume("b", 1)
    b = town.nodes["b"]
    assert b.counter("pool_read_bytes") > 0
    assert b.counter("pool_asked", "found") == 1
    assert town.resumed("b", 1) == TOKENS, "it is here now"
    assert b.counter("pool_asked", "found") == 1
    assert town.resumed("b", 2) == 0
    assert sum(b.figures().counters["pool_asked"].values()) == 1, (
        "what is not there is not asked for"
    )
    shown = CliRunner().invoke(app, ["members", "--socket", str(b.socket)])
    assert (shown.exit_code, "s3" in shown.stdout, "ready" in shown.stdout) == (0, True, True)


def test_the_trained_model_goes_on_from_there_bit_for_bit(town: Town) -> None:
    task = episode(1, tokens=888, pairs=24)  # Its end is one token beyond a block's.
    prompt, value = task.asked(5), task.answers[4]
    with EngineProcess() as engine:
        for name in "ab":
            order = Open(name, "mla1_kda2", str(town.nodes[name].socket))
            assert engine.open(order) == "attached"
        engine.open(Open("alone", "mla1_kda2"))
        alone = engine.ask("alone", prompt, 8)
        a, b = town.nodes["a"], town.nodes["b"]
        assert engine.ask("a", prompt, 8).tokens[0] == value
        assert eventually(
            lambda: (
                engine.ask("a", prompt, 8).reused == len(prompt) - 1
                and a.counter("deposits", "stored") > 0
            ),
            BACK_S,
        )
        a.kill()
        assert eventually(lambda: b.gauge("pool_boundaries") > 0, BACK_S)
        warm = engine.ask("b", prompt, 8)
        assert warm.reused == len(prompt) - 1, warm.reason
        assert (warm.tokens, warm.logits) == (alone.tokens, alone.logits)
        assert b.counter("pool_read_bytes") > 0


def test_a_server_that_dies_costs_misses_and_comes_back(town: Town, server: S3Server) -> None:
    town.pooled("a", 1)
    town.pooled("a", 2)
    b = town.nodes["b"]
    town.client("b")
    assert eventually(lambda: b.gauge("pool_boundaries") == 2, BACK_S)
    server.kill()
    try:
        assert town.resumed("b", 1) == 0
        assert eventually(lambda: b.gauge("pool_unreachable") == 1, BACK_S)
        for _ in range(5):
            assert town.resumed("b", 2) == 0
        assert b.gauge("pool_sick") == 1
        started = time.monotonic()
        assert town.resumed("b", 1) == 0
        assert time.monotonic() - started < SLACK_S, "nobody waits for it any more"
        assert town.resumed("a", 1) == TOKENS, "what is here is here"
    finally:
        server.start()  # With nothing in it.
    assert eventually(lambda: b.gauge("pool_unreachable") == 0, BACK_S)
    assert eventually(lambda: b.gauge("pool_boundaries") == 0, BACK_S), "it knows that all is lost"
    assert eventually(
        lambda: town.resumed("a", 1) == TOKENS and b.gauge("pool_boundaries") == 1, BACK_S
    ), "it is put there again"
    assert town.comes_to_resume("b", 1)


def test_a_set_that_lost_a_part_is_a_shorter_boundary(town: Town, server: S3Server) -> None:
    """Prompt 1 ends at two boundaries, and each goes there; then the deeper one loses its state."""
    prompt, client, a = toy.chain(1, TOKENS + 1), town.client("a"), town.nodes["a"]
    for end in (16, TOKENS):
        before, held = a.counter("deposits", "stored"), set(stored(server, STATE_BYTES))
        client.save(f"save-{end}", prompt, toy.state(prompt, end))
        client.flush()
        requests = (f"{end}-{number}" for number in itertools.count())

        def is_stored(end: int = end, before: int = before, ids: Iterator[str] = requests) -> bool:
            with client.load(client.plan(next(ids), prompt, limit=end)) as loaded:
                assert loaded.boundary == end
            return a.counter("deposits", "stored") > before

        assert eventually(is_stored, BACK_S)
    (deeper,) = set(stored(server, STATE_BYTES)) - held
    town.client("b")
    assert eventually(lambda: town.nodes["b"].gauge("pool_boundaries") == 2, BACK_S)
    import obstore

    obstore.delete(bucket(server), [deeper])
    assert town.resumed("b", 1) == 16
    assert town.resumed("b", 1) == 16


@pytest.mark.parametrize("change", [flipped, cut, silent], ids=["flipped", "cut", "silent"])
def test_bytes_that_do_not_arrive_whole_are_a_miss(town: Town, gate: Gate, change: Change) -> None:
    town.pooled("a", 1)
    b = town.nodes["b"]
    town.client("b")
    assert eventually(lambda: b.gauge("pool_boundaries") == 1, BACK_S)
    gate.change = change
    try:
        assert town.resumed("b", 1) == 0
    finally:
        gate.change = None
    faults = b.figures().counters["pool_faults"]
    asked = b.figures().counters["pool_asked"]
    assert sum(faults.values()) + asked["failed"] + asked["late"] + asked["not_found"] > 0
    assert town.comes_to_resume("b", 1, 4 * BACK_S)


def test_a_clear_on_one_node_is_one_everywhere(town: Town) -> None:
    town.pooled("a", 1)
    assert town.comes_to_resume("b", 1)
    a, b = town.nodes["a"], town.nodes["b"]
    digest = toy.NAMESPACE.digest.hex()
    done = CliRunner().invoke(app, ["clear", digest, "--yes", "--socket", str(a.socket)])
    assert done.exit_code == Exit.OK, done.stderr
    assert town.resumed("a", 1) == 0
    assert eventually(lambda: b.gauge("objects", "host") == 0, BACK_S)
    assert town.resumed("b", 1) == 0
    b.stop()
    b.start()
    b.wait_scanned()
    assert town.resumed("b", 1) == 0
    town.pooled("a", 1)
    assert town.comes_to_resume("b", 1)
    refused = CliRunner().invoke(
        app, ["clear", digest, "--yes", "--cluster", "--socket", str(a.socket)]
    )
    assert refused.exit_code == Exit.REFUSED
    assert "clears both" in refused.stderr


def test_a_clear_that_the_pool_does_not_hear_of_says_so(town: Town, server: S3Server) -> None:
    town.pooled("a", 1)
    a = town.nodes["a"]
    server.kill()
    try:
        digest = toy.NAMESPACE.digest.hex()
        done = CliRunner().invoke(app, ["clear", digest, "--yes", "--socket", str(a.socket)])
        assert done.exit_code == Exit.CONTENT, done.stdout
        assert "pool" in done.stderr
        assert town.resumed("a", 1) == 0
    finally:
        server.start()
