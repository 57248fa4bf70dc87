"""One UCX endpoint, driven by an event loop and dressed as the asyncio transport of a `Link`.

The pieces below ucxx's asyncio part are used: that part spins while a receive is posted, and one is
posted at all times here. The worker's event descriptor wakes the loop instead.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

from tiercache.errors import ConfigError
from tiercache.transport.fetching import ChunkLanding
from tiercache.transport.link import Link

OPTIONS: Final = {"TCP_TX_SEG_SIZE": "512k", "TCP_RX_SEG_SIZE": "512k", "TCP_SNDBUF": "512k"}
"""Over TCP, UCX is several times slower than a socket with its own segments of 8 KiB, and half as fast with
the kernel's send buffer."""

LOOK_S: Final = 0.5
"""UCX is looked after so often even when its descriptor says nothing."""

CLOSE_NS_MAX: Final = 1_000_000_000
TAG_BYTES: Final = 8

Ucx: TypeAlias = Any
"""ucxx has no types."""

Done: TypeAlias = Callable[[Exception | None], None]
"""Called when a request is over, with the error if it failed."""


def load() -> Ucx:
    """Return the module below ucxx's asyncio part; raises ConfigError when there is none."""
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise ConfigError(f"no ucxx here ({error}): install the extra `ucx`") from error
    return libucxx, Array


class Worker:
    """UCX in one event loop: requests in, callbacks out. Nothing spins."""

    def __init__(self, options: dict[str, str]) -> None:
        self.ucx, self.array = load()
        self._loop = asyncio.get_running_loop()
        self._context = self.ucx.UCXContext({**OPTIONS, **options})
        self.worker = self.ucx.UCXWorker(self._context)
        self.worker.init_blocking_progress_mode()
        self._pending: list[tuple[Ucx, Done]] = []
        self._fd = self.worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self.progress)
        self._timer = self._loop.call_later(LOOK_S, self._look)
        self._busy = False

    def watch(self, request: Ucx, done: Done) -> None:
        """Call `done` when the request is over."""
        self._pending.append((request, done))
        self._loop.call_soon(self.progress)

    def progress(self) -> None:
        """Let UCX work until it has nothing to do, and arm its descriptor."""
        if self._busy:
            return
        self._busy = True
        try:
            while True:
                self.worker.progress()
                if not self._finish() and self.worker.arm():
                    return
        finally:
            self._busy = False

    def close(self) -> None:
        """Let go of the loop."""
        self._timer.cancel()
        self._loop.remove_reader(self._fd)

    def _finish(self) -> bool:
        over: list[tuple[Ucx, Done]] = []
        pending: list[tuple[Ucx, Done]] = []
        for each in self._pending:
            (over if each[0].completed else pending).append(each)
        self._pending = pending
        for request, done in over:
            try:
                request.check_error()
            except self.ucx.UCXError as error:
                done(error)
            else:
                done(None)
        return bool(over)

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        self.progress()


