"""Nodes that share an object store and nothing else: real nodes, a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.testing.nodes import Launcher, Table
from tiercache.testing.s3 import BUCKET, Gate, S3Server, why_not
from tiercache.testing.towns import Town

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
        "answer_s_max": 2.0,
        "transfer_s_max": 2.0,
    }
    with Town([], pool=pool) as made:
        made.add("a", launcher)
        made.add("b", launcher)
        yield made


def test_what_a_node_that_died_put_there_another_one_resumes(town: Town) -> None:
    town.pooled("a", 1)
    town.nodes["a"].kill()
    assert town.comes_to_resume("b", 1)
    b = town.nodes["b"]
    assert b.counter("pool_read_bytes") > 0
    assert b.counter("pool_asked", "found") == 1
