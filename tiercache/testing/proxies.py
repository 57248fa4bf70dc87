"""A way to a port that a test can shut, slow down, and make lose what goes through."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine

START_S = 30.0
PIECE_BYTES = 1 << 16


class Gate:
    """A way to a port of the loopback that listens from the first time its `url` is asked for, in a thread
    of its own.

    It can be shut: then it swallows what comes and answers nothing, while what was connected stays
    connected, as when a cable is cut. All that goes through is late by `delay_s`, each way. Of the pieces
    that come, a share of `loss` ends its connection instead, as the transport sees it when packets are
    lost for too long; chance comes from `seed`.
    """

    def __init__(
        self, port: int, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0
    ) -> None:
        self._to = port
        self._delay_s = delay_s
        self._loss = loss
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._port = 0
        self._listening = threading.Event()
        self._done = asyncio.Event()
        self._entered: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="gate")
        self.lost = 0

    @property
    def address(self) -> str:
        """Where it listens."""
        if not self._port:
            self._thread.start()
            assert self._listening.wait(START_S)
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """Where it listens, for HTTP."""
        return f"http://{self.address}"

    def shut(self) -> None:
        """Let nothing through."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def open(self) -> None:
        """Let everything through again."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    def close(self) -> None:
        """End it and all connections."""
        if self._port:
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join(START_S)
        else:
            self._loop.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._enter, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._done.wait()
        server.close()
        if self._entered:
            await asyncio.wait(self._entered)

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._entered.add(task)
        task.add_done_callback(self._entered.discard)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        with contextlib.closing(writer), contextlib.closing(back):
            ways = (self._pass(reader, back), self._pass(there, writer))
            await _until_one_ends(*ways, self._over())

    async def _over(self) -> None:
        await self._done.wait()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry bytes one way, until they end or are lost."""
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        try:
            await _until_one_ends(self._take(reader, late), self._give(late, writer))
        except* OSError:
            writer.close()

    async def _take(
        self, reader: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            piece = await reader.read(PIECE_BYTES)
            if self._loss and self._rng.random() < self._loss:
                self.lost += 1
                return
            late.put_nowait((self._loop.time() + self._delay_s, piece))
            if not piece:  # The end too is late.
                await asyncio.Event().wait()

    async def _give(
        self, late: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due, piece = await late.get()
            await asyncio.sleep(due - self._loop.time())
            await self._is_open.wait()
            if not piece:
                return
            writer.write(piece)
            await writer.drain()


async def _until_one_ends(*works: Coroutine[None, None, None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(work) for work in works]
        await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
        for each in started:
            each.cancel()
