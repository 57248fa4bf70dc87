"""Both ends of a connection: order, typed messages, and what hostile bytes come to."""

import pickle
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import ProtocolError
from tiercache.state import Kind, Layout, Namespace, Part, Piece, Tensor
from tiercache.wire import clustering, guarding, sharing, surveying
from tiercache.wire import messages as wire
from tiercache.wire.connection import ANSWERS, CALLS_MAX, ClientSide, ServerSide
from tiercache.wire.frames import frame

LIMIT = 1 << 16
LAYOUT = Layout(
    (Part("kv", Kind.KV, None, 4, 1, (Tensor("k", "int8", (8,), ("d",)),)),), block_tokens=4
)
NAMESPACE = Namespace.of(LAYOUT, model="m", weights="w", tokenizer="t")

TAIL = wire.Tail(5, b"d" * 32, b"b" * 32)

# One of each message; requests carry call 2, since 1 is the Hello of `pair`.
FROM_CLIENT: list[wire.FromClient] = [
    wire.Attach(2, NAMESPACE, LAYOUT, 2, 1, True),
    wire.Plan(2, "r", "l", "s", b"c" * 32, 5, 4, [TAIL], ["native"], wire.Capture(8, 2), False),
    surveying.Survey(2, "r", "l", "s", b"c" * 64, ["native"], 1000),
    wire.Load(2, "r", "l", "s", 8, b"d" * 32, 100),
    wire.Reserve(2, "r", "", "", [wire.Offer(0, 0, 1, "native", b"d", b"", 0, 4, 32, b"p", 1)]),
    wire.Fetch(2, "r", "", "", [wire.Wanted(0, 0, 1, "native", b"d" * 32)], 0),
    wire.Flush(2, True, 1),
    wire.Stats(2),
    wire.List(2, 0, 10, ""),
    wire.Inspect(2, "k"),
    wire.Evict(2, "", "host", 0),
    wire.Clear(2, ""),
    wire.Verify(2, 0, 1),
    guarding.Pin(2, "l", "s", b"c" * 32, 5, b"t" * 32, 1000),
    guarding.Unpin(2, 1, "o"),
    guarding.PinKeys(2, "ab", "o", 1000),
    guarding.Pins(2),
    guarding.Shares(2, "ab", 0.5, None),
    sharing.Push(2, "r", "l", "s", b"c" * 32, 4, ["native"], False, "b", 100),
    sharing.Where(2, b"", "l", "s", b"c" * 32, 4, 4, ["native"], True),
    clustering.ClearAll(2, "ab", 100),
    clustering.Members(2),
    clustering.ShareAll(2, "-", 0.5, None),
    wire.Commit([1, 2]),
    wire.Cancel([3]),
    wire.Release(["r"]),
    wire.Detach(),
]
PIECE = Piece(0, 0, 1, "native", 0, 4, 0, 4096, 32)
REPLIES: dict[type, wire.Reply] = {
    wire.Attached: wire.Attached(2, [1 << 20]),
    wire.Planned: wire.Planned(2, 4, True, 4, [PIECE], [4], [wire.Tail(5, b"d", b"b")], ""),
    surveying.Surveyed: surveying.Surveyed(2, [b"\1\1", b"\0\1"], 0),
    wire.Loaded: wire.Loaded(2, 4, [PIECE], ""),
    wire.Reserved: wire.Reserved(2, [wire.Grant("granted", 1, 0, 4096), wire.Grant("held")]),
    wire.Fetched: wire.Fetched(2, [PIECE, None]),
    wire.Flushed: wire.Flushed(2, 0, 0),
    guarding.Pinned: guarding.Pinned(2, "pinned", 1, 6, 4096, 1000),
    sharing.Pushed: sharing.Pushed(2, 4, ""),
    sharing.Places: sharing.Places(
        2, [sharing.Place("b", 4, "peer", 9, 8, -1, 0.5, "well")], "", 4
    ),
    wire.Report: wire.Report(2, b"{}"),
}
WELCOME = wire.Welcome(1, wire.PROTOCOL, "boot", "0", LIMIT, 8)


def take_server(side: ServerSide, chunk: bytes) -> list[wire.FromClient]:
    side.receive(chunk)
    out = []
    while (message := side.next()) is not None:
        out.append(message)
    return out


def take_client(side: ClientSide, chunk: bytes) -> list[wire.Reply]:
    side.receive(chunk)
    out = []
    while (message := side.next()) is not None:
        out.append(message)
    return out


