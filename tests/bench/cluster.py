"""A cluster: what a prompt costs that nobody holds, and fetching one that another node holds.

The first is a machine that knows what 16 others could resume. The second are two real nodes on the
loopback, from a client's plan to its loaded bytes, beside a plain blocking loop of `recv_into`.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from tests.bench.figures import Figure, at_least, percentile, size_label
from tests.bench.nodes import blob_layout, hybrid_layout
from tests.bench.peers.peer import pause
from tests.bench.transport import PlainLoop, Serving, filled
from tiercache.client import Blob, Client, Options
from tiercache.core import events
from tiercache.core.cluster import commands as cm
from tiercache.core.cluster import events as ev
from tiercache.core.limits import Clustering, Limits
from tiercache.core.machine import Machine
from tiercache.state import NATIVE, Chain, Layout, Namespace
from tiercache.testing.etcd import EtcdServer, free_port
from tiercache.testing.nodes import Launcher, NodeProcess, eventually

PEERS: Final = 16
NAMES: Final = 65_536
"""Told by each of them: what the settings allow at most unless they say otherwise."""

BLOCKS: Final = 1_024
BLOCK_TOKENS: Final = 64
CALLS: Final = 300
SHARE_GOAL: Final = 0.99
SIZES: Final = (1 << 20, 16 << 20, 64 << 20)
PROMPTS: Final = 5
SESSION: Final = 1
WAIT_S: Final = 30.0
SUMMARY_S: Final = 0.05
HEARD_S: Final = 10 * SUMMARY_S


def measure(reps: int) -> Iterator[Figure]:
    """Yield what an absent prompt costs, and fetches of each size."""
    yield from _absent(reps)
    if shutil.which("etcd") is not None:
        yield from _fetches(reps)


# --- a prompt that nobody holds


class Asker:
    """A machine that plans prompts of which nothing is held."""

    def __init__(self, peers: int, rng: random.Random) -> None:
        self._rng = rng
        self._call = 1
        layout = hybrid_layout(BLOCK_TOKENS)
        limits = Limits(
            host_segments=(1 << 20,), clustering=Clustering(peers_max=4096 if peers else 0)
        )
        self._machine = Machine(limits)
        namespace = Namespace.of(layout, model="m", weights="w", tokenizer="t")
        attached = events.Attached(SESSION, 1, namespace, layout, 1, 0, write=False, writer="bench")
        self._machine.handle(attached, 0.0)
        if not peers:
            return
        names = [f"node-{number}" for number in range(peers)]
        self._machine.handle(ev.MembersSeen(dict.fromkeys(names, "boot")), 0.0)
        self._machine.handle(ev.StandingHeld(inf), 0.0)
        for name in names:
            told = [rng.getrandbits(64) for _ in range(NAMES)]
            self._machine.handle(ev.PeerTold(name, "boot", NAMES, True, told, []), 0.0)

    def plan(self) -> tuple[int, bool]:
        """Plan once; return the nanoseconds, and whether no other node was asked."""
        self._call += 1
        digests = [self._rng.randbytes(32) for _ in range(BLOCKS)]
        tokens = BLOCKS * BLOCK_TOKENS
        asked = events.PlanAsked(
            SESSION, self._call, f"r{self._call}", "", "", digests, tokens, tokens, [], (NATIVE,),
            events.Capture(0, 1), all_ranks=False,
        )  # fmt: skip
        before = perf_counter_ns()
        out = self._machine.handle(asked, 0.0)
        latency = perf_counter_ns() - before
        self._machine.handle(events.Released(SESSION, [f"r{self._call}"]), 0.0)
        return latency, not any(isinstance(command, cm.Locate) for command in out)


def _absent(reps: int) -> Iterator[Figure]:
    shares, extra = [], []
    alone, many = Asker(0, random.Random(1)), Asker(PEERS, random.Random(2))
    for _ in range(reps):
        pairs = [(alone.plan(), many.plan()) for _ in range(CALLS)]
        shares.append(sum(quiet for _, (_, quiet) in pairs) / CALLS)
        without, beside = ([each[at][0] for each in pairs] for at in (0, 1))
        extra.append(percentile(beside, 50) - percentile(without, 50))
    name = f"absent prompt of {BLOCKS:,} blocks, {PEERS} nodes of {NAMES:,} boundaries"
    goal = at_least(SHARE_GOAL)
    yield Figure("cluster", f"{name}: plans without a round trip", "", tuple(shares), goal)
    yield Figure("cluster", f"{name}: added to a plan", "us", tuple(extra))


# --- one that another node holds


def _fetches(reps: int) -> Iterator[Figure]:
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tc-")))
        etcd = EtcdServer(folder / "etcd")
        closing.callback(etcd.kill)
        etcd.start()
        launcher = Launcher()
        closing.callback(launcher.close)
        nodes = [_node(closing, launcher, folder, name, etcd.url) for name in "ab"]
        assert eventually(lambda: all(node.gauge("peers") == 1 for node in nodes))
        serving = Serving("plain")
        closing.callback(serving.stop)
        plain = PlainLoop(serving.address)
        closing.callback(plain.close)
        target = filled(SIZES[-1])
        for size in SIZES:
            rates = [_compare(nodes, size, rep, plain, target) for rep in range(reps)]
            name = f"fetch from a node, {size_label(size)}, plan to loaded"
            yield Figure("cluster", name, "x plain", tuple(rates))


def _node(
    closing: ExitStack, launcher: Launcher, folder: Path, name: str, etcd: str
) -> NodeProcess:
    home = folder / name
    home.mkdir()
    node = NodeProcess(
        launcher,
        home,
        host={"bytes": "768MiB", "segment_bytes": "256MiB"},
        nvme={"path": ""},
        policy={
            "retention": "dense",
            "eviction": "lru",
        },  # Each prompt comes once: the last ones stay.
        cluster={
            "name": "bench",
            "node": name,
            "listen": f"127.0.0.1:{free_port()}",
            "etcd": (etcd,),
            "summary_s": SUMMARY_S,
            "answer_s_max": 1.0,
        },
    )
    closing.enter_context(node)
    node.start()
    return node


def _compare(
    nodes: Sequence[NodeProcess], size: int, rep: int, plain: PlainLoop, target: memoryview
) -> float:
    layout = blob_layout(size, BLOCK_TOKENS)
    namespace = Namespace.of(layout, model=f"{size}-{rep}", weights="w", tokenizer="t")
    chains = [
        Chain(range(n * 1000, n * 1000 + BLOCK_TOKENS + 1), BLOCK_TOKENS) for n in range(PROMPTS)
    ]
    first, second = (_client(node, namespace, layout) for node in nodes)
    with first, second:
        content = memoryview(os.urandom(size))
        for number, chain in enumerate(chains):
            saved = first.save(f"s{number}", chain, [Blob("kv", BLOCK_TOKENS, content, 0)])
            assert saved.stored == 1, saved
        first.flush()
        pause(HEARD_S)
        ours, theirs = [], []
        for number, chain in enumerate(chains):
            began = perf_counter_ns()
            plan = second.plan(f"r{number}", chain)
            with second.load(plan, wait_s=WAIT_S) as loaded:
                ours.append(perf_counter_ns() - began)
                assert loaded.boundary == BLOCK_TOKENS, loaded.reason
            began = perf_counter_ns()
            plain.fetch(target[:size])
            theirs.append(perf_counter_ns() - began)
    return percentile(theirs, 50) / percentile(ours, 50)


def _client(node: NodeProcess, namespace: Namespace, layout: Layout) -> Client:
    options = Options(name=f"bench-{node.pid}", deadline_s=WAIT_S, required=True)
    return Client.attach(node.socket, namespace, layout, options=options)
