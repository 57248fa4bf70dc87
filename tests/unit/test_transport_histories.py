"""Both ends of a connection without I/O, joined by streams that are cut anywhere."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.errors import PeerFault, ProtocolError, TransportFault
from tiercache.testing.lenders import Lender, Target
from tiercache.transport.base import Lent, Limits
from tiercache.transport.fetching import FetchSide, Outcomes, Ponged, Settled
from tiercache.transport.handshake import Agreed
from tiercache.transport.serving import Request, ServeSide
from tiercache.transport.stream import HEAD_BYTES, HEADER_BYTES, Inlet, framed

CHUNK = 1000
WINDOW = 4000
FRAME_BYTES_MAX = 64 << 10
AGREED = Agreed(1, bytes(32), "peer", WINDOW, CHUNK, FRAME_BYTES_MAX, 16, 8)
LIMITS = Limits(chunk_bytes_max=CHUNK, window_bytes=WINDOW)
SIZES = {b"a": 0, b"b": 1, b"c": 999, b"d": 1000, b"e": 1001, b"f": 12_345}
WAIT_MS = 1000


class Joined:
    """A taker and a lender, and what is on its way between them."""

    def __init__(self) -> None:
        self.lender = Lender(SIZES)
        self.fetch = FetchSide(AGREED)
        self.serve = ServeSide(AGREED, LIMITS)
        self.there = bytearray()
        self.back = bytearray()
        self.there_inlet = Inlet(FRAME_BYTES_MAX)
        self.back_inlet = Inlet(FRAME_BYTES_MAX)
        self.outcomes: dict[int, Outcomes] = {}
        self.ponged: set[int] = set()
        self.later: list[Callable[[], None]] = []
        self.hold = False
        self.now = 0.0

    def ask(self, targets: Sequence[Target]) -> int:
        call, body = self.fetch.ask([target.want for target in targets], WAIT_MS)
        self.there += framed(body)
        return call

    def say(self, body: bytes) -> None:
        if body:
            self.there += framed(body)

    def hear(self, nbytes: int) -> None:
        """The lender receives so many bytes."""
        fed = _feed(self.there_inlet, self.there, nbytes)
        while fed and (body := self.there_inlet.next()) is not None:
            request = self.serve.take(body, self.now)
            if isinstance(request, Request):
                self._lend(request)

    def _lend(self, request: Request) -> None:
        def answer(lent: Sequence[Lent]) -> None:
            self.serve.lent(request, lent)

        if self.hold:
            self.later.append(lambda: self.lender.lend("p", request.asked, answer))
        else:
            self.lender.lend("p", request.asked, answer)

    def write(self) -> bool:
        """The lender writes once."""
        parts = self.serve.next()
        for body, raw in parts:
            self.back += framed(body)
            if raw is not None:
                self.back += raw
        self.serve.left()
        return bool(parts)

    def receive(self, nbytes: int) -> None:
        """The taker receives so many bytes."""
        if not _feed(self.back_inlet, self.back, nbytes):
            return
        while (body := self.back_inlet.next()) is not None:
            landing = self.fetch.take(body)
            if landing is not None:
                self.back_inlet.land(landing)
        for event in self.fetch.events():
            match event:
                case Settled(call, outcomes):
                    self.outcomes[call] = outcomes
                case Ponged(call):
                    self.ponged.add(call)
        self.say(self.fetch.credit())

    def settle(self) -> None:
        """Let everything arrive."""
        self.hold, moved = False, True
        for each in self.later:
            each()
        self.later.clear()
        while moved:
            moved = self.write()
            while self.there or self.back:
                moved = True
                self.hear(len(self.there))
                self.receive(len(self.back))


def _feed(inlet: Inlet, stream: bytearray, nbytes: int) -> int:
    space = inlet.space()
    assert len(space) > 0
    nbytes = min(nbytes, len(space), len(stream))
    space[:nbytes] = stream[:nbytes]
    del stream[:nbytes]
    if nbytes:
        inlet.filled(nbytes)
    return nbytes


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4)),
        st.tuples(st.just("hear"), st.integers(1, 300)),
        st.tuples(st.just("write"), st.just(0)),
        st.tuples(st.just("receive"), st.integers(1, 3000)),
        st.tuples(st.just("let go"), st.integers(0, 7)),
        st.tuples(st.just("hold"), st.booleans()),
        st.tuples(st.just("ping"), st.just(0)),
        st.tuples(st.just("expire"), st.just(0)),
    ),
    max_size=80,
)


class History(Joined):
    """What was asked for, and what was let go."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, list[Target]] = {}
        self.gone: list[Target] = []
        self.pings: set[int] = set()

    def step(self, what: str, detail: object) -> None:
        room = self.fetch.waiting < AGREED.calls_max
        match what, detail:
            case "ask", list(keys) if room:
                targets = [Target(key, SIZES[key]) for key in keys]
                self.calls[self.ask(targets)] = targets
            case "hear", int(nbytes):
                self.hear(nbytes)
            case "write", _:
                self.write()
            case "receive", int(nbytes):
                self.receive(nbytes)
            case "let go", int(which) if which < len(self.calls):
                self.drop(sorted(self.calls)[which])
            case "hold", bool(hold):
                self.hold = hold
            case "ping", _ if room:
                call, body = self.fetch.ping()
                self.pings.add(call)
                self.say(body)
            case "expire", _:
                self.now += 0.6
                self.serve.expire(self.now)

    def drop(self, call: int) -> None:
        self.say(self.fetch.let_go(call))
        if call not in self.outcomes:
            for target in self.calls.pop(call):
                assert target.guarded
                target.wipe()
                self.gone.append(target)


