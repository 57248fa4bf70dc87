"""Two nodes of a cluster: what SGLang computed on one, another SGLang restores on the other."""

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.sglang.children import CHILD_S, Child, start_child
from tests.engines.sglang.restoring import TOKENS
from tests.engines.sglang.shapes import Shape, shapes
from tests.engines.sglang.trees import Rank, Restored, Tree, restored_in
from tiercache.testing.etcd import EtcdServer, free_port
from tiercache.testing.nodes import Launcher
from tiercache.testing.towns import Town

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)"
)

PATIENT_S = 2.0
"""How long a node waits for another one where slowness is not what is tested."""

FAR = (16, 32)
"""Where the second prompt has states, in tokens."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    with ExitStack() as closing:
        closing.callback(server.kill)
        server.start()
        yield server


@pytest.fixture
def town(etcd: EtcdServer, launcher: Launcher) -> Iterator[Town]:
    """Nodes a and b."""
    with Town([etcd.url], answer_s_max=PATIENT_S, ttl_s=10) as made:
        for name in "ab":
            made.add(name, launcher)
        assert made.settled("a", "b")
        yield made


def at(town: Town, name: str, shape: Shape) -> Tree:
    """Return a tree at one of the nodes."""
    return Tree(shape, Rank(str(town.nodes[name].socket)))


@pytest.mark.timeout(400)
def test_another_node_restores_bit_by_bit(town: Town, child: Child, tmp_path: Path) -> None:
    """MHA and MLA, with and without recurrent states, Rust and Python cores."""
    told = 0
    for seed, shape in enumerate(shapes(), 1):
        tree = at(town, "a", shape)
        tree.compute(seed, TOKENS)
        tree.settle()
        tree.close()
        told += 1 if shape.hybrid else TOKENS // shape.page
    assert town.heard("b", told)
    results = tmp_path / "results.json"
    child("restoring.py", town.nodes["b"].socket, results)
    assert restored_in(results) == {
        str(shape): Restored(TOKENS, TOKENS, TOKENS, True, True if shape.hybrid else None)
        for shape in shapes()
    }
    there = town.nodes["b"]
    assert there.counter("peer_asked", "found") == len(shapes())
    assert there.counter("peer_read_bytes") > 0


@pytest.mark.timeout(400)
def test_a_prompt_that_the_engine_has_in_part_goes_on_from_there(town: Town) -> None:
    """What SGLang asks for begins where its own memory ends, in the middle of the prompt."""
    shape = Shape()
    tree = at(town, "a", shape)
    for stop in FAR:
        tree.compute(1, stop)
        tree.settle()
    tree.close()
    assert town.heard("b", len(FAR))
    tree = at(town, "b", shape)
    tree.compute(1, FAR[0])
    tree.settle()
    assert tree.restore(1, FAR[1], beyond=FAR[0]) == Restored(16, FAR[1], 16, True, True)
    tree.close()


@pytest.mark.timeout(400)
def test_two_ranks_choose_a_boundary_that_both_have_elsewhere(town: Town, tmp_path: Path) -> None:
    """Each lacks another state over there: the answer is one boundary, the deepest that both have."""
    both = Restored(16, 16, 16, True, True)
    found = {}
    for task, name in (("compute", "a"), ("restore", "b")):
        port = free_port()
        results = [tmp_path / f"{task}-{rank}.json" for rank in (0, 1)]
        children = [
            start_child("apart.py", task, town.nodes[name].socket, path, rank, port)
            for rank, path in enumerate(results)
        ]
        said = [process.communicate(timeout=CHILD_S)[0] for process in children]
        assert [process.returncode for process in children] == [0, 0], "\n".join(said)[-8000:]
        found[task] = [restored_in(path) for path in results]
        assert town.heard("b", 4 * sum(shape.hybrid for shape in shapes()))
    expected = {str(shape): both for shape in shapes() if shape.hybrid}
    assert found["restore"] == [expected, expected]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_node_that_is_lost_costs_the_hit_and_nothing_else(town: Town, fault: str) -> None:
    tree = at(town, "a", Shape())
    tree.compute(1, TOKENS)
    tree.settle()
    tree.close()
    assert town.heard("b", 1)
    lost = town.nodes["a"]
    lost.send(signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
    tree = at(town, "b", Shape())
    assert tree.prefetch(1, TOKENS) == 0
    tree.compute(1, TOKENS)
    tree.settle()
    tree.forget()
    assert tree.restore(1, TOKENS) == Restored(TOKENS, TOKENS, TOKENS, True, True)
    tree.close()
    lost.send(signal.SIGCONT)
