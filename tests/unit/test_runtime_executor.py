"""What the core commands is done, in the right order, and its outcome comes back."""

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence

import pytest
from xxhash import xxh3_128_digest

from tiercache.core import commands, events
from tiercache.errors import Fault, StorageFault
from tiercache.runtime import executor as module
from tiercache.runtime.executor import SEAL_INLINE_BYTES_MAX, STEP_BYTES_MAX, Executor, split
from tiercache.state import Extent, Key, Kind, Label, Layout, Part, Record, Shard, Tensor
from tiercache.tiers.base import Tier, Write
from tiercache.tiers.memory import MemoryArena, MemoryTier
from tiercache.tiers.wrap import Wrapped

WAIT_S = 10.0
PAGE = 4096
MIB = 1024 * 1024
DIGEST = bytes(32)
LAYOUT = Layout(
    (Part("kv", Kind.KV, None, 4, 1, (Tensor("k", "float16", (8,), ("dim",)),)),), block_tokens=4
)


class Rig:
    """An executor, its arena and the outcomes it delivers."""

    def __init__(self, tier: Tier | None = None, *, bytes_per_s: int = 1 << 40) -> None:
        self.news: asyncio.Queue[events.Event] = asyncio.Queue()
        self.arena = MemoryArena([16 * MIB])
        self.executor = Executor(
            asyncio.get_running_loop(),
            self.arena,
            self.news.put_nowait,
            write_bytes_per_s=bytes_per_s,
            read_threads=2,
        )
        if tier is not None:
            self.executor.use(tier)

    async def outcome(self) -> events.Event:
        return await asyncio.wait_for(self.news.get(), WAIT_S)

    def put(self, content: bytes, offset: int) -> tuple[Record, Extent]:
        """Place bytes in the arena; return their record and where they are."""
        extent = Extent(0, offset, -(-len(content) // PAGE) * PAGE)
        view = self.arena.view(extent)
        view[: len(content)] = content
        view[len(content) :] = bytes(len(view) - len(content))
        return record(content, offset), extent

    def close(self) -> None:
        assert self.executor.close(WAIT_S)


def record(content: bytes, number: int) -> Record:
    key = Key(DIGEST, "kv", Shard(0, 1), "native", number.to_bytes(32, "big"))
    return Record(key, 0, 4, len(content), xxh3_128_digest(content), "w", 1.0)


async def test_a_small_seal_is_done_at_once() -> None:
    rig = Rig()
    _, extent = rig.put(b"a" * 5000, 0)
    outcome = rig.executor.execute(commands.Seal(3, [(extent, 5000)]))
    assert outcome == events.Sealed(3, [xxh3_128_digest(b"a" * 5000)])
    assert bytes(rig.arena.view(extent)[:5000]) == b"a" * 5000
    rig.close()


async def test_a_large_seal_is_done_beside_the_loop_in_the_order_given() -> None:
    rig = Rig()
    contents = [bytes([number]) * (2 * MIB - number) for number in range(5)]
    objects = []
    for number, content in enumerate(contents):
        _, extent = rig.put(content, number * 2 * MIB)
        objects.append((extent, len(content)))
    assert sum(size for _, size in objects) > max(SEAL_INLINE_BYTES_MAX, STEP_BYTES_MAX)
    assert rig.executor.execute(commands.Seal(9, objects)) is None
    assert await rig.outcome() == events.Sealed(9, [xxh3_128_digest(each) for each in contents])
    rig.close()


async def test_objects_go_to_the_tier_and_come_back() -> None:
    tier = MemoryTier()
    rig = Rig(tier)
    one, at_one = rig.put(b"a" * 9000, 0)
    two, at_two = rig.put(b"b" * PAGE, 65536)
    to_one, to_two = Extent(4, 0, at_one.size), Extent(4, at_one.size, PAGE)
    stored = commands.Store(1, [(one, at_one, to_one), (two, at_two, to_two)])
    assert rig.executor.execute(stored) is None
    assert await rig.outcome() == events.Stored(1, [None, None])
    back_one, back_two = Extent(0, 4 * MIB, at_one.size), Extent(0, 5 * MIB, PAGE)
    rig.executor.execute(commands.Fill(2, [(two, to_two, back_two), (one, to_one, back_one)]))
    assert await rig.outcome() == events.Filled(2, [None, None])
    assert bytes(rig.arena.view(back_one)[:9000]) == b"a" * 9000
    assert bytes(rig.arena.view(back_two)) == b"b" * PAGE
    rig.close()


async def test_large_fills_are_split_and_answered_once() -> None:
    tier = MemoryTier()
    rig = Rig(tier)
    objects = []
    for number in range(4):
        label, source = rig.put(bytes([number]) * (2 * MIB), number * 2 * MIB)
        objects.append((label, source, Extent(number, 0, source.size)))
    rig.executor.execute(commands.Store(1, objects))
    assert await rig.outcome() == events.Stored(1, [None] * 4)
    tier.store.segments[2][77] ^= 1
    del tier.store.segments[3]
    fill = [(label, target, source) for label, source, target in objects]
    rig.executor.execute(commands.Fill(2, fill))
    expected = events.Filled(2, [None, None, Fault.DAMAGED, Fault.MISSING])
    assert await rig.outcome() == expected
    assert rig.news.empty()
    rig.close()


async def test_copies_are_checked_where_they_are() -> None:
    tier = MemoryTier()
    rig = Rig(tier)
    good, at_good = rig.put(b"a" * 9000, 0)
    bad, at_bad = rig.put(b"b" * 9000, 65536)
    stored = [(good, at_good, Extent(1, 0, at_good.size)), (bad, at_bad, Extent(2, 0, at_bad.size))]
    rig.executor.execute(commands.Store(1, stored))
    await rig.outcome()
    rig.arena.view(at_bad)[0] ^= 1
    tier.store.segments[2][0] ^= 1
    before = bytes(rig.arena.view(at_good))
    rig.executor.execute(
        commands.Check(
            2,
            [
                (bad, "nvme", Extent(2, 0, at_bad.size)),
                (good, "host", at_good),
                (bad, "host", at_bad),
                (good, "nvme", Extent(1, 0, at_good.size)),
            ],
        )
    )
    assert await rig.outcome() == events.Checked(2, [Fault.DAMAGED, None, Fault.DAMAGED, None])
    assert bytes(rig.arena.view(at_good)) == before, "checking changes nothing"
    rig.executor.execute(commands.Check(3, [(good, "host", at_good)]))
    assert await rig.outcome() == events.Checked(3, [None])
    rig.close()


class Noted(Wrapped):
    """A tier that notes what changes it, and fails what it is told to."""

    def __init__(self, inner: Tier, failing: frozenset[str] = frozenset()) -> None:
        super().__init__(inner)
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self._failing = failing

    def note(self, name: str) -> StorageFault | None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        return StorageFault(Fault.IO, name) if name in self._failing else None

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        fault = self.note("write")
        return [fault] * len(batch) if fault else super().write(batch)

    def forget(self, keys: Iterable[Key]) -> StorageFault | None:
        return self.note("forget") or super().forget(keys)

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> StorageFault | None:
        return self.note("reclaim") or super().reclaim(segments, keys)


async def test_changes_are_made_in_order_by_one_thread() -> None:
    tier = Noted(MemoryTier())
    rig = Rig(tier)
    label, source = rig.put(b"a" * 100, 0)
    for job in range(50):
        rig.executor.execute(commands.Store(job, [(label, source, Extent(1, 0, PAGE))]))
        rig.executor.execute(commands.Forget([label.key]))
        rig.executor.execute(commands.Reclaim([1], [label.key]))
    for job in range(50):
        assert await rig.outcome() == events.Stored(job, [None])
    rig.close()
    assert tier.calls == ["write", "forget", "reclaim"] * 50
    assert len(tier.threads) == 1
    assert not rig.executor.busy()


async def test_failures_are_told() -> None:
    rig = Rig(Noted(MemoryTier(), frozenset({"write", "forget", "reclaim"})))
    label, source = rig.put(b"a" * 100, 0)
    rig.executor.execute(commands.Store(1, [(label, source, Extent(1, 0, PAGE))]))
    rig.executor.execute(commands.Forget([label.key]))
    rig.executor.execute(commands.Reclaim([1], []))
    rig.executor.execute(commands.Wipe(2, [label.key]))
    assert await rig.outcome() == events.Stored(1, [Fault.IO])
    assert await rig.outcome() == events.TierFailed(Fault.IO)
    assert await rig.outcome() == events.TierFailed(Fault.IO)
    assert await rig.outcome() == events.Wiped(2, Fault.IO)
    rig.close()


async def test_wiping_and_remembering_reach_the_tier() -> None:
    tier = MemoryTier()
    rig = Rig(tier)
    label, source = rig.put(b"a" * 100, 0)
    rig.executor.execute(commands.Store(1, [(label, source, Extent(1, 0, PAGE))]))
    name = Label(DIGEST, "m", "w", "t", "", "-")
    rig.executor.execute(commands.Remember(name, LAYOUT))
    rig.executor.execute(commands.Wipe(2, [label.key]))
    assert await rig.outcome() == events.Stored(1, [None])
    assert await rig.outcome() == events.Wiped(2, None)
    assert tier.namespaces() == [(name, LAYOUT)]
    assert tier.store.objects == {}
    rig.close()


async def test_writes_keep_to_their_rate_until_told_to_hurry() -> None:
    rig = Rig(MemoryTier(), bytes_per_s=MIB)
    label, source = rig.put(b"a" * (64 * 1024), 0)
    started = time.monotonic()
    for job in range(5):
        rig.executor.execute(commands.Store(job, [(label, source, Extent(job, 0, source.size))]))
        await rig.outcome()
    assert time.monotonic() - started >= 4 * 64 / 1024, "the last one's debt is not waited for"
    rig.executor.hurry()
    started = time.monotonic()
    for job in range(100):
        rig.executor.execute(commands.Store(job, [(label, source, Extent(job, 0, source.size))]))
    assert rig.executor.busy()
    for _ in range(100):
        await rig.outcome()
    assert time.monotonic() - started < 6
    rig.close()


async def test_an_outcome_that_was_not_heard_keeps_it_busy() -> None:
    rig = Rig(MemoryTier())
    label, source = rig.put(b"a" * 100, 0)
    rig.executor.execute(commands.Store(1, [(label, source, Extent(1, 0, PAGE))]))
    rig.close()  # The writer has ended, and the loop did not run since.
    assert rig.executor.busy()
    await rig.outcome()
    assert not rig.executor.busy()


async def test_changes_wait_for_the_tier() -> None:
    rig = Rig()
    label, source = rig.put(b"a" * 100, 0)
    rig.executor.execute(commands.Store(1, [(label, source, Extent(1, 0, PAGE))]))
    rig.executor.execute(commands.Wipe(2, [label.key]))
    assert not rig.executor.busy()
    tier = Noted(MemoryTier())
    rig.executor.use(tier)
    assert await rig.outcome() == events.Stored(1, [None])
    assert await rig.outcome() == events.Wiped(2, None)
    assert tier.calls == ["write", "forget"]
    rig.close()


class Broken(Wrapped):
    """A tier whose device fails every change."""

    fault = StorageFault(Fault.IO, "gone")

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        return [self.fault] * len(batch)

    def forget(self, keys: Iterable[Key]) -> StorageFault:
        del keys
        return self.fault

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> StorageFault:
        del segments, keys
        return self.fault

    def remember(self, label: Label, layout: Layout) -> StorageFault:
        del label, layout
        return self.fault


async def test_every_change_that_fails_is_reported() -> None:
    rig = Rig(Broken(MemoryTier()))
    label, source = rig.put(b"a" * 100, 0)
    rig.executor.execute(commands.Store(1, [(label, source, Extent(1, 0, PAGE))]))
    rig.executor.execute(commands.Wipe(2, [label.key]))
    rig.executor.execute(commands.Forget([label.key]))
    rig.executor.execute(commands.Reclaim([1], []))
    rig.executor.execute(commands.Remember(Label(DIGEST, "m", "w", "t", "", "-"), LAYOUT))
    assert await rig.outcome() == events.Stored(1, [Fault.IO])
    assert await rig.outcome() == events.Wiped(2, Fault.IO)
    for _ in range(3):
        assert await rig.outcome() == events.TierFailed(Fault.IO)
    rig.close()


async def test_reading_before_there_is_a_tier_is_a_bug() -> None:
    rig = Rig()
    label, source = rig.put(b"a" * 100, 0)
    for command in (
        commands.Fill(1, [(label, Extent(1, 0, PAGE), source)]),
        commands.Check(1, [(label, "nvme", Extent(1, 0, PAGE))]),
    ):
        with pytest.raises(AssertionError):
            rig.executor.execute(command)
    rig.executor.use(MemoryTier())
    with pytest.raises(AssertionError):
        rig.executor.use(MemoryTier())
    rig.close()


def test_work_is_split_by_bytes_and_every_item_is_in_one_part() -> None:
    step = STEP_BYTES_MAX
    assert split([1, 2, 3]) == [(0, 3)]
    assert split([step, 1, step - 1, 1]) == [(0, 1), (1, 3), (3, 4)]
    assert split([3 * step, 3 * step]) == [(0, 1), (1, 2)]
    assert split([1, 3 * step, 1]) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("pages", [2, 10])
async def test_what_lies_behind_an_object_is_zeroed_before_it_is_stored(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    monkeypatch.setattr(module, "_ZEROS", memoryview(bytes(PAGE)))
    rig = Rig()
    record, _ = rig.put(b"a" * 5000, 0)
    extent = Extent(0, 0, pages * PAGE)
    rig.arena.view(extent)[5000:] = b"x" * (extent.size - 5000)
    rig.executor.use(MemoryTier())
    rig.executor.execute(commands.Store(1, [(record, extent, Extent(1, 0, extent.size))]))
    assert await rig.outcome() == events.Stored(1, [None])
    assert bytes(rig.arena.view(extent)) == b"a" * 5000 + bytes(extent.size - 5000)
    rig.close()