@given(STEPS)
@settings(deadline=None, max_examples=300)
def test_any_history_ends_with_the_right_bytes_and_even_books(
    steps: list[tuple[str, object]],
) -> None:
    history = History()
    for what, detail in steps:
        history.step(what, detail)
    history.settle()
    assert history.outcomes.keys() == history.calls.keys()
    for call, targets in history.calls.items():
        for target, outcome in zip(targets, history.outcomes[call], strict=True):
            assert target.right if outcome is None else outcome.fault is PeerFault.LATE
    assert all(target.wiped for target in history.gone)
    assert history.ponged == history.pings
    assert history.fetch.waiting == history.serve.calls == history.lender.loans == 0
    assert history.serve.unpaid == history.fetch.owed
    history.say(history.fetch.ping()[1])
    history.settle()
    assert history.serve.unpaid == history.fetch.owed == 0


@given(
    st.binary(max_size=200),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
)
@settings(deadline=None, max_examples=300)
def test_no_bytes_of_a_taker_break_a_lender(
    tail: bytes, flips: list[tuple[int, int]], cut: int
) -> None:
    joined = Joined()
    joined.ask([Target(b"f", SIZES[b"f"]), Target(b"c", SIZES[b"c"])])
    joined.say(joined.fetch.ping()[1])
    _spoil(joined.there, tail, flips, cut)
    try:
        while joined.there:
            joined.hear(37)
            joined.write()
    except ProtocolError:
        pass
    joined.serve.close()
    assert joined.lender.loans == 0


@given(
    st.binary(max_size=200),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 20_000),
)
@settings(deadline=None, max_examples=300)
def test_no_bytes_of_a_lender_break_a_taker(
    tail: bytes, flips: list[tuple[int, int]], cut: int
) -> None:
    """Nothing is taken for whole that is not, nothing is written beside the targets."""
    joined = Joined()
    targets = [Target(b"f", SIZES[b"f"]), Target(b"c", SIZES[b"c"]), Target(b"b", 1)]
    call = joined.ask(targets)
    while joined.there:
        joined.hear(1000)
    while joined.write():
        pass
    _spoil(joined.back, tail, flips, cut)
    try:
        while joined.back:
            joined.receive(700)
    except (ProtocolError, TransportFault):
        pass
    lost = TransportFault(PeerFault.LOST, "")
    for settled in joined.fetch.close(lost):
        joined.outcomes[settled.call] = settled.outcomes
    for target, outcome in zip(targets, joined.outcomes[call], strict=True):
        assert target.guarded
        assert outcome is not None or target.right
        target.wipe()


def _spoil(stream: bytearray, tail: bytes, flips: list[tuple[int, int]], cut: int) -> None:
    for at, value in flips:
        if at < len(stream):
            stream[at] = value
    del stream[len(stream) - min(cut, len(stream)) // 2 :]
    stream += tail


# --- the stream


def test_a_frame_that_is_too_large_is_refused() -> None:
    inlet = Inlet(100)
    stream = bytearray(framed(bytes(101)))
    _feed(inlet, stream, len(stream))
    with pytest.raises(ProtocolError, match="a frame of 101"):
        inlet.next()


@given(st.lists(st.integers(0, 3 * HEAD_BYTES), max_size=6), st.integers(1, 9000))
@settings(deadline=None)
def test_frames_come_out_as_they_went_in(sizes: list[int], step: int) -> None:
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    stream = bytearray(b"".join(framed(body) for body in bodies))
    inlet, found = Inlet(FRAME_BYTES_MAX), []
    while stream:
        assert 0 < inlet.missing <= len(stream)
        assert inlet.missing <= HEADER_BYTES + max(sizes)
        _feed(inlet, stream, step)
        while (body := inlet.next()) is not None:
            found.append(bytes(body))
    assert found == bodies
