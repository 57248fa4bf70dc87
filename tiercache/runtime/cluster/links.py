"""The way to other nodes: does what the core wants of them, and says what came of it."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple, Protocol

from tiercache.core import events
from tiercache.core.cluster import commands as cm
from tiercache.core.cluster import events as ev
from tiercache.errors import ConfigError, Fault, PeerFault, ProtocolError, TransportFault
from tiercache.registry.base import Member
from tiercache.runtime.cluster import messages as said
from tiercache.runtime.cluster.keys import packed_key
from tiercache.runtime.log import Seldom, say
from tiercache.runtime.node import Abroad
from tiercache.tiers.base import Arena
from tiercache.transport.base import Want

FAULTS: Mapping[PeerFault, Fault] = {
    PeerFault.MISSING: Fault.MISSING,
    PeerFault.DAMAGED: Fault.DAMAGED,
}
"""What a peer's fault is for the core; all others mean that it did not do what it should."""

FAILURES = (TransportFault, ProtocolError, ConfigError, ValueError)
"""What a peer may do, or be: its address, and what is asked of it, too are what it says."""

SEARCH_SHARE = 0.6
"""How much of the time for an answer a peer may look for it: the rest is for the way."""


class Peer(Protocol):
    """A `Peer` of the transport that also answers questions."""

    async def fetch(self, wants: list[Want], within_s: float) -> list[TransportFault | None]:
        """See `tiercache.transport.base.Peer`."""
        ...

    async def ask(self, body: bytes, within_s: float) -> bytes:
        """See `tiercache.transport.base.Peer`."""
        ...

    async def close(self) -> None:
        """See `tiercache.transport.base.Peer`."""
        ...


class Times(NamedTuple):
    """How long a peer may take, in seconds: to answer a plan, and to send a batch or a summary."""

    answer_s: float
    transfer_s: float


