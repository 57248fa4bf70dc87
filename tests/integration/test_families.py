"""Every family through a real node: saved by one process, resumed by another, bit for bit.

This file is also the other process: run as a script, it resumes each family that it is told.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tiercache.client import Client, Options, Saved
from tiercache.state import Chain
from tiercache.testing.families import FAMILIES, build
from tiercache_transformers import hf
from tiercache_transformers.demo_processes import NodeProcess
from tiercache_transformers.identity import namespace_of
from tiercache_transformers.layout import Form, form_of
from tiercache_transformers.state import restore, snapshot

torch.set_num_threads(1)

BLOCK = 16
BOUNDARY = 37
TOKENS = torch.randint(3, 256, (48,), generator=torch.Generator().manual_seed(7)).tolist()
CHILD_S = 240.0
OPTIONS = Options(name="test", deadline_s=10.0, required=True)


class Continued(msgspec.Struct, frozen=True):
    """What came after the boundary: a digest of the logits of each way to compute it."""

    family: str
    reused: int
    waited: bool
    steps: str
    chunk: str


def attach(socket: str, name: str, model: PreTrainedModel, form: Form) -> Client:
    namespace = namespace_of(model, form.layout, "token ids", name=name)
    return Client.attach(socket, namespace, form.layout, options=OPTIONS)


def digest(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().data).hexdigest()


def steps(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> str:
    """One call per token."""
    return digest(torch.stack([hf.forward(model, [token], cache) for token in tokens]))


def chunk(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> str:
    """One call for all."""
    return digest(hf.forward(model, tokens, cache))


def prefill(name: str, model: PreTrainedModel) -> DynamicCache:
    cache = hf.new_cache(model)
    (chunk if FAMILIES[name].chunks else steps)(model, TOKENS[:BOUNDARY], cache)
    return cache


def save(socket: str, name: str, *, durable: bool = False) -> tuple[Saved, Continued]:
    """Run to the boundary, save, and go on without interruption."""
    model = build(name)
    form = form_of(model, BLOCK)
    cache = prefill(name, model)
    blobs = snapshot(cache, form, 0, BOUNDARY)
    with attach(socket, name, model, form) as client:
        saved = client.save("first", Chain(TOKENS[:BOUNDARY], BLOCK), blobs)
        flushed = client.flush(durable=durable, wait_s=30.0)
    assert (flushed.waiting, flushed.lost, flushed.reason) == (0, 0, "")
    after = TOKENS[BOUNDARY:]
    chunked = chunk(model, after, prefill(name, model)) if FAMILIES[name].chunks else ""
    return saved, Continued(name, BOUNDARY, False, steps(model, after, cache), chunked)


def resume(socket: str, name: str) -> Continued:
    """Restore what the node has for the tokens, twice, and go on."""
    model = build(name)
    form = form_of(model, BLOCK)
    after = TOKENS[BOUNDARY:]
    with attach(socket, name, model, form) as client:
        plan = client.plan("later", Chain(TOKENS, BLOCK))
        with client.load(plan, wait_s=30.0) as loaded:
            caches = [restore(model, form, loaded.boundary, loaded.blobs) for _ in range(2)]
            reused = loaded.boundary
    stepped = steps(model, after, caches[0])
    chunked = chunk(model, after, caches[1]) if FAMILIES[name].chunks else ""
    return Continued(name, reused, not plan.ready, stepped, chunked)


def resume_elsewhere(socket: str) -> dict[str, Continued]:
    """`resume` every family in one new process."""
    child = subprocess.run(
        [sys.executable, __file__, socket, *FAMILIES],
        stdout=subprocess.PIPE,
        check=True,
        timeout=CHILD_S,
    )
    found = [msgspec.json.decode(line, type=Continued) for line in child.stdout.splitlines()]
    return {continued.family: continued for continued in found}


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="tiercache-") as directory,  # Short: it holds a socket.
        NodeProcess(Path(directory), write_back="eager") as process,
    ):
        process.start()
        yield process


@pytest.mark.slow
def test_every_family_resumes_in_another_process(node: NodeProcess) -> None:
    socket = str(node.socket)
    expected = {}
    for name in FAMILIES:
        saved, expected[name] = save(socket, name)
        assert saved.stored > 0
        assert not saved.declined
    assert resume_elsewhere(socket) == expected


@pytest.mark.slow
def test_every_family_resumes_from_nvme(node: NodeProcess) -> None:
    """The same after the node was killed: what was flushed is found on the disk."""
    socket = str(node.socket)
    expected = {}
    for name in FAMILIES:
        _, expected[name] = save(socket, name, durable=True)
    node.kill()
    node.start()
    resumed = resume_elsewhere(socket)
    assert all(continued.waited for continued in resumed.values())
    assert {
        name: msgspec.structs.replace(continued, waited=False)
        for name, continued in resumed.items()
    } == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("older", "missing", "expected"),
    [
        ((), (), BOUNDARY),
        (("kv",), (), 0),
        (("conv",), (), 0),
        (("recurrent",), (), 0),
        ((), ("kv",), 0),
        ((), ("conv",), 0),
        ((), ("recurrent",), 0),
        (("kv", "recurrent"), (), 0),
        (("kv", "conv", "recurrent"), (), BOUNDARY - 1),
    ],
)
def test_a_set_that_is_not_whole_is_no_boundary(
    node: NodeProcess, older: tuple[str, ...], missing: tuple[str, ...], expected: int
) -> None:
    """`older` parts end one token before the others; KV, recurrent and conv state alike."""
    model = build("qwen3_next")
    form = form_of(model, BLOCK)
    blobs = {}
    for boundary in (BOUNDARY - 1, BOUNDARY):
        cache = hf.new_cache(model)
        chunk(model, TOKENS[:boundary], cache)
        blobs[boundary] = snapshot(cache, form, 0, boundary)
    chosen = [
        *(blob for blob in blobs[BOUNDARY] if blob.part not in older + missing),
        *(blob for blob in blobs[BOUNDARY - 1] if blob.part in older),
    ]
    with attach(str(node.socket), "qwen3_next", model, form) as client:
        client.save("first", Chain(TOKENS[:BOUNDARY], BLOCK), chosen)
        client.flush()
        with client.plan("later", Chain(TOKENS, BLOCK)) as plan:
            assert plan.boundary == expected
            assert {blob.end for blob in plan.blobs} <= {BLOCK, 2 * BLOCK, expected}


if __name__ == "__main__":
    for family in sys.argv[2:]:
        line = msgspec.json.encode(resume(sys.argv[1], family))
        sys.stdout.buffer.write(line + b"\n")
