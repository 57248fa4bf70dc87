"""The asyncio client against a scripted node, on both event loops."""

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import pytest

from tiercache.client import Options, Saved, Wanted
from tiercache.client.aio import AsyncClient
from tiercache.errors import RefusedError, UnavailableError
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import (
    CHAIN,
    LAYOUT,
    NAMESPACE,
    SHORT,
    blobs_for,
)
from tiercache.wire import CALLS_MAX
from tiercache.wire import messages as wire

LONG = Options(deadline_s=20, retry_s=0.0)
Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


def attach(path: Path, options: Options = LONG) -> Coroutine[Any, Any, AsyncClient]:
    return AsyncClient.attach(path, NAMESPACE, LAYOUT, options=options)


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
        async with await attach(node.path) as client:
            node.mute = True
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.flush()) for _ in range(CALLS_MAX + 1)]
                await asyncio.sleep(0)
                await beside(lambda: node.wait(wire.Flush, CALLS_MAX))
                await beside(node.speak)
            reasons = [task.result().reason for task in tasks]
            assert reasons.count("") == CALLS_MAX
            assert reasons.count("unavailable: too many calls wait for the node") == 1

    run(scenario())


def test_each_call_ends_at_its_deadline(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path, Options(deadline_s=0.5)) as client:
            node.mute = True
            began = monotonic()
            async with asyncio.TaskGroup() as group:
                plan = group.create_task(client.plan("r", CHAIN))
                save = group.create_task(client.save("w", CHAIN, blobs_for(4)))
                fetch = group.create_task(client.fetch("f", [Wanted("kv", b"d")]))
                flush = group.create_task(client.flush(wait_s=0.05))
            assert 0.49 < monotonic() - began < 2.0
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
        client = await attach(node.path, Options(deadline_s=0.3, retry_s=60))
        assert client.status == "detached: the node does not answer"
        reason = (await client.plan("r", CHAIN)).reason
        assert reason == "unavailable: detached: the node does not answer"
        assert monotonic() - began < 2.0
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
        assert first.result().reason == "deadline"
        # Its time is up while it waits for the attempt, or the attempt is just over.
        away = "unavailable: detached: the node does not answer"
        assert second.result().reason in {"deadline", away}
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
            asked = [await client.plan("x" * 200 + str(n), CHAIN) for n in range(3000)]
            # On a busy machine some come too late: those were given back at once.
            plans = [plan for plan in asked if plan.leased is not None]
            assert len(plans) > 2000
            node.freeze()
            for plan in plans:
                plan.release()
            assert (await client.plan("r", CHAIN)).reason == "deadline"
            node.thaw()
            await beside(lambda: node.wait(wire.Release, len(plans) - 100))
            assert (await client.flush(wait_s=5)).reason == ""
            assert len(node.wait(wire.Release, len(plans))) >= len(plans)

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


def test_a_node_that_dies_with_calls_unread_is_noticed(run: Run, node: ScriptedNode) -> None:
    """The kernel then tells of an error together with what the node said last."""

    async def scenario() -> None:
        client = await attach(node.path)
        node.freeze()
        began = monotonic()
        async with asyncio.TaskGroup() as group:
            call = group.create_task(client.plan("r", CHAIN))
            await asyncio.sleep(0)  # It says its question, and waits.
            (sock,) = node._sides
            sock.send(b"\x20\0\0\0the start")
            os.close(sock.detach())
        assert call.result().reason == "unavailable: the connection broke: Connection reset by peer"
        assert monotonic() - began < 5.0
        await client.close()

    run(scenario())
    node.thaw()


def test_misuse(run: Run, node: ScriptedNode) -> None:
    async def scenario() -> None:
        async with await attach(node.path, Options(write=False)) as client:
            with pytest.raises(ValueError, match="without `write`"):
                await client.save("w", CHAIN, [])
            with pytest.raises(ValueError, match="needs a name"):
                await client.plan("", CHAIN)

    run(scenario())
