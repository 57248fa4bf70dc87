"""The asyncio client: copies in threads, and cancelling at any instant."""

import asyncio
import gc
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tiercache.client import Options, Plan, Saved, Wanted
from tiercache.client.aio import INLINE_BYTES, AsyncClient
from tiercache.state import Chain
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import (
    BLOCK,
    CHAIN,
    LAYOUT,
    NAMESPACE,
    SHORT,
    blobs_for,
    layout_of,
    namespace_of,
)
from tiercache.wire import messages as wire

LONG = Options(deadline_s=20, retry_s=0.0)
Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


def attach(path: Path, options: Options = LONG) -> Coroutine[Any, Any, AsyncClient]:
    return AsyncClient.attach(path, NAMESPACE, LAYOUT, options=options)


async def beside(loop_free: Callable[[], object]) -> None:
    """Wait for the node, which is a thread, without holding up the loop."""
    await asyncio.to_thread(loop_free)


LARGE = INLINE_BYTES + 1
LARGE_LAYOUT = layout_of(LARGE)
LARGE_NAMESPACE = namespace_of(LARGE_LAYOUT)


class Pause:
    """Holds a copy until told to go on."""

    def __init__(self, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        assert client._link is not None
        self.arena = client._link.session.arena
        self.copying, self.go_on = threading.Event(), threading.Event()
        self._write = self.arena.write
        monkeypatch.setattr(self.arena, "write", self._paused)

    def _paused(self, segment: int, offset: int, data: memoryview) -> bytes:
        self.copying.set()
        assert self.go_on.wait(20)
        return self._write(segment, offset, data)

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


CANCELLATIONS = 5000
ROUNDS_MAX = 1000
TASKS = 50


class Deeds:
    """Something that a task does with a client, chosen by a seeded die."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self.rng = random.Random(seed)
        self._client = client
        self._all: list[Callable[[str], Awaitable[object]]] = [
            self._plan,
            self._lose,
            self._load,
            self._fetch,
            self._save,
        ]

    async def one(self) -> None:
        # Few names, so that calls of one request overlap.
        await self.rng.choice(self._all)(f"r{self.rng.randrange(20)}")

    async def _plan(self, request: str) -> None:
        with await self._client.plan(request, CHAIN) as planned:
            assert planned.boundary == 10
            await asyncio.sleep(0)

    async def _lose(self, request: str) -> Plan:
        return await self._client.plan(request, CHAIN)

    async def _load(self, request: str) -> None:
        with await self._client.plan(f"slow {request}", CHAIN) as planned:
            await self._client.load(planned)

    async def _fetch(self, request: str) -> None:
        with await self._client.fetch(request, [Wanted("state", CHAIN.digest_at(10))]):
            await asyncio.sleep(0)

    async def _save(self, request: str) -> None:
        chain = Chain([self.rng.randrange(1 << 30) for _ in range(8)], BLOCK)
        await self._client.save(request, chain, blobs_for(8))


def plans_slowly(request: wire.Request) -> wire.Reply | None:
    match request:
        case wire.Plan(call) if request.request.startswith("slow"):
            return wire.Planned(call, 8, False, 0, [], [], [], "")
        case wire.Load(call):
            return wire.Loaded(call, 0, [], "")
        case _:
            return None


async def cancel_some(deeds: Deeds) -> int:
    """Start TASKS, cancel each after some turns of the loop; return how many were not done yet."""
    async with asyncio.TaskGroup() as group:
        due: dict[int, list[asyncio.Task[None]]] = {}
        for _ in range(TASKS):
            task = group.create_task(deeds.one())
            due.setdefault(deeds.rng.randrange(120), []).append(task)
        for instant in range(max(due) + 1):
            for task in due.get(instant, ()):
                task.cancel()
            await asyncio.sleep(0)
    return sum(task.cancelled() for tasks in due.values() for task in tasks)


def test_five_thousand_cancellations_leave_nothing_behind(run: Run, node: ScriptedNode) -> None:
    node.script = plans_slowly

    async def scenario() -> None:
        async with await attach(node.path) as client:
            await client.save("w", CHAIN, blobs_for(10))
            deeds = Deeds(client, seed=14)
            cancelled = number = 0
            while cancelled < CANCELLATIONS and number < ROUNDS_MAX:
                number += 1
                node.mute = number % 4 == 3  # Then what was cancelled is answered afterwards.
                cancelled += await cancel_some(deeds)
                await beside(node.speak)
            assert cancelled >= CANCELLATIONS
            assert number * TASKS - cancelled > 500, "too few calls came to their end"
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
