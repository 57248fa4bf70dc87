"""The handshake: who gets in, who does not, and what cannot be replayed, turned round or changed."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import ConfigError, PeerFault, ProtocolError, TransportFault
from tiercache.transport import messages as said
from tiercache.transport.base import Limits
from tiercache.transport.handshake import Agreed, Dialling, End, Listening, refusal
from tiercache.transport.messages import encode
from tiercache.transport.security import Plain, SharedKey

KEY = SharedKey(bytes(range(32)))
OTHER = SharedKey(bytes(range(1, 33)))
ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


def shake(dials: End, listens: End) -> tuple[Agreed, Agreed]:
    dialling, listening = Dialling(dials, ONE), Listening(listens, TWO)
    challenge = listening.greeted(memoryview(dialling.hello()))
    answer = dialling.challenged(memoryview(challenge))
    ready, theirs = listening.answered(memoryview(answer))
    return dialling.ready(memoryview(ready)), theirs


@pytest.mark.parametrize("security", [Plain(), KEY])
def test_two_of_a_kind_agree(security: Plain | SharedKey) -> None:
    small = Limits(batch_max=5, calls_max=9, window_bytes=5 << 20)
    ours, theirs = shake(End("a", security), End("b", security, small))
    assert (ours.peer, theirs.peer) == ("b", "a")
    assert (ours.batch_max, ours.calls_max) == (5, 9)
    assert theirs.window_bytes == 5 << 20
    assert ours.session == theirs.session
    assert len(ours.session) == 32


def test_a_small_window_makes_small_chunks() -> None:
    small = Limits(chunk_bytes_max=1000, window_bytes=4000)
    _, theirs = shake(End("a", Plain(), small), End("b", Plain()))
    assert (theirs.window_bytes, theirs.chunk_bytes_max) == (4000, 4000)


def test_the_newest_common_version_is_chosen() -> None:
    ours, theirs = shake(End("a", KEY, versions=(1, 2, 3)), End("b", KEY, versions=(1, 2)))
    assert ours.version == theirs.version == 2
    ours, theirs = shake(End("a", KEY, versions=(1,)), End("b", KEY, versions=(1, 2)))
    assert ours.version == theirs.version == 1


def test_without_a_common_version_both_are_named() -> None:
    with pytest.raises(TransportFault, match=r"'a' speaks versions \[3\].*'b' speaks \[1, 2\]"):
        shake(End("a", KEY, versions=(3,)), End("b", KEY, versions=(1, 2)))


def test_a_newer_hello_is_understood() -> None:
    """Fields added at its end are left out of account."""
    hello = msgspec.msgpack.decode(Dialling(End("a", KEY), ONE).hello())
    body = msgspec.msgpack.encode([*hello, "something new", 7])
    assert Listening(End("b", KEY), TWO).greeted(memoryview(body))


@pytest.mark.parametrize(("dials", "listens"), [(KEY, Plain()), (Plain(), KEY)])
def test_both_must_ask_for_the_same(dials: Plain | SharedKey, listens: Plain | SharedKey) -> None:
    with pytest.raises(TransportFault, match="asks for") as fault:
        shake(End("a", dials), End("b", listens))
    assert fault.value.fault is PeerFault.REFUSED


def test_another_key_is_refused_by_the_one_who_dials() -> None:
    with pytest.raises(TransportFault, match="does not have the shared key"):
        shake(End("a", KEY), End("b", OTHER))


def test_another_key_is_refused_by_the_one_who_listens() -> None:
    """A stranger gets no further, though it does not check anything itself."""
    hello = Dialling(End("a", KEY), ONE).hello()
    listening = Listening(End("b", KEY), TWO)
    listening.greeted(memoryview(hello))
    for proof in (b"", bytes(32), bytes(5)):
        with pytest.raises(TransportFault, match="does not have the shared key"):
            listening.answered(memoryview(encode(said.Answer(proof))))


def test_what_was_heard_once_opens_nothing_later() -> None:
    """The whole of a good handshake, played again to a listener with a new nonce."""
    dialling = Dialling(End("a", KEY), ONE)
    hello = dialling.hello()
    answer = dialling.challenged(
        memoryview(Listening(End("b", KEY), TWO).greeted(memoryview(hello)))
    )
    again = Listening(End("b", KEY), THREE)
    again.greeted(memoryview(hello))
    with pytest.raises(TransportFault, match="does not have the shared key"):
        again.answered(memoryview(answer))


def test_a_proof_of_one_end_is_none_of_the_other() -> None:
    """A stranger that gives a listener's own proof back gets nowhere."""
    hello = Dialling(End("a", KEY), ONE).hello()
    listening = Listening(End("b", KEY), TWO)
    challenge = said.decoded_challenge(memoryview(listening.greeted(memoryview(hello))))
    assert isinstance(challenge, said.Challenge)
    with pytest.raises(TransportFault, match="does not have the shared key"):
        listening.answered(memoryview(encode(said.Answer(challenge.proof))))


