"""What each end of a connection refuses, holds back and gives back."""

import pytest

from tiercache.errors import PeerFault, ProtocolError, TransportFault
from tiercache.testing.lenders import Lender, Target
from tiercache.transport import messages as said
from tiercache.transport.base import Asked, Limits
from tiercache.transport.fetching import FetchSide, Told
from tiercache.transport.handshake import Agreed
from tiercache.transport.messages import encode
from tiercache.transport.serving import REPLIES_MAX, Question, Request, ServeSide

CHUNK = 1000
WINDOW = 4000
AGREED = Agreed(1, bytes(32), "peer", WINDOW, CHUNK, 64 << 10, 16, 8)
LIMITS = Limits(chunk_bytes_max=CHUNK, window_bytes=WINDOW)
SIZES = {b"b": 1, b"c": 999, b"d": 1000, b"e": 1001, b"f": 12_345}
WAIT_MS = 1000


def lend(serve: ServeSide, lender: Lender, call: int, *keys: bytes) -> None:
    """Ask for whole objects, and have them lent."""
    wanted = [Asked(key, SIZES[key], 0, SIZES[key]) for key in keys]
    request = serve.take(memoryview(encode(said.Fetch(call, 10, 0, wanted))), 0.0)
    assert isinstance(request, Request)
    lender.lend("p", request.asked, lambda lent: serve.lent(request, lent))


# --- what a lender refuses


def a_request(**changes: int) -> said.Fetch:
    fields = {"call": 1, "wait_ms": 10, "credit": 0} | changes
    wanted = [Asked(b"c", 999, 0, 999)]
    return said.Fetch(fields["call"], fields["wait_ms"], fields["credit"], wanted)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (a_request(credit=1), "credit for 1"),
        (a_request(call=0), "not a message"),
        (a_request(wait_ms=-1), "not a message"),
        (said.Fetch(1, 1, 0, []), "asks for nothing"),
        (said.Fetch(1, 1, 0, [Asked(b"c", 999, 999, 1)]), "999"),
        (said.Fetch(1, 1, 0, [Asked(b"", 999, 0, 1)]), "not a message"),
        (said.Fetch(1, 1, 0, [Asked(b"c", 9, 0, 1)] * 17), "more than was agreed"),
        (said.Credit(5), "credit for 5"),
        (said.Pong(1, 0), "not a message"),
        (said.Ready(), "not a message"),
    ],
)
def test_a_lender_refuses(message: said.Fetch, match: str) -> None:
    serve = ServeSide(AGREED, LIMITS)
    with pytest.raises(ProtocolError, match=match):
        serve.take(memoryview(encode(message)), 0.0)


def test_a_call_number_in_use_is_refused() -> None:
    serve = ServeSide(AGREED, LIMITS)
    serve.take(memoryview(encode(a_request())), 0.0)
    with pytest.raises(ProtocolError, match="in use"):
        serve.take(memoryview(encode(a_request())), 0.0)


def test_too_many_calls_are_refused() -> None:
    serve = ServeSide(AGREED, LIMITS)
    for call in range(1, AGREED.calls_max + 1):
        serve.take(memoryview(encode(a_request(call=call))), 0.0)
    with pytest.raises(ProtocolError, match="more calls"):
        serve.take(memoryview(encode(a_request(call=99))), 0.0)


def test_an_answer_to_an_earlier_use_of_a_number_is_released() -> None:
    """A peer cannot have the loans of one call sent as those of another."""
    serve, lender = ServeSide(AGREED, LIMITS), Lender(SIZES)
    lender.held = []
    first = serve.take(memoryview(encode(a_request())), 0.0)
    assert isinstance(first, Request)
    lender.lend("p", first.asked, lambda lent: serve.lent(first, lent))
    serve.take(memoryview(encode(said.Cancel(1))), 0.0)
    assert serve.take(memoryview(encode(a_request())), 0.0) is not None
    lender.give()
    assert lender.loans == 0
    assert [raw for _, raw in serve.next() if raw is not None] == []


def test_what_is_being_written_is_released_when_it_has_left() -> None:
    """Not when its call is cancelled, not when it is late."""
    for end in ("cancel", "late"):
        serve, lender = ServeSide(AGREED, LIMITS), Lender(SIZES)
        lend(serve, lender, 1, b"f", b"e", b"d")
        assert lender.loans == 3
        assert serve.next()
        if end == "cancel":
            serve.take(memoryview(encode(said.Cancel(1))), 0.0)
        else:
            assert serve.expire(1.0) is None
        assert lender.loans == 1
        assert serve.next() == []
        serve.left()
        assert lender.loans == 0
        assert serve.next() == [(encode(said.Dropped(1)), None)]


