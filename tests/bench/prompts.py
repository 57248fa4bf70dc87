"""A node that holds a long prompt, and as many other objects as one likes, for `plan`.

    python -m tests.bench.prompts CONFIG UNITS OTHERS

runs a sidecar that is born with both: what is measured is the plan, not how they came in. It is the
same server around the same machine; the objects' bytes are whatever the arena holds.
"""

import sys
from collections.abc import Iterator, Sequence

import tiercache.runtime.serve as serving
from tests.bench.nodes import hybrid_layout
from tiercache.config import load
from tiercache.core import commands, events
from tiercache.core.machine import Machine
from tiercache.state import NATIVE, Chain, Layout, Namespace, Shard

TOKENS = 131_072
BLOCK_TOKENS = 64
CHUNK_TOKENS = 8_192
FILLER = 10_000
"""The session that brings the objects in; no connection gets that far."""

BATCH = 2_048
CHECKSUM = bytes(16)


def prompt() -> Chain:
    """Return the chain of the long prompt: 2,048 digests."""
    return Chain([token % 50_000 for token in range(TOKENS)], BLOCK_TOKENS)


def namespace(layout: Layout) -> Namespace:
    """Return the namespace that the prompt is stored in."""
    return Namespace.of(layout, model="bench-prompt", weights="w", tokenizer="t")


def fill(machine: Machine, layout: Layout, others: int) -> None:
    """Store the prompt for all shards, with snapshots at the ends of chunks, and `others` more
    objects of other prompts, one block each."""
    space = namespace(layout)
    attached = events.Attached(FILLER, 1, space, layout, 1, 0, write=True, writer="filler")
    machine.handle(attached, 0.0)
    chain = prompt()
    offers: list[events.Offer] = []
    for offer in _offers(layout, chain):
        offers.append(offer)
        if len(offers) == BATCH:
            _store(machine, offers)
            offers = []
    for number in range(others):
        digest = number.to_bytes(32, "big")
        offers.append(_offer(layout, 0, Shard(0, 1), digest, BLOCK_TOKENS))
        if len(offers) == BATCH:
            _store(machine, offers)
            offers = []
    _store(machine, offers)
    machine.handle(events.Closed(FILLER, acknowledged=True), 0.0)


def _offers(layout: Layout, chain: Chain) -> Iterator[events.Offer]:
    last = (TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for index, part in enumerate(layout.parts):
        if part.is_snapshot:
            ends = {*range(CHUNK_TOKENS, TOKENS, CHUNK_TOKENS), last}
        else:
            ends = set(range(BLOCK_TOKENS, TOKENS + 1, BLOCK_TOKENS))
        for end in sorted(ends):
            for shard in part.shards(part.units):
                digest = chain.digests[end // BLOCK_TOKENS]
                yield _offer(layout, index, shard, digest, end)


def _offer(layout: Layout, index: int, shard: Shard, digest: bytes, end: int) -> events.Offer:
    part = layout.parts[index]
    start = 0 if part.is_snapshot else end - BLOCK_TOKENS
    nbytes = part.nbytes(end - start, shard)
    return events.Offer(index, shard, NATIVE, digest, b"", start, end, nbytes, b"", 0)


def _store(machine: Machine, offers: Sequence[events.Offer]) -> None:
    asked = events.ReserveAsked(FILLER, 1, "fill", "", "", list(offers))
    (reply,) = machine.handle(asked, 0.0)
    assert isinstance(reply, commands.Reply)
    assert isinstance(reply.body, commands.Reserved)
    tickets = [grant.ticket for grant in reply.body.grants if grant.outcome == "granted"]
    assert len(tickets) == len(offers), "the arena is too small"
    for command in machine.handle(events.Committed(FILLER, tickets), 0.0):
        assert isinstance(command, commands.Seal)
        sums = [CHECKSUM] * len(command.objects)
        machine.handle(events.Sealed(command.job, sums), 0.0)


class Filled(serving.Sidecar):
    """A sidecar that is born full."""

    units = 1
    others = 0

    def start(self) -> None:
        fill(self._machine, hybrid_layout(BLOCK_TOKENS, self.units), self.others)
        super().start()


if __name__ == "__main__":
    Filled.units, Filled.others = int(sys.argv[2]), int(sys.argv[3])
    serving.Sidecar = Filled  # type: ignore[misc]
    sys.exit(serving.run(load(sys.argv[1])))