def pair() -> tuple[ClientSide, ServerSide]:
    """Two ends after their handshake."""
    client, server = ClientSide(LIMIT), ServerSide(LIMIT)
    hello = wire.Hello(1, wire.PROTOCOL, "test")
    assert take_server(server, client.send(hello)) == [hello]
    assert take_client(client, server.send(WELCOME)) == [WELCOME]
    return client, server


def raw(*items: object) -> bytes:
    return frame(msgspec.msgpack.encode(items))


def test_every_request_and_reply_is_in_the_tables() -> None:
    assert set(ANSWERS) == set(get_args(wire.Request))
    assert set(ANSWERS.values()) | {wire.Failed} == set(get_args(wire.Reply))
    assert {type(m) for m in FROM_CLIENT} | {wire.Hello} == set(get_args(wire.FromClient))


@pytest.mark.parametrize("message", FROM_CLIENT, ids=lambda m: type(m).__name__)
def test_every_message_arrives_and_is_answered(message: wire.FromClient) -> None:
    client, server = pair()
    stream = client.send(message)
    arrived = [out for byte in stream for out in take_server(server, bytes([byte]))]
    assert arrived == [message]
    answer = ANSWERS.get(type(message))
    assert client.waiting == (answer is not None)
    if answer is not None:
        assert take_client(client, server.send(REPLIES[answer])) == [REPLIES[answer]]
        assert client.waiting == 0


def test_replies_may_overtake_one_another() -> None:
    client, server = pair()
    stream = client.send(wire.Stats(5)) + client.send(wire.Flush(6, False, 0))
    assert take_server(server, stream) == [wire.Stats(5), wire.Flush(6, False, 0)]
    back = server.send(wire.Flushed(6, 0, 0)) + server.send(wire.Report(5, b""))
    assert take_client(client, back) == [wire.Flushed(6, 0, 0), wire.Report(5, b"")]


# --- the client breaks the protocol


def test_anything_before_hello_is_refused() -> None:
    server = ServerSide(LIMIT)
    with pytest.raises(ProtocolError, match="starts with Hello"):
        take_server(server, raw("stats", 1))
    last_words = wire.Failed(0, "protocol", _why(server))
    assert server.farewell() == frame(msgspec.msgpack.encode(last_words))


def _why(side: ServerSide) -> str:
    with pytest.raises(ProtocolError) as caught:
        side.next()
    return str(caught.value)


@pytest.mark.parametrize("more", [(), ("future", {"fields": [1]})])
def test_another_version_is_refused_by_name_whatever_else_it_says(more: tuple[object, ...]) -> None:
    server = ServerSide(LIMIT)
    with pytest.raises(ProtocolError, match=r"protocol 99, this node 1"):
        take_server(server, raw("hello", 7, 99, *more))
    client = ClientSide(LIMIT)
    client.send(wire.Hello(7, wire.PROTOCOL, "me"))
    assert take_client(client, server.farewell()) == [
        wire.Failed(7, "refused", "the client speaks protocol 99, this node 1")
    ]


def test_a_good_connection_has_no_farewell() -> None:
    assert pair()[1].farewell() == b""


def test_the_client_must_wait_for_welcome() -> None:
    server = ServerSide(LIMIT)
    with pytest.raises(ProtocolError, match="wait for the answer"):
        take_server(server, raw("hello", 1, wire.PROTOCOL, "x") + raw("stats", 2))


def test_hello_comes_once() -> None:
    _, server = pair()
    with pytest.raises(ProtocolError, match="Hello comes once"):
        take_server(server, raw("hello", 2, wire.PROTOCOL, "x"))


@pytest.mark.parametrize("call", [0, -1, 2])
def test_a_call_number_is_positive_and_its_own(call: int) -> None:
    _, server = pair()
    take_server(server, raw("stats", 2))
    with pytest.raises(ProtocolError, match="in use or below 1"):
        take_server(server, raw("stats", call))


def test_calls_in_flight_are_bounded_on_both_ends() -> None:
    client, server = pair()
    for call in range(2, CALLS_MAX + 2):
        take_server(server, client.send(wire.Stats(call)))
    with pytest.raises(RuntimeError, match="wait for their reply"):
        client.send(wire.Stats(CALLS_MAX + 2))
    assert client.waiting == CALLS_MAX
    with pytest.raises(ProtocolError, match="wait for their reply"):
        take_server(server, raw("stats", CALLS_MAX + 2))


