"""A real node for tests that talk to one, and end it without asking."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tiercache.client import Client, Options
from tiercache.testing import toy
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.nodes import START_S, Launcher, NewClient, NewNode, NodeProcess, Table


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """What starts nodes; it and all of them are gone when the tests are."""
    made = Launcher()
    yield made
    made.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd that serves, for the tests of one file."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def new_node(launcher: Launcher) -> Iterator[NewNode]:
    """Make a node that was not started, with settings by table: `new_node(host={"bytes": ...})`."""
    with ExitStack() as nodes:

        def make(**tables: Table) -> NodeProcess:
            # A socket's path must be short, and pytest's folders are not.
            folder = nodes.enter_context(tempfile.TemporaryDirectory(prefix="tc-"))
            return nodes.enter_context(NodeProcess(launcher, Path(folder), **tables))

        yield make


@pytest.fixture
def node(new_node: NewNode) -> NodeProcess:
    """A node that serves: 8 MiB of memory, 64 MiB of disk, no metrics."""
    made = new_node()
    made.start()
    return made


@pytest.fixture
def new_client() -> Iterator[NewClient]:
    """Make a client of the toy model that attaches again at every call: `new_client(node)`."""
    with ExitStack() as clients:

        def make(node: NodeProcess, *, deadline_s: float = START_S) -> Client:
            options = Options(name="test", deadline_s=deadline_s, retry_s=0.0)
            client = Client.attach(node.socket, toy.NAMESPACE, toy.LAYOUT, options=options)
            clients.callback(client.close)
            return client

        yield make
