"""The machine in its loop: outcomes come back, time passes, a bug ends all decisions."""

import asyncio
from collections.abc import Callable

import pytest

from tiercache.core import commands, events
from tiercache.core.limits import Limits
from tiercache.core.machine import Machine
from tiercache.runtime.executor import Executor
from tiercache.runtime.node import Node
from tiercache.runtime.telemetry import Tally
from tiercache.state import Extent
from tiercache.tiers.memory import MemoryArena

WAIT_S = 10.0
MIB = 1024 * 1024
Answer = Callable[[events.Event], list[commands.Command]]


class Scripted(Machine):
    """A machine that does what the test says."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(Limits(host_segments=(4 * MIB,)))
        self.answer = answer
        self.heard: list[events.Event] = []
        self.due: float | None = None

    def handle(self, event: events.Event, now: float, wall: float = 0.0) -> list[commands.Command]:
        self.heard.append(event)
        self.due = None if isinstance(event, events.Tick) else now + 0.01
        return self.answer(event)

    def wakeup(self) -> float | None:
        return self.due


class Rig:
    """A node around a scripted machine, and what came out of it."""

    def __init__(self, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        self.machine = Scripted(answer)
        self.replies: list[commands.Reply] = []
        self.bursts = 0
        self.broken: list[str] = []
        self.node = Node(
            loop,
            self.machine,
            Tally(),
            reply=self.replies.append,
            replied=self.burst,
            broken=self.broken.append,
        )
        self.executor = Executor(
            loop, MemoryArena([4 * MIB]), self.hear, write_bytes_per_s=MIB, read_threads=1
        )
        self.node.execute_with(self.executor)
        self.news = asyncio.Event()

    def burst(self) -> None:
        self.bursts += 1

    def hear(self, event: events.Event) -> None:
        self.node.hear(event)
        self.news.set()

    def close(self) -> None:
        self.node.close()
        assert self.executor.close(WAIT_S)


def nothing(event: events.Event) -> list[commands.Command]:
    del event
    return []


async def test_answers_go_out_in_order_and_in_one_burst() -> None:
    evicted = commands.Evicted(0, 0, 0)
    said = [commands.Reply(1, call, evicted) for call in range(3)]
    rig = Rig(lambda event: [*said])
    rig.node.hear(events.StatsAsked(1, 1))
    assert rig.replies == said
    assert rig.bursts == 1
    rig.close()


async def test_what_is_done_at_once_is_heard_before_anything_else() -> None:
    def answer(event: events.Event) -> list[commands.Command]:
        if isinstance(event, events.Committed):
            return [commands.Seal(5, [(Extent(0, 0, 4096), 100)])]
        return []

    rig = Rig(answer)
    rig.node.take(events.Committed(1, [1]))
    assert [type(event) for event in rig.machine.heard] == [events.Committed, events.Sealed]
    assert rig.bursts == 0, "the caller sends the answers"
    rig.close()


async def test_what_a_thread_did_is_heard_later() -> None:
    def answer(event: events.Event) -> list[commands.Command]:
        if isinstance(event, events.Committed):
            return [commands.Seal(5, [(Extent(0, 0, 2 * MIB), 2 * MIB)])]
        return []

    rig = Rig(answer)
    rig.node.take(events.Committed(1, [1]))
    assert [type(event) for event in rig.machine.heard] == [events.Committed]
    await asyncio.wait_for(rig.news.wait(), WAIT_S)
    assert [type(event) for event in rig.machine.heard] == [events.Committed, events.Sealed]
    assert rig.bursts == 1
    rig.close()


async def test_it_is_woken_when_time_is_due_and_not_after() -> None:
    rig = Rig(nothing)
    ticked = asyncio.Event()

    def answer(event: events.Event) -> list[commands.Command]:
        if isinstance(event, events.Tick):
            ticked.set()
        return []

    rig.machine.answer = answer
    rig.node.take(events.Released(1, []))
    rig.node.take(events.Released(1, []))
    await asyncio.wait_for(ticked.wait(), WAIT_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.05)
    assert sum(isinstance(event, events.Tick) for event in rig.machine.heard) == 1
    rig.close()


async def test_an_earlier_time_replaces_a_later_one() -> None:
    rig = Rig(nothing)
    rig.machine.answer = nothing
    rig.node.take(events.Released(1, []))
    rig.machine.due = 0.0
    rig.node.take(events.ScanEnded())
    rig.node.close()
    heard = len(rig.machine.heard)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.05)
    assert len(rig.machine.heard) == heard, "a closed node is not woken"
    rig.close()


async def test_a_machine_that_raises_decides_nothing_more() -> None:
    def answer(event: events.Event) -> list[commands.Command]:
        raise AssertionError("the books do not add up")

    rig = Rig(answer)
    with pytest.raises(AssertionError, match="add up"):
        rig.node.hear(events.Tick())
    assert rig.broken == ["AssertionError: the books do not add up"]
    rig.node.hear(events.Tick())
    assert len(rig.machine.heard) == 1
    rig.close()