class Pipe:
    """One UCX endpoint, as the asyncio transport below a `Link`.

    Bytes are written to the stream, views as tagged messages. Everything written is under way, and in
    memory that must not change, until `resume_writing` or `connection_lost`.
    """

    def __init__(self, worker: Worker, endpoint: Ucx, link: Link) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._writing = 0
        self._waiting_bytes = 0
        self._reading = False
        self._stopped = False
        self._closing = False
        self._lost = False
        self.received: asyncio.Future[None] | None = None
        self.direct: ChunkLanding | None = None
        endpoint.set_close_callback(self._on_close)
        link.connection_made(cast("asyncio.Transport", self))
        self._read()

    def get_extra_info(self, name: str) -> None:
        """See asyncio.BaseTransport: nothing is known."""

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """See asyncio.WriteTransport: writing always pauses until all is gone."""

    def get_write_buffer_size(self) -> int:
        """See asyncio.WriteTransport."""
        return self._waiting_bytes

    def is_closing(self) -> bool:
        """See asyncio.BaseTransport."""
        return self._closing

    def pause_reading(self) -> None:
        """See asyncio.ReadTransport: after the message that is being received."""
        self._stopped = True

    def resume_reading(self) -> None:
        """See asyncio.ReadTransport."""
        self._stopped = False
        self._loop.call_soon(self._read)

    def write(self, buffer: bytes) -> None:
        """See asyncio.WriteTransport."""
        self.writelines([buffer])

    def writelines(self, buffers: Sequence[bytes | memoryview]) -> None:
        """See asyncio.WriteTransport."""
        if self._closing:
            return
        for buffer in buffers:
            if len(buffer) == 0:
                continue
            array = self._worker.array(buffer)
            if isinstance(buffer, memoryview):
                request = self._endpoint.tag_send(array, self._tag())
            else:
                request = self._endpoint.stream_send(array)
            self._writing += 1
            self._waiting_bytes += len(buffer)
            self._worker.watch(request, self._written(array, len(buffer)))
        if self._writing:
            self._link.pause_writing()

    def close(self) -> None:
        """See asyncio.BaseTransport: what was written goes out first."""
        self._closing = True
        if not self._writing:
            self.abort()

    def abort(self) -> None:
        """See asyncio.WriteTransport."""
        self._closing = True
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.remove_close_callback()
            self._loop.call_soon(self._force, endpoint)

    def _force(self, endpoint: Ucx) -> None:
        endpoint.close_blocking(period=CLOSE_NS_MAX, max_attempts=1)
        self._worker.progress()
        self._lose()

    def _on_close(self) -> None:
        # Called by UCX while it works: nothing of UCX may be called here.
        self._loop.call_soon(self.abort)

    def _tag(self) -> Ucx:
        assert self._link.agreed is not None
        number = int.from_bytes(self._link.agreed.session[:TAG_BYTES], "little")
        return self._worker.ucx.UCXXTag(number)

    def _written(self, array: Ucx, nbytes: int) -> Done:
        def done(error: Exception | None) -> None:
            assert array is not None  # It keeps the memory until here.
            self._writing -= 1
            self._waiting_bytes -= nbytes
            if error is not None:
                self.abort()
            if not self._writing:
                if self._endpoint is None:
                    self._lose()
                elif self._closing:
                    self.abort()
                else:
                    self._link.resume_writing()

        return done

    def _read(self) -> None:
        """Post the next receive."""
        if self._reading or self._stopped or self._closing:
            return
        self._reading = True
        inlet = self._link.inlet
        landing = inlet.landing
        if isinstance(landing, ChunkLanding):
            nbytes = landing.left
            space = memoryview(bytearray(nbytes)) if landing.gone else landing.space()
            self.direct = None if landing.gone else landing
            self.received = self._loop.create_future()
            request = self._endpoint.tag_recv(self._worker.array(space), self._tag())
        else:
            space = inlet.space()
            nbytes = min(inlet.missing, len(space))
            space = space[:nbytes]
            request = self._endpoint.stream_recv(self._worker.array(space))
        self._worker.watch(request, self._arrived(space, nbytes))

    def _arrived(self, space: memoryview, nbytes: int) -> Done:
        def done(error: Exception | None) -> None:
            assert len(space) == nbytes  # It keeps the memory until here.
            self._reading = False
            self.direct = None
            if self.received is not None and not self.received.done():
                self.received.set_result(None)
            if error is not None:
                self.abort()
            if self._endpoint is None:
                self._lose()
                return
            if not self._link.over:
                self._link.buffer_updated(nbytes)
            self._read()

        return done

    def _lose(self) -> None:
        """The endpoint is gone; so is the connection, once UCX is done with all memory."""
        if self._endpoint is None and not self._writing and not self._reading and not self._lost:
            self._lost = True
            self._link.connection_lost(None)