DEEP = b"\x91" * 50_000 + b"\x00"
HOSTILE = {
    "empty": b"",
    "pickle": pickle.dumps({"a": [1]}),
    "nested": DEEP,
    "nested in a field": b"\x92\xa6commit" + DEEP,
    "nested in a surplus field": b"\x93\xa6commit\x90" + DEEP,
    "huge array": b"\xdd\xff\xff\xff\xff\xa6commit",
    "huge list": b"\x92\xa6commit\xdd\xff\xff\xff\xff\x01",
    "huge text": b"\x92\xa7release\x91\xdb\xff\xff\xff\xff",
    "huge bytes": b"\x93\xa7inspect\x02\xc6\xff\xff\xff\xff",
    "bad utf-8": b"\x93\xa7inspect\x02\xa2\xff\xfe",
    "wrong type": msgspec.msgpack.encode(("stats", "2")),
    "float for int": msgspec.msgpack.encode(("stats", 2.5)),
    "integer beyond 64 bits of a reply": msgspec.msgpack.encode(("stats", {})),
    "unknown tag": msgspec.msgpack.encode(("steal", 2)),
    "a reply": msgspec.msgpack.encode(REPLIES[wire.Report]),
    "unknown field": msgspec.msgpack.encode(("stats", 2, 3)),
    "missing field": msgspec.msgpack.encode(("stats",)),
    "a map": msgspec.msgpack.encode({"type": "stats", "call": 2}),
    "an extension": b"\x92\xa5stats\xd4\x01\x00",
    "trailing": msgspec.msgpack.encode(("stats", 2)) + b"\x00",
    "bad layout": msgspec.msgpack.encode(FROM_CLIENT[0]).replace(b"int8", b"int9"),
    "no parts": msgspec.msgpack.encode(
        ("attach", 2, NAMESPACE, {"parts": [], "block_tokens": 4}, 1, 0, False)
    ),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bodies_break_the_connection_and_nothing_else(body: bytes) -> None:
    _, server = pair()
    with pytest.raises(ProtocolError):
        take_server(server, frame(body))
    with pytest.raises(ProtocolError):
        server.next()
    client = pair()[0]
    with pytest.raises(ProtocolError):
        take_client(client, frame(body.replace(b"\x02", b"\x09")))
    with pytest.raises(ProtocolError):
        client.next()


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_first_bodies_are_not_a_hello(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="starts with Hello"):
        take_server(ServerSide(LIMIT), frame(body))


def test_a_newer_hello_with_deep_nesting_is_not_a_crash() -> None:
    with pytest.raises(ProtocolError):
        take_server(ServerSide(LIMIT), frame(b"\x95\xa5hello\x01\x02" + DEEP + b"\x00"))


@given(body=st.binary(max_size=200), welcomed=st.booleans())
def test_random_bytes(body: bytes, welcomed: bool) -> None:  # noqa: FBT001
    server = pair()[1] if welcomed else ServerSide(LIMIT)
    _only_protocol_errors(lambda: take_server(server, frame(body)))
    _only_protocol_errors(lambda: take_server(ServerSide(LIMIT), body))
    _only_protocol_errors(lambda: take_client(pair()[0], frame(body)))


def test_damaged_messages() -> None:
    """Every message with a few bytes changed: still a message, or a ProtocolError."""
    rng = random.Random(20)
    bodies = [msgspec.msgpack.encode(m) for m in (*FROM_CLIENT, *REPLIES.values())]
    for _ in range(3000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        damaged = frame(bytes(body))
        _only_protocol_errors(partial(take_server, pair()[1], damaged))
        _only_protocol_errors(partial(take_client, pair()[0], damaged))


def _only_protocol_errors(act: Callable[[], object]) -> None:
    with suppress(ProtocolError):
        act()


def test_an_oversized_frame_is_refused_at_its_length() -> None:
    _, server = pair()
    with pytest.raises(ProtocolError, match="bytes"):
        take_server(server, struct.pack("<I", LIMIT + 1))


# --- the node breaks the protocol


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (wire.Report(9, b""), "does not answer call 9"),
        (wire.Flushed(2, 0, 0), "does not answer call 2"),
        (wire.Failed(9, "invalid", ""), "call 9"),
        (WELCOME, "does not answer call 1"),
    ],
)
def test_a_reply_must_answer_a_call(reply: wire.Reply, why: str) -> None:
    client, _ = pair()
    client.send(wire.Stats(2))
    with pytest.raises(ProtocolError, match=why):
        take_client(client, frame(msgspec.msgpack.encode(reply)))


