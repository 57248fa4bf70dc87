"""The NVMe tier behind a node that serves already: found, or failed, and nobody left waiting."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.config import Nvme
from tiercache.core import commands, events
from tiercache.core.limits import Limits
from tiercache.core.machine import Machine
from tiercache.errors import ConfigError, Fault, StorageFault
from tiercache.runtime.disk import FOUND_BATCH, Disk
from tiercache.runtime.executor import Executor
from tiercache.runtime.node import Node
from tiercache.runtime.telemetry import Tally
from tiercache.testing.objects import row
from tiercache.tiers import nvme
from tiercache.tiers.base import Found
from tiercache.tiers.memory import MemoryArena
from tiercache.tiers.nvme import NvmeTier

WAIT_S = 10.0
MIB = 1024 * 1024
OBJECTS = FOUND_BATCH + 5


class Rig:
    """A node that serves, and the disk that comes up behind it."""

    def __init__(self, path: Path) -> None:
        loop = asyncio.get_running_loop()
        self.settings = Nvme(path=str(path), cap_bytes=64 * MIB, segment_bytes=MIB)
        self.disk = Disk(self.settings)
        self.machine = Machine(
            Limits(host_segments=(MIB,), nvme_bytes=32 * MIB, nvme_segment_bytes=MIB)
        )
        self.replies: list[commands.Reply] = []
        self.news = asyncio.Event()
        self.node = Node(
            loop,
            self.machine,
            Tally(),
            reply=self.hear,
            replied=lambda: None,
            broken=pytest.fail,
        )
        self.executor = Executor(
            loop, MemoryArena([MIB]), self.node.hear, write_bytes_per_s=MIB, read_threads=1
        )
        self.node.execute_with(self.executor)

    def store(self) -> None:
        """Leave objects of an earlier start on the disk."""
        settings = self.settings
        tier = NvmeTier(
            Path(settings.path), cap_bytes=settings.cap_bytes, segment_bytes=settings.segment_bytes
        )
        assert tier.write(row(range(OBJECTS))) == [None] * OBJECTS
        tier.close()

    def hear(self, reply: commands.Reply) -> None:
        self.replies.append(reply)
        self.news.set()

    def ask(self, event: events.Event) -> None:
        self.news.clear()
        self.node.hear(event)

    async def close(self) -> None:
        self.node.close()
        assert self.executor.close(WAIT_S)
        assert await self.disk.close(WAIT_S)


async def test_without_a_path_there_is_none(tmp_path: Path) -> None:
    assert Disk(Nvme()).state == "off"
    assert Disk(Nvme(path=str(tmp_path))).state == "opening"


async def test_what_an_earlier_start_stored_is_found(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "nvme")
    rig.store()
    await rig.disk.start(rig.node, rig.executor)
    assert (rig.disk.state, rig.disk.found) == ("ready", OBJECTS)
    assert rig.machine.gauges()["objects"]["nvme"] == OBJECTS
    await rig.close()


async def test_a_directory_that_is_anothers_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "notes.txt").write_text("mine")
    rig = Rig(tmp_path / "nvme")
    with pytest.raises(ConfigError, match="is not empty"):
        await rig.disk.start(rig.node, rig.executor)
    await rig.close()


async def test_a_device_that_cannot_be_opened_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageFault(Fault.IO, "gone")

    monkeypatch.setattr(nvme, "NvmeTier", fail)
    rig = Rig(tmp_path / "nvme")
    rig.ask(events.ClearAsked(1, 1, ""))
    assert rig.replies == [], "what is on the disk is not known yet"
    await rig.disk.start(rig.node, rig.executor)
    assert rig.disk.state == "failed: io: gone"
    assert [reply.body for reply in rig.replies] == [commands.Evicted(0, 0, 0, "nvme")]
    assert rig.machine.counters["nvme_faults"]["io"] == 1
    assert not rig.executor.busy()
    await rig.close()


async def test_a_scan_that_breaks_off_leaves_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(NvmeTier):
        def scan(self, batch: int) -> Iterator[list[Found]]:
            yield next(super().scan(batch))
            raise StorageFault(Fault.IO, "gone")

    monkeypatch.setattr(nvme, "NvmeTier", Breaking)
    rig = Rig(tmp_path / "nvme")
    rig.store()
    rig.ask(events.ClearAsked(1, 1, "ffff"))
    await rig.disk.start(rig.node, rig.executor)
    assert (rig.disk.state, rig.disk.found) == ("failed: io: gone", FOUND_BATCH)
    assert [reply.body for reply in rig.replies] == [commands.Evicted(0, 0, 0, "nvme")]
    rig.ask(events.VerifyAsked(1, 2, 0, OBJECTS))
    await asyncio.wait_for(rig.news.wait(), WAIT_S)
    assert rig.replies[1].body == commands.Verified(FOUND_BATCH, FOUND_BATCH * 4091, [], 0)
    await rig.close()
