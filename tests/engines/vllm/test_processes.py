"""vLLM as it is usually run: a scheduler, and two workers that share a model, in processes of their own."""

import os

from tests.engines.vllm.engines import Engine, NewEngine, NewNode, difference, prompt
from tiercache.testing.nodes import eventually

IDS = prompt(41, 600)
# What a rank stores of the prompt's 512 tokens: an engine that is stopped sooner loses what is under way.
OBJECTS_PER_RANK = 6


def test_two_ranks(new_engine: NewEngine, new_node: NewNode) -> None:
    node = new_node()
    cores = sorted(os.sched_getaffinity(0))

    def start() -> Engine:
        return new_engine(
            "qwen3next",
            node.socket,
            processes=True,
            environment={
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
            },
            settings={"tensor_parallel_size": 2},
        )

    engine = start()
    (first,) = engine.generate(IDS)
    assert first["cached"] == 0
    assert eventually(lambda: node.counter("commits") == 2 * OBJECTS_PER_RANK)
    engine.close()
    engine = start()
    (second,) = engine.generate(IDS)
    assert second["cached"] == 512
    assert second["tokens"] == first["tokens"]
    assert difference(first, second) < 1e-6
    engine.close()
