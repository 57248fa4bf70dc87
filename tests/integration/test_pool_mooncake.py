"""Nodes that share a Mooncake Store and nothing else: real nodes, a real master, a real store process."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.testing.mooncake import MooncakeServers, why_not
from tiercache.testing.nodes import Launcher, Table, eventually
from tiercache.testing.towns import BACK_S, TOKENS, Town

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

MIB = 1 << 20


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[MooncakeServers]:
    made = MooncakeServers(tmp_path, segment_bytes=64 * MIB)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def town(servers: MooncakeServers, launcher: Launcher) -> Iterator[Town]:
    """Nodes a and b, which have nothing in common but the pool."""
    pool: Table = {
        "kind": "mooncake",
        "mooncake_master": servers.address,
        "answer_s_max": 2.0,
        "transfer_s_max": 2.0,
        "deposit_s_max": 5.0,
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
    started = time.monotonic()
    assert b.stop() == 0, b.said()
    assert time.monotonic() - started < 10, "it does not wait for Mooncake's own farewell"
