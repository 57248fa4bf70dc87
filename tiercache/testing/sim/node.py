"""One node in the simulation: the machine, memory, and everything on its way, each step by itself."""

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeVar

import xxhash

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster.commands import Agree, Announce, Deposit, FlushPool, Locate, Pull
from tiercache.core.limits import Limits
from tiercache.core.machine import Machine
from tiercache.errors import Fault
from tiercache.state import Extent, Record
from tiercache.testing.sim.disk import Disk

GARBAGE = 0xA5
Reading = cm.Fill | cm.Check
Abroad = Agree | Locate | Pull | Announce | Deposit | FlushPool
Writing = cm.Store | cm.Forget | cm.Reclaim | cm.Wipe | cm.Remember
Trace = Callable[[float, ev.Event | cm.Command], None]
Job = TypeVar("Job")


class SimNode:
    """Executes what the machine commands, in any order that a real node could.

    `check_every`: books are checked at every so many events. `reply` gets each answer.
    """

    def __init__(
        self,
        limits: Limits,
        disk: Disk,
        rng: random.Random,
        *,
        reply: Callable[[cm.Reply], None],
        trace: Trace,
    ) -> None:
        self.machine = Machine(limits)
        self.limits = limits
        self.memory = [bytearray([GARBAGE]) * size for size in limits.host_segments]
        self.disk = disk
        self.seals: list[cm.Seal] = []
        self.reads: list[Reading] = []
        self.writes: deque[Writing] = deque()
        self.written: list[Fault | None] = []  # Outcomes of the first of `writes`, so far.
        self.outcomes: list[ev.Event] = []
        self.stored: deque[ev.Event] = deque()  # In the order of the one writer.
        self.unfound: deque[ev.Event] = deque()  # What opening the disk has still to say.
        self.opened = False
        self.opening_pace = 1.0  # How likely the disk is to be among what can happen next.
        self.ticked: Callable[[float], None] = lambda now: None
        self.abroad: Callable[[Abroad], None] = _nobody
        self.now = 0.0
        self.clock: Callable[[float], float] = _since_1970
        self.check_every = 1
        self.handled: Counter[str] = Counter()
        self.rng = rng
        self._reply = reply
        self._trace = trace

    # --- the machine

    def hear(self, event: ev.Event) -> None:
        """Let the machine decide, and take its commands."""
        self._trace(self.now, event)
        name = type(event).__name__
        self.handled[name] += 1
        for command in self.machine.handle(event, self.now, self.wall(self.now)):
            self._trace(self.now, command)
            self._take(command)
        if self.handled.total() % self.check_every == 0:
            self.machine.check()

    def _take(self, command: cm.Command) -> None:
        match command:
            case cm.Reply():
                self._reply(command)
            case cm.Seal():
                self.seals.append(command)
            case cm.Fill(objects=objects):
                assert self.opened, "a read before the disk is open"
                for _, _, target in objects:
                    self.view(target)[:] = bytes([GARBAGE]) * target.size
                self.reads.append(command)
            case cm.Check(objects=objects):
                assert self.opened or all(tier == "host" for _, tier, _ in objects)
                self.reads.append(command)
            case Locate() | Pull() | Announce() | Agree() | Deposit() | FlushPool():
                if isinstance(command, Pull):
                    for _, target in command.objects:
                        self.view(target)[:] = bytes([GARBAGE]) * target.size
                self.abroad(command)
            case _:
                assert self.opened, "a write before the disk is open"
                self.writes.append(command)

    def wall(self, now: float) -> float:
        """Return the wall clock's time."""
        return self.clock(now)

    def view(self, extent: Extent) -> memoryview:
        """Return arena memory."""
        segment = memoryview(self.memory[extent.segment])
        return segment[extent.offset : extent.offset + extent.size]

    # --- what can happen next

    def steps(self) -> list[Callable[[], None]]:
        """Return everything that may happen next, each as a call."""
        found: list[Callable[[], None]] = []
        if self.seals:
            found.append(self.seal)
        if self.reads:
            found.append(self.read)
        if self.writes:
            found.append(self.write)
        if self.outcomes:
            found.append(self.deliver)
        if self.stored:
            found.append(self.deliver_stored)
        if self.unfound and (self.opening_pace >= 1 or self.rng.random() < self.opening_pace):
            found.append(self.find)
        due = self.machine.wakeup()
        if due is not None and due <= self.now:
            found.append(self.tick)
        return found

    def tick(self) -> None:
        """Time is due."""
        self.hear(ev.Tick())
        self.ticked(self.now)

    def seal(self) -> None:
        """Any one sealing job ends."""
        job = self._any(self.seals)
        sums = []
        for extent, nbytes in job.objects:
            sums.append(xxhash.xxh3_128_digest(self.view(extent)[:nbytes]))
        self.outcomes.append(ev.Sealed(job.job, sums))

    def read(self) -> None:
        """Any one reading job ends."""
        job = self._any(self.reads)
        match job:
            case cm.Fill(number, objects):
                faults = [self.disk.read(r, place, self.view(into)) for r, place, into in objects]
                self.outcomes.append(ev.Filled(number, faults))
            case cm.Check(number, checks):
                self.outcomes.append(ev.Checked(number, [self._check(*check) for check in checks]))

    def _check(self, record: Record, tier: str, extent: Extent) -> Fault | None:
        if tier == "nvme":
            return self.disk.read(record, extent, memoryview(bytearray(extent.size)))
        whole = xxhash.xxh3_128_digest(self.view(extent)[: record.nbytes]) == record.checksum
        return None if whole else Fault.DAMAGED

    def write(self) -> None:
        """The writer goes one step on: one object of a batch, or one other command."""
        match self.writes[0]:
            case cm.Store(job, objects):
                record, source, place = objects[len(self.written)]
                self.written.append(self.disk.write(record, place, bytes(self.view(source))))
                if len(self.written) < len(objects):
                    return
                self.stored.append(ev.Stored(job, self.written))
                self.written = []
            case cm.Forget(keys):
                self._report(self.disk.forget(keys))
            case cm.Reclaim(segments, keys):
                self._report(self.disk.reclaim(segments, keys))
            case cm.Remember(label, layout):
                self._report(self.disk.remember(label, layout))
            case cm.Wipe(job, keys):
                self.stored.append(ev.Wiped(job, self.disk.forget(keys)))
        self.writes.popleft()
        assert self.disk.over_cap or self.disk.used_bytes() <= self.limits.nvme_bytes, (
            "over the cap"
        )

    def _report(self, fault: Fault | None) -> None:
        if fault is not None:
            self.stored.append(ev.TierFailed(fault))

    def deliver(self) -> None:
        """Any one outcome reaches the machine."""
        self.hear(self._any(self.outcomes))

    def deliver_stored(self) -> None:
        """The writer's next outcome reaches the machine."""
        self.hear(self.stored.popleft())

    # --- start and end

    def open_disk(self, batch: int, *, fails: bool) -> None:
        """Prepare what the disk has to say of earlier starts: in some order, and some of it twice.

        `fails`: it breaks down before it has said all.
        """
        found = self.disk.found()
        self.rng.shuffle(found)
        found.extend(found[: len(found) // 4])
        sizes = {number: len(content) for number, content in self.disk.segments.items()}
        self.unfound.append(ev.NvmeOpened(sizes, list(self.disk.labels.values())))
        for at in range(0, len(found), batch):
            self.unfound.append(ev.Found(found[at : at + batch]))
        self.unfound.append(ev.ScanEnded())
        if fails:
            for _ in range(self.rng.randint(1, len(self.unfound))):
                self.unfound.pop()
            self.unfound.append(ev.NvmeFailed(Fault.IO))

    def find(self) -> None:
        """The disk says the next thing."""
        event = self.unfound.popleft()
        self.opened = self.opened or isinstance(event, ev.NvmeOpened)
        self.hear(event)

    def die(self) -> None:
        """Kill -9: what the writer was in the middle of is torn, all else is gone."""
        if self.writes and isinstance(self.writes[0], cm.Store):
            for _, source, place in self.writes[0].objects[len(self.written) :][:1]:
                self.disk.tear(place, bytes(self.view(source)))

    def _any(self, jobs: list[Job]) -> Job:
        return jobs.pop(self.rng.randrange(len(jobs)))


def _since_1970(now: float) -> float:
    return 1e9 + now


def _nobody(command: Abroad) -> None:
    raise AssertionError(f"there are no other nodes: {command}")