def test_a_nonce_that_comes_back_is_refused() -> None:
    with pytest.raises(ProtocolError, match="nonce"):
        Listening(End("b", KEY), ONE).greeted(memoryview(Dialling(End("a", KEY), ONE).hello()))
    dialling = Dialling(End("a", Plain()), ONE)
    challenge = Listening(End("b", Plain()), TWO).greeted(memoryview(dialling.hello()))
    said_so = msgspec.structs.replace(_challenge(challenge), nonce=ONE)
    with pytest.raises(ProtocolError, match="nonce"):
        dialling.challenged(memoryview(encode(said_so)))


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"node": "c"}, {"nonce": THREE}, {"batch_max": 7}, {"proof": bytes(32)}],
)
def test_nothing_of_a_challenge_can_be_changed(change: dict[str, int]) -> None:
    dialling = Dialling(End("a", KEY, versions=(1, 2)), ONE)
    listening = Listening(End("b", KEY), TWO)
    challenge = _challenge(listening.greeted(memoryview(dialling.hello())))
    changed = msgspec.structs.replace(challenge, **change)
    with pytest.raises(TransportFault, match="does not have the shared key"):
        dialling.challenged(memoryview(encode(changed)))


def test_nothing_of_a_hello_can_be_changed() -> None:
    """Somebody between the two cannot make them speak an older version."""
    dialling = Dialling(End("a", KEY, versions=(1, 2)), ONE)
    hello = said.decoded_hello(memoryview(dialling.hello()))
    changed = encode(msgspec.structs.replace(hello, versions=[1]))
    challenge = Listening(End("b", KEY, versions=(1, 2)), TWO).greeted(memoryview(changed))
    with pytest.raises(TransportFault, match="does not have the shared key"):
        dialling.challenged(memoryview(challenge))


def test_a_version_that_was_not_offered_is_refused() -> None:
    dialling = Dialling(End("a", Plain()), ONE)
    challenge = Listening(End("b", Plain()), TWO).greeted(memoryview(dialling.hello()))
    changed = msgspec.structs.replace(_challenge(challenge), version=9)
    with pytest.raises(ProtocolError, match="not offered"):
        dialling.challenged(memoryview(encode(changed)))


def _challenge(body: bytes) -> said.Challenge:
    challenge = said.decoded_challenge(memoryview(body))
    assert isinstance(challenge, said.Challenge)
    return challenge


def test_a_refusal_says_why() -> None:
    fault = TransportFault(PeerFault.BUSY, "no room")
    for body in (refusal(fault), refusal(TransportFault(PeerFault.BUSY, "no room" + 999 * "!"))):
        with pytest.raises(TransportFault, match="no room") as told:
            Dialling(End("a", KEY), ONE).challenged(memoryview(body))
        assert told.value.fault is PeerFault.BUSY
    dialling = Dialling(End("a", Plain()), ONE)
    dialling.challenged(
        memoryview(Listening(End("b", Plain()), TWO).greeted(memoryview(dialling.hello())))
    )
    with pytest.raises(TransportFault, match="broken") as told:
        dialling.ready(memoryview(refusal(ProtocolError("broken"))))
    assert told.value.fault is PeerFault.PROTOCOL
    with pytest.raises(TransportFault) as told:
        dialling.ready(memoryview(encode(said.Refused("a new word", ""))))
    assert told.value.fault is PeerFault.REFUSED


@given(st.binary(max_size=300))
def test_no_bytes_get_in(body: bytes) -> None:
    view = memoryview(body)
    dialling, listening = Dialling(End("a", KEY), ONE), Listening(End("b", KEY), TWO)
    hello = memoryview(dialling.hello())
    with pytest.raises((ProtocolError, TransportFault)):
        listening.greeted(view)
    listening.greeted(hello)
    with pytest.raises((ProtocolError, TransportFault)):
        listening.answered(view)
    with pytest.raises((ProtocolError, TransportFault)):
        dialling.challenged(view)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 random bytes"):
        SharedKey(bytes(31))
    assert "0001" not in repr(KEY)
    assert repr(replace(KEY)) == "SharedKey()"
