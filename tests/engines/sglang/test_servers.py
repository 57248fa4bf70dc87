"""Real servers on the CPU: a second process resumes from what the first one computed."""

import json
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from tests.engines.sglang import models
from tests.engines.sglang.children import NewNode
from tests.engines.sglang.servers import Answer, Server, flags_of
from tiercache.testing.nodes import NodeProcess

pytestmark = pytest.mark.timeout(900)

BASE = [(7 * at) % 500 + 2 for at in range(100)]
SUFFIX = [9, 9, 9, 9, 8, 7, 33, 21]
OTHER = [400, 3, 77]
DEADLINE_S = 2.0
"""More than the default: the machine may be busy."""

EXACT = 2e-5
"""Float32 sums in another order."""

NOT_FAR = 0.5
TELLS = 0.02
"""A log probability that is off by this is no rounding."""


def extra_config(node: NodeProcess, **given: Any) -> str:
    """Return what is passed as `--hicache-storage-backend-extra-config`."""
    table = {"socket": str(node.socket), "deadline_s": DEADLINE_S, **given.pop("table", {})}
    config = {
        "backend_name": "tiercache",
        "module_path": "tiercache_sglang.backend",
        "class_name": "TierCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": 16,
        "tiercache": table,
    }
    return json.dumps(config | given)


@pytest.fixture
def large_node(new_node: NewNode) -> NodeProcess:
    """A node with room for all of it."""
    return new_node(host={"bytes": "256MiB", "segment_bytes": "64MiB"})


def dense(node: NodeProcess, folder: Path, model: Path, memory: str = "cache") -> Server:
    """Return a server of a dense model, to be started."""
    flags = flags_of(extra_config(node), page=16, hybrid=False, memory=memory)
    return Server(folder, model, flags)


def hybrid(node: NodeProcess, folder: Path, model: Path, memory: str = "cache") -> Server:
    """Return a server of a hybrid model, to be started."""
    flags = flags_of(extra_config(node), page=1, hybrid=True, memory=memory)
    return Server(folder, model, flags)


def settled(node: NodeProcess) -> None:
    """Wait until nothing is on its way to the node any more."""
    seen = -1
    quiet = threading.Event()

    def still() -> bool:
        nonlocal seen
        quiet.wait(0.5)
        before, seen = seen, node.counter("commits")
        return before == seen and node.gauge("reservations") == 0

    node.wait_until(still)


def test_a_dense_model_resumes_in_a_second_server(large_node: NodeProcess, tmp_path: Path) -> None:
    """The second one has no host cache of its own."""
    model = models.dense(tmp_path / "model")
    with dense(large_node, tmp_path / "first", model) as first:
        first.generate(BASE)
        warm = first.generate(BASE + SUFFIX)
        settled(large_node)
    with dense(large_node, tmp_path / "second", model, "buffer_only") as second:
        resumed = second.generate(BASE + SUFFIX)
        assert resumed.from_storage == 96
        assert resumed.is_like(warm, 0.0)
        second.detach()
        second.flush()
        uncached = second.generate(BASE + SUFFIX)
        assert sum(uncached.cached.values()) == 0
        assert resumed.is_like(uncached, EXACT)


@pytest.fixture
def hybrid_model(tmp_path: Path) -> Path:
    """A hybrid model."""
    return models.hybrid(tmp_path / "model")


@pytest.fixture
def pair(
    large_node: NodeProcess, hybrid_model: Path, tmp_path: Path
) -> Iterator[tuple[Server, Answer]]:
    """A second server of a hybrid model, and what the first one answered before it ended. The first one
    does without a host cache of SGLang's own: the node is its only one."""
    with hybrid(large_node, tmp_path / "first", hybrid_model, "buffer_only") as first:
        first.generate(BASE)
        warm = first.generate(BASE + SUFFIX)
        settled(large_node)
        first.flush()
        again = first.generate(BASE + SUFFIX)
        assert again.from_storage == len(BASE)
        assert again.is_like(warm, 0.0)
    with hybrid(large_node, tmp_path / "second", hybrid_model) as second:
        yield second, warm


def test_a_hybrid_model_resumes_in_a_second_server(
    large_node: NodeProcess, pair: tuple[Server, Answer]
) -> None:
    """One server for all of it: a start takes most of a minute."""
    server, warm = pair
    resumed = server.generate(BASE + SUFFIX)
    assert resumed.from_storage == len(BASE)
    assert resumed.is_like(warm, 0.0)
    uncached = check_attach_and_detach(large_node, server, resumed)
    check_int8_states(large_node, server, uncached)
    check_prefetch_policies(large_node, server, uncached)
    check_updated_weights(large_node, server, uncached)
    check_detaching_under_load(large_node, server, uncached)
    check_a_node_that_is_killed(large_node, server, uncached)
    check_a_node_that_is_frozen(large_node, server, uncached)


