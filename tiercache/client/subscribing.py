"""Follows nodes over ZMQ and keeps a `Residency` up to date. Needs pyzmq, the extra `events`."""

from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import Final, NamedTuple, Self

import zmq

from tiercache.client.residency import Residency
from tiercache.errors import ProtocolError
from tiercache.wire.residency import NOTHING_KNOWN, TOPIC, Ask, ask_frames

BATCH_BYTES_MAX: Final = 128 << 20
"""A node that sends a longer frame is disconnected."""

BATCHES_QUEUED_MAX: Final = 1000
"""Beyond these, ZMQ drops what a node publishes: a gap, which is asked for."""

ASKS_QUEUED_MAX: Final = 8


class Source(NamedTuple):
    """Where a node tells what it could resume: its `events.bind` and `events.replay_bind`, as seen from
    here."""

    events: str
    replay: str


class Subscriber:
    """Listens to nodes, from construction to `close`; blocking, for one thread.

    Nodes need not be there yet: they are listened to once they are. A node that is gone stays in the
    index until somebody drops it (see `Residency.silent`).
    """

    def __init__(self, sources: Sequence[Source], index: Residency) -> None:
        """Raises zmq.ZMQError for an address that is none."""
        self.index = index
        self.invalid = 0  # Messages that were none.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._asking: dict[
            zmq.Socket[bytes], zmq.Socket[bytes]
        ] = {}  # By where its node publishes.
        try:
            for source in sources:
                self._follow(source)
        except zmq.ZMQError:
            self.close()
            raise

    def _follow(self, source: Source) -> None:
        heard = self._socket(zmq.SUB)
        heard.setsockopt(zmq.RCVHWM, BATCHES_QUEUED_MAX)
        heard.setsockopt(zmq.SUBSCRIBE, TOPIC)
        asking = self._asking[heard] = self._socket(zmq.DEALER)
        asking.setsockopt(zmq.SNDHWM, ASKS_QUEUED_MAX)
        heard.connect(source.events)
        asking.connect(source.replay)
        self._ask(asking, Ask(NOTHING_KNOWN, ""))

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        self._poller.register(made, zmq.POLLIN)
        return made

    def poll(self, wait_s: float) -> int:
        """Take in what has come, after waiting for it up to `wait_s`; return how many messages it was."""
        ready = dict(self._poller.poll(max(0, int(wait_s * 1000))))
        count = 0
        for heard, asking in self._asking.items():
            if asking in ready:
                count += self._drain(asking, None)
            if heard in ready:
                count += self._drain(heard, asking)
        return count

    def _drain(self, socket: "zmq.Socket[bytes]", asking: "zmq.Socket[bytes] | None") -> int:
        for count in range(BATCHES_QUEUED_MAX):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            try:
                if asking is None:
                    self.index.replayed(frames, monotonic())
                elif (ask := self.index.feed(frames, monotonic())) is not None:
                    self._ask(asking, ask)
            except ProtocolError:
                self.invalid += 1
        return BATCHES_QUEUED_MAX

    def _ask(self, asking: "zmq.Socket[bytes]", ask: Ask) -> None:
        try:
            asking.send_multipart(ask_frames(ask), zmq.NOBLOCK)
        except zmq.Again:
            return  # Nobody answers there now; what is missing is asked for again.

    def close(self) -> None:
        """Listen no more. Idempotent. The index stays as it is."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
