"""Tells routers which boundaries can be resumed here, over ZMQ. Imports pyzmq, the extra `events`."""

import asyncio
import logging
import time
from typing import Final

import zmq

from tiercache.core.cluster.summary import Own, Summary
from tiercache.errors import ConfigError, ProtocolError
from tiercache.runtime.log import say
from tiercache.runtime.telemetry import Tally
from tiercache.settings import Events
from tiercache.state.names import packed
from tiercache.wire.residency import (
    ASK_BYTES_MAX,
    NOTHING_KNOWN,
    Batch,
    ask_of,
    batch_frames,
)

HEARTBEAT_S: Final = 1.0
"""When nothing changes, that is said so often: who missed the last change finds out."""

BATCHES_QUEUED_MAX: Final = 64
"""Unread by one subscriber; beyond them it gets no more for a while, and sees the gap."""

ASKS_QUEUED_MAX: Final = 64
ANSWERS_QUEUED_MAX: Final = 4
ASK_FRAMES_MAX: Final = 4
"""Who asks, perhaps an empty frame, and the question."""

FRAMES_PER_TURN_MAX: Final = 1024
ANSWERING_S_MAX: Final = 0.005
"""The loop is not kept longer for answers at a time, but for the one under way."""

ANSWERING_SHARE: Final = 0.1
"""The part of the time that answers may take, however many ask for however much."""

LINGER_MS: Final = 100
PINGS_MS: Final = 5_000
SILENT_MS_MAX: Final = 15_000
"""Who is silent for so long is disconnected, and what waits for it is let go."""

SUBSCRIPTION_BYTES_MAX: Final = 512


class Publisher:
    """Publishes every change of `own`, and answers who missed some. On the loop's thread; never waits.

    What it has no room to send is dropped. It shows: every batch says which version it starts from.
    """

    def __init__(self, settings: Events, node: str, boot: str, own: Own, tally: Tally) -> None:
        """Raises ConfigError when an address cannot be used."""
        self._node = node
        self._boot = boot
        self._own = own
        self._tally = tally
        self._interval_s = settings.interval_s
        self._version = NOTHING_KNOWN
        self._beat_at = 0.0
        self._rests_until = 0.0  # No question is read before.
        self._asking: list[bytes] = []  # The first frames of one that is being read.
        self._all: list[bytes] = []  # The frames of all there is at some version.
        self._all_version = NOTHING_KNOWN
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._told = self._bound(zmq.PUB, "bind", settings.bind)
            self._asked = self._bound(zmq.ROUTER, "replay_bind", settings.replay_bind)
        except ConfigError:
            self.close()
            raise

    def _bound(self, kind: int, key: str, address: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        told = kind == zmq.PUB
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.IPV6, int("[" in address)),
            (zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES_MAX if told else ASK_BYTES_MAX),
            (zmq.SNDHWM, BATCHES_QUEUED_MAX if told else ANSWERS_QUEUED_MAX),
            (zmq.RCVHWM, ASKS_QUEUED_MAX),
            (zmq.HEARTBEAT_IVL, PINGS_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENT_MS_MAX),
        ):
            made.setsockopt(option, value)
        try:
            made.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f'events.{key} "{address}" cannot be used: {error.strerror}. Choose another, or "" for '
                f"no events"
            ) from error
        return made

    async def run(self) -> None:
        """Tell and answer until cancelled; then tell that nothing can be resumed here any more."""
        try:
            while True:
                self.turn(time.monotonic())
                await asyncio.sleep(self._interval_s)
        finally:
            self._withdraw()
            self.close()

    def turn(self, now: float) -> None:
        """Tell what has changed, if anything, and answer whoever asked."""
        try:
            if self._own.version != self._version or now >= self._beat_at:
                told = self._own.since(self._version)
                self._publish(batch_frames(self._batch(self._version, told)))
                self._version = told.version
                self._beat_at = now + HEARTBEAT_S
            self._answer_some(time.monotonic())
        except zmq.ZMQError as error:
            say(logging.WARNING, "events not told", error=str(error))

    def _publish(self, frames: list[bytes]) -> None:
        self._told.send_multipart(frames, zmq.NOBLOCK)
        self._tally.add("told")

    def _answer_some(self, began: float) -> None:
        if began < self._rests_until:
            return
        now, until = began, began + ANSWERING_S_MAX
        for _ in range(FRAMES_PER_TURN_MAX):
            try:
                frame = self._asked.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(self._asking) <= ASK_FRAMES_MAX:  # What has more frames is no question.
                self._asking.append(frame)
            if self._asked.getsockopt(zmq.RCVMORE):
                continue
            asking, self._asking = self._asking, []
            self._answer_one(asking)
            now = time.monotonic()
            if now >= until:
                break
        self._rests_until = began + (now - began) / ANSWERING_SHARE

    def _answer_one(self, frames: list[bytes]) -> None:
        try:
            answer = self._answer(frames)
        except ProtocolError:
            self._tally.add("replays", "refused")
            return
        # For who is gone, or reads no answers, it is dropped.
        self._asked.send_multipart(answer, zmq.NOBLOCK, copy=False)
        self._tally.add("replays", "answered")

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        # From a REQ socket there is an empty frame after who asked, from a DEALER there need not be.
        start = 2 if len(frames) > 3 and not frames[1] else 1
        ask = ask_of(frames[start:])
        version = ask.version if ask.boot == self._boot else NOTHING_KNOWN
        return [*frames[:start], *self._since(version)]

    def _since(self, version: int) -> list[bytes]:
        if version == NOTHING_KNOWN and self._all_version == self._own.version:
            return self._all
        told = self._own.since(version)
        frames = batch_frames(self._batch(version, told))
        if told.whole:
            self._all, self._all_version = frames, told.version
        return frames

    def _batch(self, since: int, told: Summary) -> Batch:
        slower = self._own.slower(told.added)
        in_memory = [name for name in told.added if name not in slower]
        return Batch(
            self._node,
            self._boot,
            NOTHING_KNOWN if told.whole else since,
            told.version,
            told.whole,
            packed(in_memory),
            packed(list(slower)),
            packed(told.removed),
        )

    def _withdraw(self) -> None:
        nothing = Summary(self._own.version, whole=True, added=[], removed=[])
        try:
            self._publish(batch_frames(self._batch(NOTHING_KNOWN, nothing)))
        except zmq.ZMQError as error:
            say(logging.WARNING, "events not told", error=str(error))

    def close(self) -> None:
        """Let go of the addresses. Idempotent."""
        self._context.destroy(linger=LINGER_MS)
