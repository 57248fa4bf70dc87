"""One engine whose ranks sit on two machines' nodes: they resume at one boundary that both have."""

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from tiercache.client import Plan, RanksOf, Scope
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.nodes import Launcher, eventually
from tiercache.testing.sharded import DEEP, RANKS, SHALLOW, Rank, chain
from tiercache.testing.towns import ANSWER_S, BACK_S, SLACK_S, Town

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)"
)

SEATS = Scope(all_ranks=True, seats=(RanksOf("", 0, 1), RanksOf("b", 1, 2)))
_requests = count(1)


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
def ranks(town: Town) -> Iterator[list[Rank]]:
    """Rank 0 at node a, rank 1 at node b."""
    with ExitStack() as clients:
        found = []
        for number, name in enumerate(("a", "b")):
            rank = Rank.at(town.nodes[name], number, RANKS)
            clients.callback(rank.client.close)
            found.append(rank)
        yield found


def plan(head: Rank, number: int) -> Plan:
    """Plan as rank 0 does for all ranks; it takes no longer than it may."""
    started = time.monotonic()
    found = head.client.plan(f"r{next(_requests)}", chain(number), scope=SEATS)
    assert time.monotonic() - started < ANSWER_S + SLACK_S, "waits for the other node too long"
    return found


def resumed(ranks: list[Rank], number: int) -> int:
    """Return the boundary at which both ranks have what they need."""
    found = plan(ranks[0], number)
    if not found.boundary:
        return 0
    assert all(rank.fetched(found, number) for rank in ranks)
    ranks[0].client.release(found)
    return found.boundary


def test_both_ranks_resume_at_the_deepest_boundary_that_both_have(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.save(1, SHALLOW, DEEP)
    assert resumed(ranks, 1) == DEEP
    ranks[0].save(2, SHALLOW, DEEP)
    ranks[1].save(2, SHALLOW)
    assert resumed(ranks, 2) == SHALLOW
    ranks[0].save(3, DEEP)
    ranks[1].save(3, SHALLOW)
    assert plan(ranks[0], 3).reason == "elsewhere"
    assert resumed(ranks, 4) == 0


def test_an_engine_that_says_that_all_its_ranks_sit_here_asks_nobody(
    town: Town, ranks: list[Rank]
) -> None:
    ranks[0].save(1, DEEP)
    second = Rank.at(town.nodes["a"], 1, RANKS)
    with second.client:
        second.save(1, DEEP)
        scope = Scope(all_ranks=True, seats=(RanksOf("", 0, RANKS),))
        assert ranks[0].client.plan("r", chain(1), scope=scope).boundary == DEEP


def test_a_node_that_freezes_dies_or_forgets_is_a_miss_and_comes_back(
    town: Town, ranks: list[Rank]
) -> None:
    for rank in ranks:
        rank.save(1, DEEP)
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
    ranks[1].save(1, DEEP)
    assert eventually(lambda: resumed(ranks, 1) == DEEP, BACK_S)
