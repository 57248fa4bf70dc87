"""The blocking client: what engines use."""

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar

from tiercache.client import flows
from tiercache.client.attempts import Attempts
from tiercache.client.checks import Form
from tiercache.client.link import Link, connect
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

T = TypeVar("T")
_OPTIONS = Options()
_SCOPE = Scope()


class Client:
    """A handle on the node of this machine, for one namespace. Thread-safe, and safe to fork.

    A node that is away, slow or refusing is never an exception: each call answers in time, with a
    reason ("deadline", "unavailable: why", ...), and the client attaches again by itself, at most
    once per `retry_s`, within a call. Wrong arguments raise ValueError or LayoutError before
    anything is sent. Views of arena memory stay readable memory for as long as somebody holds them.
    """

    def __init__(
        self, socket: str | Path, namespace: Namespace, layout: Layout, options: Options
    ) -> None:
        """See `attach`. Nothing is sent before the first call."""
        self._path = str(socket)
        self._form = Form(namespace, layout, options)
        self._options = options
        self._attempts = Attempts(options.retry_s)
        self._attaching = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        _clients.add(self)

    @classmethod
    def attach(
        cls,
        socket: str | Path,
        namespace: Namespace,
        layout: Layout,
        *,
        options: Options = _OPTIONS,
    ) -> "Client":
        """Attach to the node that listens at `socket`.

        Raises LayoutError when the layout does not fit the namespace or the ranks; and, only with
        `options.required`, RefusedError or UnavailableError when the node cannot be had.
        """
        client = cls(socket, namespace, layout, options)
        try:
            client._attached(monotonic() + options.deadline_s)
        except UnavailableError as fault:
            if options.required:
                cause = fault.__cause__
                raise (cause if isinstance(cause, RefusedError) else fault) from None
        return client

    def plan(
        self, request: str, chain: Chain, *, limit: int | None = None, scope: Scope = _SCOPE
    ) -> Plan:
        """Ask where `request` can resume, `limit` tokens at most (one less than the chain has).

        Boundaries inside blocks are checked against the chain. Idempotent by `request`.
        """
        return self._run(flows.planning(self._form, request, chain, limit, scope))

    def load(self, plan: Plan, *, wait_s: float = 1.0) -> Plan:
        """Return the plan with its `blobs`, once they are in host memory, after `wait_s` (and the
        deadline) at most. Its boundary may be lower, down to 0."""
        return self._run(flows.loading(self._form, plan, wait_s), wait_s)

    def save(
        self,
        request: str,
        chain: Chain,
        blobs: Sequence[Blob],
        *,
        scope: Scope = _SCOPE,
        parent: bytes = b"",
    ) -> Saved:
        """Store the blobs. `parent`: digest of the checkpoint that the request resumed from.

        The bytes are copied before it returns; that takes as long as it takes, beside the deadline.
        """
        if not self._options.write:
            raise ValueError("this client attached without `write`")
        return self._run(saving(self._form, request, chain, blobs, scope, parent))

    def fetch(
        self,
        request: str,
        wanted: Sequence[Wanted],
        *,
        scope: Scope = _SCOPE,
        wait_s: float = 0.0,
    ) -> Holding:
        """Lease objects by name, waiting up to `wait_s` for those outside host memory."""
        return self._run(flows.fetching(self._form, request, wanted, scope, wait_s), wait_s)

    def survey(
        self,
        request: str,
        path: bytes,
        *,
        scope: Scope = _SCOPE,
        hold_s: float = 10.0,
        before: bytes = b"",
    ) -> Survey:
        """Ask what is held along a path, for an engine that chooses the boundary itself and then fetches.

        `path`: digests of consecutive whole blocks, concatenated, from any block on. `before`: those of
        blocks before it that the engine has itself; they count as seen. The node drops nothing of what it
        found for `hold_s`, or until the survey is released.
        """
        return self._run(flows.looking(self._form, request, path, scope, hold_s, before))

    def clear(self, *, wait_s: float = 10.0) -> Cleared:
        """Drop all objects of this client's namespace (as it attached, without narrowing), whoever
        saved them, from every tier."""
        return self._run(flows.clearing(self._form), wait_s)

    def flush(self, *, durable: bool = False, wait_s: float = 10.0) -> Flushed:
        """Wait until what this client saved is sealed and, if `durable`, on disk as far as it has
        earned it."""
        return self._run(flows.flushing(durable=durable, wait_s=wait_s), wait_s)

    def push(
        self,
        request: str,
        chain: Chain,
        to: str,
        *,
        scope: Scope = _SCOPE,
        wait_s: float = 1.0,
    ) -> Pushed:
        """Have the node `to` of the cluster take what this one holds of a prompt, so that an engine there
        goes on from it. May be called again while the prompt is computed: each time, what is new goes
        over. Whole blocks only; what is not sealed yet (see `flush`) does not go."""
        return self._run(pushing(self._form, request, chain, to, scope, wait_s), wait_s)

    def where(self, chain: Chain, *, limit: int | None = None, scope: Scope = _SCOPE) -> Places:
        """Ask where a prompt could be resumed, `limit` tokens at most (one less than the chain has), and
        what that would take: here, and on the other nodes of the cluster as far as they have told.

        Changes nothing: no lease, no visit. Whole blocks only. What is said may be over by the time it is
        heard; `plan` decides.
        """
        return self._run(locating(self._form, chain, limit, scope))

    def pin(
        self,
        chain: Chain,
        *,
        boundary: int | None = None,
        scope: Scope = _SCOPE,
        age_s: float = 60.0,
    ) -> Pinned:
        """Keep what a boundary (None: the chain's end) rests on in host memory for `age_s`, within the
        node's budget. Ends with this attachment, or with `unpin`."""
        return self._run(pinning(self._form, chain, boundary, scope, age_s))

    def unpin(self, pinned: Pinned) -> Pinned:
        """End a pin of this attachment; "nothing" when it has ended already."""
        return self._run(unpinning(pinned.number))

    def release(self, plan: Plan | Holding | Survey) -> None:
        """Let go of a plan's bytes. Idempotent, never blocks."""
        plan.release()

    def close(self) -> None:
        """End the session; the node takes back all that it leased. Idempotent.

        Never waits for the node. Views of arena memory stay readable.
        """
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.flush()
            link.session.end("closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def status(self) -> str:
        """ "attached", "detached: why" or "refused: why"."""
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
        """The boot token of the node that it is attached to, "" when detached."""
        link = self._link
        return link.session.boot if link is not None and link.alive() else ""

    def _run(self, flow: flows.Flow[T], wait_s: float = 0.0) -> T:
        """Drive a flow to its end; on every path, what it had begun is undone."""
        deadline = monotonic() + self._options.deadline_s + wait_s
        link: Link | None = None
        answer: flows.Answer
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, Call):
                        assert link is not None
                        answer = link.call(step, deadline)
                    elif isinstance(step, flows.Copying):
                        assert link is not None
                        began = monotonic()
                        step.run()
                        deadline += monotonic() - began
                        link.flush()
                        answer = None
                    else:
                        link = self._attached(deadline)
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
            flow.close()
            if link is not None and link.session.queued:
                link.flush()

    def _attached(self, deadline: float) -> Link:
        link = self._link
        if link is not None and link.alive():
            return link
        if not self._attaching.acquire(timeout=max(0.0, deadline - monotonic())):
            raise UnavailableError("deadline")
        try:
            return self._attach(deadline)
        finally:
            self._attaching.release()

    def _attach(self, deadline: float) -> Link:
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
            link = connect(self._path, self._form, self._options, deadline)
        except (RefusedError, ProtocolError, OSError) as fault:
            raise self._attempts.failed(monotonic(), fault, self._path) from fault
        self._attempts.attached(link.session.boot)
        self._link = link
        if self._closed:
            self.close()
            raise UnavailableError("unavailable: closed")
        return link

    def _after_fork(self) -> None:
        link, self._link = self._link, None
        self._attaching = threading.Lock()
        self._attempts = Attempts(self._options.retry_s)
        if link is not None:
            link.after_fork()


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork)