class Links:
    """Connections to the members of the cluster, by name.

    `dial` makes a peer of an address, without any I/O yet. `hear` gets every outcome, on the loop. Each
    command becomes a task of `group`; after `close` every one fails at once. One fetch of a peer has
    `batch_max` objects at most. What a peer does, or is said to be, never ends this node.
    """

    def __init__(
        self,
        arena: Arena,
        hear: Callable[[events.Event], None],
        dial: Callable[[str], Peer],
        group: asyncio.TaskGroup,
        times: Times,
        batch_max: int,
    ) -> None:
        self._arena = arena
        self._hear = hear
        self._dial = dial
        self._group = group
        self._times = times
        self._batch_max = batch_max
        self._links: dict[str, tuple[Member, Peer]] = {}
        self._asking: set[Member] = set()  # Who is asked for a summary now.
        self._closed = False
        self._seldom = Seldom()

    @property
    def members(self) -> list[Member]:
        """The nodes that there is a way to."""
        return [member for member, _ in self._links.values()]

    def meet(self, members: Mapping[str, Member]) -> None:
        """These are the other nodes now. The way to one that moved, or started anew, is a new one."""
        for name in list(self._links):
            known, peer = self._links[name]
            if members.get(name) != known:
                del self._links[name]
                self._group.create_task(peer.close())
        for name, member in members.items():
            if name not in self._links:
                self._links[name] = (member, self._dial(member.address))

    def execute(self, command: Abroad) -> None:
        """Start what the core wants of another node."""
        if self._closed:  # The node is on its way out; nothing waits for ever meanwhile.
            asyncio.get_running_loop().call_soon(self._hear, _failed(command))
            return
        work: Coroutine[None, None, None]
        match command:
            case cm.Locate():
                work = self._locate(command)
            case cm.Announce():
                work = self._announce(command)
            case cm.Agree():
                work = self._agree(command)
            case cm.Pull():
                work = self._pull(command)
        self._group.create_task(work)

    def _way(self, peer: str, boot: str) -> Peer | None:
        member, way = self._links.get(peer, (None, None))
        return way if member is not None and member.boot == boot else None

    async def _locate(self, command: cm.Locate) -> None:
        way = self._way(command.peer, command.boot)
        if way is None:
            self._hear(_failed(command))
            return
        within_s = min(self._times.answer_s, command.wait_s)
        question = said.encode(said.question_of(command, SEARCH_SHARE * within_s))
        try:
            answer = said.decoded_answer(await way.ask(question, within_s))
            if not isinstance(answer, said.Located):
                raise ProtocolError("the answer is of another kind")
            records = said.records_of(answer, command.namespace)
        except FAILURES:
            self._hear(_failed(command))
        else:
            self._hear(ev.LocateEnded(command.job, answer.boundary, records, None))

    async def _announce(self, command: cm.Announce) -> None:
        way = self._way(command.peer, command.boot)
        if way is None:
            self._hear(_failed(command))
            return
        question = said.encode(said.announced_of(command))
        try:
            answer = said.decoded_answer(
                await way.ask(question, command.wait_s + self._times.answer_s)
            )
            if not isinstance(answer, said.Taken):
                raise ProtocolError("the answer is of another kind")
        except FAILURES:
            self._hear(_failed(command))
        else:
            self._hear(ev.AnnounceEnded(command.job, answer.boundary, None))

    async def _agree(self, command: cm.Agree) -> None:
        way = self._way(command.peer, command.boot)
        if way is None:
            self._hear(_failed(command))
            return
        within_s = min(self._times.answer_s, command.wait_s)
        question = said.encode(said.agree_of(command, SEARCH_SHARE * within_s))
        try:
            answer = said.decoded_answer(await way.ask(question, within_s))
            if not isinstance(answer, said.Agreed):
                raise ProtocolError("the answer is of another kind")
        except FAILURES:
            self._hear(_failed(command))
        else:
            self._hear(ev.AgreeEnded(command.job, answer.ends, None))

    async def _pull(self, command: cm.Pull) -> None:
        way = self._way(command.peer, command.boot)
        if way is None:
            self._hear(_failed(command))
            return
        wants = [
            Want(
                packed_key(record.key),
                record.nbytes,
                0,
                self._arena.view(target)[: record.nbytes],
                record.checksum,
            )
            for record, target in command.objects
        ]
        parts = [wants[at : at + self._batch_max] for at in range(0, len(wants), self._batch_max)]
        fetched = await asyncio.gather(*(self._fetched(way, part) for part in parts))
        faults = [fault for part in fetched for fault in part]
        if Fault.DAMAGED in faults:
            held = self._seldom.due("damaged", time.monotonic())
            if held is not None:
                say(
                    logging.ERROR, "damaged bytes from a node", node=command.peer, held_back=held,
                    objects=faults.count(Fault.DAMAGED),
                )  # fmt: skip
        self._hear(ev.Pulled(command.job, faults))

    async def _fetched(self, way: Peer, wants: list[Want]) -> Sequence[Fault | None]:
        try:
            outcomes = await way.fetch(wants, self._times.transfer_s)
        except FAILURES:
            return [Fault.IO] * len(wants)
        return [None if each is None else FAULTS.get(each.fault, Fault.IO) for each in outcomes]

    def gossip(self, version_of: Callable[[str], int]) -> None:
        """Ask every node what it could resume, but those that have not answered the last time yet."""
        for member, way in self._links.values():
            if member not in self._asking:
                self._asking.add(member)
                self._group.create_task(self._summarise(member, way, version_of(member.name)))

    async def _summarise(self, member: Member, way: Peer, version: int) -> None:
        """Ask a node what it could resume, and tell the core. A node that does not say is asked again
        the next time."""
        question = said.encode(said.Summarise(version))
        try:
            answer = said.decoded_answer(await way.ask(question, self._times.transfer_s))
            if not isinstance(answer, said.Summary):
                return
            added, removed = said.names_of(answer.added), said.names_of(answer.removed)
        except FAILURES:
            return
        finally:
            self._asking.discard(member)
        self._hear(
            ev.PeerTold(
                member.name, member.boot, answer.version, answer.whole, added, removed, version
            )
        )

    async def close(self) -> None:
        """End all connections. Idempotent."""
        self._closed = True
        links, self._links = self._links, {}
        for _, peer in links.values():
            await peer.close()


def _failed(command: Abroad) -> events.Event:
    match command:
        case cm.Locate(job=job):
            return ev.LocateEnded(job, 0, [], Fault.IO)
        case cm.Agree(job=job):
            return ev.AgreeEnded(job, [], Fault.IO)
        case cm.Announce(job=job):
            return ev.AnnounceEnded(job, 0, Fault.IO)
        case cm.Pull(job=job, objects=objects):
            return ev.Pulled(job, [Fault.IO] * len(objects))
