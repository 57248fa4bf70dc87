"""The asyncio client against a scripted node, on both event loops."""

import asyncio
import gc
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import pytest
import uvloop

from tiercache.client import Blob, Options, Plan, Saved, Wanted
from tiercache.client.aio import INLINE_BYTES, AsyncClient
from tiercache.errors import RefusedError, UnavailableError
from tiercache.state import Chain, Kind, Layout, Namespace, Part, Tensor
from tiercache.testing.scripted import ScriptedNode
from tiercache.wire import CALLS_MAX
from tiercache.wire import messages as wire

BLOCK = 4
LARGE = INLINE_BYTES + 1


def layout_of(state_bytes: int) -> Layout:
    return Layout(
        (
            Part("kv", Kind.KV, None, BLOCK, 1, (Tensor("k", "int8", (8,), ("d",)),)),
            Part("state", Kind.RECURRENT, 1, 0, 1, (Tensor("s", "int8", (state_bytes,), ("d",)),)),
        ),
        block_tokens=BLOCK,
    )


LAYOUT = layout_of(64)
NAMESPACE = Namespace.of(LAYOUT, model="m", weights="w", tokenizer="t")
CHAIN = Chain(range(1, 12), BLOCK)
SHORT = Options(deadline_s=0.2, retry_s=0.0)
LONG = Options(deadline_s=20, retry_s=0.0)

Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def on_its_loop(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario)

    return on_its_loop


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.fixture
def node(path: Path) -> Iterator[ScriptedNode]:
    with ScriptedNode(path, LAYOUT) as scripted:
        yield scripted


def attach(path: Path, options: Options = LONG) -> Coroutine[Any, Any, AsyncClient]:
    return AsyncClient.attach(path, NAMESPACE, LAYOUT, options=options)


def blobs_for(end: int, state_bytes: int = 64) -> list[Blob]:
    edges = [*range(0, end, BLOCK), end]
    blobs = [
        Blob("kv", stop, memoryview(bytes([start + 1]) * (8 * (stop - start))), start)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    return [*blobs, Blob("state", end, memoryview(bytes([end]) * state_bytes))]


async def beside(loop_free: Callable[[], object]) -> None:
    """Wait for the node, which is a thread, without holding up the loop."""
    await asyncio.to_thread(loop_free)


def test_what_is_saved_is_planned_and_read(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path) as client:
            assert (client.status, client.boot) == ("attached", "boot-1")
            assert await client.save("w", CHAIN, blobs_for(10)) == Saved(4, 0, {})
            with await client.plan("r", CHAIN) as plan:
                assert (plan.boundary, plan.ready) == (10, True)
                assert await client.load(plan) is plan
                assert [bytes(b.data) for b in plan.blobs] == [bytes(b.data) for b in blobs_for(10)]
                assert plan.held
            holding = await client.fetch("f", [Wanted("state", CHAIN.digest_at(10))])
            assert [blob is not None for blob in holding.blobs] == [True]
            await client.release(holding)
            assert (await client.flush()).reason == ""
            assert node.shelf.leases == set()
        await beside(lambda: node.wait(wire.Detach))
        await beside(lambda: node.wait_until(lambda: not node._sides))
        assert (client.status, client.boot) == ("detached: closed", "")
        assert (await client.plan("r", CHAIN)).reason == "unavailable: closed"
        await client.close()

    run(scenario())


def test_many_calls_are_in_flight_at_once(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path) as client:
            node.mute = True
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.plan(f"r{n}", CHAIN)) for n in range(100)]
                await beside(lambda: node.wait(wire.Plan, 100))
                node.speak()
            plans = [task.result() for task in tasks]
            assert {plan.reason for plan in plans} == {"nothing held"}
            assert [plan.request for plan in plans] == [f"r{n}" for n in range(100)]
            assert node.connections == 1

    run(scenario())


def test_calls_in_flight_are_bounded(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path, Options(deadline_s=3, retry_s=0)) as client:
            node.mute = True
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.flush()) for _ in range(CALLS_MAX + 1)]
                await asyncio.sleep(0)
                await beside(lambda: node.wait(wire.Flush, CALLS_MAX))
                node.speak()
            reasons = [task.result().reason for task in tasks]
            assert reasons.count("") == CALLS_MAX
            assert reasons.count("unavailable: too many calls wait for the node") == 1

    run(scenario())


