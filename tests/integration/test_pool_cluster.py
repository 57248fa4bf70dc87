"""Nodes of a cluster that also have a pool: who is asked, and what a flush of all nodes is there."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.testing import toy
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.nodes import Launcher, Table, eventually
from tiercache.testing.s3 import BUCKET, S3Server, why_not
from tiercache.testing.towns import BACK_S, TOKENS, Town

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)"),
]


@pytest.fixture
def town(launcher: Launcher, tmp_path: Path) -> Iterator[Town]:
    """Nodes a and b of a cluster that has a pool."""
    etcd, server = EtcdServer(tmp_path / "etcd"), S3Server(tmp_path)
    (tmp_path / "etcd").mkdir()
    secret = tmp_path / "secret"
    secret.write_text("AKIASECRETSECRET")
    pool: Table = {
        "kind": "s3",
        "s3_bucket": BUCKET,
        "s3_endpoint": server.url,
        "s3_access_key_file": str(secret),
        "s3_secret_key_file": str(secret),
        "answer_s_max": 1.0,  # Shorter than a client's deadline: a plan waits for it.
    }
    try:
        server.start()
        etcd.start()
        with Town([etcd.url], pool=pool) as made:
            for name in "ab":
                made.add(name, launcher)
            assert made.settled("a", "b")
            yield made
    finally:
        etcd.kill()
        server.kill()


def test_a_node_comes_before_the_pool_and_the_pool_after_its_death(town: Town) -> None:
    town.pooled("a", 1)
    b = town.nodes["b"]
    town.client("b")
    assert town.heard("b", 1)
    assert eventually(lambda: b.gauge("pool_boundaries") == 1, BACK_S)
    assert town.comes_to_resume("b", 1)
    assert (b.counter("peer_asked", "found"), b.counter("pool_asked", "found")) == (1, 0)
    town.pooled("a", 2)
    assert eventually(lambda: b.gauge("pool_boundaries") == 2, BACK_S)
    town.nodes["a"].kill()
    assert town.settled("b")
    assert town.comes_to_resume("b", 2)
    assert b.counter("pool_asked", "found") == 1
    shown = CliRunner().invoke(app, ["members", "--socket", str(b.socket)])
    assert shown.exit_code == 0
    assert "self" in shown.stdout
    assert "s3" in shown.stdout.split()


def test_a_flush_of_all_nodes_is_one_of_the_pool(town: Town, launcher: Launcher) -> None:
    """Also for a node that comes later, and knows nothing."""
    town.pooled("a", 1)
    assert town.comes_to_resume("b", 1)
    words = ("clear", toy.NAMESPACE.digest.hex(), "--yes", "--cluster")
    done = CliRunner().invoke(app, [*words, "--socket", str(town.nodes["a"].socket)])
    assert done.exit_code == Exit.OK, done.stderr
    assert town.resumed("a", 1) == town.resumed("b", 1) == 0
    late = town.add("c", launcher)
    assert town.settled("a", "b", "c")
    assert town.resumed("c", 1) == 0
    town.pooled("b", 1)
    town.nodes["a"].kill()
    town.nodes["b"].kill()
    assert town.settled("c")
    assert town.comes_to_resume("c", 1)
    assert late.counter("pool_read_bytes") > 0
    assert town.resumed("c", 1) == TOKENS
