"""vLLM as it is usually run: a scheduler, and two workers that share a model, in processes of their own."""

import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode, difference, prompt
from tests.engines.vllm.seated import SECOND
from tiercache.testing.etcd import EtcdServer, free_port
from tiercache.testing.nodes import NodeProcess, eventually

IDS = prompt(41, 600)
# What a rank stores of the prompt's 512 tokens: an engine that is stopped sooner loses what is under way.
OBJECTS_PER_RANK = 6
# Workers are bound to a core each: on a busy machine a node may have to wait for its turn.
DEADLINE_S = 30.0


def two_processes() -> dict[str, str]:
    """Return the environment of an engine whose workers are two processes."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
    }


def start(
    new_engine: NewEngine,
    node: NodeProcess,
    *,
    second: NodeProcess | None = None,
    **connector: Json,
) -> Engine:
    """Start an engine of two ranks; with `second`, that is the node of the second one."""
    module = "tests.engines.vllm.seated"
    seated = {"kv_connector": "SeatedConnector", "kv_connector_module_path": module}
    return new_engine(
        "qwen3next",
        node.socket,
        processes=True,
        environment={**two_processes(), SECOND: str(second.socket) if second is not None else ""},
        settings={"tensor_parallel_size": 2},
        connector={"deadline_s": DEADLINE_S, **connector},
        transfer=seated if second is not None else {},
    )


def test_two_ranks(new_engine: NewEngine, new_node: NewNode) -> None:
    node = new_node()
    engine = start(new_engine, node)
    (first,) = engine.generate(IDS)
    assert first["cached"] == 0
    assert eventually(lambda: node.counter("commits") == 2 * OBJECTS_PER_RANK)
    engine.close()
    engine = start(new_engine, node)
    (second,) = engine.generate(IDS)
    assert second["cached"] == 512
    assert second["tokens"] == first["tokens"]
    assert difference(first, second) < 1e-6
    engine.close()


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


def has_all(node: NodeProcess) -> bool:
    """Return whether a node holds all that a rank stores of the prompt."""
    return node.counter("commits") == OBJECTS_PER_RANK


def member(new_node: NewNode, etcd: EtcdServer, cluster: str, name: str) -> NodeProcess:
    """Return a new node of a cluster."""
    settings: dict[str, Json] = {
        "name": cluster, "node": name, "listen": f"127.0.0.1:{free_port()}", "etcd": (etcd.url,),
        "answer_s_max": 5.0, "ttl_s": 30,
    }  # fmt: skip
    return new_node(cluster=settings)


@pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")
def test_ranks_whose_nodes_are_two(
    new_engine: NewEngine, new_node: NewNode, etcd: EtcdServer
) -> None:
    """Each rank has what it stored, on its own node; one boundary holds for both, or none."""
    one, other = (member(new_node, etcd, "seats", name) for name in ("one", "other"))
    assert eventually(lambda: one.gauge("peers") == other.gauge("peers") == 1)
    seats = {"one": (0, 1), "other": (1, 2)}
    engine = start(new_engine, one, second=other, seats=seats)
    (first,) = engine.generate(IDS)
    assert first["cached"] == 0
    assert eventually(lambda: one.counter("commits") == OBJECTS_PER_RANK)
    assert eventually(lambda: other.counter("commits") == OBJECTS_PER_RANK)
    engine.close()
    engine = start(new_engine, one, second=other, seats=seats)
    (second,) = engine.generate(IDS)
    assert second["cached"] == 512
    assert second["tokens"] == first["tokens"]
    assert difference(first, second) < 1e-6
    assert one.counter("agreements", "found") == 1
    engine.ask("reset_local")
    other.send(signal.SIGKILL)
    (third,) = engine.generate(IDS)
    assert third["cached"] == 0
    assert third["tokens"] == first["tokens"]
    engine.close()


@pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")
def test_engines_whose_ranks_have_two_nodes_each_reuse_one_another(
    new_engine: NewEngine, new_node: NewNode, etcd: EtcdServer
) -> None:
    """Each rank of the second one loads what the rank of its number has stored on a node of the first."""
    names = ("a1", "a2", "b1", "b2")
    nodes = {name: member(new_node, etcd, "twins", name) for name in names}
    assert eventually(lambda: all(node.gauge("peers") == 3 for node in nodes.values()))
    engine = start(new_engine, nodes["a1"], second=nodes["a2"], seats={"a1": (0, 1), "a2": (1, 2)})
    (first,) = engine.generate(IDS)
    for node in (nodes["a1"], nodes["a2"]):
        assert eventually(partial(has_all, node))
    engine.close()
    engine = start(new_engine, nodes["b1"], second=nodes["b2"], seats={"b1": (0, 1), "b2": (1, 2)})
    engine.generate(prompt(42, 600))  # From then on node b2 knows what model it is.
    for node in (nodes["b1"], nodes["b2"]):
        assert eventually(partial(has_all, node))
    (second,) = engine.generate(IDS)
    assert second["cached"] == 512
    assert second["tokens"] == first["tokens"]
    assert difference(first, second) < 1e-6
    for name in ("b1", "b2"):
        assert nodes[name].counter("peer_read_bytes") > 0
        assert has_all(nodes[name]), "what came from others is not saved again"
    engine.close()


def test_a_pipeline_starts_uncached(new_engine: NewEngine, new_node: NewNode) -> None:
    """It is not supported: the engine starts all the same, and says so. On a CPU it gets no further, with
    a connector or without: its second stage was never given what it receives into."""
    node = new_node()
    engine = new_engine(
        "llama",
        node.socket,
        processes=True,
        environment=two_processes(),
        settings={"pipeline_parallel_size": 2},
    )
    why = "this engine runs uncached: pipeline parallelism is not supported"
    assert eventually(lambda: why in engine.log.read_text())
    engine.close()
