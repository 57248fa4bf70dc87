"""A process that works on an NVMe tier until somebody stops it. Run by test_nvme_faults.py.

    nvme_child.py load PATH START [CRASH_POINT COUNT]    write, forget and reclaim for long
    nvme_child.py full PATH                              what a full disk does, on a small filesystem
    nvme_child.py faulty PATH SYNC                       a few writes under strace's faults

`load` says what it does on standard output, one line each: `+ n segment offset` once object n is
acknowledged, `- n` before it may go, `=` after each scan.
"""

import mmap
import random
import sys
from pathlib import Path

from tiercache.errors import Fault
from tiercache.state import Kind, Label, Layout, Part, Tensor
from tiercache.testing.objects import NAMESPACE, content, faults, found_in, read_of, row, write_of
from tiercache.tiers import crash
from tiercache.tiers.base import Write
from tiercache.tiers.nvme import NvmeTier

MIB = 1 << 20
PAGE = 4096
CAP_BYTES = 64 * MIB
SEGMENT_BYTES = 512 * 1024
SEGMENTS_LIVE_MAX = 6
BATCHES_MAX = 3000
"""Where a child that nobody stops ends by itself."""
LAYOUT = Layout((Part("kv", Kind.KV, None, 64, 1, (Tensor("k", "bfloat16", (4,), ("dim",)),)),), 64)


def tier_at(path: Path, *, sync: bool = False) -> NvmeTier:
    return NvmeTier(path, cap_bytes=CAP_BYTES, segment_bytes=SEGMENT_BYTES, sync=sync)


def payload(number: int) -> bytes:
    """The bytes of object `number`: anybody can tell them."""
    return content(number, random.Random(number).choice([100, PAGE, 3 * PAGE + 1, 20 * PAGE]))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Load:
    """Fills segments and drops the oldest, like the core."""

    def __init__(self, tier: NvmeTier, start: int) -> None:
        self.tier = tier
        self.dice = random.Random(start)
        self.next_object = start
        self.segment = max(tier.segment_bytes(), default=0) + 1
        self.offset = 0
        self.live: dict[int, list[int]] = {number: [] for number in sorted(tier.segment_bytes())}

    def run(self) -> None:
        for _ in range(BATCHES_MAX):
            batch = [self.one() for _ in range(self.dice.randint(1, 6))]
            assert self.tier.write(batch) == [None] * len(batch)
            for write in batch:
                number = write.record.start // 64
                say("+", number, write.extent.segment, write.extent.offset)
                self.live[write.extent.segment].append(number)
            if self.dice.random() < 0.2:
                self.forget_one()
            while len(self.live) > SEGMENTS_LIVE_MAX:
                self.drop_oldest()

    def one(self) -> Write:
        number = self.next_object
        self.next_object += 1
        write = write_of(number, payload(number), self.segment, self.offset)
        if self.offset + write.extent.size > SEGMENT_BYTES:
            self.segment += 1
            write = write_of(number, payload(number), self.segment, 0)
        self.offset = write.extent.offset + write.extent.size
        self.live.setdefault(self.segment, [])
        return write

    def forget_one(self) -> None:
        number = self.dice.choice([n for numbers in self.live.values() for n in numbers])
        say("-", number)
        assert self.tier.forget([write_of(number, b"", 0, 0).record.key]) is None
        for numbers in self.live.values():
            if number in numbers:
                numbers.remove(number)

    def drop_oldest(self) -> None:
        segment = min(self.live)
        numbers = self.live.pop(segment)
        for number in numbers:
            say("-", number)
        say("- segment", segment)
        keys = [write_of(number, b"", 0, 0).record.key for number in numbers]
        assert self.tier.reclaim([segment], keys) is None


