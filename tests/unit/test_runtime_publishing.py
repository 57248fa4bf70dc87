"""What a publisher sends and answers, over sockets in one process; and when it is not there."""

import builtins
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import zmq

from tiercache.config import Settings, parse
from tiercache.core.cluster.summary import Own
from tiercache.errors import ConfigError
from tiercache.runtime import publishing
from tiercache.runtime.publishing import HEARTBEAT_S, Publisher
from tiercache.runtime.routers import publisher_of
from tiercache.runtime.telemetry import Tally
from tiercache.settings import Events
from tiercache.state.names import packed
from tiercache.wire.residency import NOTHING_KNOWN, Ask, Batch, ask_frames, batch_of

WAIT_MS = 20_000
ZmqContext = zmq.Context[zmq.Socket[bytes]]
ZmqSocket = zmq.Socket[bytes]


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def own() -> Own:
    return Own(names_max=1000, changes_max=4)


@pytest.fixture
def settings(tmp_path: Path) -> Events:
    return Events(bind=f"ipc://{tmp_path}/e", replay_bind=f"ipc://{tmp_path}/r")


@pytest.fixture
def publisher(settings: Events, own: Own, tally: Tally) -> Iterator[Publisher]:
    made = Publisher(settings, "n", "boot", own, tally)
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    made: ZmqContext = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def asking(context: ZmqContext, settings: Events) -> Iterator[ZmqSocket]:
    """A DEALER at the node's second address."""
    with context.socket(zmq.DEALER) as made:
        made.connect(settings.replay_bind)
        yield made


@pytest.fixture
def listener(context: ZmqContext, publisher: Publisher, settings: Events) -> Iterator[ZmqSocket]:
    """A subscriber that is connected for certain: it has heard something."""
    with context.socket(zmq.SUB) as heard:
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        heard.connect(settings.bind)
        now = 0.0
        while not heard.poll(10):
            now += HEARTBEAT_S
            publisher.turn(now)
        while heard.poll(50):
            heard.recv_multipart()
        yield heard


def received(socket: ZmqSocket) -> Batch:
    assert socket.poll(WAIT_MS)
    return batch_of(socket.recv_multipart())


def test_changes_are_told_together_and_silence_is_told_seldom(
    publisher: Publisher, listener: ZmqSocket, own: Own
) -> None:
    now = 1e6
    publisher.turn(now)
    assert received(listener).version == 0
    own.add(1)
    own.add(2, slower=True)
    publisher.turn(now)
    assert received(listener) == Batch(
        "n", "boot", 0, 2, whole=False, host=packed([1]), nvme=packed([2]), removed=b""
    )
    publisher.turn(now + HEARTBEAT_S / 2)
    own.remove(1)
    publisher.turn(now + HEARTBEAT_S / 2)
    assert received(listener) == Batch(
        "n", "boot", 2, 3, whole=False, host=b"", nvme=b"", removed=packed([1])
    )
    publisher.turn(now + 2 * HEARTBEAT_S)
    assert received(listener) == Batch(
        "n", "boot", 3, 3, whole=False, host=b"", nvme=b"", removed=b""
    )
    for name in range(10, 20):  # More than is remembered.
        own.add(name)
    publisher.turn(now + 2 * HEARTBEAT_S)
    batch = received(listener)
    assert (batch.whole, batch.since, len(batch.host)) == (True, NOTHING_KNOWN, 80)


@pytest.fixture
def requesting(context: ZmqContext, settings: Events) -> Iterator[ZmqSocket]:
    """A REQ socket there."""
    with context.socket(zmq.REQ) as made:
        made.connect(settings.replay_bind)
        yield made


