"""Recording what a node is asked: a trace for replays, written beside the loop.

What is recorded: when each request came, how long its prompt was and what it decoded, and which blocks it
has in common with others. Neither tokens nor digests, names or salts.
"""

import gzip
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from tiercache.core import events
from tiercache.runtime import ptrace
from tiercache.runtime.log import say
from tiercache.runtime.telemetry import Tally

EVENTS_MAX: Final = 1024
"""Events that wait for the thread; more are left out, and counted."""

BLOCKS_MAX: Final = 262_144
"""Blocks that one trace tells apart; see `ptrace.Numbering`."""

OPEN_MAX: Final = 256
"""Requests that may still say what they decoded, before their lines are written."""

OPEN_S: Final = 60.0
"""How long a request may say so."""

LOOK_S: Final = 1.0
"""How often lines whose time is up are written."""

BATCH_BYTES: Final = 64 * 1024
"""Text that becomes one member of the file; a member that is whole can be read whatever happens next."""

SESSIONS_MAX: Final = 4096
"""Sessions whose namespaces are remembered."""

TRACES_MAX: Final = 8
"""Sizes of blocks, each of which has a file of its own."""

Name: TypeAlias = tuple[bytes, str, str]
Heard: TypeAlias = tuple[events.Event, float] | None


class Asked(NamedTuple):
    """A request whose line is not written yet."""

    at: float
    tokens: int
    path: ptrace.Path


class Trace:
    """One file: requests of namespaces with blocks of one size. Not thread-safe; may raise OSError."""

    def __init__(self, path: Path, block_tokens: int, started: float) -> None:
        self.nbytes = 0
        self._path = path
        self._started = started
        # Resting lets the loop have the interpreter: a long prompt would keep it for milliseconds.
        self._numbering = ptrace.Numbering(BLOCKS_MAX, os.sched_yield)
        self._open: OrderedDict[Name, Asked] = OrderedDict()
        self._out: dict[Name, int] = {}
        self._text = ptrace.header(block_tokens, path.name.partition(".")[0])
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def asked(self, name: Name, digests: list[bytes], tokens: int, at: float) -> None:
        """Take in a request; one that is known already changes nothing."""
        if name in self._open:
            return
        path = self._numbering.path(name[0], digests)
        self._open[name] = Asked(at, tokens, path)
        if len(self._open) > OPEN_MAX:
            self._write_first()

    def saved(self, name: Name, end: int) -> None:
        """The request saved state up to `end` tokens: what lies behind its prompt it decoded."""
        asked = self._open.get(name)
        if asked is not None:
            self._out[name] = max(self._out.get(name, 0), end - asked.tokens)

    def due(self, before: float) -> None:
        """Write the lines of requests that came before that time."""
        while self._open and next(iter(self._open.values())).at < before:
            self._write_first()
        self.flush()

    def flush(self) -> None:
        """Write the text that is there."""
        if self._text:
            packed = gzip.compress(self._text.encode(), mtime=0)
            self._text = ""
            self.nbytes += len(packed)
            view = memoryview(packed)
            while view:
                view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        """Write what is left."""
        try:
            self.due(float("inf"))
        finally:
            os.close(self._fd)

    def _write_first(self) -> None:
        name, asked = self._open.popitem(last=False)
        at_ms = max(0, round((asked.at - self._started) * 1000))
        out = self._out.pop(name, 0)
        self._text += ptrace.line(at_ms, asked.tokens, out, asked.path)
        if len(self._text) >= BATCH_BYTES:
            self.flush()


class Recorder:
    """Writes traces into a directory, on a thread of its own, up to `bytes_max` in all.

    `hear` never waits. Recording that fails ends with a message, and the node goes on.
    """

    def __init__(self, directory: Path, bytes_max: int, tally: Tally) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._tally = tally
        self._stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._started = time.monotonic()
        self._heard: queue.Queue[Heard] = queue.Queue(EVENTS_MAX)
        self._traces: dict[int, Trace] = {}
        self._blocks: dict[int, tuple[bytes, str, int]] = {}
        self._stopping = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def hear(self, event: events.Event, now: float) -> None:
        """Take in an event, if it belongs into a trace."""
        match event:
            case events.Attached() | events.PlanAsked() | events.SurveyAsked():
                pass
            case events.ReserveAsked() | events.Closed():
                pass
            case _:
                return
        if self._over:
            return
        try:
            self._heard.put_nowait((event, now))
        except queue.Full:
            self._tally.add("recorded", "left_out")

    def close(self, wait_s: float) -> bool:
        """Write what was heard; False when that took longer."""
        self._stopping = True
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    # --- the thread

    def _run(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            while self._listen():
                pass
        except OSError as error:
            self._end("recording failed", error=str(error))
        finally:
            self._over = True
            self._close()

    def _close(self) -> None:
        for trace in self._traces.values():
            try:
                trace.close()
            except OSError as error:
                say(logging.ERROR, "recording failed", error=str(error))

    def _listen(self) -> bool:
        """Take in one event, or look whose time is up; False when that is enough."""
        try:
            heard = self._heard.get(timeout=0 if self._stopping else LOOK_S)
        except queue.Empty:
            if self._stopping:
                return False
            heard = None
        if heard is None:
            for trace in self._traces.values():
                trace.due(time.monotonic() - OPEN_S)
        else:
            self._take(*heard)
        if sum(trace.nbytes for trace in self._traces.values()) >= self._bytes_max:
            self._end("recording is full", bytes_max=self._bytes_max)
            return False
        return True

    def _end(self, why: str, **fields: str | int) -> None:
        self._over = True
        say(logging.WARNING, why, path=str(self._directory), **fields)

    def _take(self, event: events.Event, now: float) -> None:
        match event:
            case events.Attached(session=session, namespace=namespace, layout=layout):
                self._blocks[session] = (namespace.digest, event.writer, layout.block_tokens)
                if len(self._blocks) > SESSIONS_MAX:  # Refused ones are never closed.
                    del self._blocks[next(iter(self._blocks))]
            case events.Closed(session=session):
                self._blocks.pop(session, None)
            case events.PlanAsked() | events.SurveyAsked() | events.ReserveAsked():
                known = self._blocks.get(event.session)
                trace = self._trace(known[2]) if known is not None else None
                if known is not None and trace is not None:
                    self._request(trace, known, event, now)
            case _:
                raise AssertionError(f"not asked for: {type(event).__name__}")

    def _request(
        self,
        trace: Trace,
        known: tuple[bytes, str, int],
        event: events.PlanAsked | events.SurveyAsked | events.ReserveAsked,
        now: float,
    ) -> None:
        namespace, writer, block = known
        space = namespace + repr((event.lora, event.salt)).encode()
        name = (space, writer, event.request)
        match event:
            case events.PlanAsked(digests=digests, tokens=tokens):
                trace.asked(name, digests, tokens, now)
                self._tally.add("recorded", "heard")
            case events.SurveyAsked(digests=digests):
                trace.asked(name, digests, len(digests) * block, now)
                self._tally.add("recorded", "heard")
            case events.ReserveAsked(offers=offers):
                trace.saved(name, max((offer.end for offer in offers), default=0))

    def _trace(self, block_tokens: int) -> Trace | None:
        trace = self._traces.get(block_tokens)
        if trace is None and len(self._traces) < TRACES_MAX:
            path = self._directory / f"requests-{self._stamp}-b{block_tokens}.ptrace.gz"
            trace = Trace(path, block_tokens, self._started)
            self._traces[block_tokens] = trace
            say(logging.INFO, "recording", path=str(path))
        return trace