def load(path: Path, start: int) -> None:
    tier = tier_at(path)
    found = found_in(tier, batch=5)
    say("=", len(found))
    assert tier.remember(Label(NAMESPACE, "model", "w", "t", "", ""), LAYOUT) is None
    job = Load(tier, start)
    for each in found.values():
        job.live[each.extent.segment].append(each.record.start // 64)
    job.run()


def full(path: Path) -> None:
    """Every step is checked here: a failing assertion is the exit status."""
    tier = tier_at(path)
    first = row(range(20), segment=1)
    assert tier.write(first) == [None] * 20
    last = full_of_segments(tier, first)
    say("segments: writes stopped and went on")
    filler = path.parent / "filler"
    added = full_for_the_index(tier, first, filler)
    say("index: writes stopped and went on")
    fill(filler)
    tier.close()
    full_at_start(path, filler, [*first, *last, *added])
    say("start: reads at once, writes went on")


def full_of_segments(tier: NvmeTier, first: list[Write]) -> list[Write]:
    """The disk ends before the cap does: no new segment can be had."""
    segment = 1
    while True:
        segment += 1
        batch = row(range(20 * segment, 20 * segment + 20), segment=segment)
        outcomes = faults(tier.write(batch))
        if outcomes != [None] * 20:
            break
    assert outcomes == [Fault.NO_SPACE] * 20, outcomes
    assert segment > 5
    assert segment not in tier.segment_bytes()
    assert tier.read([read_of(write) for write in first]) == [None] * 20
    victims = row(range(40, 60), segment=2)
    assert tier.reclaim([2], [write.record.key for write in victims]) is None
    assert tier.write(batch) == [None] * 20
    return batch


def full_for_the_index(tier: NvmeTier, first: list[Write], filler: Path) -> list[Write]:
    """The segment has its space, the index has not."""
    fill(filler)
    added: list[Write] = []
    while True:
        at = 20 + len(added)
        write = write_of(10_000 + at, content(at, PAGE), 1, at * PAGE)
        outcomes = faults(tier.write([write]))
        if outcomes != [None]:
            break
        added.append(write)
        fill(filler)  # The index has set some aside; that runs out.
    assert outcomes == [Fault.NO_SPACE]
    assert faults(tier.write([write])) == [Fault.NO_SPACE]
    reads = [read_of(each) for each in [*first, *added]]
    assert tier.read(reads) == [None] * len(reads)
    filler.unlink()
    assert tier.write([write]) == [None]
    return [*added, write]


def full_at_start(path: Path, filler: Path, acknowledged: list[Write]) -> None:
    """The node starts, serves what it has, and writes again when there is space."""
    tier = tier_at(path)
    fill(filler)
    found = found_in(tier)
    assert found.keys() >= {write.record.key for write in acknowledged}
    assert 2 not in {each.extent.segment for each in found.values()}
    assert tier.read([read_of(each) for each in found.values()]) == [None] * len(found)
    late = write_of(20_000, b"late", 1, 100 * PAGE)
    while tier.write([late]) == [None]:
        fill(filler)
    assert faults(tier.write([late])) == [Fault.NO_SPACE]
    filler.unlink()
    assert tier.write([late]) == [None]
    tier.close()
    tier = tier_at(path)
    assert found_in(tier).keys() == found.keys() | {late.record.key}
    tier.close()


def fill(path: Path) -> None:
    """Take every last page."""
    with path.open("ab", buffering=0) as file:
        for step in (MIB, PAGE):
            try:
                while file.write(bytes(step)) == step:
                    pass
            except OSError:
                continue


def faulty(path: Path, *, sync: bool) -> None:
    """Ten batches into one segment; says how each went, and what a restart and reads make of it."""
    tier = tier_at(path, sync=sync)
    say("ready")
    writes = []
    for number in range(10):
        pair = (2 * number, 2 * number + 1)
        batch = [aligned(write_of(at, content(at, PAGE), 1, at * PAGE)) for at in pair]
        writes += batch
        say("write", *(fault.value if fault else "ok" for fault in faults(tier.write(batch))))
    say("read", *(fault.value if fault else "ok" for fault in reading(tier, writes)))
    tier.close()
    tier = tier_at(path)
    found = found_in(tier)
    say("found", *(int(write.record.key in found) for write in writes))
    tier.close()


def aligned(write: Write) -> Write:
    """As from an arena, so that one batch is one system call."""
    source = memoryview(mmap.mmap(-1, write.extent.size))
    source[:] = write.source
    return write._replace(source=source)


def reading(tier: NvmeTier, writes: list[Write]) -> list[Fault | None]:
    return [fault for write in writes for fault in faults(tier.read([read_of(write)]))]


def main(arguments: list[str]) -> None:
    match arguments:
        case ["load", path, start]:
            load(Path(path), int(start))
        case ["load", path, start, point, count]:
            crash.arm(point, int(count))
            load(Path(path), int(start))
        case ["full", path]:
            full(Path(path))
        case ["faulty", path, sync]:
            faulty(Path(path), sync=sync == "sync")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
