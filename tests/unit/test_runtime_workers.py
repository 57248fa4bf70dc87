"""Threads that take turns, and how their outcomes come back."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tiercache.runtime.workers import Countdown, Mailbox, Step, Turns

WAIT_S = 10.0


@pytest.fixture
def one_thread() -> Iterator[Turns]:
    turns = Turns("test", 1)
    yield turns
    assert turns.close(WAIT_S)


def test_a_small_job_is_not_delayed_by_more_than_one_step(one_thread: Turns) -> None:
    order: list[str] = []
    gate, ended = threading.Event(), threading.Event()

    def large() -> Iterator[Step]:
        yield lambda: None if gate.wait(WAIT_S) else order.append("late")
        for number in range(3):
            yield lambda number=number: order.append(f"large {number}")  # type: ignore[misc]
        yield ended.set

    one_thread.add(large())
    one_thread.add(iter([lambda: order.append("small")]))
    gate.set()
    assert ended.wait(WAIT_S)
    assert order == ["small", "large 0", "large 1", "large 2"]


def test_steps_of_one_job_run_at_the_same_time() -> None:
    turns = Turns("test", 2)
    both = threading.Barrier(2, timeout=WAIT_S)
    met: list[int] = []
    ended = threading.Event()
    count = Countdown(2, ended.set)

    def step() -> None:
        met.append(both.wait())
        count()

    turns.add(iter([step, step]))
    assert ended.wait(WAIT_S)
    assert turns.close(WAIT_S)
    assert sorted(met) == [0, 1]


def test_closing_does_not_wait_for_a_step_that_hangs() -> None:
    turns = Turns("test", 1)
    started, release = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(WAIT_S)

    turns.add(iter([hang]))
    assert started.wait(WAIT_S)
    assert not turns.close(0.01)
    release.set()


def test_a_countdown_calls_once_at_the_last() -> None:
    called: list[int] = []
    count = Countdown(3, lambda: called.append(1))
    for expected in ([], [], [1]):
        count()
        assert called == expected


async def test_outcomes_arrive_in_order_and_in_one_wakeup() -> None:
    loop = asyncio.get_running_loop()
    got: list[int] = []
    ended = asyncio.Event()

    def deliver(item: int) -> None:
        got.append(item)
        if item == 99:
            ended.set()

    box: Mailbox[int] = Mailbox(loop, deliver)

    def put() -> None:
        for item in range(100):
            box.put(item)

    await asyncio.to_thread(put)
    await asyncio.wait_for(ended.wait(), WAIT_S)
    assert got == list(range(100))


async def test_what_is_put_while_delivering_arrives_too() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    got: list[int] = []

    def deliver(item: int) -> None:
        got.append(item)
        if item < 3:
            box.put(item + 1)
        else:
            ended.set()

    box: Mailbox[int] = Mailbox(loop, deliver)
    box.put(0)
    await asyncio.wait_for(ended.wait(), WAIT_S)
    assert got == [0, 1, 2, 3]


def test_a_mailbox_of_a_closed_loop_takes_what_comes() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    got: list[int] = []
    Mailbox(loop, got.append).put(1)
    assert got == []
