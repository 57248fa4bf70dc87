"""`vllm serve`, over HTTP: what one server saves, another restores, and clients come and go."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.vllm import models
from tests.engines.vllm.engines import Json, NewNode, prompt
from tests.engines.vllm.servers import COMPLETIONS, Server, completion
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
    assert stage.server.post("reset_prefix_cache") == {"success": True}
    found = stage.server.complete(ids)
    assert found["cached"] == 512, "vLLM's own cache only"
    assert stage.server.post("reset_prefix_cache?reset_external=true") == {"success": True}
    before = stage.node.counter("commits")
    found = stage.server.complete(ids)
    assert found["cached"] == 0, "ours too"
    stage.right("whole", found)
    assert eventually(lambda: stage.node.counter("commits") >= before + 6)
    assert stage.server.post("reset_prefix_cache") == {"success": True}
    assert stage.server.complete(ids)["cached"] == 512, "saved again"


def test_clients_that_go_away_leave_nothing_behind(stage: Stage) -> None:
    """Disconnected while it decodes, and, many times, while it is asked about or loaded."""
    asked = stage.server.begin(COMPLETIONS, completion(PROMPTS["whole"], 1400, stream=True))
    answer = asked.getresponse()
    assert answer.readline().startswith(b"data:")
    assert not stage.empty()
    answer.close()
    asked.close()
    assert eventually(stage.empty)
    for turn in range(12):
        stage.server.post("reset_prefix_cache")
        body = completion(PROMPTS["whole"], 100, cache_salt="gone" if turn % 2 else None)
        stage.server.begin(COMPLETIONS, body).close()
    assert eventually(stage.empty)
    assert stage.server.post("reset_prefix_cache") == {"success": True}, "no block is held"
    stage.right("whole", stage.server.complete(PROMPTS["whole"]))


HOSTILE: dict[str, Json] = {
    "one token": {"prompt": [7]},
    "no token": {"prompt": []},
    "too long": {"prompt": prompt(85, 5000)},
    "as long as can be": {"prompt": prompt(86, 2047), "max_tokens": 1},
    "tokens that are none": {"prompt": [-1, 10**9, 3]},
    "a long salt": {"cache_salt": "s" * 100_000},
    "a salt of signs": {"cache_salt": "a/b/../\\0 \U0001f600%s{}"},
    "a salt that is half a sign": {"cache_salt": "\ud800"},
    "an empty salt": {"cache_salt": ""},
    "a salt that is a number": {"cache_salt": 7},
    "a source that is a list": {"kv_transfer_params": {"tiercache_source": ["x"]}},
    "a source that is a path": {"kv_transfer_params": {"tiercache_source": "../../etc"}},
    "parameters of another connector": {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1], "a": {"b": []}}
    },
    "parameters that are none": {"kv_transfer_params": "x"},
    "an adapter that is not there": {"model": "nobody"},
    "a name that is long": {"request_id": "r" * 5000},
    "many answers": {"n": 4, "temperature": 1.0, "seed": 1},
    "nothing to answer": {"max_tokens": 0},
    "of the prompt itself": {"prompt_logprobs": 2},
    "echoed": {"echo": True},
}


def test_no_request_does_harm(stage: Stage) -> None:
    """Each is answered or refused, and the server serves everybody else as before."""
    for case, changed in HOSTILE.items():
        status, answer = stage.server.send(COMPLETIONS, completion(PROMPTS["other"], 4) | changed)
        assert status in (200, 400, 404, 422), (case, answer)
    for _ in range(2):
        stage.server.post("reset_prefix_cache")
        stage.right("other", stage.server.complete(PROMPTS["other"]))
    assert eventually(stage.empty)
    assert stage.node.counter("protocol_errors") == 0


def test_names_that_collide_share_nothing_wrong(stage: Stage) -> None:
    """Two requests of one name at the same time, of which one may hit and one may not."""
    pair = [("whole", "x"), ("other", "y")]
    stage.server.post("reset_prefix_cache")
    asked = [
        stage.server.begin(
            COMPLETIONS, completion(PROMPTS[case], 8, request_id="twin", cache_salt=salt)
        )
        for case, salt in pair
    ]
    for (case, _), connection in zip(pair, asked, strict=True):
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        assert found["choices"][0]["token_ids"] == stage.computed[case]["tokens"], case
        connection.close()
    assert eventually(stage.empty)


def test_it_sleeps(stage: Stage) -> None:
    for level in (0, 1):
        stage.server.complete(PROMPTS["whole"])
        stage.server.post(f"sleep?level={level}")
        stage.server.post("wake_up?tags=scheduling" if level == 0 else "wake_up")
        stage.server.post("reset_prefix_cache")
        found = stage.server.complete(PROMPTS["whole"])
        assert found["cached"] == (0 if level else 512), "vLLM has connectors reset from level 1 on"
        stage.right("whole", found)
