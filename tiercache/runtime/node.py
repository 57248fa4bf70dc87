"""The machine in its loop: feeds it events, has its commands done, wakes it when time is due."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tiercache.core import commands, events
from tiercache.core.cluster.commands import Agree, Announce, Deposit, FlushPool, Locate, Pull
from tiercache.core.cluster.peers import POOL
from tiercache.core.machine import Machine
from tiercache.runtime.executor import Executor, Work
from tiercache.runtime.telemetry import Tally

Abroad: TypeAlias = Locate | Pull | Announce | Agree
Pooled: TypeAlias = Locate | Pull | Deposit | FlushPool

TICK_S_MIN = 0.002
"""A timer is never finer than this: the loop's clock counts milliseconds."""


class Readiness(NamedTuple):
    """How far a start has come. `nvme` is "off", "opening", "scanning", "ready" or "failed: why"."""

    ready: bool
    nvme: str
    nvme_found: int
    arena_bytes: int
    prefaulted_bytes: int


class Node:
    """Owns the machine. Everything here runs on the loop's thread.

    `reply` gets every answer of the core; `replied` is called after each burst of them. A machine that
    raises has a bug, and its books may be wrong: `broken` is called, and nothing is decided any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        machine: Machine,
        tally: Tally,
        *,
        reply: Callable[[commands.Reply], None],
        replied: Callable[[], None],
        broken: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._machine = machine
        self._tally = tally
        self._reply = reply
        self._replied = replied
        self._broken = broken
        self._is_broken = False
        self._executor: Executor | None = None
        self._abroad: Callable[[Abroad], None] | None = None
        self._pooled: Callable[[Pooled], None] | None = None
        self._record: Callable[[events.Event, float], None] | None = None
        self._inbox: deque[events.Event] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def machine(self) -> Machine:
        """What decides; to be asked, and told only through here."""
        return self._machine

    def execute_with(self, executor: Executor) -> None:
        """Have commands done by `executor`, whose outcomes go to `hear`."""
        self._executor = executor

    def reach_with(self, abroad: Callable[[Abroad], None]) -> None:
        """Have what concerns other nodes done by `abroad`; the outcomes go to `hear`."""
        self._abroad = abroad

    def pool_with(self, pooled: Callable[[Pooled], None]) -> None:
        """Have what concerns the pool done by `pooled`; the outcomes go to `hear`."""
        self._pooled = pooled

    def record_with(self, record: Callable[[events.Event, float], None]) -> None:
        """Tell `record` every event, and when it came (monotonic seconds)."""
        self._record = record

    def hear(self, event: events.Event) -> None:
        """Take in one event that happened outside a client's call, and send the answers."""
        self.take(event)
        self._replied()

    def take(self, event: events.Event) -> None:
        """Take in one event; the caller sends the answers."""
        if self._is_broken:
            return
        inbox = self._inbox
        inbox.append(event)
        try:
            while inbox:
                self._decide(inbox.popleft())
        except BaseException as error:
            self._is_broken = True
            self._broken(f"{type(error).__name__}: {error}")
            raise
        self._arm()

    def _decide(self, event: events.Event) -> None:
        started = time.monotonic()
        if self._record is not None:
            self._record(event, started)
        decided = self._machine.handle(event, started, time.time())
        self._tally.handled(time.monotonic() - started)
        for command in decided:
            if isinstance(command, commands.Reply):
                self._reply(command)
            elif isinstance(command, Locate | Pull | Announce | Agree | Deposit | FlushPool):
                self._send(command)
            else:
                self._execute(command)

    def _send(self, command: Abroad | Pooled) -> None:
        if isinstance(command, Deposit | FlushPool) or (
            isinstance(command, Locate | Pull) and command.peer == POOL
        ):
            if self._pooled is None:
                raise AssertionError("no way to the pool")
            self._pooled(command)
            return
        if self._abroad is None:
            raise AssertionError("no way to other nodes")
        self._abroad(command)

    def close(self) -> None:
        """Wake nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _execute(self, command: Work) -> None:
        if self._executor is None:
            raise AssertionError("no executor")
        outcome = self._executor.execute(command)
        if outcome is not None:
            self._inbox.append(outcome)

    def _arm(self) -> None:
        due = self._machine.wakeup()
        if due is None:
            return  # A timer that runs finds nothing to do, once.
        if self._timer is not None:
            if self._timer_at <= due:
                return
            self._timer.cancel()
        self._timer_at = due
        delay = max(TICK_S_MIN, due - time.monotonic())
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.hear(events.Tick())
