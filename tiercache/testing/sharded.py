"""Ranks of an engine whose state is in shards, each at a node of its own: what they hold can be told from
anything else."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from tiercache.client import Blob, Client, Options, Plan, Wanted
from tiercache.device.kinds import Heads, latent, recurrent
from tiercache.state import Chain, Layout, Namespace
from tiercache.testing.nodes import NodeProcess
from tiercache.testing.towns import DEADLINE_S

BLOCK = 16
RANKS = 2
SHALLOW, DEEP = 16, 48
LAYERS = range(2)
LAYOUT = Layout(
    (latent(LAYERS, 12, 4, BLOCK, "bfloat16"), recurrent(Heads(LAYERS, 8, 4, 6))), BLOCK
)
NAMESPACE = Namespace.of(LAYOUT, model="seats", weights="w", tokenizer="t")


def chain(number: int) -> Chain:
    """Return a prompt that ends inside a block."""
    return Chain([number * 7919 + at for at in range(DEEP + 5)], BLOCK)


class Rank(NamedTuple):
    """One rank of `ranks`, and its client."""

    client: Client
    rank: int = 0
    ranks: int = 1

    @classmethod
    def at(cls, node: NodeProcess, rank: int = 0, ranks: int = 1, name: str = "tp") -> "Rank":
        """Attach one at a node; `name` is the engine's."""
        options = Options(name=name, ranks=ranks, rank=rank, deadline_s=DEADLINE_S, retry_s=0.0)
        client = Client.attach(node.socket, NAMESPACE, LAYOUT, options=options)
        return cls(client, rank, ranks)

    def blobs(self, number: int, end: int) -> list[Blob]:
        """Return all that it must hold to resume a prompt at `end`."""
        found = []
        for part in LAYOUT.parts:
            shard = part.shards(self.ranks)[self.rank]
            for start in [0] if part.is_snapshot else range(0, end, BLOCK):
                stop = end if part.is_snapshot else start + BLOCK
                name = f"{part.name}/{shard.start}-{shard.stop}/{number}/{stop}".encode()
                held = hashlib.shake_128(name).digest(part.nbytes(stop - start, shard))
                found.append(Blob(part.name, stop, memoryview(held), start))
        return found

    def save(self, number: int, *ends: int) -> None:
        """Save what these boundaries rest on."""
        for end in ends:
            self.save_blobs(number, self.blobs(number, end))

    def save_blobs(self, number: int, blobs: Sequence[Blob]) -> None:
        """Save these, until they are sealed."""
        done = self.client.save(f"save-{number}-{blobs[-1].end}", chain(number), list(blobs))
        assert not done.declined, done
        assert self.client.flush().waiting == 0

    def fetched(self, found: Plan, number: int) -> bool:
        """Whether it gets all that it must have at a plan's boundary. AssertionError for a wrong byte."""
        expected = self.blobs(number, found.boundary)
        prompt = chain(number)
        wanted = [
            Wanted(
                blob.part,
                prompt.digest_at(blob.end),
                LAYOUT.part(blob.part).shards(self.ranks)[self.rank],
            )
            for blob in expected
        ]
        with self.client.fetch(found.request, wanted, wait_s=1.0) as holding:
            for blob, there in zip(expected, holding.blobs, strict=True):
                if there is None:
                    return False
                assert bytes(there.data) == bytes(blob.data)
        return True
