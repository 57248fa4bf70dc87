"""Several real nodes of one cluster, for tests that kill, cut and freeze them."""

import itertools
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tiercache.client import Client, Options
from tiercache.runtime.cluster.documents import Members
from tiercache.testing import toy
from tiercache.testing.etcd import free_port
from tiercache.testing.nodes import Launcher, NodeProcess, Table, Value, eventually
from tiercache.testing.speaker import Speaker
from tiercache.wire import clustering
from tiercache.wire import messages as wire

TTL_S = 1
SUMMARY_S = 0.05
ANSWER_S = 0.3
REFRESH_S = 0.1
DEADLINE_S = 2.0
"""Of a client's calls: longer than a plan may wait for a node, shorter than anybody's patience."""

SLACK_S = 1.0
"""What a call may take longer on a busy machine."""

BACK_S = 20.0
"""By then a cluster must be whole again, whatever happened to it; `docs/cluster.md` has the usual times."""

TOKENS = 48
"""Whole blocks: a boundary inside a block is told to no other node."""

_clusters = itertools.count(1)


class Town:
    """Nodes of a cluster of its own, by name, each in the namespace or on the loopback port given for it.

    `etcd`: where they find one another; without one they have a `pool` in common, or nothing. Clients
    attach when they are first asked for.
    """

    def __init__(self, etcd: Sequence[str], *, pool: Table | None = None, **changes: Value) -> None:
        self.name = f"town-{next(_clusters)}"
        self._etcd = tuple(etcd)
        self._changes = changes
        self._pool = pool
        self._open = ExitStack()
        self._requests = itertools.count(1)
        self.nodes: dict[str, NodeProcess] = {}
        self._clients: dict[str, Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def add(self, name: str, launcher: Launcher, listen: str = "", **changes: Value) -> NodeProcess:
        """Start one more node."""
        cluster: dict[str, Value] = {
            "name": self.name,
            "node": name,
            "listen": listen or f"127.0.0.1:{free_port()}",
            "etcd": self._etcd,
            "ttl_s": TTL_S,
            "summary_s": SUMMARY_S,
            "answer_s_max": ANSWER_S,
            "transfer_s_max": 5.0,
        }
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="tc-")))
        tables: dict[str, Table] = {}
        if self._etcd:
            tables["cluster"] = {**cluster, **self._changes, **changes}
        if self._pool is not None:
            tables["pool"] = {"name": self.name, "refresh_s": REFRESH_S, **self._pool}
        node = self.nodes[name] = self._open.enter_context(NodeProcess(launcher, folder, **tables))
        node.start()
        return node

    def client(self, name: str) -> Client:
        """Return the client of a node."""
        if name not in self._clients:
            options = Options(name=f"engine-{name}", deadline_s=DEADLINE_S, retry_s=0.0)
            client = Client.attach(
                self.nodes[name].socket, toy.NAMESPACE, toy.LAYOUT, options=options
            )
            self._open.callback(client.close)
            self._clients[name] = client
        return self._clients[name]

    def settled(self, *names: str) -> bool:
        """Wait until these nodes, and no others, are members for one another and give things out."""
        return all(
            eventually(partial(_deals_with, self.nodes[name], len(names) - 1), BACK_S)
            for name in names
        )

    def heard(self, name: str, boundaries: int) -> bool:
        """Wait until a node knows that others could resume at so many boundaries."""
        return eventually(lambda: self._told(name) >= boundaries, BACK_S)

    def _told(self, name: str) -> int:
        with Speaker(self.nodes[name].socket) as speaker:
            reply = speaker.ask(clustering.Members(speaker.call()))
        assert isinstance(reply, wire.Report), reply
        found = msgspec.json.decode(reply.body, type=Members)
        return sum(row.boundaries for row in found.nodes if row.health != "self")

    def saved(self, name: str, number: int) -> None:
        """Have a node hold a prompt's state, in memory at least."""
        done = toy.save(self.client(name), number, TOKENS)
        assert not done.declined, done
        assert self.client(name).flush().waiting == 0

    def resumed(self, name: str, number: int) -> int:
        """Return where a node resumes a prompt. AssertionError for a wrong byte, or a call that took longer
        than it may."""
        client, prompt = self.client(name), toy.chain(number, TOKENS + 1)
        started = time.monotonic()
        plan = client.plan(f"{name}-{next(self._requests)}", prompt)
        assert time.monotonic() - started < DEADLINE_S + SLACK_S, "a plan beyond its deadline"
        started = time.monotonic()
        with client.load(plan, wait_s=1.0) as loaded:
            assert time.monotonic() - started < 1.0 + DEADLINE_S + SLACK_S, "a load beyond its time"
            found = [*toy.wrong(loaded, prompt)]
            assert not found or not loaded.held, found
            return loaded.boundary if loaded.held else 0

    def pooled(self, name: str, number: int) -> None:
        """Have a node save a prompt's state and resume it until it has put it into the pool."""
        node = self.nodes[name]
        stored = node.counter("deposits", "stored")
        self.saved(name, number)
        assert self.resumed(name, number) == TOKENS
        assert eventually(
            lambda: (
                self.resumed(name, number) == TOKENS and node.counter("deposits", "stored") > stored
            ),
            BACK_S,
        ), node.said()

    def comes_to_resume(self, name: str, number: int, within_s: float = BACK_S) -> bool:
        """Whether a node comes to resume a prompt that others hold."""
        return eventually(lambda: self.resumed(name, number) == TOKENS, within_s)


def _deals_with(node: NodeProcess, others: int) -> bool:
    gauges = node.figures().gauges
    return gauges["peers"][""] == others and not gauges["isolated_now"][""]