def check_attach_and_detach(node: NodeProcess, server: Server, resumed: Answer) -> Answer:
    """Return what is answered without any cache."""
    server.detach()
    server.flush()
    uncached = server.generate(BASE + SUFFIX)
    assert sum(uncached.cached.values()) == 0
    assert resumed.is_like(uncached, EXACT)

    # With wrong states the answer is another one: so the right ones were restored above.
    server.flush()
    server.attach(extra_config(node, module_path="wrong_states", class_name="WrongStates"))
    wrong = server.generate(BASE + SUFFIX)
    assert wrong.from_storage == len(BASE)
    assert not wrong.is_like(uncached, TELLS)
    server.detach()

    server.flush()
    server.attach(extra_config(node))
    again = server.generate(BASE + OTHER)
    assert again.from_storage == len(BASE)
    assert node.gauge("objects", "host") > 0

    server.flush()
    server.clear()
    assert node.gauge("objects", "host") == 0
    cold = server.generate(BASE + SUFFIX)
    assert sum(cold.cached.values()) == 0
    assert cold.is_like(uncached, EXACT)
    metrics = server.metrics()
    assert "sglang:prefetched_tokens_total" in metrics
    assert "sglang:backup_pgs_count" in metrics
    return uncached


def check_int8_states(node: NodeProcess, server: Server, uncached: Answer) -> None:
    """States kept in fewer bytes give nearly the same answer, and not by chance the same."""
    server.detach()
    server.attach(extra_config(node, table={"states": "int8"}))
    server.clear()
    server.flush()
    server.generate(BASE)
    server.generate(BASE + SUFFIX)
    settled(node)
    server.flush()
    resumed = server.generate(BASE + SUFFIX)
    assert resumed.from_storage == len(BASE)
    assert resumed.tokens == uncached.tokens
    assert resumed.is_like(uncached, NOT_FAR)
    assert resumed.logprobs != uncached.logprobs
    server.detach()
    server.attach(extra_config(node))
    server.clear()
    server.flush()  # It has restored such states.


def check_prefetch_policies(node: NodeProcess, server: Server, uncached: Answer) -> None:
    """A hybrid model gets all or nothing: what has not come by then is computed."""
    server.detach()
    server.attach(extra_config(node))
    server.flush()
    server.generate(BASE)
    server.generate(BASE + SUFFIX)
    settled(node)
    came: dict[str, int] = {}
    for policy in ("best_effort", "timeout", "wait_complete"):
        server.detach()
        server.attach(extra_config(node), policy)
        server.flush()
        answer = server.generate(BASE + SUFFIX)
        assert answer.is_like(uncached, EXACT)
        came[policy] = answer.from_storage
    assert came["wait_complete"] == len(BASE)
    assert set(came.values()) <= {0, len(BASE)}


def check_updated_weights(node: NodeProcess, server: Server, uncached: Answer) -> None:
    """State of other weights is not served, until the backend is attached for them."""
    for version in ("step 2", "default"):
        server.call("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        server.flush()
        assert server.generate(BASE + SUFFIX).from_storage == 0
        server.flush()
        server.detach()
        server.attach(extra_config(node))
        answer = server.generate(BASE + SUFFIX)
        assert answer.from_storage == (0 if version == "step 2" else len(BASE))
        assert answer.is_like(uncached, EXACT)


def check_detaching_under_load(node: NodeProcess, server: Server, uncached: Answer) -> None:
    """Whoever asks meanwhile is answered, and answered the same."""
    ended = threading.Event()
    answers: list[Answer] = []

    def ask() -> None:
        while not ended.is_set():
            answers.append(server.generate(BASE + SUFFIX))
            ended.wait(0.05)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        cycles = 0
        while len(answers) < 8 or cycles < 3:
            server.detach()
            until_attached(server, extra_config(node))
            cycles += 1
            assert cycles < 100
    finally:
        ended.set()
        asking.join()
    assert [answer for answer in answers if not answer.is_like(uncached, EXACT)] == []


def until_attached(server: Server, config: str) -> None:
    """Attach as soon as the server is idle for it."""
    rest = threading.Event()
    for _ in range(300):
        try:
            server.attach(config)
        except urllib.error.HTTPError:
            rest.wait(0.05)
        else:
            return
    raise AssertionError(server.said())


def check_a_node_that_is_killed(node: NodeProcess, server: Server, uncached: Answer) -> None:
    """Serving goes on without it, and with it again once it is back."""
    node.kill()
    server.flush()
    alone = server.generate(BASE + SUFFIX)
    assert alone.from_storage == 0
    assert alone.is_like(uncached, EXACT)
    node.start()
    server.flush()

    def resumed() -> bool:
        server.flush()
        server.generate(BASE)
        settled(node)
        server.flush()
        answer = server.generate(BASE + SUFFIX)
        assert answer.is_like(uncached, EXACT)
        return answer.from_storage == len(BASE)

    node.wait_until(resumed, 60)


def check_a_node_that_is_frozen(node: NodeProcess, server: Server, uncached: Answer) -> None:
    """A node that does not answer costs a bounded time, once, and then nothing."""
    node.send(SIGSTOP)
    try:
        server.flush()
        took = []
        for _ in range(3):
            answer = server.generate(BASE + SUFFIX)
            took.append(answer.seconds)
            assert answer.is_like(uncached, EXACT)
            server.flush()
        assert max(took) < 2 * DEADLINE_S + 3, took
        assert took[-1] < DEADLINE_S, took
    finally:
        node.send(SIGCONT)
    server.generate(BASE)
    assert server.generate(BASE + SUFFIX).is_like(uncached, EXACT)
