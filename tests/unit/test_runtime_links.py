"""The way to other nodes, whatever they do."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from tiercache.core import events
from tiercache.core.cluster import commands as cm
from tiercache.core.cluster import events as ev
from tiercache.errors import ConfigError, Fault, PeerFault, ProtocolError, TransportFault
from tiercache.registry.base import Member
from tiercache.runtime.cluster import messages as said
from tiercache.runtime.cluster.links import Links, Times
from tiercache.runtime.node import Abroad
from tiercache.state import Care, Extent, Key, Record, Shard
from tiercache.testing.nodes import START_S
from tiercache.tiers.memory import MemoryArena
from tiercache.transport.base import Want

PAGE = 4096
SPACE = bytes(range(32))
KEY = Key(SPACE, "kv", Shard(0, 2), "native", bytes(32))
RECORD = Record(KEY, 0, 16, 100, bytes(16), "engine-0", 1e9)
DIGESTS = [bytes([number]) * 32 for number in range(3)]
LOCATE = cm.Locate(
    5, "b", "boot", "r", SPACE, DIGESTS, 48, 16, 1, ("native",), reshard=False, flush=7
)
PULL = cm.Pull(6, "b", "boot", [(RECORD, Extent(0, 0, PAGE)), (RECORD, Extent(0, PAGE, PAGE))])


class FakePeer:
    """A peer that does what the test says."""

    def __init__(self) -> None:
        self.says: Callable[[bytes], Awaitable[bytes]] = _silent
        self.gives: Callable[[list[Want]], Awaitable[list[TransportFault | None]]] = _nothing
        self.fetched: list[int] = []
        self.asked: list[bytes] = []
        self.closed = 0

    async def fetch(self, wants: list[Want], within_s: float) -> list[TransportFault | None]:
        assert within_s == 9.0
        self.fetched.append(len(wants))
        return await self.gives(wants)

    async def ask(self, body: bytes, within_s: float) -> bytes:
        assert within_s > 0
        self.asked.append(body)
        return await self.says(body)

    async def close(self) -> None:
        self.closed += 1


async def _silent(body: bytes) -> bytes:
    del body
    await asyncio.Event().wait()
    return b""


async def _nothing(wants: list[Want]) -> list[TransportFault | None]:
    return [None] * len(wants)


def member(name: str = "b", boot: str = "boot") -> Member:
    return Member(name=name, boot=boot, address=f"{name}:1", protocols=(1, 1))


class Rig:
    """Links whose peers the test makes, and what came of them."""

    def __init__(self, tasks: asyncio.TaskGroup, batch_max: int = 10) -> None:
        self.peers: dict[str, FakePeer] = {}
        self.heard: asyncio.Queue[events.Event] = asyncio.Queue()
        self.links = Links(
            MemoryArena([4 * PAGE]),
            self.heard.put_nowait,
            self.dial,
            tasks,
            Times(0.5, 9.0),
            batch_max,
        )

    def dial(self, address: str) -> FakePeer:
        return self.peers.setdefault(address, FakePeer())

    @property
    def peer(self) -> FakePeer:
        return self.peers["b:1"]

    async def outcome(self, command: Abroad) -> events.Event:
        self.links.execute(command)
        async with asyncio.timeout(START_S):
            return await self.heard.get()


def lost(text: str = "gone") -> TransportFault:
    return TransportFault(PeerFault.LOST, text)


async def test_what_a_peer_answers_is_heard() -> None:
    async def says(body: bytes) -> bytes:
        assert said.decoded_question(body) == said.question_of(LOCATE, 0.3)
        return said.encode(said.answer_of(cm.Located(16, [RECORD])))

    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member()})
        rig.peer.says = says
        assert await rig.outcome(LOCATE) == ev.LocateEnded(5, 16, [RECORD], None)


AGREE = cm.Agree(
    8, "b", "boot", "engine", "r", SPACE, DIGESTS, 49, 48, 4, 2, 4, ("native",), reshard=False,
    chunk_tokens=8, grain=16, care=Care(), flush=7, ends=[16, 48], wait_s=0.5,
)  # fmt: skip


@pytest.mark.parametrize(("wait_s", "wait_ms"), [(0.2, 120), (0.5, 300), (9.0, 300)])
async def test_a_peer_looks_no_longer_than_the_question_is_of_use(
    wait_s: float, wait_ms: int
) -> None:
    """And no longer than any may: some of the time is for the way."""
    asked: list[said.Question | None] = []

    async def says(body: bytes) -> bytes:
        question = said.decoded_question(body)
        asked.append(question)
        of_ranks = isinstance(question, said.Agree)
        return said.encode(said.answer_of(cm.Agreed([48]) if of_ranks else cm.Located(0, [])))

    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member()})
        rig.peer.says = says
        locate = msgspec.structs.replace(LOCATE, first=1, stop=2, wait_s=wait_s)
        agree = msgspec.structs.replace(AGREE, wait_s=wait_s)
        assert await rig.outcome(locate) == ev.LocateEnded(5, 0, [], None)
        assert await rig.outcome(agree) == ev.AgreeEnded(8, [48], None)
    located, agreed = asked
    assert isinstance(located, said.Locate)
    assert (located.first, located.stop, located.wait_ms) == (1, 2, wait_ms)
    assert isinstance(agreed, said.Agree)
    assert agreed.wait_ms == wait_ms


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        said.encode(said.Unknown()),
        said.encode(said.answer_of(cm.Summarised(1, True, [], []))),
        said.encode(said.answer_of(cm.Located(16, [RECORD]))).replace(b"\xc4\x10", b"\xc4\x0f"),
        lost(),
        ConfigError("its address is nonsense"),
        ValueError("it does not fit into a frame"),
        ProtocolError("nonsense"),
    ],
)
async def test_a_peer_that_answers_wrongly_failed_and_that_is_all(
    answer: bytes | Exception,
) -> None:
    async def says(body: bytes) -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member()})
        rig.peer.says = says
        assert await rig.outcome(LOCATE) == ev.LocateEnded(5, 0, [], Fault.IO)


ANNOUNCE = cm.Announce(
    7, "b", "boot", "r", SPACE, DIGESTS, 48, 1, ("native",), reshard=False, flush=7, wait_s=0.2
)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (said.encode(said.answer_of(cm.Taken(32))), ev.AnnounceEnded(7, 32, None)),
        (said.encode(said.Unknown()), ev.AnnounceEnded(7, 0, Fault.IO)),
        (b"", ev.AnnounceEnded(7, 0, Fault.IO)),
    ],
)
async def test_what_is_announced_is_answered(answer: bytes, outcome: events.Event) -> None:
    async def says(body: bytes) -> bytes:
        assert said.decoded_question(body) == said.announced_of(ANNOUNCE)
        return answer

    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member()})
        rig.peer.says = says
        assert await rig.outcome(ANNOUNCE) == outcome
        rig.links.meet({})
        assert await rig.outcome(ANNOUNCE) == ev.AnnounceEnded(7, 0, Fault.IO)


@pytest.mark.parametrize("command", [LOCATE, PULL])
@pytest.mark.parametrize("there", [None, member(boot="another"), member("c")])
async def test_who_is_not_there_any_more_is_not_asked(
    command: cm.Locate | cm.Pull, there: Member | None
) -> None:
    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({there.name: there} if there is not None else {})
        outcome = await rig.outcome(command)
        assert isinstance(outcome, ev.LocateEnded | ev.Pulled)
        assert outcome.job == command.job
        faults = outcome.faults if isinstance(outcome, ev.Pulled) else [outcome.fault]
        assert set(faults) == {Fault.IO}


async def test_objects_come_in_parts_that_a_peer_takes_and_in_order() -> None:
    async def gives(wants: list[Want]) -> list[TransportFault | None]:
        faults = {0: PeerFault.MISSING, 1: PeerFault.DAMAGED, 2: PeerFault.LATE}
        return [
            TransportFault(faults[number], "")
            if (number := each.target.nbytes - 1) in faults
            else None
            for each in wants
        ]

    objects = [(replace(RECORD, nbytes=number + 1), Extent(0, 0, PAGE)) for number in range(5)]
    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks, batch_max=2)
        rig.links.meet({"b": member()})
        rig.peer.gives = gives
        outcome = await rig.outcome(cm.Pull(6, "b", "boot", objects))
        assert outcome == ev.Pulled(6, [Fault.MISSING, Fault.DAMAGED, Fault.IO, None, None])
        assert rig.peer.fetched == [2, 2, 1]


@pytest.mark.parametrize(
    "fault", [ValueError("a checksum has 16 bytes"), ConfigError("no"), lost()]
)
async def test_a_fetch_that_no_peer_can_serve_fails(fault: Exception) -> None:
    async def gives(wants: list[Want]) -> list[TransportFault | None]:
        raise fault

    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member()})
        rig.peer.gives = gives
        assert await rig.outcome(PULL) == ev.Pulled(6, [Fault.IO, Fault.IO])


async def test_the_way_to_a_node_that_moved_is_a_new_one() -> None:
    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member(), "c": member("c")})
        old = rig.peer
        rig.links.meet({"b": msgspec.structs.replace(member(), address="b:2"), "c": member("c")})
    assert (old.closed, rig.peers["c:1"].closed, rig.peers["b:2"].closed) == (1, 0, 0)
    assert [each.name for each in rig.links.members] == ["c", "b"]
    await rig.links.close()
    await rig.links.close()
    assert [peer.closed for peer in rig.peers.values()] == [1, 1, 1]


@pytest.mark.parametrize("command", [LOCATE, PULL])
async def test_after_the_end_everything_fails_at_once(command: cm.Locate | cm.Pull) -> None:
    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member()})
        await rig.links.close()
    outcome = await rig.outcome(command)
    assert isinstance(outcome, ev.LocateEnded | ev.Pulled)
    assert outcome.job == command.job


async def test_one_that_is_busy_answering_is_not_asked_again_and_holds_nobody_up() -> None:
    answered = asyncio.Event()

    async def late(body: bytes) -> bytes:
        await answered.wait()
        return said.encode(said.answer_of(cm.Summarised(4, True, [7], [])))

    async def at_once(body: bytes) -> bytes:
        return said.encode(said.answer_of(cm.Summarised(2, False, [], [8])))

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(START_S):
        rig = Rig(tasks)
        rig.links.meet({"b": member(), "c": member("c")})
        rig.peer.says, rig.peers["c:1"].says = late, at_once
        told = ev.PeerTold("c", "boot", 2, False, [], [8], 1)
        for _ in range(2):
            rig.links.gossip({"b": -1, "c": 1}.__getitem__)
            assert await rig.heard.get() == told
        assert rig.peer.asked == [said.encode(said.Summarise(-1))]
        assert rig.peers["c:1"].asked == [said.encode(said.Summarise(1))] * 2
        answered.set()
        assert await rig.heard.get() == ev.PeerTold("b", "boot", 4, True, [7], [])


@pytest.mark.parametrize("answer", [b"\xc1", said.encode(said.Unknown()), lost()])
async def test_one_that_says_nothing_of_use_is_asked_again(answer: bytes | Exception) -> None:
    async def says(body: bytes) -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with asyncio.TaskGroup() as tasks:
        rig = Rig(tasks)
        rig.links.meet({"b": member()})
        rig.peer.says = says
        rig.links.gossip(lambda _: 0)
    async with asyncio.TaskGroup() as tasks:
        rig.links._group = tasks
        rig.links.gossip(lambda _: 0)
    assert len(rig.peer.asked) == 2
    assert rig.heard.empty()
