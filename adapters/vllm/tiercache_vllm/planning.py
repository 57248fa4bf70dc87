"""Questions to the node, asked on threads of their own: the scheduler never waits for an answer."""

import hashlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic

from tiercache.client import Capture, Client, Plan, Scope
from tiercache.errors import LayoutError, ProtocolError
from tiercache.state import Chain
from tiercache_vllm.geometry import Geometry
from tiercache_vllm.identity import Adapter, Adapters, Feature, extras_of, salt_of
from tiercache_vllm.settings import Settings

_log = logging.getLogger(__name__)

NAME_BYTES_MAX = 200
"""Longer names of requests are hashed: a node takes 256 bytes."""

SOURCE_THREADS_MAX = 16
"""Threads for requests that were prefilled elsewhere, which may wait: others do not wait for them."""

SOURCE_PAUSE_S = 0.01
SOURCE_PAUSE_S_MAX = 0.1
"""Between two questions about a request that was prefilled elsewhere: doubled each time."""


@dataclass(frozen=True, slots=True)
class Question:
    """Where a request can resume. `features`: its multimodal inputs; None when some input of it has no
    identity at all. `limit`: the deepest boundary that is of use. `source`: the node of the cluster that
    has what was prefilled, "" for none."""

    request: str
    tokens: Sequence[int]
    limit: int
    salt: str = ""
    epoch: str = ""
    adapter: Adapter | None = None
    features: tuple[Feature, ...] | None = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`chain` and `scope` are None for a request that must not be cached at all, and `reason` says why.

    `boundary`: tokens that can be loaded, a multiple of the scheduler's block; `ready` of them were in
    host memory when asked. `advice`: boundaries worth saving. `short`: it was prefilled elsewhere, and
    less of it can be loaded than its prompt allows.
    """

    reason: str
    chain: Chain | None = None
    scope: Scope | None = None
    boundary: int = 0
    ready: int = 0
    advice: frozenset[int] = frozenset()
    plan: Plan | None = None
    short: bool = False

    def release(self) -> None:
        """Let go of what was leased. Idempotent."""
        if self.plan is not None:
            self.plan.release()


class Planner:
    """Asks the node. `ask` returns at once; its future never raises."""

    def __init__(self, client: Client, geometry: Geometry, settings: Settings, grid: int) -> None:
        self._client = client
        self._geometry = geometry
        self._settings = settings
        self._capture = Capture(chunk_tokens=grid, grain=geometry.block_tokens)
        self._seats = settings.seats_of(geometry.ranks, 0)
        self._adapters = Adapters()
        self._pool = ThreadPoolExecutor(settings.planners, thread_name_prefix="tiercache-plan")
        self._sourced = ThreadPoolExecutor(
            SOURCE_THREADS_MAX, thread_name_prefix="tiercache-source"
        )
        self._closing = threading.Event()

    @property
    def status(self) -> str:
        """As the client's."""
        return self._client.status

    def ask(self, question: Question) -> "Future[Answer]":
        """Return the answer to come.

        One with a source waits for its prefix until `source_wait_s` from now, however many others are
        ahead of it.
        """
        pool = self._sourced if question.source else self._pool
        return pool.submit(self._answer, question, monotonic() + self._settings.source_wait_s)

    def clear(self) -> None:
        """Have the node drop what it holds under this namespace, for what that is worth: tenants and
        adapters have namespaces of their own."""
        self._pool.submit(self._client.clear)

    def close(self) -> None:
        """Stop; questions that were not begun are not answered."""
        self._closing.set()
        self._sourced.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _answer(self, question: Question, until: float) -> Answer:
        try:
            return self._planned(question, until)
        except (LayoutError, ProtocolError, ValueError, OverflowError) as fault:
            _log.warning("a request is not cached: %s", fault)
            return Answer(f"refused: {fault}")

    def _planned(self, question: Question, until: float) -> Answer:
        extras = None if question.features is None else extras_of(question.features)
        if extras is None:
            return Answer("refused: an input without an identity")
        lora = ""
        if question.adapter is not None:
            found = self._adapters.content(question.adapter)
            if found is None:
                return Answer("refused: an adapter without an identity")
            lora = found
        scope = Scope(
            lora=lora,
            salt=salt_of(question.salt, question.epoch),
            capture=self._capture,
            all_ranks=True,
            reshard=self._settings.reshard,
            source=question.source,
            seats=self._seats,
        )
        chain = Chain(question.tokens, self._geometry.layout.block_tokens, extras)
        block = self._geometry.block_tokens
        limit = min(question.limit, len(chain)) // block * block
        if limit <= 0:
            return Answer("shorter than a block", chain, scope)
        name = name_of(question.request)
        plan = self._plan(name, chain, limit, scope)
        pause = SOURCE_PAUSE_S
        while question.source and plan.boundary < limit and self._paused(pause, until):
            # What is saved there follows the prefill's own answer: it may not be there yet. Only a
            # request that was let go of is asked about there again.
            plan.release()
            plan = self._plan(name, chain, limit, scope)
            pause = min(2 * pause, SOURCE_PAUSE_S_MAX)
        ready = plan.ready_boundary
        advice = frozenset(plan.checkpoints)
        if plan.boundary and not plan.ready:
            plan = self._client.load(plan, wait_s=self._settings.plan_wait_s)
        boundary = plan.boundary if plan.ready and plan.boundary % block == 0 else 0
        if not boundary:
            plan.release()
        ready = min(ready, boundary)
        short = bool(question.source) and boundary < limit
        return Answer(plan.reason, chain, scope, boundary, ready, advice, plan, short)

    def _plan(self, name: str, chain: Chain, limit: int, scope: Scope) -> Plan:
        """Return the plan of the deepest boundary that every group has."""
        block = self._geometry.block_tokens
        plan = self._client.plan(name, chain, limit=limit, scope=scope)
        while plan.boundary % block:
            # A boundary of a finer part.
            plan.release()
            plan = self._client.plan(name, chain, limit=plan.boundary // block * block, scope=scope)
        return plan

    def _paused(self, pause_s: float, until: float) -> bool:
        """Wait a little; whether there was time for it, and there is a node to ask again."""
        left = until - monotonic()
        if left <= 0 or self._client.status != "attached":
            return False
        return not self._closing.wait(min(pause_s, left))


def name_of(request: str) -> str:
    """Return a request's name on the node."""
    if len(request.encode()) <= NAME_BYTES_MAX:
        return request
    return hashlib.sha256(request.encode()).hexdigest()
