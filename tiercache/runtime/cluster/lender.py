"""What this node lends to others, and answers them: the transport's way into the machine."""

from collections.abc import Callable, Sequence
from functools import partial

from tiercache.core import commands
from tiercache.core.cluster import commands as cm
from tiercache.core.cluster import events as ev
from tiercache.errors import PeerFault
from tiercache.runtime.cluster import messages as said
from tiercache.runtime.cluster.calls import Calls
from tiercache.runtime.cluster.keys import key_of
from tiercache.state import Key
from tiercache.tiers.base import Arena
from tiercache.transport.base import Asked, Lent, Loan

WAIT_MS_MAX = 60_000
"""Another node's question waits no longer, whatever it says."""


class Lender:
    """A `Source` of the transport. `hold_s`: how long what was located is kept for who asked. `clock` is
    that of the machine."""

    def __init__(
        self, arena: Arena, calls: Calls, clock: Callable[[], float], hold_s: float
    ) -> None:
        self._arena = arena
        self._calls = calls
        self._clock = clock
        self._hold_s = hold_s

    def lend(
        self, peer: str, asked: Sequence[Asked], answer: Callable[[Sequence[Lent]], None]
    ) -> None:
        """See `Source.lend`."""
        if not self._calls.knows(peer):
            answer([PeerFault.BUSY] * len(asked))
            return
        keys = [key_of(each.key) for each in asked]
        wanted = [
            (key, each.object_bytes)
            for key, each in zip(keys, asked, strict=True)
            if key is not None
        ]
        name = self._calls.session(peer), self._calls.number()
        done = partial(self._lent, name, keys, answer)
        self._calls.ask(ev.LendAsked(*name, wanted), name, done)

    def ask(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        """Answer what another node asks, now or later."""
        question = said.decoded_question(body)
        if question is None or not self._calls.knows(peer):
            answer(said.encode(said.Unknown()))
            return
        name = self._calls.session(peer), self._calls.number()
        done = partial(_told, answer)
        match question:
            case said.Summarise(version):
                self._calls.ask(ev.SummaryAsked(*name, version), name, done)
            case said.Locate():
                until = self._until(question)
                asked = ev.LocateAsked(
                    *name,
                    peer,
                    question.request,
                    question.namespace,
                    said.digests_of(question),
                    question.limit,
                    question.whole,
                    question.ranks,
                    tuple(question.codecs),
                    question.reshard,
                    question.flush,
                    until,
                    until + self._hold_s,
                    question.partial,
                    question.first,
                    question.stop,
                    question.some,
                )
                self._calls.ask(asked, name, done)
            case said.Announced():
                announced = ev.Announced(
                    *name,
                    peer,
                    question.request,
                    question.namespace,
                    said.digests_of(question),
                    question.limit,
                    question.ranks,
                    tuple(question.codecs),
                    question.reshard,
                    question.flush,
                    self._until(question),
                )
                self._calls.ask(announced, name, done)

            case said.Agree():
                agree = self._agree(name, peer, question)
                self._calls.ask(agree, name, done)

    def _agree(self, name: tuple[int, int], peer: str, question: said.Agree) -> ev.AgreeAsked:
        return ev.AgreeAsked(
            *name,
            peer,
            question.writer,
            question.request,
            question.namespace,
            said.digests_of(question),
            question.tokens,
            question.limit,
            question.ranks,
            question.first,
            question.stop,
            tuple(question.codecs),
            question.reshard,
            question.chunk_tokens,
            question.grain,
            question.care,
            question.flush,
            question.ends,
            self._until(question),
            self._clock() + self._hold_s,
        )

    def left(self, peer: str) -> None:
        """A node is gone: nothing is kept for it."""
        session = self._calls.session(peer)
        self._calls.tell(ev.PeerLeft(session))
        self._calls.forget(session)

    def _until(self, question: said.Locate | said.Announced | said.Agree) -> float:
        """Return until when a question is worth an answer; nobody makes this node wait for ever."""
        return self._clock() + min(question.wait_ms, WAIT_MS_MAX) / 1000

    def _lent(
        self,
        name: tuple[int, int],
        keys: Sequence[Key | None],
        answer: Callable[[Sequence[Lent]], None],
        body: commands.ReplyBody,
    ) -> None:
        assert isinstance(body, cm.Lent), body
        found = iter(body.objects)
        open_loans = _Countdown(
            sum(each is not None for each in body.objects),
            lambda: self._calls.tell(ev.LoanOver(*name)),
        )
        lent: list[Lent] = []
        for key in keys:
            place = next(found) if key is not None else None
            if place is None:
                lent.append(PeerFault.MISSING)
            else:
                extent, nbytes, checksum = place
                view = self._arena.view(extent)[:nbytes].toreadonly()
                lent.append(Loan(view, checksum, open_loans.end_one))
        answer(lent)


class _Countdown:
    """Calls `done` when as many loans as there are have ended."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left = count
        self._done = done

    def end_one(self) -> None:
        """One loan is over."""
        self._left -= 1
        if not self._left:
            self._done()


def _told(answer: Callable[[bytes], None], body: commands.ReplyBody) -> None:
    assert isinstance(body, cm.Located | cm.Summarised | cm.Taken | cm.Agreed), body
    answer(said.encode(said.answer_of(body)))
