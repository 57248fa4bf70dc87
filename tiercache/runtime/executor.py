"""Does what the core commands, beside the loop, and says what came of it. It chooses nothing."""

import asyncio
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from xxhash import xxh3_128_digest

from tiercache.core import commands, events
from tiercache.core.debt import ByteDebt
from tiercache.errors import Fault, StorageFault
from tiercache.runtime.workers import Countdown, Mailbox, Step, Turns
from tiercache.state import Extent, Record
from tiercache.tiers import crash
from tiercache.tiers.base import Arena, Read, Tier, Write

SEAL_INLINE_BYTES_MAX = 256 * 1024
"""A seal up to this size is done on the loop: hashing it takes less than handing it to a thread."""

STEP_BYTES_MAX = 4 * 1024 * 1024
"""Work that a thread does for one job before it looks at the next."""

SCRATCH_KEPT_BYTES_MAX = 16 * 1024 * 1024
SEAL_THREADS = 2

Work = (
    commands.Seal
    | commands.Store
    | commands.Fill
    | commands.Check
    | commands.Forget
    | commands.Reclaim
    | commands.Wipe
    | commands.Remember
)
_Check = Callable[[Record, Extent], Fault | None]
_InOrder = commands.Store | commands.Forget | commands.Reclaim | commands.Wipe | commands.Remember
_ZEROS = memoryview(bytes(1024 * 1024))


