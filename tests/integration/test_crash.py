"""Killed at any moment: what was acknowledged is there again, and nothing wrong ever is."""

import itertools
import random
import signal
import threading
from collections.abc import Iterable, Iterator

import pytest

from tiercache.cli.admin import Admin
from tiercache.client import Client
from tiercache.testing import toy
from tiercache.testing.nodes import START_S, NewClient, NewNode, NodeProcess
from tiercache.tiers.crash import CRASH_POINTS

SEED = 20261129
KILLS = 200
PROMPTS = 48
ALIVE_S_MAX = 0.04
"""A node is killed after a random time up to this; what comes before is the start's own."""

STARTING_S_MAX = 0.012
EAGER = {"write_back": "eager"}
BEFORE_CLIENTS = {
    "nvme.owned",
    "nvme.mid_scan",
    "nvme.after_orphan_removed",
    "runtime.listening",
}
WHEN_FULL = {
    "nvme.after_forget",
    "nvme.mid_reclaim_after_forget",
    "nvme.mid_reclaim_after_remove",
}


def length(number: int) -> int:
    """Return where a prompt ends: inside a block for most."""
    return 17 + number % 5 * 7


class Load:
    """A client that stores prompt after prompt until it is told to stop, or its node is gone."""

    def __init__(self, client: Client, numbers: Iterable[int]) -> None:
        self._durable: set[int] = set()
        self._client = client
        self._numbers = numbers
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop_when_done(self) -> set[int]:
        """Wait for the last prompt; return those of which the node said that they are on disk."""
        self._thread.join()
        return self._durable

    def stop(self) -> set[int]:
        """End after the current prompt; return those of which the node said that they are on disk."""
        self._stopping.set()
        self._thread.join()
        return self._durable

    def _run(self) -> None:
        for number in self._numbers:
            if self._stopping.is_set():
                break
            if toy.is_put(self._client, number, length(number)):
                self._durable.add(number)
        self._client.close()


def problems(
    node: NodeProcess, client: Client, numbers: set[int], *, all_there: bool
) -> Iterator[str]:
    """Yield what is wrong with what the node holds of these prompts, and of everything it lists."""
    for number in sorted(numbers):
        found = toy.resumed(client, number, length(number))
        if all_there and found != length(number):
            yield f"prompt {number}: {found} of {length(number)} tokens"
    with Admin(str(node.socket), START_S) as admin:
        for page in admin.verify():
            yield from (f"{key} in {tier}: {fault}" for key, tier, fault in page.failed)


@pytest.mark.slow
def test_killed_at_random_moments(new_client: NewClient, new_node: NewNode) -> None:
    chance = random.Random(SEED)
    node = new_node(nvme=EAGER, node={"log": "info"})
    clock = threading.Event()
    numbers = itertools.cycle(range(PROMPTS))
    durable: set[int] = set()
    for kill in range(KILLS):
        if kill % 5 == 4:
            node.start(listening=False)
            clock.wait(chance.uniform(0, STARTING_S_MAX))
            node.kill()
            continue
        node.start()
        load = Load(new_client(node), itertools.islice(numbers, PROMPTS))
        if kill % 10 == 9:
            node.wait_scanned()
            found = [*problems(node, new_client(node), durable, all_there=True)]
            assert not found, f"after {kill} kills: {found}\n{node.said()[-3000:]}"
        clock.wait(chance.uniform(0, ALIVE_S_MAX))
        node.kill()
        durable |= load.stop()
    node.start()
    node.wait_scanned()
    assert not [*problems(node, new_client(node), durable, all_there=True)]
    assert len(durable) > PROMPTS // 2, "the load must have got through"
    assert node.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_at_each_named_point(new_client: NewClient, new_node: NewNode, point: str) -> None:
    full = point in WHEN_FULL
    cap = {"cap_bytes": "8MiB" if full else "64MiB"}
    node = new_node(nvme={**EAGER, **cap}, node={"log": "info"})
    durable: set[int] = set()
    if point != "nvme.after_remember":  # A namespace is remembered once.
        node.start()
        durable = Load(new_client(node), range(10)).stop_when_done()
        assert node.stop() == 0
        (node.nvme / "segments" / "seg-00009999.bin").write_bytes(bytes(1 << 20))
    node.start(crash_at=point, listening=False)
    if point not in BEFORE_CLIENTS:
        node.wait_until(node.listens)
        load = Load(new_client(node), itertools.count(100))
        if point == "runtime.stopping":
            node.send(signal.SIGTERM)
        code = node.wait()
        durable |= load.stop()
    else:
        code = node.wait()
    assert code == -signal.SIGKILL, node.said()

    node.start()
    node.wait_scanned()
    assert not [*problems(node, new_client(node), durable, all_there=not full)]
    client = new_client(node)
    assert toy.is_put(client, 7_000, length(7_000))
    assert not [*problems(node, client, {7_000}, all_there=True)]
    assert node.stop() == 0
