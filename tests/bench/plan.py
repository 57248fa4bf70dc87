"""Planning a prompt of 131,072 tokens: inside the sidecar, and as a client sees it.

Inside: decoding the request, the machine, encoding the reply, driven in this process without a
socket. Its cost must not grow with the number of stored objects. The long prompt is held but for
its last block, which an engine computes anyway.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter_ns

from tests.bench import prompts
from tests.bench.figures import Figure, at_most, number, percentile
from tests.bench.nodes import OBJECTS_MAX, Sidecar, hybrid_layout
from tests.bench.prompts import BLOCK_TOKENS, TOKENS
from tiercache.client import Client, Options
from tiercache.core import commands, events
from tiercache.core.limits import Limits, Retaining
from tiercache.core.machine import Machine
from tiercache.runtime.translate import Caller, Telling, to_event, to_reply
from tiercache.state import NATIVE, Chain
from tiercache.wire import messages as wire
from tiercache.wire.connection import ClientSide, ServerSide

UNITS = (1, 8)
OTHERS = (1_000, 1_000_000)
GOAL_MS = 3.0
GROWTH_GOAL = 1.5
"""How much slower a thousand times more objects may make it: colder caches, not more work."""

CALLS = 60
PAGE_BYTES = 4096
FRAME_BYTES_MAX = 16 << 20
SESSION = 1


def measure(reps: int) -> Iterator[Figure]:
    """Yield figures for each number of shards and of stored objects."""
    chain = prompts.prompt()
    yield from _chain_cost(reps)
    for units in UNITS:
        planners = {others: Planner(units, others, chain) for others in OTHERS}
        gc.collect()
        gc.freeze()  # As the sidecar does.
        inside: dict[int, list[float]] = {others: [] for others in OTHERS}
        for _ in range(reps):
            for others, latency in _in_turns(planners).items():
                inside[others].append(percentile(latency, 50) / 1e3)
        del planners
        gc.unfreeze()
        gc.collect()
        for others, values in inside.items():
            goal = at_most(GOAL_MS) if units == 1 else None
            yield Figure(
                "plan", _name("inside the sidecar", units, others), "ms", tuple(values), goal
            )
        pairs = zip(*(inside[others] for others in OTHERS), strict=True)
        growth = tuple(more / less for less, more in pairs)
        name = f"plan, {units} shard{'s' * (units > 1)}: {number(OTHERS[-1])} objects over 1,000"
        yield Figure("plan", name, "x", growth, at_most(GROWTH_GOAL))
    for units in UNITS:
        resident = {}
        for others in OTHERS:
            figure, resident[others] = _end_to_end(units, others, chain, reps)
            yield figure
        few, many = OTHERS
        grown = (resident[many] - resident[few]) / (many - few)
        name = f"memory per object, from {number(few)} to {number(many)} objects"
        if units == 1:
            yield Figure("plan", name, "bytes", (grown,))


def _in_turns(planners: Mapping[int, "Planner"]) -> Mapping[int, Sequence[int]]:
    """Return the latencies of plans that took turns: all saw the same neighbours."""
    latency: dict[int, list[int]] = {others: [] for others in planners}
    for _ in range(CALLS):
        for others, planner in planners.items():
            latency[others].append(planner.plan())
    return latency


class Planner:
    """A machine, and both ends of a connection to it, without the connection."""

    def __init__(self, units: int, others: int, chain: Chain) -> None:
        layout = hybrid_layout(BLOCK_TOKENS, units)
        arena_bytes = (3 * len(chain.digests) * units + others + 1000) * PAGE_BYTES
        limits = Limits(
            host_segments=(arena_bytes,), objects_max=OBJECTS_MAX, retaining=Retaining("chunk")
        )
        self._machine = Machine(limits)
        prompts.fill(self._machine, layout, others)
        attached = events.Attached(
            SESSION, 1, prompts.namespace(layout), layout, units, 0, write=False, writer="bench"
        )
        self._machine.handle(attached, 0.0)
        self._server, self._client = ServerSide(FRAME_BYTES_MAX), ClientSide(FRAME_BYTES_MAX)
        self._server.receive(self._client.send(wire.Hello(1, wire.PROTOCOL, "bench")))
        self._next()
        welcome = wire.Welcome(1, wire.PROTOCOL, "boot", "version", FRAME_BYTES_MAX, TOKENS)
        self._take(self._server.send(welcome))
        self._chain = chain
        self._call = 1

    def plan(self) -> int:
        """Plan once; return the nanoseconds."""
        self._call += 1
        asked = self._client.send(self._plan())
        before = perf_counter_ns()
        self._server.receive(asked)
        (reply,) = self._hear(self._next())
        assert isinstance(reply, commands.Reply)
        answer = self._server.send(to_reply(reply.call, reply.body, _no_facts))
        latency = perf_counter_ns() - before
        planned = self._take(answer)
        assert isinstance(planned, wire.Planned)
        assert planned.boundary == TOKENS - BLOCK_TOKENS, planned.boundary
        assert planned.ready
        assert len(planned.pieces) == planned.boundary // BLOCK_TOKENS + 2
        self._hear(wire.Release([f"request-{self._call}"]))
        return latency

    def _plan(self) -> wire.Plan:
        return wire.Plan(
            call=self._call,
            request=f"request-{self._call}",
            lora="",
            salt="",
            chain=self._chain.blocks(),
            tokens=TOKENS,
            limit=TOKENS - 1,
            tails=[],
            codecs=[NATIVE],
            capture=wire.Capture(chunk_tokens=prompts.CHUNK_TOKENS),
            all_ranks=False,
        )

    def _next(self) -> wire.FromClient:
        message = self._server.next()
        assert message is not None
        assert self._server.next() is None
        return message

    def _take(self, answer: bytes) -> wire.Reply:
        self._client.receive(answer)
        reply = self._client.next()
        assert reply is not None
        assert self._client.next() is None
        return reply

    def _hear(self, message: wire.FromClient) -> list[commands.Command]:
        assert isinstance(
            message, wire.Attach | wire.Plan | wire.Reserve | wire.Commit | wire.Release
        )
        return self._machine.handle(to_event(message, Caller(SESSION, "bench"), 0.0), 0.0)


def _no_facts() -> Telling:
    raise AssertionError("a plan asks for no facts")


def _end_to_end(units: int, others: int, chain: Chain, reps: int) -> tuple[Figure, int]:
    """Return the figure, and what the node keeps in memory beyond the arena and its code."""
    layout = hybrid_layout(BLOCK_TOKENS, units)
    pages = 3 * len(chain.digests) * units + others + 1000
    options = Options(ranks=units, write=False, deadline_s=10.0, required=True)
    with (
        Sidecar(
            arena_bytes=pages * PAGE_BYTES,
            module="tests.bench.prompts",
            arguments=(str(units), str(others)),
        ) as node,
        Client.attach(node.socket, prompts.namespace(layout), layout, options=options) as client,
    ):
        node.wait_prefaulted()
        values, names = [], iter(range(10**9))
        for _ in range(reps):
            latency = []
            for _ in range(CALLS):
                before = perf_counter_ns()
                plan = client.plan(f"request-{next(names)}", chain)
                latency.append(perf_counter_ns() - before)
                assert plan.boundary == TOKENS - BLOCK_TOKENS, plan
                assert plan.ready
                client.release(plan)
            values.append(percentile(latency, 50) / 1e3)
        resident = node.memory()["RssAnon"]
    name = _name("seen by a client", units, others)
    return Figure("plan", name, "ms", tuple(values)), resident


def _chain_cost(reps: int) -> Iterator[Figure]:
    """The client's own part before it asks: hashing the tokens. An engine does it as they come."""
    tokens = [token % 50_000 for token in range(TOKENS)]
    values = []
    for _ in range(reps):
        before = perf_counter_ns()
        Chain(tokens, BLOCK_TOKENS)
        values.append((perf_counter_ns() - before) / 1e6)
    yield Figure("plan", f"chain of {number(TOKENS)} tokens, in the client", "ms", tuple(values))


def _name(where: str, units: int, others: int) -> str:
    shards = f"{units} shard{'s' if units > 1 else ''}"
    return f"plan {number(TOKENS)} tokens, {shards}, {number(others)} other objects, {where}"
