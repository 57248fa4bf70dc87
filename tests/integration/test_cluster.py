"""Three machines, an etcd, and all that can happen to them: no wrong byte, no call beyond its deadline,
and reuse is back."""

import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.testing import toy
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.networks import BRIDGE_ADDRESS, Network, why_not
from tiercache.testing.nodes import Launcher, NodeProcess, eventually
from tiercache.testing.recall import episode
from tiercache.testing.towns import ANSWER_S, BACK_S, TOKENS, TTL_S, Town
from tiercache_transformers.demo_engine import Open
from tiercache_transformers.demo_processes import EngineProcess

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there can be a network"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)"),
]

PORT = 7411
NAMES = ("a", "b", "c")


class Country:
    """The machines, and what runs on all of them."""

    def __init__(self, network: Network, etcd: EtcdServer, launchers: dict[str, Launcher]) -> None:
        self.network = network
        self.etcd = etcd
        self.launchers = launchers


@pytest.fixture(scope="module")
def country(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Country]:
    with ExitStack() as closing:
        network = closing.enter_context(Network(*NAMES))
        folder = tmp_path_factory.mktemp("etcd")
        etcd = EtcdServer(folder, BRIDGE_ADDRESS, network.inside())
        closing.callback(etcd.kill)
        etcd.start()
        launchers = {name: Launcher(network.inside(name)) for name in NAMES}
        for launcher in launchers.values():
            closing.callback(launcher.close)
        yield Country(network, etcd, launchers)


@pytest.fixture
def town(country: Country, tmp_path: Path) -> Iterator[Town]:
    """Nodes a, b and c, each on a machine of its own, with a key in common."""
    key = tmp_path / "key"
    key.write_bytes(secrets.token_hex(32).encode())
    with Town([country.etcd.url], key_file=str(key)) as made:
        for name in NAMES:
            listen = f"{country.network.address(name)}:{PORT}"
            made.add(name, country.launchers[name], listen)
        assert made.settled(*NAMES)
        yield made