def test_each_call_ends_at_its_deadline(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path, Options(deadline_s=0.1)) as client:
            node.mute = True
            began = monotonic()
            async with asyncio.TaskGroup() as group:
                plan = group.create_task(client.plan("r", CHAIN))
                save = group.create_task(client.save("w", CHAIN, blobs_for(4)))
                fetch = group.create_task(client.fetch("f", [Wanted("kv", b"d")]))
                flush = group.create_task(client.flush(wait_s=0.05))
            assert 0.09 < monotonic() - began < 0.8
            assert plan.result().reason == fetch.result().reason == "deadline"
            assert flush.result().reason == "deadline"
            assert save.result() == Saved(0, 0, {"deadline": 2})
            assert client.status == "detached: the node does not answer"
            reason = (await client.plan("r", CHAIN)).reason
            assert reason == "unavailable: the node does not answer"
            node.speak()
            await beside(lambda: node.wait(wire.Reserve))
            # The late replies are there; the node is heard, and they are undone.
            assert (await client.flush(wait_s=5)).reason == ""
            await client.flush(wait_s=5)
            assert node.shelf.leases == set()
            assert node.shelf.pending == {}
            assert client.status == "attached"

    run(scenario())


def test_attaching_ends_at_its_deadline(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        node.mute = True
        began = monotonic()
        client = await attach(node.path, Options(deadline_s=0.1, retry_s=60))
        assert client.status == "detached: the node does not answer"
        reason = (await client.plan("r", CHAIN)).reason
        assert reason == "unavailable: detached: the node does not answer"
        assert monotonic() - began < 0.8
        assert node.connections == 1
        with pytest.raises(UnavailableError, match="deadline"):
            await attach(node.path, Options(deadline_s=0.1, required=True))
        await client.close()

    run(scenario())


def test_coroutines_share_one_attempt_and_its_deadline(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        node.mute = True
        client = AsyncClient(node.path, NAMESPACE, LAYOUT, Options(deadline_s=0.2, retry_s=0.05))
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.plan("a", CHAIN))
            second = group.create_task(client.plan("b", CHAIN))
        assert first.result().reason == second.result().reason == "deadline"
        assert node.connections == 1
        await client.close()

    run(scenario())


def test_a_cancelled_attempt_says_nothing_of_the_node(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        client = AsyncClient(node.path, NAMESPACE, LAYOUT, Options(deadline_s=10, retry_s=60))
        node.mute = True
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.plan("a", CHAIN))
            await beside(lambda: node.wait(wire.Hello))
            task.cancel()
        node.mute = False
        assert (await client.plan("a", CHAIN)).reason == "nothing held"
        assert node.connections == 2
        await client.close()

    run(scenario())


def test_refusals(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        node.script = lambda r: wire.Failed(r.call, "refused", "not you")
        client = await attach(node.path)
        assert client.status == "refused: not you"
        assert (await client.plan("r", CHAIN)).reason == "unavailable: refused: not you"
        with pytest.raises(RefusedError, match="not you"):
            await attach(node.path, Options(required=True))
        with pytest.raises(UnavailableError, match="No such file"):
            await attach(node.path.with_name("other"), Options(required=True))
        await client.close()

    run(scenario())


def test_a_restarted_node_is_attached_to_again(run: Run, path: Path) -> None:
    async def scenario() -> None:
        with ScriptedNode(path, LAYOUT, boot="first"):
            client = await attach(path)
            await client.save("w", CHAIN, blobs_for(8))
            plan = await client.plan("old", CHAIN)
            kept = plan.blobs[0].data
            expected = bytes(kept)
        assert not plan.held
        assert client.status == "detached: the node closed the connection"
        assert (await client.plan("r", CHAIN)).reason.startswith("unavailable: detached: ")
        with ScriptedNode(path, LAYOUT, boot="second") as node:
            assert (await client.plan("r", CHAIN)).reason == "nothing held"
            assert client.boot == "second"
            plan.release()
            await client.flush()
            assert wire.Release(["old"]) not in node.wait(wire.Release, 0)
            await client.close()
            await beside(lambda: node.wait_until(lambda: not node._sides))
        gc.collect()
        assert bytes(kept) == expected

    run(scenario())


def test_the_end_of_the_node_wakes_every_call(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path) as client:
            node.mute = True
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.plan(f"r{n}", CHAIN)) for n in range(3)]
                await beside(lambda: node.wait(wire.Plan, 3))
                node.drop_clients()
            reasons = {task.result().reason for task in tasks}
            assert reasons == {"unavailable: the node closed the connection"}

    run(scenario())


