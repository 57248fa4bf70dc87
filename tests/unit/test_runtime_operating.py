"""Flushes of a cluster as one node carries them out, and what operators ask of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tiercache.core import commands, events, guard_events
from tiercache.core.cluster import events as ev
from tiercache.core.limits import Clustering, Limits
from tiercache.core.machine import Machine
from tiercache.registry.base import Member, TenantShare
from tiercache.registry.shared import Board, SharedRegistry
from tiercache.runtime.cluster.calls import Calls
from tiercache.runtime.cluster.carrying import Carrying
from tiercache.runtime.cluster.documents import Cleared, Members, Shared
from tiercache.runtime.cluster.flushed import NAME, Flushed
from tiercache.runtime.cluster.operating import CLEARS_MAX, SHARES_MAX, Operating
from tiercache.runtime.cluster.sharing import Sharing
from tiercache.runtime.log import KeyValues
from tiercache.testing.nodes import START_S
from tiercache.wire import clustering
from tiercache.wire import messages as wire

SPACE = "ab" * 32
OTHER = "cd" * 32
DONE = commands.Evicted(0, 0, 0)


class Machinery:
    """A machine's place, where clears are answered when and how the test says."""

    def __init__(self, folder: Path) -> None:
        self.calls = Calls(self.take)
        self.answers: list[commands.ReplyBody | None] = []
        self.asked: list[events.ClearAsked] = []
        self.changes = 0
        self.takes = asyncio.Semaphore(0)
        self.carrying = Carrying(self.calls, Flushed(str(folder)), self.changed)

    def changed(self) -> None:
        self.changes += 1

    def take(self, event: events.Event) -> None:
        assert isinstance(event, events.ClearAsked)
        self.asked.append(event)
        self.takes.release()
        answer = self.answers.pop(0) if self.answers else DONE
        if answer is not None:
            self.answer(event, answer)

    def answer(self, asked: events.ClearAsked, body: commands.ReplyBody) -> None:
        self.calls.answered(commands.Reply(asked.session, asked.call, body))


@pytest.fixture
def machinery(tmp_path: Path) -> Machinery:
    return Machinery(tmp_path)


@pytest.fixture
def board() -> Board:
    return Board(lambda: 0.0, 100.0)


def member(name: str) -> Member:
    return Member(name=name, boot="boot", address=f"{name}:1", protocols=(1, 1), host_bytes=8)


@contextlib.asynccontextmanager
async def joined(board: Board, name: str = "a") -> AsyncIterator[SharedRegistry]:
    """Make a node a member of the board's cluster."""
    registry = SharedRegistry(board, member(name))
    there = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(registry.run(lambda _: there.set()))
        await there.wait()
        yield registry
        running.cancel()


async def until_dropped(board: Board, number: int) -> None:
    async with asyncio.timeout(START_S):
        while board.read().dropped.get("a", {}).get(SPACE) != number:
            await board.changed.wait()


async def test_when_a_flush_was_heard_nothing_old_can_be_found(
    machinery: Machinery, board: Board, tmp_path: Path
) -> None:
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        machinery.carrying.heard({SPACE: 5, "no digest": 3}, registry, tasks)
        assert [(asked.namespace, asked.flush) for asked in machinery.asked] == [(SPACE, 5)]
        assert machinery.carrying.is_sure
        await until_dropped(board, 5)
    assert (tmp_path / NAME).exists()
    again = Machinery(tmp_path)
    assert again.carrying.load() == ev.FlushesKnown({bytes.fromhex(SPACE): 5})
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        again.carrying.heard({SPACE: 5}, registry, tasks)
    assert again.asked == [], "an earlier start has"


async def test_one_flush_is_carried_out_once_however_often_it_is_heard(
    machinery: Machinery, board: Board
) -> None:
    machinery.answers = [None]
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        for _ in range(3):
            machinery.carrying.heard({SPACE: 5}, registry, tasks)
        assert len(machinery.asked) == 1
        assert machinery.carrying.is_sure, "it waits for the disk only"
        assert SPACE not in board.read().dropped.get("a", {})
        machinery.answer(machinery.asked[0], DONE)
        await until_dropped(board, 5)


async def test_a_later_flush_takes_the_place_of_one_under_way(
    machinery: Machinery, board: Board
) -> None:
    machinery.answers = [None]
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        machinery.carrying.heard({SPACE: 5}, registry, tasks)
        machinery.carrying.heard({SPACE: 6}, registry, tasks)
        await until_dropped(board, 6)
        machinery.answer(machinery.asked[0], commands.Evicted(0, 0, 0, "nvme"))