def test_a_req_socket_is_answered_too(
    publisher: Publisher, requesting: ZmqSocket, own: Own, tally: Tally
) -> None:
    asking = requesting
    own.add(1)
    own.add(2)
    whole = Batch("n", "boot", -1, 2, whole=True, host=packed([1, 2]), nvme=b"", removed=b"")
    for ask, answer in (
        (Ask(1, "boot"), Batch("n", "boot", 1, 2, False, packed([2]), b"", b"")),
        (Ask(-1, ""), whole),
        (Ask(-1, "boot"), whole),
        (Ask(1, "an earlier start"), whole),
        (Ask(7, "boot"), whole),
        (Ask(2, "boot"), Batch("n", "boot", 2, 2, False, b"", b"", b"")),
    ):
        asking.send_multipart(ask_frames(ask))
        while not asking.poll(5):
            publisher.turn(0.0)
        assert received(asking) == answer
    own.remove(2)
    asking.send_multipart(ask_frames(Ask(-1, "")))
    while not asking.poll(5):
        publisher.turn(0.0)
    assert received(asking).host == packed([1])
    assert tally.counters["replays"] == {"answered": 7, "refused": 0}


def test_answers_take_a_bounded_time_of_each_turn(
    publisher: Publisher,
    asking: ZmqSocket,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "ANSWERING_S_MAX", 0.0)
    for _ in range(3):
        asking.send_multipart(ask_frames(Ask(-1, "")))
    for count in (1, 2, 3):
        while tally.counters["replays"]["answered"] < count:
            publisher.turn(0.0)
        assert tally.counters["replays"]["answered"] == count
        received(asking)


def test_a_message_of_very_many_frames_is_read_in_parts_and_refused(
    publisher: Publisher, asking: ZmqSocket, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "FRAMES_PER_TURN_MAX", 10)
    asking.send_multipart([bytes(8), b""] * 100)
    asking.send_multipart(ask_frames(Ask(-1, "")))
    turns = 0
    while not asking.poll(1):
        publisher.turn(0.0)
        turns += 1
    assert turns > 20
    assert received(asking).whole
    assert tally.counters["replays"] == {"answered": 1, "refused": 1}


def test_a_publisher_that_is_closed_says_so_once_in_the_log(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.close()
    publisher.close()
    publisher.turn(1e6)
    assert [record.message for record in caplog.records] == ["events not told"]


@pytest.mark.parametrize(
    ("bind", "key"),
    [("ipc:///dev/null/no", "bind"), ("tcp://192.0.2.1:5557", "bind")],
)
def test_an_address_that_cannot_be_used_is_named(
    own: Own, tally: Tally, bind: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=rf'events.{key} "{bind}" cannot be used'):
        Publisher(Events(bind=bind, replay_bind="ipc:///tmp/x"), "n", "b", own, tally)


def test_an_address_for_answers_that_is_taken_lets_go_of_the_other(
    settings: Events, own: Own, tally: Tally, publisher: Publisher, tmp_path: Path
) -> None:
    other = Events(bind=f"ipc://{tmp_path}/other", replay_bind=f"ipc://{tmp_path}/no/such")
    with pytest.raises(ConfigError, match="replay_bind"):
        Publisher(other, "n", "b", own, tally)
    again = Events(bind=other.bind, replay_bind=f"ipc://{tmp_path}/r2")
    Publisher(again, "n", "b", own, tally).close()


def test_nobody_is_told_unless_the_settings_say_where(own: Own, tally: Tally) -> None:
    assert publisher_of(Settings(), "b", own, tally) is None


def test_the_node_goes_by_its_name_in_the_cluster(
    settings: Events, own: Own, tally: Tally, asking: ZmqSocket
) -> None:
    both = {"bind": settings.bind, "replay_bind": settings.replay_bind}
    made = publisher_of(parse({"events": both, "cluster": {"node": "x1"}}, "t"), "b", own, tally)
    assert made is not None
    asking.send_multipart([struct.pack(">q", -1), b""])
    while not asking.poll(5):
        made.turn(0.0)
    assert received(asking).node == "x1"
    made.close()


@pytest.mark.parametrize(("missing", "error"), [("zmq", ConfigError), ("other", ImportError)])
def test_without_pyzmq_the_extra_is_named(
    settings: Events,
    own: Own,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    error: type[Exception],
) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: object, **more: object) -> ModuleType:
        if name == "tiercache.runtime.publishing":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(error, match="`events`" if missing == "zmq" else "other"):
        publisher_of(Settings(events=settings), "b", own, tally)