class Executor:
    """Threads for sealing, writing and reading.

    `deliver` gets each outcome, on the loop. Small seals are done at once and their outcome is
    returned by `execute`. Commands that change the NVMe tier wait until `use` gave it; none that read
    it comes before.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        arena: Arena,
        deliver: Callable[[events.Event], None],
        *,
        write_bytes_per_s: int,
        read_threads: int,
    ) -> None:
        self._arena = arena
        self._outcomes: Mailbox[events.Event] = Mailbox(loop, deliver)
        self._sealers = Turns("seal", SEAL_THREADS)
        self._read_threads = read_threads
        self._readers: Turns | None = None
        self._writer = Writer(arena, self._outcomes, ByteDebt(write_bytes_per_s))
        self._tier: Tier | None = None
        self._scratch = threading.local()

    def use(self, tier: Tier) -> None:
        """Execute NVMe commands on `tier`. Its owner closes it, after `close`."""
        self._tier = tier
        self._readers = Turns("nvme-read", self._read_threads)
        self._writer.start(tier)

    def execute(self, command: Work) -> events.Event | None:
        """Start `command`; return its outcome when it is done already."""
        match command:
            case commands.Seal(job, objects):
                return self._seal(job, objects)
            case commands.Fill(job, objects):
                self._fill(job, objects)
            case commands.Check(job, objects):
                self._check(job, objects)
            case _:
                self._writer.put(command)
        return None

    def busy(self) -> bool:
        """Whether writes are under way or queued, or their outcomes have not been heard."""
        # In this order: what was just finished has put its outcome before it says so.
        return self._writer.busy() or not self._outcomes.empty

    def hurry(self) -> None:
        """Write without a limit to the rate, for a node that stops."""
        self._writer.hurry()

    def close(self, timeout_s: float) -> bool:
        """End all threads, after what they do now; False when that took longer than `timeout_s`."""
        until = time.monotonic() + timeout_s
        crews = [self._sealers, self._readers, self._writer]
        left = (crew.close(until - time.monotonic()) for crew in crews if crew is not None)
        return all([*left])

    # --- seals

    def _seal(self, job: int, objects: list[tuple[Extent, int]]) -> events.Event | None:
        if sum(nbytes for _, nbytes in objects) <= SEAL_INLINE_BYTES_MAX:
            outcome = events.Sealed(job, [self._sum(*item) for item in objects])
            crash.reach("runtime.after_seal_before_handle")
            return outcome
        checksums = [b""] * len(objects)

        def done() -> None:
            self._outcomes.put(events.Sealed(job, checksums))

        def some(start: int, stop: int) -> None:
            for index in range(start, stop):
                checksums[index] = self._sum(*objects[index])

        spans = split([nbytes for _, nbytes in objects])
        self._sealers.add(_ranges(spans, some, done))
        return None

    def _sum(self, extent: Extent, nbytes: int) -> bytes:
        return xxh3_128_digest(self._arena.view(extent)[:nbytes])

    # --- reads

    def _fill(self, job: int, objects: list[tuple[Record, Extent, Extent]]) -> None:
        tier, arena = self._tier, self._arena
        if tier is None or self._readers is None:
            raise AssertionError("Fill without an NVMe tier")
        faults: list[Fault | None] = [None] * len(objects)
        spans = split([source.size for _, source, _ in objects])

        def done() -> None:
            self._outcomes.put(events.Filled(job, faults))

        def some(start: int, stop: int) -> None:
            reads = [
                Read(record, source, arena.view(target)[: source.size])
                for record, source, target in objects[start:stop]
            ]
            faults[start:stop] = _kinds(tier.read(reads))

        self._readers.add(_ranges(spans, some, done))

    def _check(self, job: int, objects: list[tuple[Record, str, Extent]]) -> None:
        faults: list[Fault | None] = [None] * len(objects)
        host = [at for at, (_, tier, _) in enumerate(objects) if tier == "host"]
        nvme = [at for at, (_, tier, _) in enumerate(objects) if tier != "host"]

        def done() -> None:
            self._outcomes.put(events.Checked(job, faults))

        both = Countdown(bool(host) + bool(nvme), done)
        for crew, check, chosen in (
            (self._sealers, self._check_host, host),
            (self._readers, self._check_nvme, nvme),
        ):
            if not chosen:
                continue
            if crew is None:
                raise AssertionError("Check on NVMe without an NVMe tier")

            def some(
                start: int, stop: int, check: _Check = check, chosen: list[int] = chosen
            ) -> None:
                for at in chosen[start:stop]:
                    record, _, extent = objects[at]
                    faults[at] = check(record, extent)

            spans = split([objects[at][2].size for at in chosen])
            crew.add(_ranges(spans, some, both))

    def _check_host(self, record: Record, extent: Extent) -> Fault | None:
        found = xxh3_128_digest(self._arena.view(extent)[: record.nbytes])
        return None if found == record.checksum else Fault.DAMAGED

    def _check_nvme(self, record: Record, extent: Extent) -> Fault | None:
        if self._tier is None:
            raise AssertionError("Check on NVMe without an NVMe tier")
        scratch: mmap.mmap | None = getattr(self._scratch, "pages", None)
        if scratch is None or len(scratch) < extent.size:
            scratch = mmap.mmap(-1, extent.size)
        self._scratch.pages = scratch if len(scratch) <= SCRATCH_KEPT_BYTES_MAX else None
        read = Read(record, extent, memoryview(scratch)[: extent.size])
        return _kinds(self._tier.read([read]))[0]


class Writer:
    """The one thread that changes the NVMe tier, in the order it was told."""

    def __init__(self, arena: Arena, outcomes: Mailbox[events.Event], debt: ByteDebt) -> None:
        self._arena = arena
        self._outcomes = outcomes
        self._debt = debt
        self._queue: queue.SimpleQueue[_InOrder | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._queued = 0
        self._finished = 0
        self._thread: threading.Thread | None = None

    def start(self, tier: Tier) -> None:
        """Do what is queued, and what comes, on `tier`."""
        if self._thread is not None:
            raise AssertionError("a node has one NVMe tier")
        self._tier = tier
        self._thread = threading.Thread(target=self._work, name="nvme-write", daemon=True)
        self._thread.start()

    def put(self, command: _InOrder) -> None:
        """Do `command` after all before it. Only the loop's thread calls this."""
        self._queued += 1
        self._queue.put(command)

    def busy(self) -> bool:
        """Whether anything is under way or queued, and somebody works on it."""
        return self._thread is not None and self._finished < self._queued

    def hurry(self) -> None:
        """Stop limiting the rate."""
        self._hurry.set()

    def close(self, timeout_s: float) -> bool:
        """End after all that is queued; False when that took longer than `timeout_s`."""
        self._hurry.set()
        self._queue.put(None)
        if self._thread is None:
            return True
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (command := self._queue.get()) is not None:
            match command:
                case commands.Store(job, objects):
                    self._store(job, objects)
                case commands.Forget(keys):
                    self._report(self._tier.forget(keys))
                case commands.Reclaim(segments, keys):
                    self._report(self._tier.reclaim(segments, keys))
                case commands.Wipe(job, keys):
                    wiped = self._tier.forget(keys)
                    fault = None if wiped is None else wiped.fault
                    self._outcomes.put(events.Wiped(job, fault))
                case commands.Remember(label, layout):
                    self._report(self._tier.remember(label, layout))
            self._finished += 1

    def _store(self, job: int, objects: list[tuple[Record, Extent, Extent]]) -> None:
        self._hurry.wait(self._debt.wait_s(time.monotonic()))
        writes: list[Write] = []
        for record, source, target in objects:
            view = self._arena.view(source)[: target.size]
            clear_rest(view, record.nbytes)
            writes.append(Write(record, target, view))
        faults = _kinds(self._tier.write(writes))
        self._debt.add(sum(target.size for _, _, target in objects), time.monotonic())
        crash.reach("runtime.after_store_before_handle")
        self._outcomes.put(events.Stored(job, faults))

    def _report(self, fault: StorageFault | None) -> None:
        if fault is not None:
            self._outcomes.put(events.TierFailed(fault.fault))


def clear_rest(view: memoryview, nbytes: int) -> None:
    """Zero what lies behind an object's bytes: an earlier object's bytes never reach the disk."""
    for start in range(nbytes, len(view), len(_ZEROS)):
        stop = min(len(view), start + len(_ZEROS))
        view[start:stop] = _ZEROS[: stop - start]


def split(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges of items, each of `STEP_BYTES_MAX` at most or of one item."""
    spans: list[tuple[int, int]] = []
    start = nbytes = 0
    for index, size in enumerate(sizes):
        if index > start and nbytes + size > STEP_BYTES_MAX:
            spans.append((start, index))
            start, nbytes = index, 0
        nbytes += size
    spans.append((start, len(sizes)))
    return spans


def _ranges(
    spans: list[tuple[int, int]], some: Callable[[int, int], None], done: Callable[[], None]
) -> Iterator[Step]:
    """Yield one step per range; `done` is called once, after the last of them ended."""
    ended = Countdown(len(spans), done)

    def step(start: int, stop: int) -> None:
        some(start, stop)
        ended()

    for start, stop in spans:
        yield partial(step, start, stop)


def _kinds(outcomes: Sequence[StorageFault | None]) -> list[Fault | None]:
    return [None if outcome is None else outcome.fault for outcome in outcomes]
