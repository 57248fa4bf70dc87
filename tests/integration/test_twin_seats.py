"""Two engines of one model, each with ranks at two nodes of its own; and prompts that two nodes hold parts
of. Real processes: no wrong byte, and no call beyond its time whatever becomes of a node."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator
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

NAMES = ("a1", "a2", "b1", "b2")
_requests = count(1)


@pytest.fixture
def town(etcd: EtcdServer) -> Iterator[Town]:
    with ExitStack() as closing:
        launcher = Launcher()
        closing.callback(launcher.close)
        town = closing.enter_context(Town([etcd.url]))
        for name in NAMES:
            town.add(name, launcher)
        assert town.settled(*NAMES)
        yield town


@pytest.fixture
def attach(town: Town) -> Iterator[Callable[..., Rank]]:
    """Attach a rank at a node; all are closed at the end."""
    with ExitStack() as clients:

        def at(name: str, rank: int = 0, ranks: int = 1, engine: str = "tp") -> Rank:
            found = Rank.at(town.nodes[name], rank, ranks, engine)
            clients.callback(found.client.close)
            return found

        yield at


@pytest.fixture
def engines(attach: Callable[..., Rank]) -> dict[str, list[Rank]]:
    """Engines a and b, rank 0 at a1 and b1, rank 1 at a2 and b2."""
    return {
        letter: [attach(f"{letter}{rank + 1}", rank, RANKS, letter) for rank in range(RANKS)]
        for letter in "ab"
    }


def timed(head: Rank, number: int, scope: Scope | None = None) -> Plan:
    """Plan; it takes no longer than one answer of another node may."""
    started = time.monotonic()
    found = head.client.plan(f"r{next(_requests)}", chain(number), scope=scope or Scope())
    assert time.monotonic() - started < ANSWER_S + SLACK_S, "waits for other nodes too long"
    return found


def resumed(engine: list[Rank], other: str, number: int) -> int:
    """Return the boundary at which all ranks of an engine got the bytes they need; -1: some did not."""
    scope = Scope(all_ranks=True, seats=(RanksOf("", 0, 1), RanksOf(other, 1, 2)))
    found = timed(engine[0], number, scope)
    if not found.boundary:
        return 0
    there = [rank.fetched(found, number) for rank in engine]
    engine[0].client.release(found)
    return found.boundary if all(there) else -1


def comes_to_resume(engine: list[Rank], other: str, number: int, boundary: int = DEEP) -> bool:
    return eventually(lambda: resumed(engine, other, number) == boundary, BACK_S)


def test_engines_on_two_nodes_each_resume_what_the_other_computed(
    town: Town, engines: dict[str, list[Rank]]
) -> None:
    for rank in engines["a"]:
        rank.save(1, SHALLOW, DEEP)
    assert town.heard("b1", 4)
    assert town.heard("b2", 4)
    assert resumed(engines["b"], "b2", 1) == DEEP
    for name, rank in zip(("b1", "b2"), engines["b"], strict=True):
        assert town.nodes[name].counter("peer_read_bytes") == sum(
            len(blob.data) for blob in rank.blobs(1, DEEP)
        ), "the shards of its own rank, once"
    for rank in engines["b"]:
        rank.save(2, DEEP)
    assert comes_to_resume(engines["a"], "a2", 2)
    engines["a"][0].save(3, DEEP)
    assert resumed(engines["b"], "b2", 3) == 0, "one node's shards are no state"


def test_a_source_that_freezes_or_dies_is_a_miss_in_time(
    town: Town, engines: dict[str, list[Rank]]
) -> None:
    for number in range(1, 6):
        for rank in engines["a"]:
            rank.save(number, DEEP)
    assert comes_to_resume(engines["b"], "b2", 1)
    town.nodes["a2"].send(signal.SIGSTOP)
    try:
        for number in (2, 3):
            assert resumed(engines["b"], "b2", number) == 0
        assert resumed(engines["b"], "b2", 1) == DEEP, "what was fetched is here"
    finally:
        town.nodes["a2"].send(signal.SIGCONT)
    assert town.settled(*NAMES)
    assert comes_to_resume(engines["b"], "b2", 2)
    town.nodes["a1"].kill()
    assert resumed(engines["b"], "b2", 4) in {0, -1}
    assert resumed(engines["b"], "b2", 2) == DEEP
    town.nodes["a1"].start()
    assert town.settled(*NAMES)
    engines["a"][0].save(5, DEEP)
    assert comes_to_resume(engines["b"], "b2", 5)


def test_the_other_node_of_the_engine_that_freezes_is_a_miss_in_time(
    town: Town, engines: dict[str, list[Rank]]
) -> None:
    for rank in engines["a"]:
        rank.save(1, DEEP)
    assert comes_to_resume(engines["b"], "b2", 1)
    for rank in engines["a"]:
        rank.save(2, DEEP)
    town.nodes["b2"].send(signal.SIGSTOP)
    try:
        for number in (1, 2, 1, 2):
            assert resumed(engines["b"], "b2", number) == 0
    finally:
        town.nodes["b2"].send(signal.SIGCONT)
    assert town.settled(*NAMES)
    assert comes_to_resume(engines["b"], "b2", 2)


def test_one_prompt_comes_from_two_nodes(town: Town, attach: Callable[..., Rank]) -> None:
    """One has its beginning, the other its end: together they are a boundary that neither has."""
    beginning, end, here = attach("a1"), attach("a2"), attach("b1")
    for number in range(1, 5):
        beginning.save(number, SHALLOW)
        end.save_blobs(number, [blob for blob in end.blobs(number, DEEP) if blob.end > SHALLOW])

    def depth(number: int) -> int:
        found = timed(here, number)
        depth = found.boundary if not found.boundary or here.fetched(found, number) else -1
        here.client.release(found)
        return depth

    assert town.heard("b1", 8)
    assert depth(1) == DEEP
    assert town.nodes["a1"].counter("peer_lent_bytes") == sum(
        len(blob.data) for blob in here.blobs(1, SHALLOW)
    )
    assert town.nodes["a2"].counter("peer_lent_bytes") == sum(
        len(blob.data) for blob in here.blobs(1, DEEP) if blob.end > SHALLOW
    ), "nothing twice"
    town.nodes["a2"].send(signal.SIGSTOP)
    try:
        assert SHALLOW in {depth(2), depth(3)}, "who is late leaves time for the other"
    finally:
        town.nodes["a2"].send(signal.SIGCONT)
    assert town.settled(*NAMES)
    assert eventually(lambda: depth(4) == DEEP, BACK_S)


def test_an_engine_on_one_node_resumes_what_one_on_two_computed(
    town: Town, engines: dict[str, list[Rank]], attach: Callable[..., Rank]
) -> None:
    """The shards come from both, for all of its ranks."""
    for rank in engines["a"]:
        rank.save(1, DEEP)
    ranks = [attach("b1", number, RANKS, "one") for number in range(RANKS)]
    assert town.heard("b1", 2)

    def resumes() -> bool:
        found = timed(ranks[0], 1, Scope(all_ranks=True))
        there = found.boundary == DEEP and all(rank.fetched(found, 1) for rank in ranks)
        ranks[0].client.release(found)
        return there

    assert eventually(resumes, BACK_S)
    for name in ("a1", "a2"):
        assert town.nodes[name].counter("peer_lent_bytes") > 0
