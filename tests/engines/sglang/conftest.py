"""A real node, SGLang on a CPU, and children that are other engines."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.sglang.children import CHILD_S, Child, NewNode, start_child
from tiercache.testing.nodes import Launcher, NodeProcess

if TYPE_CHECKING:
    from tests.engines.sglang.prompts import NewTree

# SGLang looks at these when it is imported, here and in children: what stands in for its kernels has
# names of its own choosing, and lies in a folder of its own.
STAND_INS = str(Path(__file__).parent / "stand_ins")
sys.path.insert(0, STAND_INS)
os.environ["PYTHONPATH"] = os.pathsep.join([STAND_INS, os.environ["PYTHONPATH"]])
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS"] = "1"
os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # Rounding would hide what is restored wrongly.

HOST = {"bytes": "64MiB", "segment_bytes": "16MiB"}


@pytest.fixture(scope="session", autouse=True)
def page_hashes() -> None:
    """SGLang compiles its page hash when it is first used, which takes longer than its threads wait."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    assert len(get_storage_hash_str([1, 2, 3, 4], None, page_size=2)) == 2


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts nodes."""
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def new_node(launcher: Launcher, tmp_path: Path) -> Iterator[NewNode]:
    """Starts nodes, which end with the test."""
    started: list[NodeProcess] = []

    def start(**tables: dict[str, str | int]) -> NodeProcess:
        folder = tmp_path / f"node-{len(started)}"
        folder.mkdir()
        tables.setdefault("host", {**HOST})
        node = NodeProcess(launcher, folder, **tables)
        node.start()
        started.append(node)
        return node

    yield start
    for node in started:
        if node.running:
            node.kill()


@pytest.fixture
def node(new_node: NewNode) -> NodeProcess:
    """A node."""
    return new_node()


@pytest.fixture(scope="module")
def module_node(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    """A node that a whole module shares."""
    with NodeProcess(launcher, tmp_path_factory.mktemp("node"), host=HOST) as node:
        node.start()
        yield node


@pytest.fixture
def new_tree() -> Iterator["NewTree"]:
    """Makes trees; all are detached at the end."""
    from tests.engines.sglang.shapes import Shape
    from tests.engines.sglang.trees import Rank, Tree

    made: list[Tree] = []

    def make(
        node: NodeProcess,
        shape: Shape | None = None,
        server: dict[str, object] | None = None,
        **table: object,
    ) -> Tree:
        rank = Rank(str(node.socket), table=table, server=server or {})
        made.append(Tree(shape or Shape(), rank))
        return made[-1]

    yield make
    for tree in made:
        tree.close()
    gc.collect()


@pytest.fixture
def child() -> Child:
    """Runs a script of this folder in another process to its end; returns what it said."""

    def run(script: str, *arguments: object) -> str:
        with start_child(script, *arguments) as process:
            try:
                said, _ = process.communicate(timeout=CHILD_S)
            finally:
                process.kill()
        assert process.returncode == 0, said[-8000:]
        return said

    return run