@pytest.mark.parametrize(
    "first", [commands.Refused("invalid", "busy"), commands.Evicted(0, 0, 0, "nvme")]
)
async def test_what_could_not_be_dropped_is_tried_again(
    machinery: Machinery,
    board: Board,
    monkeypatch: pytest.MonkeyPatch,
    first: commands.ReplyBody,
) -> None:
    """What is still findable makes the node unsure; what a disk may bring back does not, yet."""
    monkeypatch.setattr("tiercache.runtime.cluster.carrying.RETRY_S", 0.001)
    machinery.answers = [first]
    sure = isinstance(first, commands.Evicted)
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        machinery.carrying.heard({SPACE: 5}, registry, tasks)
        assert machinery.carrying.is_sure is sure
        await until_dropped(board, 5)
    assert machinery.carrying.is_sure
    assert machinery.changes == (0 if sure else 1)
    assert len(machinery.asked) == 2


async def test_what_cannot_be_told_or_kept_is_tried_again(
    machinery: Machinery, board: Board, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tiercache.runtime.cluster.carrying.RETRY_S", 0.001)
    (tmp_path / NAME).mkdir()
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        registry.away = True
        machinery.carrying.heard({SPACE: 5}, registry, tasks)
        for _ in range(3):
            await machinery.takes.acquire()
        (tmp_path / NAME).rmdir()
        for _ in range(3):
            await machinery.takes.acquire()
        assert (tmp_path / NAME).exists(), "kept, and not told"
        assert SPACE not in board.read().dropped.get("a", {})
        registry.away = False
        await until_dropped(board, 5)


# --- what operators ask


@pytest.fixture
def operating() -> Operating:
    machine = Machine(Limits(host_segments=(4096,), clustering=Clustering(peers_max=8)))
    machine.handle(ev.MembersSeen({"b": "boot"}), 0.0)
    return Operating("town", "a", 7, machine)


async def asked(operating: Operating, message: clustering.Request) -> wire.Report | wire.Failed:
    answer: asyncio.Future[wire.Report | wire.Failed] = asyncio.get_running_loop().create_future()
    operating.ask(message, answer.set_result)
    async with asyncio.timeout(START_S):
        return await answer


async def cleared(operating: Operating, wait_ms: int) -> Cleared:
    answer = await asked(operating, clustering.ClearAll(1, SPACE, wait_ms))
    assert isinstance(answer, wire.Report), answer
    return msgspec.json.decode(answer.body, type=Cleared)


async def test_before_and_after_nothing_is_begun(operating: Operating, board: Board) -> None:
    message = clustering.Members(3)
    assert isinstance(await asked(operating, message), wire.Failed)
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        assert isinstance(await asked(operating, message), wire.Report)
        operating.close()
        answer = await asked(operating, message)
        assert isinstance(answer, wire.Failed)
        assert (answer.call, answer.kind) == (3, "refused")


async def test_members_are_told_with_what_is_known_of_them(
    operating: Operating, board: Board
) -> None:
    async with (
        joined(board, "b"),
        joined(board, "c"),
        joined(board) as registry,
        asyncio.TaskGroup() as tasks,
    ):
        board.flush(OTHER)
        await asyncio.sleep(0)
        operating.open(registry, tasks)
        answer = await asked(operating, clustering.Members(3))
        assert isinstance(answer, wire.Report)
        found = msgspec.json.decode(answer.body, type=Members)
        assert (found.cluster, found.node, found.standing_s) == ("town", "a", 0)
        assert [(row.name, row.health) for row in found.nodes] == [
            ("a", "self"), ("b", "well"), ("c", "other_protocol"),
        ]  # fmt: skip
        assert found.nodes[1].host_bytes == 8
        assert found.behind == {OTHER: ("a", "b", "c")}


async def test_a_clear_is_done_when_all_have_said_so(operating: Operating, board: Board) -> None:
    async with (
        joined(board, "b") as other,
        joined(board) as registry,
        asyncio.TaskGroup() as tasks,
    ):
        operating.open(registry, tasks)
        waiting = tasks.create_task(cleared(operating, 60_000))
        async with asyncio.timeout(START_S):
            while SPACE not in board.read().flushes:
                await board.changed.wait()
        number = board.read().flushes[SPACE]
        await registry.dropped(SPACE, number)
        assert not waiting.done()
        await other.dropped(SPACE, number)
        assert await waiting == Cleared(number, (), 7)


async def test_who_has_not_said_so_in_time_is_named(operating: Operating, board: Board) -> None:
    async with joined(board, "b"), joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        assert (await cleared(operating, 0)).behind in {("a",), ("a", "b")}
        await registry.dropped(SPACE, board.read().flushes[SPACE] + 10**15)
        assert (await cleared(operating, 30)).behind == ("b",)


async def test_a_clear_that_cannot_begin_says_so(operating: Operating, board: Board) -> None:
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        short = await asked(operating, clustering.ClearAll(1, SPACE[:12], 100))
        assert isinstance(short, wire.Failed)
        assert short.kind == "invalid"
        registry.away = True
        refused = await asked(operating, clustering.ClearAll(2, SPACE, 100))
        assert isinstance(refused, wire.Failed)
        assert (refused.kind, "nothing was begun" in refused.text) == ("refused", True)
        registry.away = False
        answers: list[object] = []
        for call in range(CLEARS_MAX + 1):
            operating.ask(clustering.ClearAll(call + 1, SPACE, 20), answers.append)
        (too_many,) = answers
        assert isinstance(too_many, wire.Failed)
        assert "try again" in too_many.text


async def shared(
    operating: Operating, tenant: str, host: float | None = None, nvme: float | None = None
) -> wire.Report | wire.Failed:
    return await asked(operating, clustering.ShareAll(4, tenant, host, nvme))


async def test_a_share_is_set_for_all_and_unset_again(operating: Operating, board: Board) -> None:
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        for values, now in (((0.5, None), (0.5, None)), ((None, 0.25), (0.5, 0.25))):
            answer = await shared(operating, "0123abcd", *values)
            assert isinstance(answer, wire.Report)
            assert msgspec.json.decode(answer.body, type=Shared) == Shared("0123abcd", *now)
        assert board.read().shares == {"0123abcd": TenantShare(host=0.5, nvme=0.25)}
        answer = await shared(operating, "0123abcd")
        assert isinstance(answer, wire.Report)
        assert board.read().shares == {}


@pytest.mark.parametrize(
    ("tenant", "host", "kind"),
    [("a salt", 0.5, "invalid"), ("0123ABCD", 0.5, "invalid"), ("-", 1.5, "invalid"),
     ("-", float("nan"), "invalid")],
)  # fmt: skip
async def test_a_share_that_makes_no_sense_is_refused(
    operating: Operating, board: Board, tenant: str, host: float, kind: str
) -> None:
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        answer = await shared(operating, tenant, host)
        assert isinstance(answer, wire.Failed)
        assert (answer.call, answer.kind) == (4, kind)
        assert board.read().shares == {}


async def test_shares_are_bounded_and_those_that_are_there_can_be_changed(
    operating: Operating, board: Board
) -> None:
    most = Machine(Limits((4096,))).limits.protecting.shares_max
    for number in range(most):
        board.share(f"{number:08x}", TenantShare(host=0.1))
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        answer = await shared(operating, "-", 0.5)
        assert isinstance(answer, wire.Failed)
        assert answer.kind == "refused"
        assert isinstance(await shared(operating, f"{0:08x}", 0.5), wire.Report)
        assert isinstance(await shared(operating, f"{0:08x}"), wire.Report)
        both = await asyncio.gather(shared(operating, "-", 0.5), shared(operating, "f" * 8, 0.5))
        assert [type(answer) for answer in both] == [wire.Report, wire.Failed]
        assert len(board.read().shares) == most


def test_the_machine_hears_of_shares_when_they_change(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[guard_events.SharesTold] = []
    sharing = Sharing(heard.append, 2)
    both = {"b": TenantShare(host=0.5), "a": TenantShare(nvme=0.0)}
    for shares in ({}, both, dict(both), {}):
        sharing.heard(shares)
    assert [each.shares for each in heard] == [{"b": (0.5, None), "a": (None, 0.0)}, {}]
    assert not caplog.records
    sharing.heard({**both, "c": TenantShare(host=0.1)})
    (line,) = map(KeyValues().format, caplog.records)
    assert "some do not count" in line
    assert line.endswith("shares=3 shares_max=2 first_left_out=c")


async def test_a_registry_that_is_away_sets_no_share(operating: Operating, board: Board) -> None:
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        registry.away = True
        answer = await shared(operating, "-", 0.5)
        assert isinstance(answer, wire.Failed)
        assert "may not have been set" in answer.text
        registry.away = False


async def test_only_so_many_shares_are_set_at_a_time(operating: Operating, board: Board) -> None:
    async with joined(board) as registry, asyncio.TaskGroup() as tasks:
        operating.open(registry, tasks)
        calls = [shared(operating, "-", 0.5) for _ in range(SHARES_MAX + 1)]
        answers = await asyncio.gather(*calls)
        assert [type(answer) for answer in answers].count(wire.Failed) == 1
        assert isinstance(await shared(operating, "-", 0.5), wire.Report)
