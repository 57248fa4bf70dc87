"""States that ranks of one number saved in a real node, resumed by ranks of another number."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from tiercache.client import Blob, Client, Options, Scope
from tiercache.device import gather
from tiercache.device.kinds import Columns, Heads, conv_qkv, latent, recurrent
from tiercache.state import Chain, Layout, Namespace, Part, Tensor
from tiercache.testing.nodes import START_S, NodeProcess
from tiercache.testing.toy import WAIT_S

BLOCK = 16
SAVED = 4
EARLY, LATE = 16, 40
"""Two boundaries: after the first block, and inside the third."""

LAYERS = range(2)
LAYOUT = Layout(
    (
        latent(LAYERS, 12, 4, BLOCK, "bfloat16"),
        recurrent(Heads(LAYERS, 8, 4, 6)),
        conv_qkv(Columns(LAYERS, 3), (8, 2), (8, 5)),
    ),
    BLOCK,
)
NAMESPACE = Namespace.of(LAYOUT, model="reshard", weights="w", tokenizer="t")
CHAIN = Chain(range(LATE), BLOCK)
Bytes = NDArray[np.uint8]
Group = Callable[[NodeProcess, int], list[Client]]


@pytest.fixture
def group() -> Iterator[Group]:
    """Make the clients of all ranks of one engine: `group(node, ranks)`."""
    with ExitStack() as clients:

        def make(node: NodeProcess, ranks: int) -> list[Client]:
            found = []
            for rank in range(ranks):
                options = Options(
                    name=f"tp{ranks}", ranks=ranks, rank=rank, deadline_s=START_S, retry_s=0.0
                )
                client = Client.attach(node.socket, NAMESPACE, LAYOUT, options=options)
                clients.callback(client.close)
                found.append(client)
            return found

        yield make


def original(part: Part, at: int, end: int) -> Bytes:
    """Return tensor `at` of a part before `end` as one rank has it, its items as bytes: random ones."""
    tensor = part.tensors[at]
    tokens = () if part.is_snapshot else ((end - 1) % BLOCK + 1,)
    item = tensor.nbytes // int(np.prod(tensor.shape))
    seed = (LAYOUT.parts.index(part), at, end)
    return np.random.default_rng(seed).integers(
        0, 256, (*tokens, *tensor.shape, item), dtype=np.uint8
    )


def share(part: Part, tensor: Tensor, whole: Bytes, ranks: int, rank: int) -> Bytes:
    """Return a rank's share, by the rules of engines: equal ranges of each segment, or a copy."""
    if tensor.shard_axis is None:
        return whole
    axis = tensor.shard_axis + (0 if part.is_snapshot else 1)
    cuts = np.cumsum(tensor.segments)[:-1]
    pieces = np.split(whole, cuts, axis) if tensor.segments else [whole]
    return np.concatenate([np.split(piece, ranks, axis)[rank] for piece in pieces], axis)


def expected(end: int, ranks: int, rank: int) -> list[Blob]:
    """Return all that a rank needs to resume at `end`."""
    found = []
    for part in LAYOUT.parts:
        edges = [*range(0, end, BLOCK), end]
        for start, stop in [(0, end)] if part.is_snapshot else pairwise(edges):
            shares = [
                share(part, tensor, original(part, at, stop), ranks, rank).tobytes()
                for at, tensor in enumerate(part.tensors)
            ]
            found.append(Blob(part.name, stop, memoryview(b"".join(shares)), start))
    return found


def save(clients: list[Client], end: int) -> None:
    """Save all that these ranks, of `SAVED`, have at `end`."""
    for rank, client in enumerate(clients):
        saved = client.save("save", CHAIN, expected(end, SAVED, rank))
        assert not saved.declined
        assert not client.flush(wait_s=WAIT_S).reason


def resumed(client: Client, ranks: int, rank: int) -> int:
    """Return where a rank can resume; AssertionError when it would resume with other bytes."""
    plan = client.plan(f"resume {ranks} {rank}", CHAIN, limit=LATE, scope=Scope(reshard=True))
    with client.load(plan, wait_s=WAIT_S) as loaded:
        ours = {
            (blob.part, blob.start, blob.end): blob.data.tobytes()
            for blob in gather(LAYOUT, loaded.blobs, ranks, rank)
        }
        wanted = {
            (blob.part, blob.start, blob.end): blob.data.tobytes()
            for blob in (expected(loaded.boundary, ranks, rank) if loaded.boundary else [])
        }
        assert ours.keys() == wanted.keys()
        assert [key for key in wanted if ours[key] != wanted[key]] == []
        assert loaded.held or not loaded.boundary
        return loaded.boundary


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_byte_is_that_of_the_unsharded_state(
    ranks: int, node: NodeProcess, group: Group
) -> None:
    save(group(node, SAVED), LATE)
    for rank, client in enumerate(group(node, ranks)):
        assert resumed(client, ranks, rank) == LATE


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_missing_shard_is_a_lower_boundary_for_all_ranks(
    ranks: int, node: NodeProcess, group: Group
) -> None:
    savers = group(node, SAVED)
    save(savers, EARLY)
    save(savers[:-1], LATE)
    found = [resumed(client, ranks, rank) for rank, client in enumerate(group(node, ranks))]
    assert found == [EARLY] * ranks


def test_without_being_asked_a_node_answers_with_no_other_size(
    node: NodeProcess, group: Group
) -> None:
    save(group(node, SAVED), LATE)
    (client,) = group(node, 1)
    assert client.plan("plain", CHAIN, limit=LATE).boundary == 0
