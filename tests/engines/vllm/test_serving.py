"""`vllm serve`, over HTTP: what one server saves, another restores, and clients come and go."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.vllm import models
from tests.engines.vllm.engines import Json, NewNode, prompt
from tests.engines.vllm.servers import Server, completion
from tiercache.testing.nodes import NodeProcess, eventually

PROMPTS = {
    "whole": prompt(81, 600),
    "other": prompt(82, 300),
    "a multiple of the block": prompt(83, 512),
}
CACHED = {"whole": 512, "other": 256, "a multiple of the block": 384}
OBJECTS = 4 + 2 + 2 + 2 + 4 + 2
"""What is stored of the prompts: pages of 128 tokens, and two of a state at the end of each."""

TOLERANCE_BFLOAT16 = 0.1


@dataclass
class Stage:
    """A node, what a first server computed, and a second one that may load."""

    node: NodeProcess
    computed: dict[str, Json]
    server: Server

    def right(self, case: str, found: Json) -> None:
        """The answer is what the first server computed."""
        assert found["tokens"] == self.computed[case]["tokens"], case
        pairs = zip(found["logprobs"], self.computed[case]["logprobs"], strict=True)
        for ours, theirs in pairs:
            shared = ours.keys() & theirs.keys()
            assert shared
            assert max(abs(ours[t] - theirs[t]) for t in shared) <= TOLERANCE_BFLOAT16, case

    def empty(self) -> bool:
        """Whether nobody holds anything."""
        metrics = self.server.metrics()
        held = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        return (
            not held and not metrics["vllm:kv_cache_usage_perc"] and not self.node.gauge("leases")
        )


@pytest.fixture(scope="module")
def stage(new_node: NewNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    node = new_node()
    folder = tmp_path_factory.mktemp("model") / "qwen3next"
    models.build("qwen3next", folder)
    connector = {"socket": str(node.socket), "naming_wait_s": 60.0, "node": "here", "retry_s": 0.05}

    def start(name: str) -> Server:
        return Server(folder, connector, log(tmp_path_factory, name), "--dtype", "bfloat16")

    first = start("first")
    try:
        computed = {case: first.complete(ids) for case, ids in PROMPTS.items()}
        assert eventually(lambda: node.counter("commits") == OBJECTS)
        first.stop()
    finally:
        first.close()
    assert eventually(lambda: node.gauge("leases") == 0)
    second = start("second")
    yield Stage(node, computed, second)
    second.close()


def log(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return where a server logs."""
    return factory.mktemp(name) / "log"


def test_another_server_restores_it(stage: Stage) -> None:
    for case, ids in PROMPTS.items():
        assert stage.computed[case]["cached"] == 0, case
        found = stage.server.complete(ids)
        stage.right(case, found)
        assert found["cached"] == CACHED[case], case
        assert found["handed"] == {"tiercache_source": "here"}, case
    metrics = stage.server.metrics()
    assert metrics["vllm:tiercache_hits_total"] == len(PROMPTS)
    assert metrics["vllm:tiercache_hit_tokens_total"] == sum(CACHED.values())
    assert metrics["vllm:tiercache_loaded_bytes_total"] > 0
    assert metrics["vllm:tiercache_loads_failed_total"] == 0
    assert metrics["vllm:tiercache_attached"] == 1


def test_a_reset_clears_what_is_asked_for(stage: Stage) -> None:
    ids = PROMPTS["whole"]
    stage.server.complete(ids)
    assert stage.server.post("/reset_prefix_cache") == {"success": True}
    found = stage.server.complete(ids)
    assert found["cached"] == 512, "vLLM's own cache only"
    assert stage.server.post("/reset_prefix_cache?reset_external=true") == {"success": True}
    before = stage.node.counter("commits")
    found = stage.server.complete(ids)
    assert found["cached"] == 0, "ours too"
    stage.right("whole", found)
    assert eventually(lambda: stage.node.counter("commits") >= before + 6)
    assert stage.server.post("/reset_prefix_cache") == {"success": True}
    assert stage.server.complete(ids)["cached"] == 512, "saved again"


def test_clients_that_go_away_leave_nothing_behind(stage: Stage) -> None:
    """Disconnected while it decodes, and, many times, while it is asked about or loaded."""
    asked = stage.server.begin("/v1/completions", completion(PROMPTS["whole"], 1400, stream=True))
    answer = asked.getresponse()
    assert answer.readline().startswith(b"data:")
    assert not stage.empty()
    answer.close()
    asked.close()
    assert eventually(stage.empty)
    for turn in range(12):
        stage.server.post("/reset_prefix_cache")
        body = completion(PROMPTS["whole"], 100, cache_salt="gone" if turn % 2 else None)
        stage.server.begin("/v1/completions", body).close()
    assert eventually(stage.empty)
    assert stage.server.post("/reset_prefix_cache") == {"success": True}, "no block is held"
    stage.right("whole", stage.server.complete(PROMPTS["whole"]))
