"""One request of a simulated engine, over all its ranks: planned, loaded, judged, run and saved."""

from collections.abc import Generator
from random import Random
from typing import Protocol, TypeAlias

import xxhash

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import NATIVE, Chain, Extent, Layout, Piece, Shard
from tiercache.testing.sim.model import Run, visible_from
from tiercache.testing.sim.node import SimNode
from tiercache.testing.sim.swarm import Swarm, draw_care
from tiercache.testing.sim.texts import Scope, Texts

Script: TypeAlias = Generator[list[ev.Event], list[cm.ReplyBody], None]
XOR = 0x5A


class Host(Protocol):
    """The engine that a request runs in."""

    node: SimNode
    swarm: Swarm
    texts: Texts
    rng: Random
    sessions: list[int]
    layout: Layout
    resumed_tokens: int
    resumed_requests: int

    def call(self) -> int:
        """Return a call number that was never used."""
        ...

    def hold(self, session: int, request: str, piece: Piece) -> None:
        """Remember what was promised to stay."""
        ...

    def reserved(self, session: int) -> dict[int, Extent]:
        """Return what a session may still write, by ticket."""
        ...

    def read(self, piece: Piece) -> bytes:
        """Return the native bytes of a piece."""
        ...


def span_of(layout: Layout, part: int, end: int) -> tuple[int, int]:
    """Return the token range of the object of a part that ends at `end`."""
    block = layout.parts[part].block_tokens
    if block == 0:
        return 0, end
    return end - (end % block or block), end


