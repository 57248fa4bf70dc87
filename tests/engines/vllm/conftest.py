"""Real engines and real nodes."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode
from tiercache.testing.nodes import Launcher, NodeProcess


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def new_engine(tmp_path_factory: pytest.TempPathFactory, model_root: Path) -> Iterator[NewEngine]:
    made: list[Engine] = []

    def make(model: str, socket: Path | None = None, seed: int = 0, **order: object) -> Engine:
        log = tmp_path_factory.mktemp("engine") / "log"
        folder = model_root / f"{model}-{seed}"
        full = {"model": model, "folder": str(folder), "seed": seed, **order}
        engine = Engine(full | ({"socket": str(socket)} if socket else {}), log)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def new_node(launcher: Launcher) -> Iterator[NewNode]:
    """Make a node that serves, with settings by table."""
    with ExitStack() as nodes:

        def make(**tables: Json) -> NodeProcess:
            tables.setdefault("host", {"bytes": "96MiB", "segment_bytes": "32MiB"})
            tables.setdefault("nvme", {"cap_bytes": "256MiB", "segment_bytes": "16MiB"})
            # A socket's path must be short, and pytest's folders are not.
            folder = nodes.enter_context(tempfile.TemporaryDirectory(prefix="tc-"))
            node = nodes.enter_context(NodeProcess(launcher, Path(folder), **tables))
            node.start()
            return node

        yield make
