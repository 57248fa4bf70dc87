"""Threads that take turns at jobs, and the way their outcomes come back to the loop.

Anything written in Python that runs beside the loop delays it. A step must therefore spend its time
in calls that release the interpreter (hashing, reading, writing), and say little in between.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Step = Callable[[], None]
Outcome = TypeVar("Outcome")


class Mailbox(Generic[Outcome]):
    """Hands what threads found out to one function on the loop, in order, in as few wake-ups as
    possible."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Outcome], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._items: deque[Outcome] = deque()
        self._woken = False

    @property
    def empty(self) -> bool:
        """Whether all that was put has been delivered."""
        return not self._items

    def put(self, item: Outcome) -> None:
        """Deliver `item` soon. Any thread may call this."""
        self._items.append(item)
        if not self._woken:
            self._woken = True
            # A closed loop refuses: then nobody is left to be told.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        # Before the items are taken: one that is put from now on wakes the loop again.
        self._woken = False
        while self._items:
            self._deliver(self._items.popleft())


class Turns:
    """Threads that work on several jobs at once, one step of each at a time.

    A job is an iterator of steps; steps of one job may run at the same time. So a large job does not
    delay a small one by more than a step per thread.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Iterator[Step] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: Iterator[Step]) -> None:
        """Work on `job`."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """End after the steps that run now; False when that took longer than `timeout_s`."""
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            step = next(job, None)
            if step is not None:
                self._jobs.put(job)  # Whoever is free goes on with it meanwhile.
                step()


class Countdown:
    """Calls `done` when it was told `count` times, from whichever thread comes last."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left = count
        self._done = done
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Count one down."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._done()