def command(node: NodeProcess, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--socket", str(node.socket)])


def isolated(node: NodeProcess) -> bool:
    return bool(node.gauge("isolated_now"))


def test_what_one_node_computed_the_others_resume_bit_for_bit(
    country: Country, tmp_path: Path
) -> None:
    """The trained recall model prefills on one machine, and answers on two others."""
    key = tmp_path / "key"
    key.write_bytes(secrets.token_hex(32).encode())
    task = episode(1, tokens=888, pairs=24)  # Its end is one token beyond a block's.
    prompt, value = task.asked(5), task.answers[4]
    with Town([country.etcd.url], key_file=str(key)) as town, EngineProcess() as engine:
        for name in NAMES:
            launcher = country.launchers[name]
            town.add(name, launcher, f"{country.network.address(name)}:{PORT}")
        assert town.settled(*NAMES)
        orders = {name: Open(name, "mla1_kda2", str(town.nodes[name].socket)) for name in NAMES}
        for order in orders.values():
            assert engine.open(order) == "attached"
        engine.open(Open("alone", "mla1_kda2"))
        alone = engine.ask("alone", prompt, 8)
        cold = engine.ask("a", prompt, 8)
        assert (cold.reused, cold.tokens[0]) == (0, value)
        for name in "bc":
            peer = town.nodes[name]
            assert town.heard(name, 1)
            warm = engine.ask(name, prompt, 8)
            assert warm.reused == len(prompt) - 1, warm.reason
            assert (warm.tokens, warm.logits) == (alone.tokens, alone.logits)
            assert peer.counter("peer_read_bytes") > 0


def test_a_node_that_dies_is_a_miss_and_then_gone(town: Town) -> None:
    town.saved("a", 1)
    assert town.comes_to_resume("b", 1)
    town.saved("a", 2)
    assert town.comes_to_resume("c", 1)
    town.nodes["a"].kill()
    for number in range(3, 8):
        assert town.resumed("b", number) == 0
    assert town.resumed("b", 2) in {0, TOKENS}
    assert town.resumed("b", 1) == town.resumed("c", 1) == TOKENS, "what was fetched is here"
    started = time.monotonic()
    assert town.settled("b", "c")
    assert time.monotonic() - started < TTL_S + BACK_S / 4
    town.nodes["a"].start()
    assert town.settled(*NAMES)
    town.saved("a", 8)
    assert town.comes_to_resume("b", 8)
    assert town.comes_to_resume("a", 1), "and it takes back what it had given"


def test_a_node_that_is_cut_off_gives_nothing_out_and_comes_back(
    town: Town, country: Country
) -> None:
    town.saved("a", 1)
    town.saved("b", 2)
    assert town.comes_to_resume("b", 1)
    try:
        country.network.cut("b")
        town.saved("a", 3)
        assert town.resumed("b", 3) == 0
        assert eventually(lambda: isolated(town.nodes["b"]), TTL_S + BACK_S / 4)
        assert town.resumed("b", 2) == 0, "it may have missed a clear"
        assert "isolated" in town.client("b").plan("why", toy.chain(2, TOKENS + 1)).reason
        assert town.settled("a", "c")
        assert town.resumed("a", 2) == 0
        assert town.comes_to_resume("c", 3)
    finally:
        country.network.heal("b")
    assert town.settled(*NAMES)
    assert town.resumed("b", 2) == TOKENS
    assert town.comes_to_resume("b", 3)
    assert town.comes_to_resume("a", 2)


def test_without_etcd_sharing_goes_on_for_its_time_to_live(town: Town, country: Country) -> None:
    town.saved("a", 1)
    assert town.comes_to_resume("b", 1)
    country.etcd.kill()
    try:
        town.saved("a", 2)
        assert town.comes_to_resume("b", 1)
        assert eventually(lambda: all(isolated(node) for node in town.nodes.values()), BACK_S)
        assert town.resumed("a", 1) == town.resumed("b", 2) == 0
        refused = command(town.nodes["a"], "clear", "00" * 32, "--yes", "--cluster")
        assert refused.exit_code == Exit.REFUSED, refused.stderr
    finally:
        country.etcd.start()
    assert town.settled(*NAMES)
    assert town.resumed("a", 1) == TOKENS
    assert town.comes_to_resume("c", 2)


def test_a_frozen_node_is_left_alone_and_comes_back(town: Town) -> None:
    numbers = range(1, 7)
    for number in numbers:
        town.saved("a", number)
    b = town.nodes["b"]
    assert town.comes_to_resume("b", 1)
    assert town.heard("b", len(numbers))
    town.nodes["a"].send(signal.SIGSTOP)
    try:
        for number in (2, 3, 4):
            assert town.resumed("b", number) == 0
        assert b.counter("peer_asked", "late") > 0
        assert b.gauge("peers_sick") + (b.gauge("peers") < 2) > 0
        started = time.monotonic()
        assert town.resumed("b", 5) == 0
        assert time.monotonic() - started < ANSWER_S, "nobody waits for it any more"
        assert town.settled("b", "c"), "it says nothing to etcd either"
    finally:
        town.nodes["a"].send(signal.SIGCONT)
    assert town.settled(*NAMES)
    assert town.comes_to_resume("b", 6)


def flushed(node: NodeProcess, *words: str) -> Result:
    digest = toy.NAMESPACE.digest.hex()
    return command(node, "clear", digest, "--yes", "--cluster", *words)


def test_after_a_weight_update_nothing_old_is_anywhere(town: Town, country: Country) -> None:
    """Also not on a node that was down meanwhile, nor on one that was cut off."""
    for number, name in enumerate(NAMES, 1):
        town.saved(name, number)
        town.resumed(name, number)  # A second visit earns a place on disk.
        town.client(name).flush(durable=True)
        assert town.comes_to_resume("a", number)
    assert flushed(town.nodes["a"]).exit_code == Exit.OK
    for name in NAMES:
        assert [town.resumed(name, number) for number in (1, 2, 3)] == [0, 0, 0]
    for number, name in enumerate(NAMES, 4):
        town.saved(name, number)
        town.resumed(name, number)
        assert town.client(name).flush(durable=True).waiting == 0
        assert town.comes_to_resume("a", number)
    town.nodes["c"].kill()
    try:
        country.network.cut("b")
        early = flushed(town.nodes["a"], "--deadline", "1.1")
        assert early.exit_code == Exit.UNREACHABLE, early.stdout
        assert "b" in early.stderr
        done = flushed(town.nodes["a"])
        assert (done.exit_code, done.stderr) == (Exit.OK, "")
        assert [town.resumed("b", number) for number in (4, 5, 6)] == [0, 0, 0]
    finally:
        country.network.heal("b")
    town.nodes["c"].start()
    assert town.settled(*NAMES)
    for name in NAMES:
        assert [town.resumed(name, number) for number in (4, 5, 6)] == [0, 0, 0]
    town.nodes["c"].wait_scanned()
    assert town.nodes["c"].gauge("objects", "nvme") == 0
    town.saved("c", 7)
    assert town.comes_to_resume("b", 7)


NEXT_VERSION = """
import runpy, sys
from tiercache.transport import messages
messages.PROTOCOL = 2
runpy.run_module(sys.argv[3], run_name="__main__")
"""


@pytest.fixture
def newer(country: Country) -> Iterator[Callable[[], Launcher]]:
    with ExitStack() as closing:

        def make() -> Launcher:
            inside = (*country.network.inside("c"), sys.executable, "-c", NEXT_VERSION)
            made = Launcher(inside)
            closing.callback(made.close)
            return made

        yield make


def test_a_node_of_another_version_works_alone(
    country: Country, newer: Callable[[], Launcher], town: Town
) -> None:
    town.nodes["c"].stop()
    listen = f"{country.network.address('c')}:{PORT}"
    town.add("d", newer(), listen)
    assert town.settled("a", "b")
    d = town.nodes["d"]
    assert eventually(lambda: not isolated(d), BACK_S)
    assert d.gauge("peers") == 0
    town.saved("a", 1)
    town.saved("d", 2)
    assert town.comes_to_resume("b", 1)
    assert (town.resumed("d", 1), town.resumed("b", 2), town.resumed("d", 2)) == (0, 0, TOKENS)
    shown = command(town.nodes["a"], "members")
    assert "other_protocol" in shown.stdout
    assert flushed(town.nodes["a"]).exit_code == Exit.OK, "it drops what all drop"
    assert town.resumed("d", 2) == 0
