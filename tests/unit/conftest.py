"""A scripted node at a socket and clients of it, for the tests of the clients; two machines and engines at
them, for those of clusters."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tiercache.client import Client
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.sim import rig as sim
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.tiny import LAYOUT, NAMESPACE, SHORT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the node listens."""
    return tmp_path / "node.sock"


@pytest.fixture
def node(path: Path) -> Iterator[ScriptedNode]:
    """A node of the tiny model."""
    with ScriptedNode(path, LAYOUT) as scripted:
        yield scripted


@pytest.fixture
def client(node: ScriptedNode) -> Iterator[Client]:
    """A blocking client that is attached to it."""
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=SHORT) as attached:
        assert attached.status == "attached"
        yield attached


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Run a scenario to its end, on each kind of event loop."""

    def on_its_loop(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario)

    return on_its_loop


@pytest.fixture
def nodes() -> Nodes:
    """Two machines, a and b, that know of one another."""
    return Nodes(a=sim.Rig(clustered()), b=sim.Rig(clustered()))


@pytest.fixture
def here(nodes: Nodes) -> sim.Client:
    """An engine at a."""
    return sim.Client(nodes.rigs["a"], sim.hybrid()).attach()


@pytest.fixture
def there(nodes: Nodes) -> sim.Client:
    """An engine at b."""
    return sim.Client(nodes.rigs["b"], sim.hybrid()).attach()
