"""SGLang's real tree and controller, both cores of it: what one process writes, another restores."""

import socket
from pathlib import Path

import pytest

from tests.engines.sglang.children import CHILD_S, Child, start_child
from tests.engines.sglang.restoring import TOKENS
from tests.engines.sglang.shapes import Shape, shapes
from tests.engines.sglang.trees import Rank, Restored, Tree, restored_in
from tiercache.testing.nodes import NodeProcess


@pytest.mark.timeout(400)
def test_another_process_restores_bit_by_bit(
    node: NodeProcess, child: Child, tmp_path: Path
) -> None:
    """MHA and MLA, with and without recurrent states, Rust and Python cores."""
    for seed, shape in enumerate(shapes(), 1):
        tree = Tree(shape, Rank(str(node.socket)))
        tree.compute(seed, TOKENS)
        tree.settle()
        counts = tree.backend.figures.counts()
        assert counts.get("states_stored", 0) == counts.get("states_offered", 0) == shape.hybrid
        tree.close()
    results = tmp_path / "results.json"
    child("restoring.py", node.socket, results)
    expected = {
        str(shape): Restored(TOKENS, TOKENS, TOKENS, True, True if shape.hybrid else None)
        for shape in shapes()
    }
    assert restored_in(results) == expected


@pytest.mark.timeout(400)
@pytest.mark.parametrize("memory", ["cache", "buffer_only"])
@pytest.mark.parametrize("core", ["rust", "python"])
def test_a_later_turn_is_saved_where_it_stands(
    node: NodeProcess, core: str, memory: str, request: pytest.FixtureRequest
) -> None:
    """What SGLang 0.5.23 says to come before a look-up leaves out the last node before it."""
    tree = Tree(Shape(core, memory=memory), Rank(str(node.socket)))
    request.addfinalizer(tree.close)
    for seed, stops in ((1, (8, 16, 32)), (2, (4, 8, 32))):
        before = 0
        for stop in stops:
            assert tree.prefetch(seed, stop, beyond=before) == 0
            tree.compute(seed, stop)
            tree.settle()
            before = stop
        tree.forget()
        assert tree.stops(seed, stops[-1]) == [stop // tree.shape.page for stop in stops]
        if memory == "cache":
            assert tree.restore(seed, stops[-1]) == Restored(32, 32, 32, True, True)
        else:  # A scheduler brings it to the device; the servers' tests have one.
            assert tree.prefetch(seed, stops[-1]) == 32
        tree.forget()
    counts = tree.backend.figures.counts()
    assert counts["states_stored"] == counts["states_offered"] == 6
    assert not any(name.startswith("faults") for name in counts), counts


@pytest.mark.timeout(400)
def test_two_ranks_choose_a_boundary_that_both_have(node: NodeProcess, tmp_path: Path) -> None:
    """Each rank tells every boundary it has; the deepest common one is not the smaller of the deepest."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [tmp_path / f"rank-{rank}.json" for rank in (0, 1)]
    children = [
        start_child("ranks.py", node.socket, path, rank, port) for rank, path in enumerate(results)
    ]
    said = [process.communicate(timeout=CHILD_S)[0] for process in children]
    assert [process.returncode for process in children] == [0, 0], "\n".join(said)[-8000:]
    both, neither = Restored(16, 16, 16, True, True), Restored(0, 0, 0, True, True)
    hybrids = [str(shape) for shape in shapes() if shape.hybrid]
    expected = dict.fromkeys(hybrids, both)
    expected |= {f"{name} cut off": neither for name in hybrids}
    first, second = (restored_in(path) for path in results)
    assert first == second
    failing = {name: first.pop(name) for name in list(first) if name.startswith("injected")}
    assert first == expected
    assert all(each.kv and each.state for each in failing.values())
    assert {each.device for each in failing.values()} == {0, 32}