class Turn:
    """One request of an engine, over all its ranks."""

    def __init__(self, engine: Host, scope: Scope, request: str, tokens: list[int]) -> None:
        self.engine = engine
        self.scope = scope
        self.request = request
        self.tokens = tokens
        self.chain: Chain = engine.texts.chain(tokens)
        self.reference: Run = engine.texts.reference(scope, tokens)
        self.codecs = engine.rng.choice(engine.swarm.codecs)
        self.all_ranks = engine.rng.random() < 0.5
        self.reshard = engine.rng.random() < engine.swarm.reshard
        self.care = draw_care(engine.rng, engine.swarm.care)
        self.boundaries: list[int] = []
        self.pieces: list[list[Piece]] = []
        self.ready: list[bool] = []
        self.checkpoints: list[int] = []

    # --- plan and load

    def plan(self) -> Script:
        """Plan on every rank, in two steps where boundaries inside blocks are offered."""
        for session in self.engine.sessions:
            tails: list[ev.Tail] = []
            again = self.engine.rng.random() < self.engine.swarm.twice
            while True:
                (answer,) = yield [self._asked(session, tails)]
                offered = answer.candidates if isinstance(answer, cm.Planned) else []
                verified = [t for t in offered if self._is_ours(t)]
                if not verified and not again:
                    break
                again = again and bool(verified)
                tails += [tail for tail in verified if tail not in tails]
            self._take(session, answer)

    def _asked(self, session: int, tails: list[ev.Tail]) -> ev.PlanAsked:
        engine, rng = self.engine, self.engine.rng
        capture = ev.Capture(rng.choice((0, 3, 8)), rng.choice((0, 1, 4)))
        return ev.PlanAsked(
            session,
            engine.call(),
            self.request,
            self.scope.lora,
            self.scope.salt,
            list(self.chain.digests[1:]),
            len(self.tokens),
            len(self.tokens) - 1,
            tails,
            self.codecs,
            capture,
            self.all_ranks,
            self.reshard,
            self._ends() if rng.random() < 0.5 else [],
            self.care,
        )

    def _ends(self) -> list[ev.Tail]:
        block = self.chain.block_tokens
        return [
            ev.Tail(end, self.chain.digest_at(end), self.chain.digests[end // block])
            for end in (len(self.tokens) - 1, len(self.tokens))
            if end % block
        ]

    def _is_ours(self, tail: ev.Tail) -> bool:
        whole = tail.tokens // self.chain.block_tokens
        return (
            tail.tokens < len(self.tokens)
            and tail.base == self.chain.digests[whole]
            and tail.digest == self.chain.digest_at(tail.tokens)
        )

    def _take(self, session: int, answer: cm.ReplyBody) -> None:
        planned = isinstance(answer, cm.Planned)
        boundary = answer.boundary if isinstance(answer, cm.Planned) else 0
        assert 0 <= boundary < max(1, len(self.tokens)), "a boundary beyond the limit"
        self.boundaries.append(boundary)
        self.ready.append(not planned or (isinstance(answer, cm.Planned) and answer.ready))
        self.pieces.append(answer.pieces if isinstance(answer, cm.Planned) else [])
        if isinstance(answer, cm.Planned):
            assert answer.ready_boundary <= boundary
            assert all(boundary < end <= len(self.tokens) for end in answer.checkpoints)
            self.checkpoints = answer.checkpoints
            for piece in answer.pieces:
                self.engine.hold(session, self.request, piece)

    def load(self) -> Script:
        """Wait for what is not in memory, on all ranks at once."""
        engine = self.engine
        waiting = [rank for rank, ready in enumerate(self.ready) if not ready]
        if not waiting:
            return
        until = engine.node.now + engine.rng.choice((0.0, 0.3, 10.0))
        lora, salt = self.scope.lora, self.scope.salt
        answers = yield [
            ev.LoadAsked(
                engine.sessions[rank],
                engine.call(),
                self.request,
                lora,
                salt,
                self.boundaries[rank],
                self.chain.digest_at(self.boundaries[rank]),
                until,
            )
            for rank in waiting
        ]
        for rank, answer in zip(waiting, answers, strict=True):
            loaded = answer if isinstance(answer, cm.Loaded) else cm.Loaded(0, [], "refused")
            assert loaded.boundary <= self.boundaries[rank], "more than was planned"
            self.boundaries[rank] = loaded.boundary
            self.pieces[rank] = loaded.pieces
            for piece in loaded.pieces:
                engine.hold(engine.sessions[rank], self.request, piece)

    # --- restore and run

    def restore(self) -> int:
        """Resume at the boundary that all ranks got; judge what was given for it."""
        for rank, boundary in enumerate(self.boundaries):
            self._judge(rank, boundary)
        boundary = self.boundaries[0]
        if boundary == 0 or any(other != boundary for other in self.boundaries):
            return 0
        run = Run(self.engine.layout, self.reference.seed)
        put: set[tuple[int, Shard]] = set()  # Ranks may hold the same copy.
        for rank, pieces in enumerate(self.pieces):
            for index in range(len(self.engine.layout.parts)):
                own = self._shard(index, rank)
                mine = [piece for piece in pieces if piece.part == index]
                if (index, own) not in put:
                    for piece in sorted(mine, key=lambda p: p.end):
                        shard = Shard(piece.shard_start, piece.shard_stop)
                        span = (piece.start, piece.end)
                        run.put(index, shard, span, self.engine.read(piece), own)
                put.add((index, own))
        run.resumed(self.tokens[:boundary])
        for token in self.tokens[boundary:]:
            output = run.step(token, keep=False)
            seen = len(run.tokens)
            assert output == self.reference.outputs[seen], (
                f"wrong output after token {seen}, resumed at {boundary} of {self.request}"
            )
        self.engine.resumed_tokens += boundary
        self.engine.resumed_requests += 1
        return boundary

    def _judge(self, rank: int, boundary: int) -> None:
        """The pieces are those that the boundary needs, and their bytes are the reference's."""
        pieces = self.pieces[rank]
        if boundary == 0:
            assert not pieces, "pieces of no boundary"
            return
        needed: set[tuple[int, int, int]] = set()
        for index, part in enumerate(self.engine.layout.parts):
            if part.is_snapshot:
                needed.add((index, 0, boundary))
                continue
            block = part.block_tokens
            starts = range(visible_from(part, boundary), boundary, block)
            needed |= {(index, at, min(at + block, boundary)) for at in starts}
        given = {(p.part, p.start, p.end) for p in pieces}
        assert given == needed, f"needs {sorted(needed)}, got {sorted(given)}"
        for index, start, end in given:
            own = self._shard(index, rank)
            here = [p for p in pieces if (p.part, p.start, p.end) == (index, start, end)]
            shards = [Shard(p.shard_start, p.shard_stop) for p in here]
            units = [unit for shard in shards for unit in range(shard.start, shard.stop)]
            assert len(set(units)) == len(units), f"more than once: {shards}"
            assert set(range(own.start, own.stop)) <= set(units), f"{shards} do not cover {own}"
            assert self.reshard or shards == [own]
        for piece in pieces:
            assert piece.codec in self.codecs
            shard = Shard(piece.shard_start, piece.shard_stop)
            expected = self.reference.encode(piece.part, shard, piece.start, piece.end)
            assert self.engine.read(piece) == expected, f"wrong bytes: {piece}"

    def _shard(self, part: int, rank: int) -> Shard:
        return self.engine.layout.parts[part].shards(len(self.engine.sessions))[rank]

    def generate(self, boundary: int) -> list[int]:
        """Decode some tokens; return the token counts at which state is saved."""
        rng = self.engine.rng
        longer = self.tokens + [rng.randrange(5) for _ in range(rng.randint(0, 6))]
        if longer != self.tokens:
            self.engine.texts.add(longer)
        self.reference = self.engine.texts.reference(self.scope, longer)
        self.tokens = longer
        self.chain = self.engine.texts.chain(longer)
        ends = [end for end in (*self.checkpoints, len(longer)) if boundary < end]
        return sorted(dict.fromkeys(end for end in ends if rng.random() < 0.9))

    # --- save

    def save(self, boundary: int, ends: list[int]) -> Script:
        """Save what was computed, rank by rank, in chunks and in any order; some of it not at all."""
        engine, rng = self.engine, self.engine.rng
        for rank, session in enumerate(engine.sessions):
            offers = self._offers(rank, boundary, ends)
            rng.shuffle(offers)
            lora, salt = self.scope.lora, self.scope.salt
            ask = ev.ReserveAsked(
                session, engine.call(), self.request, lora, salt, offers, self.care
            )
            (answer,) = yield [ask]
            if not isinstance(answer, cm.Reserved):
                continue
            reserved = engine.reserved(session)
            granted: list[tuple[ev.Offer, int]] = []
            for offer, grant in zip(offers, answer.grants, strict=True):
                assert (grant.extent is not None) == (grant.outcome == "granted")
                if grant.extent is not None:
                    engine.node.view(grant.extent)[:] = b"\xee" * grant.extent.size
                    reserved[grant.ticket] = grant.extent
                    granted.append((offer, grant.ticket))
            while granted:
                count = rng.randint(1, len(granted))
                yield self._write(session, granted[:count])
                del granted[:count]

    def _write(self, session: int, chunk: list[tuple[ev.Offer, int]]) -> list[ev.Event]:
        engine, swarm = self.engine, self.engine.swarm
        rng = engine.rng
        reserved = engine.reserved(session)
        tickets: list[int] = []
        sums: list[bytes] = []
        for offer, ticket in chunk:
            content = self.reference.encode(offer.part, offer.shard, offer.start, offer.end)
            if offer.codec != NATIVE:
                content = bytes(byte ^ XOR for byte in content)
            engine.node.view(reserved.pop(ticket))[: len(content)] = content
            tickets.append(ticket)
            known = rng.random() < swarm.sums
            sums.append(xxhash.xxh3_128_digest(content) if known else b"")
        said: list[ev.Event] = [ev.Committed(session, tickets, sums)]
        if rng.random() < swarm.cancel:
            half = len(tickets) // 2
            committed = ev.Committed(session, tickets[half:], sums[half:])
            said = [ev.Cancelled(session, tickets[:half]), committed]
        if rng.random() < swarm.twice:
            said.append(
                rng.choice((ev.Committed(session, tickets), ev.Cancelled(session, tickets)))
            )
        return said

    def _offers(self, rank: int, boundary: int, ends: list[int]) -> list[ev.Offer]:
        engine, rng = self.engine, self.engine.rng
        omitted = (
            rng.randrange(len(engine.layout.parts)) if rng.random() < engine.swarm.omit else -1
        )
        parent = self.chain.digest_at(boundary) if boundary else b""
        offers: list[ev.Offer] = []
        for index, part in enumerate(engine.layout.parts):
            if index == omitted:
                continue
            shard = part.shards(len(engine.sessions))[rank]
            stops = list(ends)
            if not part.is_snapshot and ends:
                block = part.block_tokens
                stops.extend(range((boundary // block + 1) * block, ends[-1] + 1, block))
            for end in sorted(set(stops)):
                start = span_of(engine.layout, index, end)[0]
                codec = rng.choice(self.codecs)
                nbytes = part.nbytes(end - start, shard)
                base = b""
                if end % engine.layout.block_tokens:
                    base = self.chain.digests[end // engine.layout.block_tokens]
                digest = self.chain.digest_at(end)
                offers.append(
                    ev.Offer(index, shard, codec, digest, base, start, end, nbytes, parent, 0)
                )
        return offers