def test_a_second_reply_is_refused() -> None:
    client, server = pair()
    take_server(server, client.send(wire.Stats(2)))
    reply = server.send(wire.Report(2, b""))
    with pytest.raises(ProtocolError, match="does not answer"):
        take_client(client, reply + reply)


def test_failed_answers_any_call_and_call_0_the_connection() -> None:
    client, server = pair()
    take_server(server, client.send(wire.Stats(2)))
    failed, farewell = wire.Failed(2, "invalid", "no"), wire.Failed(0, "protocol", "bye")
    assert take_client(client, server.send(failed) + server.send(farewell)) == [failed, farewell]


@pytest.mark.parametrize(
    ("welcome", "why"),
    [
        (wire.Welcome(1, 99, "b", "0", LIMIT, 8), "protocol 99, this client 1"),
        (wire.Welcome(1, wire.PROTOCOL, "b", "0", 0, 8), "below 1"),
        (wire.Welcome(1, wire.PROTOCOL, "b", "0", LIMIT, 0), "below 1"),
    ],
)
def test_a_welcome_that_cannot_be_followed(welcome: wire.Welcome, why: str) -> None:
    client = ClientSide(LIMIT)
    client.send(wire.Hello(1, wire.PROTOCOL, "x"))
    with pytest.raises(ProtocolError, match=why):
        take_client(client, frame(msgspec.msgpack.encode(welcome)))


# --- our own mistakes


def test_the_client_speaks_in_order() -> None:
    client = ClientSide(LIMIT)
    early: list[wire.FromClient] = [wire.Stats(1), wire.Detach()]
    for message in early:
        with pytest.raises(RuntimeError, match="out of turn"):
            client.send(message)
    hello = wire.Hello(1, wire.PROTOCOL, "x")
    client.send(hello)
    early = [hello, wire.Stats(2)]
    for message in early:
        with pytest.raises(RuntimeError, match="out of turn"):
            client.send(message)
    take_client(client, frame(msgspec.msgpack.encode(WELCOME)))
    with pytest.raises(RuntimeError, match="out of turn"):
        client.send(wire.Hello(2, wire.PROTOCOL, "x"))
    client.send(wire.Stats(2))
    with pytest.raises(RuntimeError, match="in use"):
        client.send(wire.Stats(2))


def test_the_node_answers_once_and_what_was_asked() -> None:
    client, server = pair()
    take_server(server, client.send(wire.Stats(2)))
    with pytest.raises(RuntimeError, match="does not answer"):
        server.send(wire.Flushed(2, 0, 0))
    with pytest.raises(RuntimeError, match="no call 3"):
        server.send(wire.Failed(3, "invalid", ""))
    server.send(wire.Report(2, b""))
    with pytest.raises(RuntimeError, match="does not answer"):
        server.send(wire.Report(2, b""))


def test_a_refused_hello_may_be_said_again() -> None:
    server = ServerSide(LIMIT)
    hello = wire.Hello(1, wire.PROTOCOL, "x")
    take_server(server, raw("hello", 1, wire.PROTOCOL, "x"))
    server.send(wire.Failed(1, "refused", "not you"))
    assert take_server(server, raw("hello", 1, wire.PROTOCOL, "x")) == [hello]


def test_what_is_too_large_is_not_sent() -> None:
    client, server = pair()
    take_client(client, b"")
    with pytest.raises(ValueError, match=f"Release takes .* the limit is {LIMIT}"):
        client.send(wire.Release(["r" * LIMIT]))
    with pytest.raises(ValueError, match="the limit is"):
        client.send(wire.Inspect(2, "k" * LIMIT))
    assert client.waiting == 0
    take_server(server, client.send(wire.Stats(2)))
    with pytest.raises(ValueError, match="the limit is"):
        server.send(wire.Report(2, b"x" * LIMIT))
    server.send(wire.Failed(2, "invalid", "too large"))


def test_the_nodes_limit_holds_after_welcome() -> None:
    client = ClientSide(LIMIT)
    client.send(wire.Hello(1, wire.PROTOCOL, "x"))
    small = wire.Welcome(1, wire.PROTOCOL, "b", "0", 100, 8)
    take_client(client, frame(msgspec.msgpack.encode(small)))
    with pytest.raises(ValueError, match="the limit is 100"):
        client.send(wire.Inspect(2, "k" * 100))
    with pytest.raises(ProtocolError, match="takes 100 at most"):
        take_client(client, frame(b"x" * 101))
