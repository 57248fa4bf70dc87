"""The NVMe tier against real trouble: SIGKILL, a full disk, a disk that fails or lies."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from tiercache.errors import ConfigError
from tiercache.state import Extent, Key, Record, Shard
from tiercache.testing.objects import NAMESPACE, faults, found_in, read_of, write_of
from tiercache.tiers.crash import CRASH_POINTS
from tiercache.tiers.nvme import NvmeTier, index_reserve_bytes
from tiercache.tiers.nvme_entry import encode_entry
from tiercache.tiers.nvme_index import Index
from tiercache.tiers.segments import segment_name

CHILD = Path(__file__).with_name("nvme_child.py")
ROOT = CHILD.parents[2]
MIB = 1 << 20
PAGE = 4096
CAP_BYTES = 64 * MIB
SEGMENT_BYTES = 512 * 1024
CHILD_S_MAX = 60

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "nvme"
    shutil.rmtree(tmp_path)  # Many megabytes that nobody looks at again.


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(CHILD), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def tier_at(path: Path) -> NvmeTier:
    return NvmeTier(path, cap_bytes=CAP_BYTES, segment_bytes=SEGMENT_BYTES)


def payload(number: int) -> bytes:
    size = random.Random(number).choice([100, PAGE, 3 * PAGE + 1, 20 * PAGE])
    return random.Random(number).randbytes(size)


# --- SIGKILL


@dataclass
class Told:
    """What children said of their tier: which objects must be there, which may be gone."""

    acknowledged: dict[int, Extent] = field(default_factory=dict)
    lines: int = 0
    scanned: int = 0

    def hear(self, line: str) -> None:
        self.lines += 1
        match line.split():
            case ["+", number, segment, offset]:
                size = write_of(int(number), payload(int(number)), 0, 0).extent.size
                self.acknowledged[int(number)] = Extent(int(segment), int(offset), size)
            case ["-", number]:
                self.acknowledged.pop(int(number), None)
            case ["=", _]:
                self.scanned += 1


def live_until_killed(path: Path, told: Told, start: int, *, lines: int, crash: str = "") -> None:
    """Run a child until it kills itself at `crash`, or kill it after so many lines."""
    arguments = crash.split() if crash else []
    with subprocess.Popen(
        command("load", path, start, *arguments),
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as child:
        assert child.stdout is not None
        for count, line in enumerate(child.stdout):
            told.hear(line)
            if not crash and count + 1 == lines:
                child.kill()
        assert child.wait(CHILD_S_MAX) == -signal.SIGKILL


def check_after_death(path: Path, told: Told) -> None:
    """Everything acknowledged is there, everything there is right, nothing else is left."""
    start = time.monotonic()
    tier = tier_at(path)
    found = found_in(tier)
    assert time.monotonic() - start < 5
    for number, extent in told.acknowledged.items():
        write = write_of(number, payload(number), extent.segment, extent.offset)
        there = found[write.record.key]
        assert there.record.checksum == xxhash.xxh3_128_digest(payload(number))
        assert there.extent == extent
    reads = [read_of(each) for each in found.values()]
    assert tier.read(reads) == [None] * len(reads)
    for read in reads:
        assert read.target[: read.record.nbytes] == payload(read.record.start // 64)
    assert tier.segment_bytes().keys() == {each.extent.segment for each in found.values()}
    files = {file.name for file in (path / "segments").iterdir()}
    assert files == set(map(segment_name, tier.segment_bytes()))
    assert not tier.recovery.rebuilt
    tier.close()


@pytest.mark.parametrize("point", [p for p in CRASH_POINTS if p.startswith("nvme.")])
def test_sigkill_at_each_crash_point_loses_nothing_acknowledged(path: Path, point: str) -> None:
    told = Told()
    live_until_killed(path, told, 0, lines=60)
    (path / "segments" / segment_name(0)).write_bytes(b"an orphan")
    once = point in {"nvme.owned", "nvme.after_remember", "nvme.after_orphan_removed"}
    live_until_killed(path, told, 100_000, lines=0, crash=f"{point} {1 if once else 3}")
    check_after_death(path, told)
    live_until_killed(path, told, 200_000, lines=40)
    assert told.scanned >= 2
    check_after_death(path, told)


def test_sigkill_at_random_moments_loses_nothing_acknowledged(path: Path) -> None:
    told = Told()
    dice = random.Random(11)
    for turn in range(12):
        live_until_killed(path, told, 100_000 * turn, lines=dice.randint(1, 400))
        check_after_death(path, told)
    assert told.lines > 1000


def test_a_second_process_is_refused_until_the_first_is_dead(path: Path) -> None:
    with subprocess.Popen(
        command("load", path, 0), stdout=subprocess.PIPE, text=True, env=environment()
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(ConfigError, match=f"{path} is in use by process {child.pid}"):
            tier_at(path)
        child.kill()
        child.stdout.read()
    tier_at(path).close()


# --- a full disk


def test_a_full_disk_stops_writes_and_nothing_else(path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    mount = f"mount -t tmpfs -o size=24m tmpfs '{path.parent}' || exit 77; exec \"$@\""
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", *command("full", path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_S_MAX,
        env=environment(),
    )
    if result.returncode == 77 or "unshare failed" in result.stderr:
        pytest.skip(f"no small filesystem can be mounted here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "segments: writes stopped and went on",
        "index: writes stopped and went on",
        "start: reads at once, writes went on",
    ]


# --- a disk that fails or lies


def under_faults(path: Path, *options: str, sync: str = "nosync") -> dict[str, list[str]]:
    """Run ten batches of two objects under strace; return what was written, read and found."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    trace = path.parent / "trace"
    result = subprocess.run(
        [strace, "-f", "-qq", "-o", trace, *options, *command("faulty", path, sync)],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_S_MAX,
        env=environment(),
    )
    if "ptrace" in result.stderr:
        pytest.skip(f"strace may not trace here: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    assert "INJECTED" in trace.read_text()
    lines = [line.split() for line in result.stdout.splitlines()]
    written = [word for line in lines if line[0] == "write" for word in line[1:]]
    rest = {line[0]: line[1:] for line in lines if line[0] != "write"}
    return {"write": written, **rest}


def at(spoiled: dict[int, str], fine: str) -> list[str]:
    return [spoiled.get(number, fine) for number in range(20)]


MOVES = ("-e", "trace=pwritev,pwritev2,preadv,preadv2")


def test_an_error_while_writing_is_that_batchs_alone(path: Path) -> None:
    said = under_faults(path, *MOVES, "-e", "inject=pwritev,pwritev2:error=EIO:when=3")
    assert said["write"] == at({4: "io", 5: "io"}, "ok")
    assert said["read"] == at({4: "damaged", 5: "damaged"}, "ok")
    assert said["found"] == at({4: "0", 5: "0"}, "1")


def test_no_space_while_writing_is_no_space(path: Path) -> None:
    said = under_faults(path, *MOVES, "-e", "inject=pwritev,pwritev2:error=ENOSPC:when=1")
    assert said["write"] == at({0: "no_space", 1: "no_space"}, "ok")
    assert said["found"] == at({0: "0", 1: "0"}, "1")


def test_a_lost_write_is_found_by_its_checksum(path: Path) -> None:
    said = under_faults(path, *MOVES, "-e", "inject=pwritev,pwritev2:retval=8192:when=3")
    assert said["write"] == at({}, "ok")
    assert said["read"] == at({4: "damaged", 5: "damaged"}, "ok")


def test_a_short_write_goes_on(path: Path) -> None:
    said = under_faults(path, *MOVES, "-e", "inject=pwritev,pwritev2:retval=4096:when=3")
    assert said["write"] == at({}, "ok")
    assert said["read"] == at({4: "damaged"}, "ok")  # Its page was "written" by the injection.


def test_an_error_while_reading_is_that_objects_alone(path: Path) -> None:
    said = under_faults(path, *MOVES, "-e", "inject=preadv,preadv2:error=EIO:when=4")
    assert said["write"] == at({}, "ok")
    assert said["read"] == at({3: "io"}, "ok")


def test_direct_io_that_is_refused_goes_through_the_cache(path: Path) -> None:
    said = under_faults(path, *MOVES, "-e", "inject=pwritev,pwritev2:error=EINVAL:when=1")
    assert (said["write"], said["read"]) == (at({}, "ok"), at({}, "ok"))


def test_an_error_in_sync_is_that_batchs_alone(path: Path) -> None:
    segment = path / "segments" / segment_name(1)
    said = under_faults(
        path,
        *("-e", "trace=fdatasync", "-P", str(segment)),
        *("-e", "inject=fdatasync:error=EIO:when=4"),
        sync="sync",
    )
    assert said["write"] == at({6: "io", 7: "io"}, "ok")
    assert said["found"] == at({6: "0", 7: "0"}, "1")


@pytest.mark.parametrize("call", ["write", "fdatasync"])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_an_error_in_the_index_is_mended_by_the_next_write(
    path: Path, call: str, error: str
) -> None:
    log = path / "index" / "000004.log"
    said = under_faults(
        path,
        *("-e", f"trace={call}", "-P", str(log)),
        *("-e", f"inject={call}:error={error}:when=4"),
        sync="sync",
    )
    fault = "io" if error == "EIO" else "no_space"
    assert said["write"] == at({6: fault, 7: fault}, "ok")
    # The bytes are there; whether the entry is depends on how far RocksDB came.
    assert said["read"] == at({}, "ok")
    assert [bit for nth, bit in enumerate(said["found"]) if nth not in {6, 7}] == ["1"] * 18


# --- many objects


def test_a_hundred_thousand_objects_are_open_at_once(path: Path) -> None:
    """Ready means: lookups and reads can begin. The scan comes after, in pages."""
    count, segment_bytes = 100_000, 64 * MIB
    cap = 2048 * MIB
    tier = NvmeTier(path, cap_bytes=cap, segment_bytes=segment_bytes)
    tier.close()
    for segment in range(1, 1 + -(-count * PAGE // segment_bytes)):
        with (path / "segments" / segment_name(segment)).open("wb") as file:
            file.truncate(segment_bytes)
    index = Index(path / "index", index_reserve_bytes(cap), sync=False)
    dice = random.Random(5)
    per_segment = segment_bytes // PAGE
    for start in range(0, count, 1000):
        entries = []
        for number in range(start, start + 1000):
            key = Key(NAMESPACE, "kv", Shard(0, 1), "native", dice.randbytes(32))
            record = Record(key, 0, 64, PAGE, dice.randbytes(16), "engine", 1.0, dice.randbytes(32))
            extent = Extent(1 + number // per_segment, number % per_segment * PAGE, PAGE)
            entries.append(encode_entry(record, extent, 1))
        index.write(entries)
    index.close()
    begun = time.monotonic()
    tier = NvmeTier(path, cap_bytes=cap, segment_bytes=segment_bytes)
    assert tier.namespaces() == []
    assert len(tier.segment_bytes()) == 7
    ready_s = time.monotonic() - begun
    assert sum(map(len, tier.scan(4096))) == count
    tier.close()
    assert ready_s < 1


def test_an_object_behind_the_scan_can_be_read_before_it(path: Path) -> None:
    tier = tier_at(path)
    write = write_of(1, b"state", 1, 0)
    tier.write([write])
    tier.close()
    tier = tier_at(path)
    assert faults(tier.read([read_of(write)])) == [None]
    tier.close()
