"""Nodes that share a Mooncake Store and nothing else: real nodes, a real master, a real store process."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.testing.mooncake import MooncakeServers, freeze, kill, why_not
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
        "answer_s_max": 1.0,  # Shorter than a client's deadline: a plan waits for it.
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


def known(town: Town, name: str, boundaries: int) -> bool:
    """Whether a node comes to know that so many boundaries are there."""
    town.client(name)
    return eventually(lambda: town.nodes[name].gauge("pool_boundaries") == boundaries, BACK_S)


def test_a_master_that_is_killed_costs_misses_and_comes_back(
    town: Town, servers: MooncakeServers
) -> None:
    town.pooled("a", 1)
    assert known(town, "b", 1)
    kill(servers.master)
    for process in servers.stores:
        kill(process)
    b = town.nodes["b"]
    assert town.resumed("b", 1) == 0, "no later than it may be"
    assert town.resumed("a", 1) == TOKENS
    assert eventually(lambda: b.gauge("pool_unreachable") == 1, BACK_S)
    servers.stores.clear()
    servers.start()
    assert eventually(lambda: b.gauge("pool_unreachable") == 0, 2 * BACK_S), b.said()[-2000:]
    assert known(town, "b", 0)
    assert eventually(
        lambda: town.resumed("a", 1) == TOKENS and b.gauge("pool_boundaries") == 1, 2 * BACK_S
    ), "it is put there again"
    assert town.comes_to_resume("b", 1, 4 * BACK_S)


def test_a_store_process_that_freezes_holds_memory_and_nothing_else(
    town: Town, servers: MooncakeServers
) -> None:
    """What was asked of it stays where it is until it has let go; engines wait no longer than they may."""
    town.pooled("a", 1)
    assert known(town, "b", 1)
    b = town.nodes["b"]
    freeze(servers.stores[0])
    try:
        for _ in range(3):
            assert town.resumed("b", 1) == 0
        assert town.resumed("b", 2) == 0
        town.saved("b", 3)
        assert town.resumed("b", 3) == TOKENS, "all else goes on"
    finally:
        servers.stores[0].send_signal(signal.SIGCONT)
    assert eventually(lambda: b.gauge("peer_pulls") == 0, 2 * BACK_S), "it has let go"
    # The master may have forgotten the store process, and so the object.
    assert eventually(
        lambda: b.gauge("pool_boundaries") == 0 or town.resumed("b", 1) == TOKENS, 4 * BACK_S
    )


def test_a_node_ends_in_order_while_the_pool_holds_its_memory(
    town: Town, servers: MooncakeServers
) -> None:
    town.pooled("a", 1)
    assert known(town, "b", 1)
    freeze(servers.stores[0])
    assert town.resumed("b", 1) == 0
    b = town.nodes["b"]
    started = time.monotonic()
    assert b.stop() == 0, b.said()
    assert time.monotonic() - started < 12, "3 s for each of those who are waited for"


def test_a_pool_that_is_full_takes_no_more(servers: MooncakeServers, launcher: Launcher) -> None:
    pool: Table = {"kind": "mooncake", "mooncake_master": servers.address}
    with Town([], pool=pool) as town:
        a = town.add("a", launcher)
        servers.stores[0].send_signal(signal.SIGKILL)
        servers.stores[0].wait()
        town.saved("a", 1)
        assert eventually(
            lambda: (
                town.resumed("a", 1) == TOKENS
                and a.counter("deposits", "no_space") + a.counter("deposits", "io") > 0
            ),
            2 * BACK_S,
        ), a.figures().counters["deposits"]
        assert a.gauge("deposits_paused") == 1
