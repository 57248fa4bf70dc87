"""When a scheduler waits for the node: a moment, once a step, and only where that holds up nobody."""

import pytest

from tests.unit.test_vllm_scheduling import TABLES, Asked, Bench
from tiercache_vllm import scheduling


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def request_() -> Asked:
    return Asked("r", list(range(600)))


def test_who_is_alone_waits_a_moment_once_a_step(
    bench: Bench, request_: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []

    def waited(due: list[object], timeout: float, how: str) -> None:
        assert timeout < 0.01
        waits.append(len(due))

    monkeypatch.setattr(scheduling, "wait", waited)
    other = Asked("other", list(range(300)))
    assert [bench.matched(request_), bench.matched(other), bench.matched(request_)] == [None] * 3
    assert waits == [1]
    bench.side.idle()
    assert waits == [1], "a step waits once"
    bench.side.take_loads()
    bench.side.idle()
    assert waits == [1, 2]
    bench.side.take_loads()
    bench.answer(other, 0)
    bench.matched(other)
    bench.side.allocated(other, TABLES, 0)
    bench.side.take_loads()
    assert bench.matched(request_) is None
    assert waits == [1, 2], "another request computes: nobody waits"


def test_an_answer_that_comes_in_time_is_taken(
    bench: Bench, request_: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(*_: object) -> None:
        bench.answer(request_, 512)

    monkeypatch.setattr(scheduling, "wait", answered)
    assert bench.matched(request_) == 512


def test_an_idle_step_waits_a_moment_only(bench: Bench, request_: Asked) -> None:
    bench.side.idle()
    bench.matched(request_)
    bench.side.idle()
    bench.answer(request_, 512)
    bench.side.idle()
    assert bench.matched(request_) == 512
