"""A pool in a simulated fleet: what nodes put there, fetch from there, and believe of it.

It may lose and damage what it holds, be full, be away for a while, say something wrong, and take its time:
objects move one by one, while everything else goes on. Until a fetch has ended it may write anything to the
memory that it was given; until a deposit has ended it may read.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec
import xxhash

from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import Retaining
from tiercache.errors import Fault
from tiercache.state import Key, Record
from tiercache.state.names import short
from tiercache.testing.sim.errands import Member, lie
from tiercache.testing.sim.node import GARBAGE
from tiercache.testing.sim.swarm import PAGE, Swarm

Space: TypeAlias = tuple[bytes, int]
"""A namespace in one epoch."""


@dataclass(slots=True)
class Job:
    """What one start of a node wants of the pool, on its way. `at`: how many objects are done."""

    source: Member
    boot: str
    command: ccm.Locate | ccm.Pull | ccm.Deposit
    faults: list[Fault | None] = field(default_factory=list)
    members: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class Followed:
    """What one start of a node was told of one namespace, and of which epoch."""

    epoch: int
    names: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Moods:
    """How likely the pool is to do what it should not, at each chance it gets."""

    loses: float
    damages: float
    fails: float
    full: float
    lies: float


class SimPool:
    """The pool of one fleet. It outlives every node."""

    def __init__(self, rng: random.Random, moods: Moods, counts: Counter[str]) -> None:
        self.rng = rng
        self.moods = moods
        self.counts = counts
        self.away = False
        self.ended = False  # What is wanted fails at once.
        self.objects: dict[Space, dict[Key, tuple[Record, bytes]]] = {}
        self.sets: dict[Space, dict[bytes, list[tuple[int, list[Record]]]]] = {}
        self.marks: dict[bytes, int] = {}
        self.jobs: list[Job] = []
        self._followed: dict[tuple[str, str, bytes], Followed] = {}
        self._versions: Counter[tuple[str, str]] = Counter()

    # --- what nodes know of it

    def look(self, member: Member, carry: Callable[[bytes, int], None]) -> None:
        """A node looks at all that it serves; `carry` has it carry out a flush that it has not heard of."""
        if self.away:
            return
        cluster = member.world.node.machine.cluster
        for namespace in cluster.served():
            epoch = cluster.flush_of(namespace)
            mark = self.marks.get(namespace, 0)
            if mark > epoch:
                carry(namespace, mark)
                continue
            self.marks[namespace] = epoch
            for old in [each for each in self.sets if each[0] == namespace and each[1] < epoch]:
                del self.sets[old]
                self.objects.pop(old, None)
            found = self._follow(member, namespace, epoch)
            held = self.sets.get((namespace, epoch), {})
            self._tell(member, found, {short(namespace, digest) for digest in held})

    def _follow(self, member: Member, namespace: bytes, epoch: int) -> Followed:
        name = (member.name, member.boot, namespace)
        found = self._followed.get(name)
        if found is None or found.epoch != epoch:
            if found is not None:
                self._tell(member, found, set())
            found = self._followed[name] = Followed(epoch)
        return found

    def _tell(self, member: Member, found: Followed, names: set[int]) -> None:
        added, removed = sorted(names - found.names), sorted(found.names - names)
        found.names = names
        who = (member.name, member.boot)
        version = self._versions[who]
        self._versions[who] += 1
        told = cev.PeerTold(POOL, "", version, False, added, removed, version - 1)
        member.world.node.hear(told)

    # --- what they want of it

    def send(self, member: Member, command: ccm.Locate | ccm.Pull | ccm.Deposit) -> None:
        """A node wants something."""
        self.counts[f"pool {type(command).__name__}"] += 1
        if self.ended:
            member.world.node.outcomes.append(_failed(command))
            return
        self.jobs.append(Job(member, member.boot, command))

    def flush(self, member: Member, command: ccm.FlushPool) -> None:
        """A node clears, and nobody else numbers that."""
        for namespace, number in command.flushes.items():
            self.marks[namespace] = max(number, self.marks.get(namespace, 0))
        member.world.node.outcomes.append(cev.PoolFlushed(command.job, None))

    def steps(self) -> list[Callable[[], None]]:
        """Return what may happen next."""
        return [self.step] if self.jobs else []

    def step(self) -> None:
        """Any one job goes one step on."""
        job = self.rng.choice(self.jobs)
        if job.source.boot != job.boot:
            self.jobs.remove(job)  # Nobody is there any more; what was put stays.
            return
        self._misbehave()
        match job.command:
            case ccm.Locate():
                self._locate(job, job.command)
            case ccm.Pull():
                self._pull(job, job.command)
            case ccm.Deposit():
                self._deposit(job, job.command)

    def _misbehave(self) -> None:
        """Something is lost, or damaged."""
        rng, moods = self.rng, self.moods
        held = [space for space, objects in self.objects.items() if objects]
        if held and rng.random() < moods.loses:
            objects = self.objects[rng.choice(held)]
            del objects[rng.choice(list(objects))]
        elif held and rng.random() < moods.damages:
            objects = self.objects[rng.choice(held)]
            key = rng.choice(list(objects))
            record, content = objects[key]
            objects[key] = (record, bytes([content[0] ^ 1]) + content[1:])

    def _fails(self) -> bool:
        return self.away or self.rng.random() < self.moods.fails

    def _end(self, job: Job, event: cev.LocateEnded | cev.Pulled | cev.Deposited) -> None:
        self.jobs.remove(job)
        job.source.world.node.outcomes.append(event)

    def _locate(self, job: Job, asked: ccm.Locate) -> None:
        if self._fails():
            self._end(job, cev.LocateEnded(asked.job, 0, [], Fault.IO))
            return
        boundary, records = self._found(job.source, asked)
        if records and self.rng.random() < self.moods.lies:
            records = lie(self.rng, records, asked)
        self._end(job, cev.LocateEnded(asked.job, boundary, records, None))

    def _found(self, member: Member, asked: ccm.Locate) -> tuple[int, list[Record]]:
        """Return the deepest set that is whole, and what the asker lacks of it."""
        layout = member.world.node.machine.cluster.served().get(asked.namespace)
        followed = self._followed.get((member.name, member.boot, asked.namespace))
        if layout is None or followed is None or followed.epoch != asked.flush:
            return 0, []
        space = (asked.namespace, asked.flush)
        objects = self.objects.get(space, {})
        wanted = {
            (part.name, shard.start, shard.stop)
            for part in layout.parts
            for shard in part.shards(asked.ranks)
        }
        for digest in reversed(asked.digests):
            for boundary, records in self.sets.get(space, {}).get(digest, []):
                cut = {(r.key.part, r.key.shard.start, r.key.shard.stop) for r in records}
                codecs = {record.key.codec for record in records}
                usable = boundary <= asked.limit and cut == wanted and codecs <= {*asked.codecs}
                if usable and all(record.key in objects for record in records):
                    self.counts["pool found"] += 1
                    return boundary, [
                        record
                        for record in records
                        if record.end > asked.whole
                        or layout.part(record.key.part).window is not None
                    ]
        return 0, []

    def _pull(self, job: Job, asked: ccm.Pull) -> None:
        """One object more. The others' memory is the pool's until all have ended."""
        node, at = job.source.world.node, len(job.faults)
        for _, target in asked.objects[at:]:
            node.view(target)[:] = bytes([GARBAGE]) * target.size
        record, target = asked.objects[at]
        held = self.objects.get((record.key.namespace, asked.flush), {}).get(record.key)
        if self._fails():
            job.faults.append(Fault.IO)
        elif held is None or held[0].checksum != record.checksum:
            job.faults.append(Fault.MISSING)
        else:
            content = held[1]
            node.view(target)[: len(content)] = content
            whole = xxhash.xxh3_128_digest(content) == record.checksum
            job.faults.append(None if whole else Fault.DAMAGED)
            self.counts["pool fetched" if whole else "pool damaged"] += 1
            if whole:
                job.source.world.watch.guard.fetched(record)
        if len(job.faults) == len(asked.objects):
            self._end(job, cev.Pulled(asked.job, job.faults))

    def _deposit(self, job: Job, asked: ccm.Deposit) -> None:
        """One object more; then the set, if all of it is there."""
        space = (asked.namespace, asked.flush)
        objects = self.objects.setdefault(space, {})
        at = len(job.members)
        if self._fails() or self.rng.random() < self.moods.full:
            fault = Fault.IO if self.rng.random() < 0.5 else Fault.NO_SPACE
            self._end(job, cev.Deposited(asked.job, fault))
        elif at < len(asked.objects):
            record, source = asked.objects[at]
            content = bytes(job.source.world.node.view(source)[: record.nbytes])
            assert xxhash.xxh3_128_digest(content) == record.checksum, "its memory was reused"
            job.source.world.watch.guard.lent(record)
            job.members.append(objects.setdefault(record.key, (record, content))[0])
        elif all(record.key in objects for record in job.members):
            sets = self.sets.setdefault(space, {}).setdefault(asked.digest, [])
            sets.append((asked.boundary, job.members))
            self.counts["pool stored"] += 1
            self._end(job, cev.Deposited(asked.job, None))
        else:
            self._end(job, cev.Deposited(asked.job, Fault.MISSING))


def _failed(
    command: ccm.Locate | ccm.Pull | ccm.Deposit,
) -> cev.LocateEnded | cev.Pulled | cev.Deposited:
    match command:
        case ccm.Locate(job=job):
            return cev.LocateEnded(job, 0, [], Fault.IO)
        case ccm.Pull(job=job, objects=objects):
            return cev.Pulled(job, [Fault.IO] * len(objects))
        case ccm.Deposit(job=job):
            return cev.Deposited(job, Fault.IO)


def calm(rng: random.Random, swarm: Swarm) -> Swarm:
    """Return a draw in which boundaries are often resumed: only what is resumed goes to a pool."""
    limits = msgspec.structs.replace(
        swarm.limits,
        host_segments=rng.choice((swarm.limits.host_segments, (PAGE * 256,), (PAGE * 256,))),
        nvme_bytes=rng.choice((swarm.limits.nvme_bytes, 0)),
        retaining=Retaining("dense", prefill_tokens_per_s=rng.choice((0.0, 0.0, 100.0))),
        sights_max=1000,
    )
    swarm = replace(
        swarm,
        limits=limits,
        scopes=swarm.scopes[:1],
        engines=4,
        node_dies=rng.choice((0.0, 0.01, 0.03)),
    )
    if rng.random() < 0.3:
        return swarm
    return replace(
        swarm, abort=0.0, cancel=0.0, omit=0.0, care=0.0, pins=0.0, operator=0.0, engine_dies=0.0
    )


def draw_moods(rng: random.Random) -> Moods:
    """Return the moods of one seed's pool: in most it does a few things only."""

    def maybe(most: float) -> float:
        return rng.random() * most if rng.random() < 0.3 else 0.0

    return Moods(
        loses=maybe(0.2),
        damages=maybe(0.2),
        fails=maybe(0.1),
        full=maybe(0.1),
        lies=maybe(0.5),
    )
