"""Two nodes, and a way between them that is slow, loses what it carries, or ends: on the loopback."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tiercache.testing.etcd import EtcdServer, free_port
from tiercache.testing.nodes import Launcher, eventually
from tiercache.testing.proxies import Gate
from tiercache.testing.towns import ANSWER_S, BACK_S, DEADLINE_S, TOKENS, Town

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)"
)


@pytest.fixture
def ways() -> Iterator[Callable[..., Gate]]:
    """Make ways to a port of node a: `ways(port, delay_s=...)`."""
    with ExitStack() as closing:

        def make(port: int, **how: float) -> Gate:
            gate = Gate(
                port,
                delay_s=how.get("delay_s", 0.0),
                loss=how.get("loss", 0.0),
                seed=int(how.get("seed", 0)),
            )
            closing.callback(gate.close)
            return gate

        yield make


@pytest.fixture
def between(
    etcd: EtcdServer, launcher: Launcher, ways: Callable[..., Gate]
) -> Iterator[Callable[..., tuple[Town, Gate]]]:
    """Make nodes a and b, of which b reaches a over such a way only."""
    with ExitStack() as closing:

        def make(answer_s: float = ANSWER_S, **how: float) -> tuple[Town, Gate]:
            port = free_port()
            gate = ways(port, **how)
            town = closing.enter_context(Town([etcd.url], answer_s_max=answer_s))
            town.add("a", launcher, f"127.0.0.1:{port}", advertise=gate.address)
            town.add("b", launcher)
            assert town.settled("a", "b")
            return town, gate

        yield make


def test_over_a_slow_way_a_plan_waits_no_longer_than_it_may(
    between: Callable[..., tuple[Town, Gate]],
) -> None:
    """200 ms each way are more than an answer may take: prompts are computed, and a is left alone."""
    town, _ = between(delay_s=0.2)
    for number in range(1, 6):
        town.saved("a", number)
    b = town.nodes["b"]
    assert town.heard("b", 5)
    for number in range(1, 6):
        started = time.monotonic()
        assert town.resumed("b", number) == 0
        assert time.monotonic() - started < DEADLINE_S
    outcomes = b.figures().counters["peer_asked"]
    assert outcomes["late"] + outcomes["failed"] == 3, "it is left alone after three"
    assert b.gauge("peers_sick") == 1


def test_over_a_slow_way_that_may_be_waited_for_all_comes(
    between: Callable[..., tuple[Town, Gate]],
) -> None:
    town, _ = between(answer_s=1.5, delay_s=0.2)
    town.saved("a", 1)
    assert town.comes_to_resume("b", 1)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_half_is_lost_of_costs_reuse_and_no_byte(
    between: Callable[..., tuple[Town, Gate]], seed: int
) -> None:
    """Each piece that comes has an even chance to be the last of its connection."""
    town, gate = between(loss=0.5, seed=seed)
    for number in range(1, 9):
        town.saved("a", number)
        town.resumed("b", number)
    assert eventually(lambda: gate.lost > 3, BACK_S)
    assert town.resumed("a", 1) == TOKENS
    leased = town.nodes["a"].figures().gauges
    assert leased["leases"][""] == 0


def test_a_way_that_swallows_all_is_noticed_and_used_again(
    between: Callable[..., tuple[Town, Gate]],
) -> None:
    """Both go on being members: nobody but b sees anything of it."""
    town, gate = between()
    town.saved("a", 1)
    assert town.comes_to_resume("b", 1)
    for number in range(2, 7):
        town.saved("a", number)
    assert town.heard("b", 6)
    b = town.nodes["b"]
    gate.shut()
    for number in range(3, 7):
        assert town.resumed("b", number) == 0
    assert (b.gauge("peers_sick"), b.gauge("peers")) == (1, 1)
    gate.open()
    assert town.comes_to_resume("b", 6)


def test_an_address_that_cannot_be_ends_no_other_node(
    etcd: EtcdServer, launcher: Launcher, tmp_path: Path
) -> None:
    """What a node says of itself is its own business."""
    del tmp_path
    with Town([etcd.url]) as town:
        town.add("a", launcher)
        town.add("b", launcher, advertise="nowhere.invalid:7411")
        town.add("c", launcher, advertise="192.0.2.1:7")
        assert town.settled("a", "b", "c")
        town.saved("a", 1)
        assert town.comes_to_resume("b", 1)
        assert town.resumed("a", 1) == TOKENS
