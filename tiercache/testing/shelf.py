"""What a scripted node remembers: the smallest answer to every request of a client.

No eviction, no limits, no tiers: a bump allocator and a dict. What can be resumed is decided by
`resolve`, as everywhere.
"""

from dataclasses import dataclass, field
from mmap import mmap
from typing import TypeAlias

from tiercache.state import Layout, Piece, resolve
from tiercache.wire import messages as wire
from tiercache.wire import surveying

Name: TypeAlias = tuple[int, int, int, str, bytes]
"""Part, shard start and stop, codec, digest."""


@dataclass(slots=True)
class Shelf:
    """The objects of one namespace, and who leases them. `memory` is the arena's segments."""

    layout: Layout
    memory: list[mmap]
    objects: dict[Name, Piece] = field(default_factory=dict)
    tails: dict[bytes, set[tuple[int, bytes]]] = field(default_factory=dict)
    pending: dict[int, tuple[Name, Piece, bytes]] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    cancelled: list[int] = field(default_factory=list)
    ticket: int = 0
    used: int = 0

    def hear(self, notice: wire.Notice) -> None:
        """Act on a notice."""
        match notice:
            case wire.Commit(tickets):
                for ticket in tickets:
                    name, piece, base = self.pending.pop(ticket)
                    self.objects[name] = piece
                    if base:
                        self.tails.setdefault(base, set()).add((piece.end, name[4]))
            case wire.Cancel(tickets):
                for ticket in tickets:
                    del self.pending[ticket]
                self.cancelled += tickets
            case wire.Release(requests):
                self.leases.difference_update(requests)
            case wire.Detach():
                self.forget_session()

    def forget_session(self) -> None:
        """The client is gone."""
        self.leases.clear()
        self.pending.clear()

    def answer(self, request: wire.Request) -> wire.Reply:
        """Return the reply that a node owes."""
        match request:
            case wire.Plan():
                return self._plan(request)
            case wire.Load(call):
                return wire.Failed(call, "invalid", "every plan of this node is ready")
            case wire.Reserve(call):
                return wire.Reserved(call, [self._grant(offer) for offer in request.offers])
            case wire.Fetch(call):
                self.leases.add(request.request)
                names = [(w.part, w.shard_start, w.shard_stop, w.codec, w.digest)
                         for w in request.wanted]  # fmt: skip
                return wire.Fetched(call, [self.objects.get(name) for name in names])
            case surveying.Survey(call):
                self.leases.add(request.request)
                return surveying.Surveyed(call, *self._survey(request))
            case wire.Clear(call):
                count = len(self.objects)
                self.objects.clear()
                return wire.Report(call, b'{"objects":%d,"nbytes":0,"busy":0,"failed":""}' % count)
            case wire.Flush(call):
                return wire.Flushed(call, 0, 0)
            case _:
                return wire.Failed(request.call, "invalid", f"not scripted: {request}")

    def _plan(self, plan: wire.Plan) -> wire.Planned:
        block = self.layout.block_tokens
        blocks = [plan.chain[at : at + 32] for at in range(0, len(plan.chain), 32)]
        digests = {block * (i + 1): digest for i, digest in enumerate(blocks)}
        digests |= {tail.tokens: tail.digest for tail in plan.tails}
        positions = sorted(at for at in digests if at <= plan.limit)
        parts = self.layout.parts
        table = [
            [self._name(index, digests[at]) in self.objects for at in positions]
            for index in range(len(parts))
        ]
        best = resolve(parts, positions, table)
        boundary = positions[best] if best >= 0 else 0
        pieces = []
        for index, part in enumerate(parts):
            for at in positions:
                whole = part.block_tokens and at % part.block_tokens == 0
                if at == boundary or (whole and at < boundary):
                    pieces.append(self.objects[self._name(index, digests[at])])
        self.leases.add(plan.request)
        # Those of other chains, too: a client must check them.
        candidates = [
            wire.Tail(tokens, digest, base)
            for base, tails in self.tails.items()
            for tokens, digest in sorted(tails)
            if tokens > boundary and not plan.tails
        ]
        reason = "" if boundary else "nothing held"
        return wire.Planned(
            plan.call, boundary, boundary > 0, boundary, pieces, [plan.tokens], candidates, reason
        )

    def _survey(self, survey: surveying.Survey) -> tuple[list[bytes], int]:
        blocks = [survey.chain[at : at + 32] for at in range(0, len(survey.chain), 32)]
        parts = range(len(self.layout.parts))
        rows = [bytes([self._name(part, at) in self.objects for at in blocks]) for part in parts]
        whole = [row.find(0) for row, part in zip(rows, self.layout.parts, strict=True)
                 if part.window is None]  # fmt: skip
        depth = min((gap for gap in whole if gap >= 0), default=len(blocks))
        block = self.layout.block_tokens
        said = (
            self.objects[self._name(part, at)].end - number * block
            for number, at in enumerate(blocks[:depth], 1)
            for part in parts
            if self._name(part, at) in self.objects
        )
        return [row[:depth] for row in rows], next(said, -1)

    def _name(self, part: int, digest: bytes) -> Name:
        return (part, 0, self.layout.parts[part].units, "native", digest)

    def _grant(self, offer: wire.Offer) -> wire.Grant:
        name = (offer.part, offer.shard_start, offer.shard_stop, offer.codec, offer.digest)
        if name in self.objects:
            return wire.Grant("held")
        if any(name == pending for pending, _, _ in self.pending.values()):
            return wire.Grant("busy")
        if self.used + offer.nbytes > len(self.memory[0]):
            return wire.Grant("full")
        piece = Piece(*name[:4], offer.start, offer.end, 0, self.used, offer.nbytes)
        self.ticket += 1
        self.used += -(-offer.nbytes // 64) * 64
        self.pending[self.ticket] = (name, piece, offer.base)
        return wire.Grant("granted", self.ticket, 0, piece.offset)
