"""A real node and its client: prompts with a prefix in common, under the default retention."""

from pathlib import Path

import pytest

from tiercache.client import Blob, Capture, Client, Options, Plan, Scope
from tiercache.replay.traces import read_trace
from tiercache.state import Chain, Kind, Layout, Namespace, Part, Tensor
from tiercache.testing.nodes import NewNode, NodeProcess

BLOCK = 16
LAYOUT = Layout(
    (
        Part("kv", Kind.KV, None, BLOCK, 1, (Tensor("v", "float32", (8,), ("c",)),)),
        Part("state", Kind.RECURRENT, 1, 0, 1, (Tensor("v", "float32", (64,), ("c",)),)),
    ),
    BLOCK,
)
MODEL = Namespace.of(LAYOUT, model="m", weights="w", tokenizer="t")
GRID = 528
"""Where this engine can capture its state: 33 blocks."""

SCOPE = Scope(capture=Capture(grain=GRID))
PREFIX = list(range(10_000, 11_500))
SUFFIX_TOKENS = 700
SUFFIXES = 64
FORK = 1056
"""The last point of the grid before the prompts part; their ends are at 2112."""


@pytest.fixture
def node(new_node: NewNode, tmp_path: Path) -> NodeProcess:
    made = new_node(record={"path": str(tmp_path / "traces")})
    made.start()
    return made


def serve(client: Client, request: str, tokens: list[int]) -> Plan:
    """Serve one request by an engine that follows the advice, and can follow it at block ends."""
    chain = Chain(tokens, BLOCK)
    plan = client.load(client.plan(request, chain, scope=SCOPE), wait_s=5.0)
    blobs = [
        Blob("kv", end, memoryview(bytes(BLOCK * 32)), end - BLOCK)
        for end in range(plan.boundary + BLOCK, max(plan.checkpoints, default=0) + 1, BLOCK)
    ]
    blobs += [Blob("state", end, memoryview(bytes(256))) for end in plan.checkpoints]
    saved = client.save(request, chain, blobs, scope=SCOPE)
    assert not saved.declined
    plan.release()
    return plan


def prompt(number: int) -> list[int]:
    return [*PREFIX, *range(number * 1000, number * 1000 + SUFFIX_TOKENS)]


def test_a_prefix_that_many_prompts_share(node: NodeProcess) -> None:
    """The second request makes the checkpoint where they part, and all that follow resume there."""
    with Client.attach(str(node.socket), MODEL, LAYOUT, options=Options(name="e")) as client:
        plans = [serve(client, str(number), prompt(number)) for number in range(SUFFIXES)]
        assert client.flush(durable=True).waiting == 0
    assert [plan.boundary for plan in plans] == [0, 0, *[FORK] * (SUFFIXES - 2)]
    assert plans[1].checkpoints == (FORK, 4 * GRID)
    assert {plan.checkpoints for plan in [plans[0], *plans[2:]]} == {(4 * GRID,)}
    assert [plan.reason for plan in plans[:3]] == ["unknown_prefix", "no_state", ""]
    counters = node.figures().counters
    assert counters["lookups"]["hit_host"] == SUFFIXES - 2
    assert counters["lookups"]["miss"] == sum(counters["misses"].values()) == 2
    assert counters["misses"]["unknown_prefix"] == counters["misses"]["no_state"] == 1
    tokens = SUFFIXES * (len(PREFIX) + SUFFIX_TOKENS)
    assert counters["lookup_tokens"][""] == tokens
    lost = counters["lost_tokens"]
    assert sum(counters["hit_tokens"].values()) + sum(lost.values()) == tokens
    same = len(PREFIX) // BLOCK * BLOCK  # Tokens of whole blocks that they have in common.
    assert lost["no_state"] == same + (SUFFIXES - 2) * (same - FORK)
    assert lost["unseen"] == tokens - (SUFFIXES - 1) * same
    assert counters["checkpoints"] == {"followed": SUFFIXES + 1, "unfollowed": 0, "unadvised": 0}
    # Only what a second request reached is on disk: the common blocks and the state among them.
    assert node.gauge("objects", "nvme") == same / BLOCK + 1


def test_what_was_asked_is_recorded(node: NodeProcess, tmp_path: Path) -> None:
    with Client.attach(str(node.socket), MODEL, LAYOUT, options=Options(name="e")) as client:
        for number in range(3):
            serve(client, str(number), prompt(number))
    assert node.stop() == 0
    (file,) = (tmp_path / "traces").iterdir()
    trace = read_trace(file)
    assert [request.tokens for request in trace.requests] == [2200] * 3
    first, *others = [request.pages for request in trace.requests]
    for pages in others:
        assert pages[:93] == first[:93]
        assert not set(pages[93:]) & set(first)


def test_prompts_that_never_come_again_write_nothing(node: NodeProcess) -> None:
    with Client.attach(str(node.socket), MODEL, LAYOUT, options=Options(name="e")) as client:
        for number in range(200):
            serve(client, str(number), list(range(number * 1000, number * 1000 + 600)))
        assert client.flush(durable=True).waiting == 0
        assert node.counter("writeback_bytes") == 0
        serve(client, "again", list(range(600)))
        assert client.flush(durable=True).waiting == 0
    assert node.counter("writeback_bytes") > 0