def test_no_more_is_sent_than_there_is_credit_for() -> None:
    serve, lender = ServeSide(AGREED, LIMITS), Lender(SIZES)
    lend(serve, lender, 1, b"f")
    sent = 0
    while parts := serve.next():
        sent += sum(len(raw) for _, raw in parts if raw is not None)
        serve.left()
    assert WINDOW // 2 < sent == serve.unpaid <= WINDOW
    serve.take(memoryview(encode(said.Credit(sent))), 0.0)
    assert serve.next()
    serve.close()
    assert lender.loans == 0


def test_calls_take_turns() -> None:
    """A small object does not wait for all of a large one."""
    serve, lender = ServeSide(AGREED, LIMITS), Lender(SIZES)
    lend(serve, lender, 1, b"f")
    lend(serve, lender, 2, b"b")
    seen = []
    for _ in range(2):
        seen += [said.decoded_reply(memoryview(body)) for body, _ in serve.next()]
        serve.left()
    assert [each.call for each in seen if isinstance(each, said.Chunk)][:2] == [1, 2]


def test_replies_that_are_not_read_stop_the_reading() -> None:
    serve = ServeSide(AGREED, LIMITS)
    for call in range(1, REPLIES_MAX + 1):
        assert not serve.full
        serve.take(memoryview(encode(said.Ping(call, 0))), 0.0)
    assert serve.full
    assert len(serve.next()) == REPLIES_MAX
    assert not serve.full


def test_deadlines_are_the_earliest_first() -> None:
    serve = ServeSide(AGREED, LIMITS)
    serve.take(memoryview(encode(a_request(call=1, wait_ms=5000))), 0.0)
    serve.take(memoryview(encode(a_request(call=2, wait_ms=3000))), 0.0)
    serve.take(memoryview(encode(a_request(call=3, wait_ms=1 << 31))), 0.0)
    assert serve.expire(1.0) == 3.0
    assert serve.expire(3.0) == 5.0
    assert serve.expire(5.0) == LIMITS.serve_s_max
    assert serve.expire(60.0) is None


# --- what a taker refuses


@pytest.mark.parametrize(
    "message",
    [
        said.Chunk(2, 0, 999, bytes(16)),  # A call that was never made,
        said.Chunk(1, 1, 999, bytes(16)),  # a range that was not asked for,
        said.Chunk(1, 0, 1000, bytes(16)),  # more than was asked for,
        said.Chunk(1, 0, 0, b""),  # nothing,
        said.Chunk(1, 0, 10, bytes(16)),  # the end, too soon,
        said.Chunk(1, 0, 999, b""),  # all, but not the end,
        said.Chunk(1, 0, 5000, b""),
        said.Failed(1, 0, "done"),
        said.Failed(1, 0, "late"),
        said.Failed(1, 3, "missing"),
        said.Failed(7, 0, "missing"),
        said.Dropped(9),
        said.Pong(5, 0),
        said.Credit(1),
        said.Ready(),
    ],
)
def test_a_taker_refuses(message: said.Chunk) -> None:
    fetch = FetchSide(AGREED)
    fetch.ask([Target(b"c", 999).want], WAIT_MS)
    with pytest.raises(ProtocolError):
        fetch.take(memoryview(encode(message)))


def test_more_than_there_is_credit_for_is_refused() -> None:
    fetch = FetchSide(AGREED)
    fetch.ask([Target(b"f", SIZES[b"f"]).want], WAIT_MS)
    with pytest.raises(ProtocolError, match="no credit"):
        fetch.take(memoryview(encode(said.Chunk(1, 0, WINDOW + 1, b""))))


def test_a_pong_that_does_not_add_up_is_refused() -> None:
    fetch = FetchSide(AGREED)
    fetch.ping()
    with pytest.raises(ProtocolError, match="unpaid"):
        fetch.take(memoryview(encode(said.Pong(1, 3))))


