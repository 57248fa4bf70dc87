"""The index: pages, compare-and-delete, and rebuilding from what is left."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import rocksdict

from tiercache.errors import Fault, StorageFault
from tiercache.state import Extent, Key, Shard
from tiercache.testing.descriptors import open_descriptors
from tiercache.testing.objects import record_of
from tiercache.tiers import nvme_index as module
from tiercache.tiers.nvme_entry import decode_entry, encode_entry, object_key
from tiercache.tiers.nvme_index import Index

RESERVE = 4 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(folder: Path) -> Iterator[Index]:
    index = Index(folder, RESERVE, sync=False)
    yield index
    index.close()


def entries(count: int, prefix: bytes = b"o") -> list[tuple[bytes, bytes]]:
    dice = random.Random(count)
    return sorted((prefix + dice.randbytes(64), dice.randbytes(150)) for _ in range(count))


def everything(index: Index) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    while page := index.page(b"o", found[-1][0] if found else b"", 100):
        found += page
    return found


def test_pages_are_sorted_whole_and_of_one_prefix(index: Index) -> None:
    stored = entries(250)
    index.write([*stored, (b"n" + b"z" * 40, b"1"), (b"p", b"2"), (b"o", b"shortest")])
    assert everything(index) == [(b"o", b"shortest"), *stored]
    assert [len(index.page(b"o", stored[at][0], 100)) for at in (0, 149, 200, 249)] == [
        100,
        100,
        49,
        0,
    ]
    assert index.page(b"x", b"", 5) == []


def test_write_puts_and_deletes_in_one_step(index: Index) -> None:
    stored = entries(3)
    index.write(stored)
    index.write([(stored[0][0], b"new")], [stored[1][0], b"o unknown"])
    assert everything(index) == [(stored[0][0], b"new"), stored[2]]
    assert index.get(stored[1][0]) is None
    assert index.get(stored[0][0]) == b"new"


def test_discard_leaves_what_changed_meanwhile(index: Index) -> None:
    stored = entries(4)
    index.write(stored)
    index.write([(stored[1][0], b"new")], [stored[2][0]])
    index.discard(stored[:3])
    assert everything(index) == [(stored[1][0], b"new"), stored[3]]
    index.discard([])


def test_entries_survive_close_and_compaction(folder: Path) -> None:
    stored = entries(1000)
    index = Index(folder, RESERVE, sync=True)
    index.write(stored)
    index.write((), [key for key, _ in stored[::2]])
    index.compact()
    index.close()
    index.close()
    index = Index(folder, RESERVE, sync=True)
    assert everything(index) == stored[1::2]
    assert not index.rebuilt
    index.close()


def test_no_tables_are_left_open(folder: Path) -> None:
    before = open_descriptors()
    index = Index(folder, RESERVE, sync=False)
    for _ in range(20):
        index.write(entries(300))
    index.page(b"o", b"", 10)
    index.close()
    assert open_descriptors() == before


def tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.sst"))


def filled(folder: Path, count: int) -> list[tuple[bytes, bytes]]:
    """Write an index that lies in tables, not in the log."""
    stored = entries(count)
    index = Index(folder, RESERVE, sync=False)
    index.write(stored)
    index.compact()
    index.close()
    return stored


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_flipped_bit_costs_a_few_entries(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = filled(folder, 5000)
    table = tables(folder)[0]
    flip(table, table.stat().st_size // 2)
    index = Index(folder, RESERVE, sync=False)
    with caplog.at_level(logging.ERROR):
        kept = everything(index)
    assert index.rebuilt
    assert "built anew" in caplog.text
    assert set(kept) < set(stored)
    assert len(kept) > 4900
    index.write([(b"o new", b"1")])
    index.close()
    index = Index(folder, RESERVE, sync=False)
    assert len(everything(index)) == len(kept) + 1
    assert not index.rebuilt
    index.close()


class Damaged:
    """A database that finds itself damaged at its first write, as compaction may."""

    def __init__(self, inner: rocksdict.Rdict) -> None:
        self.close = inner.close

    def write(self, *_: object) -> None:
        raise Exception("Corruption: block checksum mismatch")  # noqa: TRY002 - as rocksdict does


def test_a_write_to_a_damaged_index_goes_into_the_rebuilt_one(index: Index) -> None:
    stored = entries(50)
    index.write(stored[:40])
    assert index._db is not None
    index._db = cast("rocksdict.Rdict", Damaged(index._db))
    index.write(stored[40:], [stored[0][0]])
    assert index.rebuilt
    assert everything(index) == stored[1:]


@pytest.mark.parametrize("victim", ["CURRENT", "MANIFEST-*", "*.sst"])
@pytest.mark.parametrize("how", ["missing", "garbage"])
def test_an_index_that_cannot_be_opened_is_begun_anew(folder: Path, victim: str, how: str) -> None:
    filled(folder, 2000)
    for path in folder.glob(victim):
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(random.Random(1).randbytes(5000))
    index = Index(folder, RESERVE, sync=False)
    assert everything(index) == []
    assert index.rebuilt
    index.write(entries(10))
    index.close()
    index = Index(folder, RESERVE, sync=False)
    assert everything(index) == entries(10)
    index.close()


@pytest.mark.parametrize("died", ["copying", "between", "after"])
def test_a_rebuild_that_died_is_finished_or_dropped(folder: Path, died: str) -> None:
    stored = filled(folder, 100)
    other = filled(folder.with_name("index.new"), 50)
    match died:
        case "copying":
            expected = stored
        case "between":
            folder.with_name("index.new").rename(folder.with_name("index.done"))
            expected = other
        case _:
            folder.rename(folder.with_name("gone"))
            folder.with_name("index.new").rename(folder.with_name("index.done"))
            folder.mkdir()
            expected = other
    index = Index(folder, RESERVE, sync=False)
    assert everything(index) == expected
    index.close()
    assert not folder.with_name("index.new").exists()
    assert not folder.with_name("index.done").exists()


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        ("IO error: No space left on device: While appending to file: 4.log", Fault.NO_SPACE),
        ("IO error: Disk quota exceeded: While open", Fault.NO_SPACE),
        ("Corruption: block checksum mismatch: stored = 1", Fault.DAMAGED),
        ("IO error: No such file or directory: While opening MANIFEST-5", Fault.DAMAGED),
        ("IO error: Input/output error: While fdatasync", Fault.IO),
        ("Busy: whatever", Fault.IO),
    ],
)
def test_what_a_status_of_rocksdb_means(status: str, fault: Fault) -> None:
    with pytest.raises(StorageFault) as caught, module._translated():
        raise Exception(status)  # noqa: TRY002 - what rocksdict raises
    assert caught.value.fault is fault


def test_bugs_are_not_taken_for_faults() -> None:
    with pytest.raises(KeyError), module._translated():
        raise KeyError("a bug")


def test_entries_come_back_equal() -> None:
    extent = Extent(7, 8192, 1 << 40)
    for number in range(6):
        record = record_of(number, b"x" * 100)
        key, value = encode_entry(record, extent, 2**32 - 1)
        assert key == object_key(record.key)
        assert decode_entry(key, value) == (2**32 - 1, (record, extent))


def test_damaged_entries_are_none() -> None:
    record = record_of(1, b"x" * 5000)
    key, value = encode_entry(record, Extent(1, 0, 8192), 1)
    other = Key(record.key.namespace, "conv", Shard(0, 1), "native", record.key.digest)
    assert decode_entry(object_key(other), value) is None
    assert decode_entry(key[:40], value) is None
    assert decode_entry(key, value[:-1]) is None
    assert decode_entry(key, b"") is None
    assert decode_entry(*encode_entry(record, Extent(1, 0, 4096), 1)) is None
    assert decode_entry(*encode_entry(record, Extent(1, -4096, 8192), 1)) is None
