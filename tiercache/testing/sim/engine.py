"""A simulated engine: it plans, restores, runs its model, and saves, as scripts that yield what they say.

A script yields a list of events and is sent the answers to those that are requests. Everything that an
engine is given is judged at once: whether the objects are those that the boundary needs, whether their
bytes are the ones that were saved, and whether the model goes on as if it had never stopped.
"""

from dataclasses import dataclass, field

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.state import NATIVE, Extent, Layout, Piece, Shard
from tiercache.testing.sim.node import SimNode
from tiercache.testing.sim.swarm import Swarm
from tiercache.testing.sim.texts import Scope, Texts
from tiercache.testing.sim.turn import XOR, Script, Turn, span_of


@dataclass(slots=True)
class Holding:
    """What a session may still touch: leased bytes as they were read, and reserved extents."""

    leased: dict[str, list[tuple[Extent, bytes]]] = field(default_factory=dict)
    reserved: dict[int, Extent] = field(default_factory=dict)


class Engine:
    """One engine process with a session per rank. `node` is the one it is attached to."""

    def __init__(self, number: int, node: SimNode, swarm: Swarm, texts: Texts) -> None:
        self.number = number
        self.node = node
        self.swarm = swarm
        self.texts = texts
        self.rng = node.rng
        self.sessions: list[int] = []
        self.holdings: dict[int, Holding] = {}
        self.requests = 0
        self.calls = 0
        self.resumed_tokens = 0
        self.resumed_requests = 0
        self.layout: Layout = swarm.layout
        self.home = self.rng.choice(swarm.namespaces)

    @property
    def writer(self) -> str:
        """The name its ranks share."""
        return f"engine-{self.number}"

    def call(self) -> int:
        """Return a call number that this engine never used."""
        self.calls += 1
        return self.calls

    # --- the life of an engine

    def live(self, sessions: list[int]) -> Script:
        """Attach, then serve requests until the history ends."""
        self.sessions = sessions
        self.holdings = {session: Holding() for session in sessions}
        answers = yield [
            ev.Attached(
                s, self.call(), self.home, self.layout, len(sessions), rank, True, self.writer
            )
            for rank, s in enumerate(sessions)
        ]
        if any(isinstance(answer, cm.Refused) for answer in answers):
            return
        while True:
            yield from self.serve()

    def serve(self) -> Script:
        """Serve one request from plan to release."""
        swarm, rng = self.swarm, self.rng
        tokens = self.texts.draw()
        lora, salt = rng.choice(swarm.scopes)
        scope = Scope(self.home, lora, salt)
        self.requests += 1
        request = f"r{self.requests}"
        turn = Turn(self, scope, request, tokens)
        yield from turn.plan()
        if rng.random() < swarm.abort:
            yield self.release(request)
            return
        yield from turn.load()
        boundary = turn.restore()
        ends = turn.generate(boundary)
        if rng.random() >= swarm.hold:
            yield self.release(request)
        yield from turn.save(boundary, ends)
        if rng.random() < swarm.pins:
            yield from self.pin(turn)
        if rng.random() < 0.3:
            yield from self.fetch(turn)
        if rng.random() < 0.2:
            durable = rng.random() < 0.5
            until = self.node.now + rng.random()
            yield [ev.FlushAsked(s, self.call(), durable, until) for s in self.sessions]
        yield self.release(request)

    def pin(self, turn: Turn) -> Script:
        """Pin one of a prompt's boundaries, and perhaps think better of it."""
        rng, chain = self.rng, turn.chain
        session = rng.choice(self.sessions)
        tokens = rng.randint(1, len(turn.tokens))
        digests = list(chain.digests[1 : tokens // chain.block_tokens + 1])
        tail = chain.digest_at(tokens) if tokens % chain.block_tokens else b""
        lora, salt = turn.scope.lora, turn.scope.salt
        age_s = rng.choice((0.1, 1.0, 50.0))
        asked = guard_events.PinAsked(
            session, self.call(), lora, salt, digests, tokens, tail, age_s
        )
        (answer,) = yield [asked]
        if isinstance(answer, cm.Pinned) and rng.random() < 0.3:
            yield [guard_events.UnpinAsked(session, self.call(), answer.number, "")]

    def release(self, request: str) -> list[ev.Event]:
        """Return what ends a request, after a last look at what was promised to stay."""
        said: list[ev.Event] = []
        for session in self.sessions:
            self.look(session, request)
            self.holdings[session].leased.pop(request, None)
            said.append(ev.Released(session, [request]))
            if self.rng.random() < self.swarm.twice:
                said.append(ev.Released(session, [request]))
        return said

    def look(self, session: int, request: str) -> None:
        """Leased bytes are what they were."""
        for extent, content in self.holdings[session].leased.get(request, ()):
            found = bytes(self.node.view(extent))
            assert found == content, f"leased bytes of {self.writer} {request} changed at {extent}"

    def fetch(self, turn: Turn) -> Script:
        """Ask for objects by name; what comes is judged like any other."""
        rng = self.rng
        request = f"{turn.request}-fetch"
        session = rng.choice(self.sessions)
        wanted: list[ev.Wanted] = []
        names: list[tuple[int, int, int]] = []
        for _ in range(rng.randint(1, 6)):
            part = rng.randrange(len(self.layout.parts))
            end = rng.randint(1, len(turn.tokens))
            shard = rng.choice(self.layout.parts[part].shards(len(self.sessions)))
            wanted.append(ev.Wanted(part, shard, NATIVE, turn.chain.digest_at(end)))
            names.append((part, *span_of(self.layout, part, end)))
        lora, salt = turn.scope.lora, turn.scope.salt
        survey = f"{turn.request}-survey"
        digests = list(turn.chain.digests[1:])
        if digests:
            hold_until = self.node.now + rng.choice((0.0, 5.0))
            asked = ev.SurveyAsked(
                session, self.call(), survey, lora, salt, digests, (NATIVE,), hold_until
            )
            (seen,) = yield [asked]
            if isinstance(seen, cm.Surveyed):
                assert len({len(flags) for flags in seen.held}) == 1
                assert len(seen.held) == len(self.layout.parts)
        until = self.node.now + rng.choice((0.0, 0.5, 5.0))
        call = self.call()
        (answer,) = yield [ev.FetchAsked(session, call, request, lora, salt, wanted, until)]
        if isinstance(answer, cm.Fetched):
            for piece, want, (part, start, end) in zip(answer.pieces, wanted, names, strict=True):
                if piece is not None:
                    self.hold(session, request, piece)
                    assert (piece.part, piece.start, piece.end) == (part, start, end)
                    shard = Shard(piece.shard_start, piece.shard_stop)
                    assert (shard, piece.codec) == (want.shard, want.codec)
                    expected = turn.reference.encode(part, shard, start, end)
                    assert self.read(piece) == expected, f"fetched bytes differ: {piece}"
        self.look(session, request)
        self.holdings[session].leased.pop(request, None)
        yield [ev.Released(session, [request, survey])]

    # --- memory

    def reserved(self, session: int) -> dict[int, Extent]:
        """Return what a session may still write, by ticket."""
        return self.holdings[session].reserved

    def hold(self, session: int, request: str, piece: Piece) -> None:
        """Remember what was promised to stay."""
        extent = Extent(piece.segment, piece.offset, piece.nbytes)
        promised = (extent, bytes(self.node.view(extent)))
        self.holdings[session].leased.setdefault(request, []).append(promised)

    def read(self, piece: Piece) -> bytes:
        """Return the native bytes of a piece."""
        content = bytes(self.node.view(Extent(piece.segment, piece.offset, piece.nbytes)))
        return content if piece.codec == NATIVE else bytes(byte ^ XOR for byte in content)