def test_a_peer_may_say_why_it_ends() -> None:
    fetch = FetchSide(AGREED)
    with pytest.raises(TransportFault, match="too many") as fault:
        fetch.take(memoryview(encode(said.Refused("busy", "too many"))))
    assert fault.value.fault is PeerFault.BUSY


def test_too_many_calls_are_busy() -> None:
    fetch = FetchSide(AGREED)
    for _ in range(AGREED.calls_max):
        fetch.ask([Target(b"c", 999).want], WAIT_MS)
    with pytest.raises(TransportFault) as fault:
        fetch.ping()
    assert fault.value.fault is PeerFault.BUSY


def test_a_request_is_no_larger_than_a_frame() -> None:
    fetch = FetchSide(Agreed(1, bytes(32), "peer", WINDOW, CHUNK, 100, 16, 8))
    with pytest.raises(ValueError, match="a request of"):
        fetch.ask([Target(b"c" * 100, 999).want], WAIT_MS)
    assert fetch.waiting == 0


# --- questions


def asked(call: int, wait_ms: int = WAIT_MS) -> memoryview:
    return memoryview(encode(said.Ask(call, wait_ms, 0, b"body")))


def test_a_question_that_is_over_is_not_answered() -> None:
    serve = ServeSide(AGREED, LIMITS)
    late = serve.take(asked(1), 0.0)
    gone = serve.take(asked(2), 0.0)
    assert isinstance(late, Question)
    assert isinstance(gone, Question)
    assert serve.calls == 2
    serve.take(memoryview(encode(said.Cancel(2))), 0.0)
    assert serve.expire(0.5) == WAIT_MS / 1e3
    assert serve.expire(1.0) is None
    for question in (late, gone):
        serve.told(question, b"too late")
    bodies = [body for body, _ in serve.next()]
    assert bodies == [encode(said.Dropped(2)), encode(said.Dropped(1))]
    again = serve.take(asked(1), 2.0)
    assert isinstance(again, Question)
    serve.told(late, b"of the first")
    serve.told(again, b"of the second")
    assert [body for body, _ in serve.next()] == [encode(said.Told(1, b"of the second"))]


def test_a_question_may_not_take_the_number_of_another_call() -> None:
    serve = ServeSide(AGREED, LIMITS)
    serve.take(asked(1), 0.0)
    with pytest.raises(ProtocolError, match="in use"):
        serve.take(asked(1), 0.0)
    with pytest.raises(ProtocolError, match="in use"):
        serve.take(memoryview(encode(a_request())), 0.0)


def test_questions_and_fetches_share_one_limit() -> None:
    serve = ServeSide(AGREED, LIMITS)
    for call in range(1, AGREED.calls_max + 1):
        serve.take(asked(call), 0.0)
    with pytest.raises(ProtocolError, match="more calls"):
        serve.take(asked(AGREED.calls_max + 1), 0.0)
    fetch = FetchSide(AGREED)
    for _ in range(AGREED.calls_max):
        fetch.question(b"body", WAIT_MS)
    with pytest.raises(TransportFault, match="busy"):
        fetch.question(b"body", WAIT_MS)


def test_an_answer_that_nobody_asked_for_ends_the_connection() -> None:
    fetch = FetchSide(AGREED)
    with pytest.raises(ProtocolError, match="nobody asked"):
        fetch.take(memoryview(encode(said.Told(1, b"answer"))))
    call, _ = fetch.question(b"body", WAIT_MS)
    assert fetch.let_go(call) == encode(said.Cancel(call))
    assert fetch.let_go(call) == b""
    fetch.take(memoryview(encode(said.Told(call, b"late"))))
    assert fetch.events() == []
    assert fetch.waiting == 0


def test_a_question_ends_with_what_the_peer_says_of_it() -> None:
    fetch = FetchSide(AGREED)
    calls = [fetch.question(b"body", WAIT_MS)[0] for _ in range(3)]
    fetch.take(memoryview(encode(said.Dropped(calls[0]))))
    fetch.take(memoryview(encode(said.Failed(calls[1], 0, "mismatch"))))
    fetch.take(memoryview(encode(said.Told(calls[2], b"answer"))))
    events = fetch.events()
    assert [event.call for event in events] == calls
    answers = [event.answer for event in events if isinstance(event, Told)]
    assert [a.fault if isinstance(a, TransportFault) else a for a in answers] == [
        PeerFault.LATE, PeerFault.MISMATCH, b"answer"
    ]  # fmt: skip
