"""The end that fetches, without any I/O: which bytes belong where, and how each want ends.

A call is over when every want has its outcome. One that was let go stays known, without its
targets, until the peer says that no more of it comes: its bytes fall into a scratch buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import xxhash

from tiercache.errors import PeerFault, ProtocolError, TransportFault
from tiercache.transport import messages as said
from tiercache.transport.base import Asked, Want, check_wants
from tiercache.transport.handshake import Agreed, refused
from tiercache.transport.messages import encode
from tiercache.transport.stream import SCRATCH_BYTES

CREDIT_SHARE: Final = 4
"""Credit goes back, at the latest, when so much of a window (1/4) has arrived."""

Outcomes: TypeAlias = list[TransportFault | None]
_SAID: Final = frozenset({PeerFault.MISSING, PeerFault.MISMATCH, PeerFault.BUSY})
"""Faults that a listener may state of one object."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A call is over."""

    call: int
    outcomes: Outcomes


@dataclass(frozen=True, slots=True)
class Told:
    """A question was answered, or was not: `answer` is a fault then."""

    call: int
    answer: bytes | TransportFault


@dataclass(frozen=True, slots=True)
class Ponged:
    """A ping was answered."""

    call: int


class _Range:
    """One want under way. `want` is None once it was let go."""

    __slots__ = ("at", "hasher", "nbytes", "open", "want")

    def __init__(self, want: Want) -> None:
        self.want: Want | None = want
        self.nbytes = len(want.target)
        self.at = 0
        self.hasher = xxhash.xxh3_128()
        self.open = True


@dataclass(slots=True)
class _Call:
    ranges: list[_Range]
    outcomes: Outcomes
    left: int
    gone: bool = False


class ChunkLanding:
    """A `Landing`: the bytes of one chunk, into their target or, when that is let go, nowhere."""

    __slots__ = ("_chunk", "_owner", "_range", "left")

    def __init__(self, owner: "FetchSide", into: _Range, chunk: said.Chunk) -> None:
        self._owner = owner
        self._range = into
        self._chunk = chunk
        self.left = chunk.nbytes

    @property
    def gone(self) -> bool:
        """Whether the target was let go."""
        return self._range.want is None

    def space(self) -> memoryview:
        """See `Landing.space`."""
        want = self._range.want
        if want is None:
            return self._owner.scratch[: min(self.left, SCRATCH_BYTES)]
        return want.target[self._range.at : self._range.at + self.left]

    def filled(self, nbytes: int) -> None:
        """See `Landing.filled`. The sum is taken while the bytes are in the processor's cache."""
        into = self._range
        if into.want is not None:
            into.hasher.update(into.want.target[into.at : into.at + nbytes])
        into.at += nbytes
        self.left -= nbytes
        self._owner.arrived(nbytes)
        if not self.left:
            self._owner.landed(self._chunk, into)


