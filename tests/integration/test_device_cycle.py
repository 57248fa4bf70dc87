"""A state's whole way: device, checkpoint, arena, NVMe, a node that was killed, and a fresh slot."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from tiercache.cli.app import app
from tiercache.cli.documents import Object, Statistics
from tiercache.cli.exits import Exit
from tiercache.cli.quality_path import Engine, Subject
from tiercache.device import (
    CheckpointPool,
    LeastRecent,
    MarkedTier,
    Restored,
    StateBlocks,
    codec_named,
    lane_for,
)
from tiercache.state import Chain
from tiercache.testing.nodes import NewNode, NodeProcess
from tiercache.testing.recall import MODELS, episode
from tiercache_transformers import hf
from tiercache_transformers.state import take_states

torch.set_num_threads(1)

EAGER = {"write_back": "eager"}
BOUNDARIES = (128, 85, 64, 127, 100)
"""More than there are checkpoint slots, so that the policy has to demote; some inside a block."""

MARKS = (32, 64, 96, 128)
COUNT = 24


def told(node: NodeProcess, *args: str) -> bytes:
    settings = str(node.folder / "settings.toml")
    result = CliRunner().invoke(app, [*args, "--json"], env={"TIERCACHE_CONFIG": settings})
    assert result.exit_code == Exit.OK, f"{result.stderr}\n{node.said()}"
    return result.stdout_bytes


def states(node: NodeProcess) -> list[Object]:
    """The recurrent states that the node holds."""
    found = msgspec.json.decode(told(node, "ls"), type=list[Object])
    return [one for one in found if one.part == "recurrent"]


@contextmanager
def engine_of(subject: Subject, node: NodeProcess, codec: str) -> Iterator[Engine]:
    with ExitStack() as stack:
        engine = Engine(subject, Path(node.socket), codec)
        stack.callback(engine.client.close)
        yield engine


def decode(subject: Subject, cache: DynamicCache, last: int) -> list[int]:
    """Go on greedily, one token at a time."""
    chosen = [last]
    for _ in range(COUNT):
        logits = hf.forward(subject.model, chosen[-1:], cache)
        chosen.append(int(logits.argmax()))
    return chosen[1:]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["native", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_decode_goes_on_after_the_whole_way(name: str, codec: str, new_node: NewNode) -> None:
    subject = Subject.load(name)
    block = subject.layout.block_tokens
    tokens = episode(11, tokens=160, pairs=32).context
    node = new_node(nvme=EAGER)
    node.start()
    expected: dict[int, list[int]] = {}
    with engine_of(subject, node, codec) as engine:
        for boundary in BOUNDARIES:
            cache = DynamicCache(config=subject.model.config)
            subject.run(tokens[:boundary], cache)
            chain = Chain(tokens, block)
            engine.keep(f"save-{boundary}", chain, cache, boundary)
            expected[boundary] = decode(subject, cache, tokens[boundary])
        demoted_by_policy = engine.tier.counters["demoted"]
        assert demoted_by_policy == len(BOUNDARIES) - len(engine.tier)
        assert demoted_by_policy > 0
        engine.drain()
    node.kill()
    node.start()
    node.wait_until(lambda: status(node) == "ready")
    found = {one.end: (one.codec, one.requantised) for one in states(node)}
    assert found == dict.fromkeys(BOUNDARIES, (codec, 0))
    with engine_of(subject, node, codec) as engine:
        for boundary in BOUNDARIES:
            cache = engine.fetch(f"load-{boundary}", Chain(tokens, block), boundary)
            assert decode(subject, cache, tokens[boundary]) == expected[boundary]
        assert engine.tier.counters["restored"] == len(BOUNDARIES)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_several_checkpoints_of_one_block_go_the_whole_way(codec: str, new_node: NewNode) -> None:
    """One taking of device memory holds four boundaries; each is resumed by itself after a restart."""
    subject = Subject.load("mla1_kda2")
    tokens = episode(11, tokens=160, pairs=32).context
    node = new_node(nvme=EAGER)
    node.start()
    expected: dict[int, list[int]] = {}
    with engine_of(subject, node, codec) as engine:
        prompt = engine.prompt("save", Chain(tokens, subject.layout.block_tokens))
        owner = engine.tier.owner
        pool = CheckpointPool(owner.active.seat, codec_named(codec), 1, per_block=len(MARKS))
        marked = MarkedTier(
            StateBlocks(owner, pool, MARKS), lane_for(pool.store.device), LeastRecent(), engine.outlet,
            namespace=subject.namespace, host_bytes_max=1 << 24,
        )  # fmt: skip
        for mark in MARKS:
            cache = DynamicCache(config=subject.model.config)
            subject.run(tokens[:mark], cache)
            found = engine.tier.restore(prompt, mark, take_states(cache, subject.form, mark))
            assert isinstance(found, Restored)
            assert marked.keep(found.run, prompt, mark) is None
            owner.clear(found.run)
            engine.save_blocks(prompt, cache, mark)
            expected[mark] = decode(subject, cache, tokens[mark])
        assert (len(pool.table), marked.find(prompt, 127)) == (1, 96)
        assert marked.make_room()
        engine.drain()
    node.kill()
    node.start()
    node.wait_until(lambda: status(node) == "ready")
    assert {one.end: one.codec for one in states(node)} == dict.fromkeys(MARKS, codec)
    with engine_of(subject, node, codec) as engine:
        for mark in MARKS:
            cache = engine.fetch(f"load-{mark}", Chain(tokens, subject.layout.block_tokens), mark)
            assert decode(subject, cache, tokens[mark]) == expected[mark]


@pytest.mark.slow
def test_the_generation_of_a_derived_state_is_recorded(new_node: NewNode) -> None:
    """Each turn resumes from the quantised state of the one before, and is quantised again."""
    subject = Subject.load("mla1_kda2")
    tokens = episode(12, tokens=160, pairs=32).context
    node = new_node(nvme=EAGER)
    node.start()
    ends = (64, 96, 128)
    with engine_of(subject, node, "int8") as engine:
        cache = DynamicCache(config=subject.model.config)
        subject.run(tokens[: ends[0]], cache)
        engine.keep("turn-0", Chain(tokens, subject.layout.block_tokens), cache, ends[0])
        engine.drain()
    for turn, (before, end) in enumerate(pairwise(ends), 1):
        with engine_of(subject, node, "int8") as engine:
            chain = Chain(tokens, subject.layout.block_tokens)
            cache = engine.fetch(f"resume-{turn}", chain, before)
            subject.run(tokens[before:end], cache)
            engine.keep(f"turn-{turn}", chain, cache, end, rounded=turn)
            engine.drain()
    assert {one.end: one.requantised for one in states(node)} == {64: 0, 96: 1, 128: 2}


def status(node: NodeProcess) -> str:
    return msgspec.json.decode(told(node, "stats"), type=Statistics).node.nvme


@pytest.mark.slow
def test_the_gate_passes_as_shipped() -> None:
    result = CliRunner().invoke(app, ["quality", "--json"])
    assert result.exit_code == Exit.OK, result.stderr
    document = msgspec.json.decode(result.stdout_bytes, type=dict[str, object])
    assert document["failures"] == []
    scores = document["scores"]
    assert isinstance(scores, dict)
    assert {name: set(found) for name, found in scores.items()} == {
        name: {"native", "int8"} for name in MODELS
    }
