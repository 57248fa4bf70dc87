"""The NVMe tier behind a real node: what is on disk, when, and what happens when the disk fails."""

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.cli.admin import Admin
from tiercache.testing import toy
from tiercache.testing.nodes import (
    START_S,
    Launcher,
    NewClient,
    NewNode,
    NodeProcess,
    Table,
    eventually,
)

EAGER: Table = {"write_back": "eager", "pause_s": 0.1}


def used_bytes(folder: Path) -> int:
    """Return the space that a folder takes, as `du` says."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # The index replaces its files.
            total += path.lstat().st_blocks * 512
    return total


def test_an_object_reaches_the_disk_without_further_traffic(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node(nvme=EAGER)
    node.start()
    client = new_client(node)
    toy.save(client, 1)
    segments = node.nvme / "segments"
    assert eventually(lambda: any(segments.glob("seg-*")), 1.0)
    assert not eventually(lambda: False, 0.2)  # Looking at the node would be traffic.
    node.kill()
    node.start()
    node.wait_scanned()
    again = new_client(node)
    assert toy.resumed(again, 1) == toy.TOKENS


def test_a_first_sight_writes_no_object_and_the_second_does(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node()
    node.start()
    client = new_client(node)
    for number in range(20):
        toy.is_put(client, number)
    assert node.gauge("objects", "nvme") == 0
    assert not any((node.nvme / "segments").glob("seg-*"))
    for _ in range(2):
        assert toy.resumed(client, 3) == toy.TOKENS
    assert eventually(lambda: node.gauge("objects", "nvme") == len(toy.state(toy.chain(3))))


def test_a_restart_finds_what_was_there(new_client: NewClient, new_node: NewNode) -> None:
    node = new_node(nvme=EAGER)
    node.start()
    client = new_client(node)
    assert all(toy.is_put(client, number) for number in range(30))
    before = [toy.resumed(client, number) for number in range(40)]
    written = node.counter("writeback_bytes")
    stored = node.gauge("objects", "nvme")
    assert node.stop() == 0
    node.start()
    node.wait_scanned()
    assert [toy.resumed(client, number) for number in range(40)] == before
    assert node.counter("lookups", "hit_nvme") == 30
    for number in range(30):
        toy.is_put(client, number)
    assert node.counter("writeback_bytes") == 0, "the same content is not written again"
    assert written > 0
    assert node.gauge("objects", "nvme") == stored


def test_clients_are_served_before_the_disk_was_looked_through(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node(nvme=EAGER, host={"bytes": "16MiB"})
    node.start()
    client = new_client(node)
    for number in range(60):
        toy.is_put(client, number)
    node.kill()
    node.start()
    assert client.plan("early", toy.chain(1)).reason
    toy.is_put(client, 2)
    node.wait_scanned()
    assert [toy.resumed(client, number) for number in range(60)] == [toy.TOKENS] * 60


def test_files_that_vanish_are_misses(new_client: NewClient, new_node: NewNode) -> None:
    node = new_node(nvme=EAGER)
    node.start()
    client = new_client(node)
    assert all(toy.is_put(client, number) for number in range(10))
    assert node.stop() == 0
    node.start()
    node.wait_scanned()
    for segment in (node.nvme / "segments").iterdir():
        segment.unlink()
    assert [toy.resumed(client, number) for number in range(10)] == [0] * 10
    assert node.counter("nvme_faults", "missing") + node.counter("damaged", "nvme") > 0
    assert toy.is_put(client, 3), "and can be stored anew"
    assert toy.resumed(client, 3) == toy.TOKENS


def test_damage_on_disk_is_a_miss_and_listed_by_verify(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node(nvme=EAGER)
    node.start()
    client = new_client(node)
    assert all(toy.is_put(client, number) for number in range(10))
    assert node.stop() == 0
    for segment in (node.nvme / "segments").iterdir():
        with segment.open("r+b") as file:
            for at in range(0, segment.stat().st_size, 8192):
                file.seek(at + 5)
                byte = file.read(1)
                file.seek(at + 5)
                file.write(bytes([byte[0] ^ 0x10]))
    node.start()
    node.wait_scanned()
    with Admin(str(node.socket), START_S) as admin:
        failed = [copy for page in admin.verify() for copy in page.failed]
        again = [copy for page in admin.verify() for copy in page.failed]
    assert len(failed) > 10
    assert {(tier, fault) for _, tier, fault in failed} == {("nvme", "damaged")}
    assert again == [], "what is damaged is not offered again"
    assert node.counter("damaged", "nvme") == len(failed)
    assert sum(toy.resumed(client, number) for number in range(10)) < 10 * toy.TOKENS


@pytest.mark.slow
def test_the_cap_is_a_cap(new_client: NewClient, new_node: NewNode) -> None:
    cap = 12 << 20
    node = new_node(nvme={**EAGER, "cap_bytes": cap, "segment_bytes": "1MiB"})
    node.start()
    client = new_client(node)
    largest = 0
    for number in range(900):
        toy.is_put(client, number)
        if number % 50 == 0:
            largest = max(largest, used_bytes(node.nvme))
    assert node.counter("evictions", "nvme") > 0
    assert largest <= cap + 16 * 1024
    assert toy.resumed(client, 899) == toy.TOKENS
    with Admin(str(node.socket), START_S) as admin:
        assert not [copy for page in admin.verify() for copy in page.failed]


def test_stopping_writes_what_is_on_its_way_first(new_client: NewClient, new_node: NewNode) -> None:
    node = new_node(nvme={**EAGER, "write_bytes_per_s": "1MiB"})
    node.start()
    node.wait_scanned()
    client = new_client(node)
    for number in range(120):  # At its rate this would take more than two seconds.
        toy.save(client, number)
    assert client.flush().waiting == 0
    began = time.monotonic()
    assert node.stop() == 0
    assert time.monotonic() - began < 5
    node.start()
    node.wait_scanned()
    assert [toy.resumed(client, number) for number in range(120)] == [toy.TOKENS] * 120


def test_clearing_lasts_however_early_it_comes(new_client: NewClient, new_node: NewNode) -> None:
    node = new_node(nvme=EAGER)
    node.start()
    client = new_client(node)
    assert all(toy.is_put(client, number) for number in range(20))
    node.kill()
    node.start()
    with Admin(str(node.socket), START_S) as admin:
        admin.clear("")  # The disk may not even be open yet.
    node.wait_scanned()
    again = new_client(node)
    assert [toy.resumed(again, number) for number in range(20)] == [0] * 20
    node.kill()
    node.start()
    node.wait_scanned()
    assert [toy.resumed(again, number) for number in range(20)] == [0] * 20


# --- a disk that is full


@pytest.fixture
def small_disk() -> Iterator[NodeProcess]:
    """A node whose disk has 24 MiB, of which a file takes most; seen through `/proc/<pid>/root`."""
    unshare = shutil.which("unshare")
    with tempfile.TemporaryDirectory(prefix="tc-") as folder:
        disk = Path(folder) / "disk"
        disk.mkdir()
        script = f'mount -t tmpfs -o size=24m tmpfs {disk} && exec "$@"'
        command = [unshare or "unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
        works = unshare and not subprocess.run([*command, "true"], check=False).returncode
        if not works:
            pytest.skip("needs unshare and mount in a user namespace")
        launcher = Launcher(command)
        try:
            nvme: Table = {**EAGER, "path": str(disk / "nvme"), "cap_bytes": "64MiB"}
            with NodeProcess(launcher, Path(folder), nvme=nvme) as node:
                node.start()
                yield node
        finally:
            launcher.close()


def test_a_full_disk_stops_writes_until_there_is_room(
    new_client: NewClient, small_disk: NodeProcess
) -> None:
    node = small_disk
    root = Path(f"/proc/{node.pid}/root{node.folder}/disk")
    client = new_client(node)
    assert toy.is_put(client, 0)
    ballast = root / "ballast"
    with ballast.open("wb") as file:
        file.write(bytes(max(0, shutil.disk_usage(root).free - (3 << 19))))
    numbers = iter(range(1, 400))
    assert eventually(lambda: toy.is_put(client, next(numbers)) is False)
    assert node.counter("nvme_faults", "no_space") > 0
    assert toy.resumed(client, 0) == toy.TOKENS, "reads go on"
    last = next(numbers)
    toy.is_put(client, last)
    assert toy.resumed(client, last) == toy.TOKENS, "and so does the cache, in memory"
    ballast.unlink()
    assert eventually(lambda: toy.is_put(client, next(numbers))), "writes resume by themselves"
