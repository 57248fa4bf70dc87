"""What nodes of a simulated cluster want of one another, on its way.

What is sent may be late, overtaken, lost or sent twice. Bytes are copied from one world's memory into the
other one's, object by object, while both go on.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import xxhash

from tiercache.core import commands as cm
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.errors import Fault
from tiercache.state import Extent, Record
from tiercache.testing.sim.world import World

ANSWER_S = 0.5
HOLD_S = 5.0


@dataclass(slots=True)
class Member:
    """One node: its world, and the session of its connections at the others."""

    name: str
    world: World
    session: int
    flushed: dict[bytes, int] = field(default_factory=dict)  # What it carried out, and has kept.

    @property
    def boot(self) -> str:
        """The token of its present start."""
        return f"{self.name}-{self.world.restarts}"


@dataclass(slots=True)
class Errand:
    """What one start of a node wants of another, on its way: a question or a fetch."""

    source: Member
    boot: str
    command: ccm.Locate | ccm.Pull
    faults: list[Fault | None] = field(default_factory=list)
    lent: list[tuple[Extent, int, bytes] | None] = field(default_factory=list)


@dataclass(slots=True)
class Net:
    """What may happen on the way: `cut` pairs reach one another not at all, all else is lost or sent twice
    with the chance `flaky`. `mad`: the chance that a node says something wrong of an object."""

    rng: random.Random
    cut: set[frozenset[str]] = field(default_factory=set)
    flaky: float = 0.0
    mad: float = 0.0

    def reach(self, one: Member, other: Member) -> bool:
        """Whether two nodes reach one another."""
        return frozenset((one.name, other.name)) not in self.cut

    def loses(self, one: Member, other: Member) -> bool:
        """Whether this message is lost."""
        return not self.reach(one, other) or self.rng.random() < self.flaky


class Errands:
    """All that is on its way. `number` gives calls that were never used."""

    def __init__(
        self,
        members: dict[str, Member],
        net: Net,
        counts: Counter[str],
        number: Callable[[], int],
    ) -> None:
        self.members = members
        self.net = net
        self.rng = net.rng
        self.counts = counts
        self._call = number
        self.sent: list[Errand] = []  # Not there yet.
        self._asked: set[tuple[str, str, bytes, str]] = set()  # Requests that looked for others.
        self.there: dict[tuple[str, str, int, int], Errand] = {}  # By who answers, and its call.
        self.loans: list[tuple[Member, str, int, Errand]] = []

    def send(self, member: Member, command: ccm.Locate | ccm.Pull) -> None:
        """A node wants something of another one."""
        self.counts[type(command).__name__] += 1
        if isinstance(command, ccm.Locate):
            name = (member.name, member.boot, command.namespace, command.request)
            self.counts["asked the next one"] += name in self._asked
            self._asked.add(name)
        self.sent.append(Errand(member, member.boot, command))

    def answered(self, member: Member, reply: cm.Reply) -> None:
        """A node answers another one."""
        errand = self.there.pop((member.name, member.boot, reply.session, reply.call), None)
        if errand is None:
            return  # The second answer to what was asked twice, or nobody is there any more.
        match reply.body:
            case ccm.Located(boundary, records):
                if records and self.rng.random() < self.net.mad:
                    assert isinstance(errand.command, ccm.Locate)
                    records = lie(self.rng, records, errand.command)
                lost = self.net.loses(errand.source, member)
                self._end(errand, None if lost else (boundary, records))
            case ccm.Lent(objects):
                errand.lent = objects
                assert isinstance(errand.command, ccm.Pull)
                for (record, _), lent in zip(errand.command.objects, objects, strict=True):
                    if lent is not None:
                        member.world.watch.guard.lent(record)
                self.loans.append((member, member.boot, reply.call, errand))
            case body:
                raise AssertionError(f"no answer to another node: {body}")

    def steps(self) -> list[Callable[[], None]]:
        """Return what may happen next."""
        found: list[Callable[[], None]] = []
        if self.sent:
            found.append(self.arrive)
        if self.loans:
            found.append(self.copy)
        return found

    def died(self, member: Member) -> None:
        """A node died: whoever waits for its answers hears of it."""
        lost = [name for name in self.there if name[0] == member.name]
        for name in lost:
            self._end(self.there.pop(name), None)

    def arrive(self) -> None:
        """Anything on its way arrives, or does not."""
        errand = self.sent.pop(self.rng.randrange(len(self.sent)))
        command = errand.command
        member = self.members[command.peer]
        if member.boot != command.boot or self.net.loses(errand.source, member):
            self._end(errand, None)
            return
        for _ in range(1 + (self.rng.random() < self.net.flaky)):  # Sent twice, perhaps.
            call = self._call()
            self.there[member.name, member.boot, errand.source.session, call] = errand
            if isinstance(command, ccm.Pull):
                wanted = [(record.key, record.nbytes) for record, _ in command.objects]
                member.world.node.hear(cev.LendAsked(errand.source.session, call, wanted))
                return
            now = member.world.node.now
            asked = cev.LocateAsked(
                errand.source.session,
                call,
                errand.source.name,
                command.request,
                command.namespace,
                command.digests,
                command.limit,
                command.whole,
                command.ranks,
                command.codecs,
                command.reshard,
                command.flush,
                now + min(ANSWER_S, command.wait_s),
                now + HOLD_S,
                command.partial,
                command.first,
                command.stop,
                command.some,
            )
            member.world.watch.located(asked)
            member.world.node.hear(asked)

    def copy(self) -> None:
        """One object of a fetch is copied; after the last one the loan is over."""
        at = self.rng.randrange(len(self.loans))
        member, boot, call, errand = self.loans[at]
        command = errand.command
        assert isinstance(command, ccm.Pull), "a loan that nobody asked for"
        done = len(errand.faults)
        if member.boot != boot or self.net.loses(errand.source, member):
            errand.faults += [Fault.IO] * (len(command.objects) - done)
        elif done < len(command.objects):
            errand.faults.append(self._copy_one(member, errand, command, done))
        if len(errand.faults) < len(command.objects):
            return
        del self.loans[at]
        if member.boot == boot:
            member.world.node.hear(cev.LoanOver(errand.source.session, call))
        self._end(errand, None)

    def _copy_one(self, member: Member, errand: Errand, command: ccm.Pull, at: int) -> Fault | None:
        record, target = command.objects[at]
        lent = errand.lent[at]
        if lent is None:
            return Fault.MISSING
        if errand.source.boot != errand.boot:
            return Fault.IO  # Nobody is there to write to.
        content = bytes(member.world.node.view(lent[0])[: lent[1]])
        errand.source.world.node.view(target)[: len(content)] = content
        whole = xxhash.xxh3_128_digest(content) == record.checksum
        assert whole or lent[2] != record.checksum, "what was lent is not what was sealed"
        self.counts["copied"] += whole
        if whole:
            errand.source.world.watch.guard.fetched(record)
        return None if whole else Fault.DAMAGED

    def _end(self, errand: Errand, answer: tuple[int, list[Record]] | None) -> None:
        """An errand comes back to the node that sent it, if that is still there."""
        source, command = errand.source, errand.command
        if source.boot != errand.boot:
            return
        match command:
            case ccm.Locate(job=job):
                boundary, records = answer if answer is not None else (0, [])
                fault = Fault.IO if answer is None else None
                event = cev.LocateEnded(job, boundary, list(records), fault)
                source.world.node.outcomes.append(event)
            case ccm.Pull(job=job, objects=objects):
                faults = errand.faults or [Fault.IO] * len(objects)
                source.world.node.outcomes.append(cev.Pulled(job, faults))


def lie(rng: random.Random, records: list[Record], asked: ccm.Locate) -> list[Record]:
    """Return records of which one is not what it says."""
    at = rng.randrange(len(records))
    record, digest = records[at], rng.choice(asked.digests)
    lies = (
        replace(record, end=record.end + rng.choice((-4, -1, 1, 4))),
        replace(record, start=max(0, record.start + rng.choice((-4, -1, 1, 4)))),
        replace(record, key=replace(record.key, digest=digest), end=record.end + 1),
        replace(record, base=digest),
    )
    return [*records[:at], rng.choice(lies), *records[at + 1 :]]