class FetchSide:
    """All calls of one connection, at the end that dialled."""

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed
        self._calls: dict[int, _Call] = {}
        self._pings: dict[int, int] = {}  # What was credited until then.
        self._questions: dict[int, bool] = {}  # Whether somebody still waits.
        self._events: list[Settled | Told | Ponged] = []
        self._number = 0
        self._arrived = 0  # Bytes, ever.
        self._credited = 0  # Bytes, ever, that the peer was told of.
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))

    @property
    def waiting(self) -> int:
        """Calls that the peer is not done with, those included that were let go."""
        return len(self._calls) + len(self._questions) + len(self._pings)

    @property
    def owed(self) -> int:
        """Bytes that arrived and were not credited yet."""
        return self._arrived - self._credited

    def ask(self, wants: Sequence[Want], wait_ms: int) -> tuple[int, bytes]:
        """Return the number of a new call, and the body that asks for it.

        Raises TransportFault (BUSY) when too many calls wait, ValueError for a call too large.
        """
        assert wants
        check_wants(wants, self._agreed.batch_max)
        call = self._next_call()
        wanted = [
            Asked(bytes(want.key), want.object_bytes, want.offset, len(want.target))
            for want in wants
        ]
        wait_ms = min(max(wait_ms, 0), said.WAIT_MS_MAX)
        body = encode(said.Fetch(call, wait_ms, self.owed, wanted))
        if len(body) > self._agreed.frame_bytes_max:
            raise ValueError(f"a request of {len(body)} bytes; {self._agreed.frame_bytes_max} go")
        self._credited = self._arrived
        self._calls[call] = _Call([_Range(want) for want in wants], [None] * len(wants), len(wants))
        return call, body

    def question(self, body: bytes, wait_ms: int) -> tuple[int, bytes]:
        """Return the number of a new question, and the body that asks it. Raises like `ask`."""
        call = self._next_call()
        wait_ms = min(max(wait_ms, 0), said.WAIT_MS_MAX)
        frame = encode(said.Ask(call, wait_ms, self.owed, body))
        if len(frame) > self._agreed.frame_bytes_max:
            raise ValueError(f"a question of {len(frame)} bytes; {self._agreed.frame_bytes_max} go")
        self._credited = self._arrived
        self._questions[call] = True
        return call, frame

    def ping(self) -> tuple[int, bytes]:
        """Return the number of a new ping, and its body. Raises TransportFault (BUSY)."""
        call = self._next_call()
        owed, self._credited = self.owed, self._arrived
        self._pings[call] = self._credited
        return call, encode(said.Ping(call, owed))

    def let_go(self, call: int) -> bytes:
        """Give the targets of a call back, at once; return the body that tells the peer, b"" when
        the call is over anyway."""
        if self._questions.get(call):
            self._questions[call] = False
            return encode(said.Cancel(call))
        known = self._calls.get(call)
        if known is None or known.gone:
            return b""
        known.gone = True
        for each in known.ranges:
            each.want = None
        return encode(said.Cancel(call))

    def give_up(self, call: int, fault: TransportFault) -> tuple[Outcomes, bytes]:
        """Let a call go; return its outcomes, `fault` where there is none, and what tells the peer."""
        outcomes = self._cut_short(self._calls[call], fault)
        return outcomes, self.let_go(call)

    def close(self, fault: TransportFault) -> list[Settled]:
        """Give all targets back; return the calls that were not over, each with its outcomes."""
        settled = [
            Settled(call, self.give_up(call, fault)[0])
            for call, known in self._calls.items()
            if not known.gone
        ]
        self._calls.clear()
        self._questions.clear()
        self._pings.clear()
        return settled

    def arrived(self, nbytes: int) -> None:
        """Count bytes of a chunk."""
        self._arrived += nbytes

    def credit(self) -> bytes:
        """Return the body that credits what arrived, b"" while it is too little to be said."""
        owed = self.owed
        if owed < max(1, self._agreed.window_bytes // CREDIT_SHARE):
            return b""
        self._credited = self._arrived
        return encode(said.Credit(owed))

    def take(self, body: memoryview) -> ChunkLanding | None:
        """Take a message. A landing must be filled before the next message is taken.

        Raises ProtocolError, and TransportFault when the peer ends the connection and says why.
        """
        match said.decoded_reply(body):
            case said.Chunk() as chunk:
                return self._chunk(chunk)
            case said.Failed(call) if call in self._questions:
                self._told(call, TransportFault(PeerFault.MISMATCH, "the answer is too large"))
            case said.Failed() as failed:
                self._failed(failed)
            case said.Told(call, answer):
                self._told(call, answer)
            case said.Dropped(call) if call in self._questions:
                self._told(call, TransportFault(PeerFault.LATE, "the peer gave up"))
            case said.Dropped(call):
                known = self._known(call)
                if not known.gone:
                    late = TransportFault(PeerFault.LATE, "the peer gave up")
                    self._events.append(Settled(call, self.give_up(call, late)[0]))
                del self._calls[call]
            case said.Pong(call, unpaid):
                if call not in self._pings:
                    raise ProtocolError(f"nobody asked for pong {call}")
                # Everything goes in order: what was sent before the pong has arrived, no more was.
                expected = self._arrived - self._pings.pop(call)
                if unpaid != expected:
                    raise ProtocolError(f"{unpaid} bytes unpaid, of {expected} that arrived")
                self._events.append(Ponged(call))
            case said.Refused() as said_so:
                raise refused(said_so)
        return None

    def _told(self, call: int, answer: bytes | TransportFault) -> None:
        waits = self._questions.pop(call, None)
        if waits is None:
            raise ProtocolError(f"nobody asked question {call}")
        if waits:
            self._events.append(Told(call, answer))

    def events(self) -> list[Settled | Told | Ponged]:
        """Return what came to an end since this was called last."""
        events, self._events = self._events, []
        return events

    @staticmethod
    def _cut_short(known: _Call, fault: TransportFault) -> Outcomes:
        return [
            fault if each.open else outcome
            for each, outcome in zip(known.ranges, known.outcomes, strict=True)
        ]

    def _next_call(self) -> int:
        if self.waiting >= self._agreed.calls_max:
            text = f"{self._agreed.calls_max} calls wait on this connection"
            raise TransportFault(PeerFault.BUSY, text)
        self._number += 1
        return self._number

    def _known(self, call: int) -> _Call:
        known = self._calls.get(call)
        if known is None:
            raise ProtocolError(f"call {call} does not wait for anything")
        return known

    def _open_range(self, call: int, index: int) -> tuple[_Call, _Range]:
        known = self._known(call)
        if index >= len(known.ranges) or not known.ranges[index].open:
            raise ProtocolError(f"range {index} of call {call} does not wait for anything")
        return known, known.ranges[index]

    def _chunk(self, chunk: said.Chunk) -> ChunkLanding | None:
        _, into = self._open_range(chunk.call, chunk.index)
        left = into.nbytes - into.at - chunk.nbytes
        if left < 0 or (left == 0) != bool(chunk.checksum) or (left and not chunk.nbytes):
            raise ProtocolError(f"{chunk.nbytes} bytes where {left + chunk.nbytes} were to come")
        if self.owed + chunk.nbytes > self._agreed.window_bytes:
            raise ProtocolError(f"{chunk.nbytes} bytes for which there is no credit")
        if not chunk.nbytes:
            self._end(chunk, into)
            return None
        return ChunkLanding(self, into, chunk)

    def landed(self, chunk: said.Chunk, into: _Range) -> None:
        """All bytes of a chunk arrived."""
        if chunk.checksum and chunk.call in self._calls:
            self._end(chunk, into)

    def _end(self, chunk: said.Chunk, into: _Range) -> None:
        outcome = None
        if into.want is not None:
            found = into.hasher.digest()
            if found != chunk.checksum or (into.want.checksum and found != into.want.checksum):
                outcome = TransportFault(PeerFault.DAMAGED, "not the bytes that were sealed")
        self._close_range(chunk.call, chunk.index, outcome)

    def _failed(self, failed: said.Failed) -> None:
        _, into = self._open_range(failed.call, failed.index)
        if failed.fault not in _SAID or into.at:
            raise ProtocolError(f"a fault {failed.fault!r} after {into.at} bytes")
        fault = TransportFault(PeerFault(failed.fault), "says the peer")
        self._close_range(failed.call, failed.index, fault)

    def _close_range(self, call: int, index: int, outcome: TransportFault | None) -> None:
        known = self._calls[call]
        into = known.ranges[index]
        known.outcomes[index] = outcome
        into.open = False
        into.want = None
        known.left -= 1
        if not known.left:
            del self._calls[call]
            if not known.gone:
                self._events.append(Settled(call, known.outcomes))
