"""The client for asyncio: the same values and rules, with many calls in flight on one connection."""

import asyncio
import os
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self, TypeVar

from tiercache.client import flows
from tiercache.client.aiolink import AsyncLink, connect
from tiercache.client.attempts import Attempts
from tiercache.client.checks import Form
from tiercache.client.locating import locating
from tiercache.client.pinning import pinning, unpinning
from tiercache.client.plan import Holding, Plan, Survey
from tiercache.client.pushing import pushing
from tiercache.client.saving import saving
from tiercache.client.session import Call
from tiercache.client.values import (
    Blob,
    Cleared,
    Flushed,
    Options,
    Pinned,
    Places,
    Pushed,
    Saved,
    Scope,
    Wanted,
)
from tiercache.errors import ProtocolError, RefusedError, UnavailableError
from tiercache.state import Chain, Layout, Namespace

INLINE_BYTES: Final = 256 << 10
"""Up to here, bytes are copied on the loop; a thread would take longer to start."""

T = TypeVar("T")
_OPTIONS = Options()
_SCOPE = Scope()


class AsyncClient:
    """As `Client`, for one event loop: its methods are called on the loop it attached from.

    Cancelling a call at any instant is safe: what the node leased or reserved for it is given back.
    Only the bytes that a thread is just copying for `save` are finished first, behind the caller's
    back; their buffer must stay until then. Plans are released without waiting, so they are plain
    context managers: `with await client.plan(...) as plan`.
    """

    def __init__(
        self, socket: str | Path, namespace: Namespace, layout: Layout, options: Options
    ) -> None:
        """See `attach`. Nothing is sent before the first call."""
        self._path = str(socket)
        self._form = Form(namespace, layout, options)
        self._options = options
        self._attempts = Attempts(options.retry_s)
        self._attaching = asyncio.Lock()
        self._link: AsyncLink | None = None
        self._closed = False
        _clients.add(self)

    @classmethod
    async def attach(
        cls,
        socket: str | Path,
        namespace: Namespace,
        layout: Layout,
        *,
        options: Options = _OPTIONS,
    ) -> "AsyncClient":
        """As `Client.attach`."""
        client = cls(socket, namespace, layout, options)
        try:
            await client._attached(monotonic() + options.deadline_s)
        except UnavailableError as fault:
            if options.required:
                cause = fault.__cause__
                raise (cause if isinstance(cause, RefusedError) else fault) from None
        return client

    async def plan(
        self, request: str, chain: Chain, *, limit: int | None = None, scope: Scope = _SCOPE
    ) -> Plan:
        """As `Client.plan`."""
        return await self._run(flows.planning(self._form, request, chain, limit, scope))

    async def load(self, plan: Plan, *, wait_s: float = 1.0) -> Plan:
        """As `Client.load`."""
        return await self._run(flows.loading(self._form, plan, wait_s), wait_s)

    async def save(
        self,
        request: str,
        chain: Chain,
        blobs: Sequence[Blob],
        *,
        scope: Scope = _SCOPE,
        parent: bytes = b"",
    ) -> Saved:
        """As `Client.save`; bytes above INLINE_BYTES are copied in a thread."""
        if not self._options.write:
            raise ValueError("this client attached without `write`")
        return await self._run(saving(self._form, request, chain, blobs, scope, parent))

    async def fetch(
        self,
        request: str,
        wanted: Sequence[Wanted],
        *,
        scope: Scope = _SCOPE,
        wait_s: float = 0.0,
    ) -> Holding:
        """As `Client.fetch`."""
        return await self._run(flows.fetching(self._form, request, wanted, scope, wait_s), wait_s)

    async def survey(
        self,
        request: str,
        path: bytes,
        *,
        scope: Scope = _SCOPE,
        hold_s: float = 10.0,
        before: bytes = b"",
    ) -> Survey:
        """As `Client.survey`."""
        return await self._run(flows.looking(self._form, request, path, scope, hold_s, before))

    async def clear(self, *, wait_s: float = 10.0) -> Cleared:
        """As `Client.clear`."""
        return await self._run(flows.clearing(self._form), wait_s)

    async def flush(self, *, durable: bool = False, wait_s: float = 10.0) -> Flushed:
        """As `Client.flush`."""
        return await self._run(flows.flushing(durable=durable, wait_s=wait_s), wait_s)

    async def push(
        self,
        request: str,
        chain: Chain,
        to: str,
        *,
        scope: Scope = _SCOPE,
        wait_s: float = 1.0,
    ) -> Pushed:
        """As `Client.push`."""
        return await self._run(pushing(self._form, request, chain, to, scope, wait_s), wait_s)

    async def where(
        self, chain: Chain, *, limit: int | None = None, scope: Scope = _SCOPE
    ) -> Places:
        """As `Client.where`."""
        return await self._run(locating(self._form, chain, limit, scope))

    async def pin(
        self,
        chain: Chain,
        *,
        boundary: int | None = None,
        scope: Scope = _SCOPE,
        age_s: float = 60.0,
    ) -> Pinned:
        """As `Client.pin`."""
        return await self._run(pinning(self._form, chain, boundary, scope, age_s))

    async def unpin(self, pinned: Pinned) -> Pinned:
        """As `Client.unpin`."""
        return await self._run(unpinning(pinned.number))

    async def release(self, plan: Plan | Holding | Survey) -> None:
        """As `Client.release`; never waits."""
        plan.release()

    async def close(self) -> None:
        """As `Client.close`."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def status(self) -> str:
        """As `Client.status`."""
        link = self._link
        if self._closed:
            return "detached: closed"
        if link is not None and not link.alive():
            return f"detached: {link.session.ended}"
        if link is not None and link.silent:
            return "detached: the node does not answer"
        return self._attempts.status

    @property
    def boot(self) -> str:
        """As `Client.boot`."""
        link = self._link
        return link.session.boot if link is not None and link.alive() else ""

    def _close(self) -> None:
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.flush()
            link.session.end("closed")

    async def _run(self, flow: flows.Flow[T], wait_s: float = 0.0) -> T:
        """Drive a flow to its end; on every path, what it had begun is undone."""
        deadline = monotonic() + self._options.deadline_s + wait_s
        link: AsyncLink | None = None
        copying: asyncio.Future[None] | None = None
        answer: flows.Answer
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Call):
                        assert link is not None
                        answer = await link.call(step, deadline)
                    elif isinstance(step, flows.Copying):
                        assert link is not None
                        began = monotonic()
                        if step.nbytes <= INLINE_BYTES:
                            step.run()
                        else:
                            copying = link.loop.run_in_executor(None, step.run)
                            await asyncio.shield(copying)
                        deadline += monotonic() - began
                        link.flush()
                        answer = None
                    else:
                        link = await self._attached(deadline)
                        answer = link.session
                except UnavailableError as fault:
                    if link is not None and not link.session.ended:
                        self._attempts.note(str(fault))
                    step = flow.throw(fault)
                else:
                    step = flow.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            if copying is not None and not copying.done():
                # The reservation must stand until the thread has written its last byte.
                copying.add_done_callback(partial(_end, flow, link))
            else:
                _end(flow, link)

    async def _attached(self, deadline: float) -> AsyncLink:
        link = self._link
        if link is not None and link.alive():
            return link
        try:
            async with asyncio.timeout(max(0.0, deadline - monotonic())):
                await self._attaching.acquire()
        except TimeoutError as fault:
            raise UnavailableError("deadline") from fault
        try:
            return await self._attach(deadline)
        finally:
            self._attaching.release()

    async def _attach(self, deadline: float) -> AsyncLink:
        link = self._link
        if link is not None:
            if link.alive():
                return link
            self._attempts.detached(link.session.ended)
            self._link = None
        if self._closed:
            raise UnavailableError("unavailable: closed")
        if not self._attempts.may_begin(monotonic()):
            raise UnavailableError(f"unavailable: {self._attempts.status}")
        try:
            async with asyncio.timeout(max(0.0, deadline - monotonic())):
                link = await connect(self._path, self._form, self._options)
        except asyncio.CancelledError:
            self._attempts.withdrawn()
            raise
        except (RefusedError, ProtocolError, OSError) as fault:
            raise self._attempts.failed(monotonic(), fault, self._path) from fault
        self._attempts.attached(link.session.boot)
        self._link = link
        if self._closed:
            self._close()
            raise UnavailableError("unavailable: closed")
        return link

    def _after_fork(self) -> None:
        link, self._link = self._link, None
        self._attaching = asyncio.Lock()
        self._attempts = Attempts(self._options.retry_s)
        if link is not None:
            link.after_fork()


def _end(
    flow: flows.Flow[T], link: AsyncLink | None, copied: asyncio.Future[None] | None = None
) -> None:
    """Undo what a flow had begun, and see that the node hears of it."""
    if copied is not None and not copied.cancelled():
        copied.exception()  # Seen: whoever would have been told is gone.
    flow.close()
    if link is not None:
        link.flush()


_clients: "weakref.WeakSet[AsyncClient]" = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork)