def test_nonsense_of_the_node_ends_the_attachment(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path) as client:
            node.script = lambda r: wire.Failed(0, "protocol", "bye") if _plans(r) else None
            reason = (await client.plan("r", CHAIN)).reason
            assert reason == "unavailable: the node broke the protocol: bye"

    run(scenario())


def _plans(request: wire.Request) -> bool:
    return isinstance(request, wire.Plan)


def test_a_failed_call(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path) as client:
            node.script = lambda r: wire.Failed(r.call, "invalid", "why") if _plans(r) else None
            assert (await client.plan("r", CHAIN)).reason == "unavailable: why"
            assert client.status == "attached"

    run(scenario())


def test_a_node_that_does_not_read(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path, SHORT) as client:
            plans = [await client.plan("x" * 200 + str(n), CHAIN) for n in range(3000)]
            node.freeze()
            for plan in plans:
                plan.release()
            assert (await client.plan("r", CHAIN)).reason == "deadline"
            node.thaw()
            await beside(lambda: node.wait(wire.Release, 2900))
            assert (await client.flush(wait_s=5)).reason == ""
            assert len(node.wait(wire.Release, 3000)) == 3000

    run(scenario())


def test_too_many_unread_notices_end_the_attachment(
    run: Run, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.client.session.NOTICES_MAX", 100)

    async def scenario() -> None:
        client = await attach(node.path)
        plans = [await client.plan("x" * 200 + str(n), CHAIN) for n in range(3000)]
        node.freeze()
        for plan in plans:
            plan.release()
        assert client.status == "detached: the node does not read what it is sent"
        node.thaw()
        await beside(lambda: node.wait_until(lambda: not node.shelf.leases))
        await client.close()

    run(scenario())


def test_misuse(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path, Options(write=False)) as client:
            with pytest.raises(ValueError, match="without `write`"):
                await client.save("w", CHAIN, [])
            with pytest.raises(ValueError, match="needs a name"):
                await client.plan("", CHAIN)

    run(scenario())


# --- copies in threads

LARGE_LAYOUT = layout_of(LARGE)
LARGE_NAMESPACE = Namespace.of(LARGE_LAYOUT, model="m", weights="w", tokenizer="t")


class Pause:
    """Holds a copy until told to go on."""

    def __init__(self, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        assert client._link is not None
        self.arena = client._link.session.arena
        self.copying, self.go_on = threading.Event(), threading.Event()
        self._write = self.arena.write
        monkeypatch.setattr(self.arena, "write", self._paused)

    def _paused(self, segment: int, offset: int, data: memoryview) -> None:
        self.copying.set()
        assert self.go_on.wait(20)
        self._write(segment, offset, data)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.copying.wait, 20)


def test_large_blobs_are_copied_beside_the_loop(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with ScriptedNode(path, LARGE_LAYOUT) as node:
            client = await AsyncClient.attach(path, LARGE_NAMESPACE, LARGE_LAYOUT, options=SHORT)
            pause = Pause(client, monkeypatch)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(client.save("w", CHAIN, blobs_for(4, LARGE)))
                await pause.begun()
                assert (await client.plan("r", CHAIN)).reason == "nothing held"
                pause.go_on.set()
            assert task.result() == Saved(2, 0, {})
            assert (await client.plan("r", CHAIN)).boundary == 4
            await client.close()
            await beside(lambda: node.wait_until(lambda: not node._sides))

    run(scenario())


def test_a_save_cancelled_while_a_thread_copies_is_undone_after_the_last_byte(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with ScriptedNode(path, LARGE_LAYOUT) as node:
            client = await AsyncClient.attach(path, LARGE_NAMESPACE, LARGE_LAYOUT, options=LONG)
            pause = Pause(client, monkeypatch)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(client.save("w", CHAIN, blobs_for(4, LARGE)))
                await pause.begun()
                task.cancel()
            assert task.cancelled()
            assert (await client.flush()).reason == ""
            assert not node.wait(wire.Cancel, 0)
            pause.go_on.set()
            await beside(lambda: node.wait(wire.Cancel))
            assert node.wait(wire.Cancel) == [wire.Cancel([1, 2])]
            assert not node.wait(wire.Commit, 0)
            await client.close()
            await beside(lambda: node.wait_until(lambda: not node._sides))

    run(scenario())


def test_the_node_hears_of_the_end_only_after_the_last_byte_was_written(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with ScriptedNode(path, LARGE_LAYOUT) as node:
            client = await AsyncClient.attach(path, LARGE_NAMESPACE, LARGE_LAYOUT, options=LONG)
            pause = Pause(client, monkeypatch)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(client.save("w", CHAIN, blobs_for(4, LARGE)))
                await pause.begun()
                await client.close()
                await asyncio.sleep(0)
                assert len(node._sides) == 1
                assert not node.wait(wire.Detach, 0)
                pause.go_on.set()
            assert task.result() == Saved(0, 0, {"unavailable": 2})
            await beside(lambda: node.wait(wire.Detach))
            await beside(lambda: node.wait_until(lambda: not node._sides))

    run(scenario())


def test_a_forked_child_leaves_the_connection_alone(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path) as client:
            await client.save("w", CHAIN, blobs_for(8))
            plan = await client.plan("parent", CHAIN)
            child = os.fork()
            if child == 0:
                plan.release()
                os._exit(0 if not plan.held and client.status.startswith("detached") else 1)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert plan.held
            assert (await client.plan("again", CHAIN)).boundary == 8
            assert "parent" in node.shelf.leases

    run(scenario())


# --- cancelling at any instant

ROUNDS = 100
TASKS = 50


def test_five_thousand_cancellations_leave_nothing_behind(run: Run, node: ScriptedNode) -> None:
    rng = random.Random(14)
    node.script = lambda r: (
        wire.Planned(r.call, 8, False, 0, [], [], [], "")
        if isinstance(r, wire.Plan) and r.request.startswith("slow")
        else wire.Loaded(r.call, 0, [], "")
        if isinstance(r, wire.Load)
        else None
    )

    async def plan(client: AsyncClient, request: str) -> None:
        with await client.plan(request, CHAIN) as planned:
            assert planned.boundary == 10
            await asyncio.sleep(0)

    async def lose(client: AsyncClient, request: str) -> Plan:
        return await client.plan(request, CHAIN)

    async def load(client: AsyncClient, request: str) -> None:
        with await client.plan(f"slow {request}", CHAIN) as planned:
            await client.load(planned)

    async def fetch(client: AsyncClient, request: str) -> None:
        with await client.fetch(request, [Wanted("state", CHAIN.digest_at(10))]):
            await asyncio.sleep(0)

    async def save(client: AsyncClient, request: str) -> None:
        chain = Chain([rng.randrange(1 << 30) for _ in range(8)], BLOCK)
        await client.save(request, chain, blobs_for(8))

    deeds: list[Callable[[AsyncClient, str], Awaitable[object]]] = [plan, lose, load, fetch, save]

    async def one_round(client: AsyncClient) -> int:
        async def deed() -> None:
            await rng.choice(deeds)(client, f"r{rng.randrange(20)}")

        async with asyncio.TaskGroup() as group:
            due: dict[int, list[asyncio.Task[None]]] = {}
            for _ in range(TASKS):
                due.setdefault(rng.randrange(120), []).append(group.create_task(deed()))
            for instant in range(max(due) + 1):
                for task in due.get(instant, ()):
                    task.cancel()
                await asyncio.sleep(0)
        return sum(task.cancelled() for tasks in due.values() for task in tasks)

    async def scenario() -> None:
        async with await attach(node.path) as client:
            await client.save("w", CHAIN, blobs_for(10))
            cancelled = sum([await one_round(client) for _ in range(ROUNDS)])
            assert 500 < cancelled < ROUNDS * TASKS - 500
            gc.collect()
            for _ in range(2):  # Replies that come with the first are undone before the second.
                assert (await client.flush()).reason == ""
            assert node.shelf.leases == set()
            assert node.shelf.pending == {}
            assert client._link is not None
            session = client._link.session
            assert session._holds == {}
            assert session._calls == {}
            assert client._link._waiters == {}
            assert client.status == "attached"

    run(scenario())
