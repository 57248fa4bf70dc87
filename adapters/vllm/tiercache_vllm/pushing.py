"""Prompts that another node takes while they are computed here. Needs no vLLM."""

import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic

from tiercache.client import Client, Scope
from tiercache.errors import LayoutError, ProtocolError
from tiercache.state import Chain
from tiercache_vllm.planning import name_of

_log = logging.getLogger(__name__)

PUSHES_MAX = 64
"""Requests that are pushed at a time; others are not."""

PUSH_THREADS_MAX = 16
PUSH_CALL_S = 2.0
"""How long one call may take the other node."""

PUSH_PAUSE_S = 0.01
PUSH_PAUSE_S_MAX = 0.5
"""Between two calls for a request of which nothing new was saved: doubled each time."""

PUSH_S_MAX = 600.0
"""How long one request is pushed at most."""


@dataclass(slots=True)
class _Pushed:
    """One request on its way. `goal`: the deepest boundary of its prompt. `until`: when it is given up,
    once it is over here."""

    request: str
    chain: Chain
    scope: Scope
    destination: str
    goal: int
    until: float
    news: threading.Event = field(default_factory=threading.Event)


class Pusher:
    """Has nodes of the cluster take prompts from this engine's. Nothing here waits, or raises for anything
    that a node does.

    What is saved follows the steps that compute it; so a request is pushed again while less of it was
    taken than will be, and for `patience_s` after it is over.
    """

    def __init__(self, client: Client, patience_s: float) -> None:
        self._client = client
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._under_way: dict[str, _Pushed] = {}
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(PUSH_THREADS_MAX, thread_name_prefix="tiercache-push")

    def saving(self, request: str, chain: Chain, scope: Scope, destination: str, goal: int) -> None:
        """More of a request is being saved; `goal`: how much of its prompt will be."""
        if (known := self._under_way.get(request)) is not None:
            known.news.set()
        elif goal <= 0:
            return
        elif len(self._under_way) >= PUSHES_MAX:
            self._count("pushes_dropped")
        else:
            one = _Pushed(request, chain, scope, destination, goal, monotonic() + PUSH_S_MAX)
            self._under_way[request] = one
            self._pool.submit(self._push, one)

    def over(self, request: str) -> None:
        """A request is over here."""
        if (known := self._under_way.get(request)) is not None:
            known.until = min(known.until, monotonic() + self._patience_s)
            known.news.set()

    def take_counts(self) -> Counter[str]:
        """Return what was counted since the last look."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Stop; what was not taken is not pushed any more."""
        self._closing.set()
        for one in list(self._under_way.values()):
            one.news.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _push(self, one: _Pushed) -> None:
        try:
            self._until_taken(one)
        except (LayoutError, ProtocolError, ValueError, OverflowError) as fault:
            _log.warning("a request is not pushed: %s", fault)
            self._count("pushed_short")
        finally:
            self._under_way.pop(one.request, None)

    def _until_taken(self, one: _Pushed) -> None:
        name, pause = name_of(one.request), PUSH_PAUSE_S
        while not self._closing.is_set():
            one.news.clear()
            found = self._client.push(
                name, one.chain, one.destination, scope=one.scope, wait_s=PUSH_CALL_S
            )
            if found.boundary >= one.goal:
                self._count("pushed")
                return
            left = one.until - monotonic()
            if left <= 0 or found.reason == "unknown_node":
                self._count("pushed_short")
                return
            one.news.wait(min(pause, left))
            pause = PUSH_PAUSE_S if one.news.is_set() else min(2 * pause, PUSH_PAUSE_S_MAX)
            self._closing.wait(min(PUSH_PAUSE_S, left))

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1
