"""Calls of somebody else's code, which may block for as long as it likes, with a deadline of ours."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

from tiercache.errors import Fault, StorageFault
from tiercache.tiers.remote import Late, no_time

_Answer = TypeVar("_Answer")


class _Answering:
    """Gives what a block raises to who waits for it."""

    def __init__(self, future: "Future[_Answer]") -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True


class Workers:
    """A few threads that make blocking calls. One that is stuck keeps its thread until it returns.

    When all are stuck, calls wait for one until their deadline, and then were never begun. At most
    `waiting_max` calls wait. The threads end with the process: nobody waits for a stuck one.
    """

    def __init__(self, name: str, threads: int, waiting_max: int = 256) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting_max)
        self._lock = threading.Lock()
        self._running: set[threading.Event] = set()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def call(self, work: Callable[[], _Answer], within_s: float) -> _Answer:
        """Return what `work` returns, or raise what it raises.

        Raises `Late` when it has begun and is not done in time, and another StorageFault when it was
        not begun at all.
        """
        if within_s <= 0:
            raise no_time()
        future: Future[_Answer] = Future()
        settled = threading.Event()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                with self._lock:
                    self._running.add(settled)
                with _Answering(future):
                    future.set_result(work())
                with self._lock:
                    self._running.discard(settled)
                settled.set()

        try:
            self._queue.put_nowait(run)
        except queue.Full:
            raise StorageFault(Fault.IO, "too many calls wait for the pool") from None
        try:
            return future.result(within_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()
        if future.cancel():
            raise StorageFault(Fault.IO, "all calls to the pool hang")
        raise Late("the pool did not answer in time", settled)

    def unsettled(self) -> list[threading.Event]:
        """Return one event per call that runs, late or not; it is set when the call has ended."""
        with self._lock:
            return list(self._running)

    def close(self) -> None:
        """Let threads that are idle end; later calls are not begun. Idempotent."""
        for _ in self._threads:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return

    def _serve(self) -> None:
        while (run := self._queue.get()) is not None:
            run()
