"""The end that lends, without any I/O: what is sent next, and when a loan is over.

Ranges of one call go in order, calls take turns by the chunk. What is sent is bounded by credit, what is
remembered by `calls_max` and `batch_max`. Exactly one thing is being written at a time: a loan whose
bytes are in it is released when that has left.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import xxhash

from tiercache.errors import PeerFault, ProtocolError
from tiercache.transport import messages as said
from tiercache.transport.base import Asked, Lent, Limits, Loan
from tiercache.transport.handshake import Agreed
from tiercache.transport.messages import encode

TURNS_MAX: Final = 32
"""Chunks in one thing to be written: many small ones go together."""

REPLIES_MAX: Final = 512
"""Replies that may wait to be sent before no more requests are read."""

Part: TypeAlias = tuple[bytes, memoryview | None]
"""The body of a message, and the raw bytes behind it."""


@dataclass(slots=True)
class _Call:
    asked: list[Asked]
    expires_at: float
    lent: list[Lent] = field(default_factory=list)
    index: int = 0
    at: int = 0
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Request:
    """A peer asks for ranges; `ServeSide.lent` takes the answer."""

    call: int
    asked: list[Asked]


@dataclass(frozen=True, slots=True)
class Question:
    """A peer asks something; `ServeSide.told` takes the answer."""

    call: int
    expires_at: float
    body: bytes


class ServeSide:
    """All calls of one connection, at the end that listened."""

    def __init__(self, agreed: Agreed, limits: Limits) -> None:
        self._agreed = agreed
        self._serve_s_max = limits.serve_s_max
        self._calls: dict[int, _Call] = {}
        self._questions: dict[int, Question] = {}
        self._turns: deque[int] = deque()  # Calls that were answered and are not over.
        self._replies: deque[bytes] = deque()
        self._writing: set[int] = set()  # Calls with bytes in what is being written.
        self._ending: list[Loan] = []  # Released when that has left.
        self._closed = False
        self.unpaid = 0

    @property
    def calls(self) -> int:
        """Calls that are not over."""
        return len(self._calls) + len(self._questions)

    @property
    def backlog(self) -> int:
        """Replies that wait to be written."""
        return len(self._replies)

    @property
    def full(self) -> bool:
        """Whether no more requests should be read for now."""
        return self.backlog >= REPLIES_MAX

    def take(self, body: memoryview, now: float) -> Request | Question | None:
        """Take a message. Raises ProtocolError."""
        match said.decoded_request(body):
            case said.Fetch() as fetch:
                self._paid(fetch.credit)
                return self._fetch(fetch, now)
            case said.Ask() as ask:
                self._paid(ask.credit)
                return self._ask(ask, now)
            case said.Cancel(call):
                self._drop(call)
            case said.Credit(credit):
                self._paid(credit)
            case said.Ping(call, credit):
                self._paid(credit)
                self._replies.append(encode(said.Pong(call, self.unpaid)))
        return None

    def lent(self, request: Request, lent: Sequence[Lent]) -> None:
        """Take what the source has for a request. For a call that is over, all is released."""
        assert len(lent) == len(request.asked), (len(lent), len(request.asked))
        known = self._calls.get(request.call)
        # A peer may use the number of a call that is over again: the list says which one it was.
        if known is None or known.asked is not request.asked or known.lent:
            release(lent)
            return
        known.lent = list(lent)
        self._turns.append(request.call)

    def told(self, question: Question, answer: bytes) -> None:
        """Take the answer to a question; for one that is over, it is not sent."""
        if self._questions.get(question.call) is not question:
            return
        del self._questions[question.call]
        reply = encode(said.Told(question.call, answer))
        if len(reply) > self._agreed.frame_bytes_max:
            reply = encode(said.Failed(question.call, 0, PeerFault.MISMATCH.value))
        self._replies.append(reply)

    def next(self) -> list[Part]:
        """Return what is to be written now, in order; nothing, while something is being written or
        there is no credit. Call `left` when it has left."""
        if self._writing or self._ending or self._closed:
            return []
        parts: list[Part] = [(reply, None) for reply in self._replies]
        self._replies.clear()
        room = self._agreed.chunk_bytes_max
        for _ in range(TURNS_MAX):
            if not self._turns or room <= 0:
                break
            sent = self._turn(parts, room)
            if sent < 0:
                break
            room -= sent
        return parts

    def left(self) -> None:
        """What `next` returned has left: nobody reads it any more."""
        self._writing.clear()
        ending, self._ending = self._ending, []
        release(ending)

    def expire(self, now: float) -> float | None:
        """Drop the calls that are late; return when the next one will be, None when there is none."""
        ends = {call: known.expires_at for call, known in self._calls.items()}
        ends.update((call, question.expires_at) for call, question in self._questions.items())
        for call in [call for call, end in ends.items() if end <= now]:
            self._drop(call)
        return min((end for end in ends.values() if end > now), default=None)

    def close(self) -> None:
        """The connection is gone, and nobody reads what was being written: release everything."""
        self._closed = True
        for call in [*self._calls, *self._questions]:
            self._drop(call)
        self._replies.clear()
        self.left()

    def _paid(self, credit: int) -> None:
        if credit > self.unpaid:
            raise ProtocolError(f"credit for {credit} bytes, of {self.unpaid} that were sent")
        self.unpaid -= credit

    def _fetch(self, fetch: said.Fetch, now: float) -> Request:
        if not fetch.wanted or len(fetch.wanted) > self._agreed.batch_max:
            raise ProtocolError("asks for nothing, or for more than was agreed on")
        self._check_call(fetch.call)
        asked = fetch.wanted
        for each in asked:
            if each.offset + each.nbytes > each.object_bytes:
                raise ProtocolError(f"{each.nbytes} bytes at {each.offset} of {each.object_bytes}")
        expires_at = now + min(fetch.wait_ms / 1e3, self._serve_s_max)
        self._calls[fetch.call] = _Call(asked, expires_at)
        return Request(fetch.call, asked)

    def _ask(self, ask: said.Ask, now: float) -> Question:
        self._check_call(ask.call)
        expires_at = now + min(ask.wait_ms / 1e3, self._serve_s_max)
        question = self._questions[ask.call] = Question(ask.call, expires_at, ask.body)
        return question

    def _check_call(self, call: int) -> None:
        if call in self._calls or call in self._questions:
            raise ProtocolError(f"call {call} is in use")
        if self.calls >= self._agreed.calls_max:
            raise ProtocolError("more calls than was agreed on")

    def _drop(self, call: int) -> None:
        if self._questions.pop(call, None) is not None:
            self._replies.append(encode(said.Dropped(call)))
            return
        known = self._calls.pop(call, None)
        if known is None:
            return
        self._replies.append(encode(said.Dropped(call)))
        if known.lent:
            self._turns.remove(call)
        loans = known.lent[known.index :]
        if call in self._writing and loans:
            held, loans = loans[:1], loans[1:]
            self._ending += [loan for loan in held if isinstance(loan, Loan)]
        release(loans)

    def _turn(self, parts: list[Part], room: int) -> int:
        """Append the next chunk, or outcome, of the call whose turn it is. Returns how many raw bytes
        it has; -1 when it has to wait, for credit or for the next thing to be written."""
        call = self._turns[0]
        known = self._calls[call]
        asked, lent = known.asked[known.index], known.lent[known.index]
        fault = _refused(asked, lent)
        if fault is not None:
            parts.append((encode(said.Failed(call, known.index, fault.value)), None))
            self._finish(call)
            return 0
        assert isinstance(lent, Loan)
        left = asked.nbytes - known.at
        if room < left and room < self._agreed.chunk_bytes_max // 4:
            return -1  # Not a sliver now, and the rest in another chunk.
        most = min(self._agreed.chunk_bytes_max, left, room)
        nbytes = min(most, self._agreed.window_bytes - self.unpaid)
        if nbytes < min(most, self._agreed.window_bytes // 2):
            return -1
        if known.at == 0:
            known.checksum = _checksum(asked, lent)
        start = asked.offset + known.at
        last = nbytes == left
        chunk = said.Chunk(call, known.index, nbytes, known.checksum if last else b"")
        parts.append((encode(chunk), lent.view[start : start + nbytes]))
        self.unpaid += nbytes
        known.at += nbytes
        self._writing.add(call)
        if last:
            self._finish(call)
        elif len(self._turns) > 1:
            self._turns.rotate(-1)
        return nbytes

    def _finish(self, call: int) -> None:
        """The range whose turn it is is over, once what is being written has left."""
        known = self._calls[call]
        lent = known.lent[known.index]
        if isinstance(lent, Loan):
            self._ending.append(lent)
        known.index += 1
        known.at = 0
        if known.index == len(known.asked):
            del self._calls[call]
            self._turns.remove(call)


def release(lent: Sequence[Lent]) -> None:
    """Give back all that was lent."""
    for each in lent:
        if isinstance(each, Loan):
            each.release()


def _refused(asked: Asked, lent: Lent) -> PeerFault | None:
    if isinstance(lent, PeerFault):
        return lent
    return PeerFault.MISMATCH if len(lent.view) != asked.object_bytes else None


def _checksum(asked: Asked, loan: Loan) -> bytes:
    if asked.nbytes == asked.object_bytes:
        return loan.checksum
    return xxhash.xxh3_128_digest(loan.view[asked.offset : asked.offset + asked.nbytes])
