"""Pages, registration and the record of choices: what surrounds the slots."""

import fcntl
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from tiercache.device.journal import Change, CodecJournal, Read
from tiercache.device.kinds import grouped, latent
from tiercache.device.pages import PagedBlocks
from tiercache.device.registering import CHUNK_BYTES_MAX, Registrar, Registration, cuda_registrar
from tiercache.device.staging import address_of
from tiercache.errors import ConfigError, LayoutError
from tiercache.state import Kind, Part, Shard, Tensor

torch.set_num_threads(1)

MLA = latent(range(2), 6, 2, 8, "bfloat16")
GQA = grouped(range(2), 4, 3, 8, "float32")


def paged(part: Part, shard: Shard, page_tokens: int, pages: int = 20) -> PagedBlocks:
    """Pages of which every byte says where it is."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for tensor in part.tensors:
        shape = list(tensor.shape)
        if tensor.shard_axis is not None:
            shape[tensor.shard_axis] = shape[0] // part.units * (shard.stop - shard.start)
        dtype = getattr(torch, tensor.dtype)
        nbytes = pages * page_tokens * int(np.prod(shape)) * dtype.itemsize
        data = torch.randint(0, 100, (nbytes,), dtype=torch.uint8, generator=generator)
        tensors[tensor.name] = data.view(dtype).view(pages, page_tokens, *shape)
    return PagedBlocks(part, shard, tensors)


def expected(blocks: PagedBlocks, pages: list[int], tokens: int) -> bytes:
    """A block's bytes, written down plainly."""
    content = b""
    for tensor, _ in blocks._tensors:
        rows = torch.cat([tensor[page] for page in pages])[:tokens]
        content += rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return content


@pytest.mark.parametrize("page_tokens", [8, 4, 1])
@pytest.mark.parametrize(
    ("part", "shard"), [(MLA, Shard(0, 1)), (GQA, Shard(0, 4)), (GQA, Shard(1, 3))]
)
def test_pages_are_blocks_and_back(part: Part, shard: Shard, page_tokens: int) -> None:
    blocks = paged(part, shard, page_tokens)
    step = blocks.pages_per_block
    pages = [(7 * n + 3) % 20 for n in range(2 * step)]
    found = blocks.gather(pages)
    for row in range(2):
        of_block = pages[row * step : (row + 1) * step]
        assert bytes(found[row].numpy()) == expected(blocks, of_block, 8)
    other = [(7 * n + 5) % 20 for n in range(2 * step)]
    blocks.scatter(found, other)
    assert torch.equal(blocks.gather(other), found)


@pytest.mark.parametrize("page_tokens", [8, 2])
def test_a_partial_block_leaves_the_rest_of_its_pages(page_tokens: int) -> None:
    blocks = paged(GQA, Shard(0, 4), page_tokens)
    step = blocks.pages_per_block
    source, target = list(range(step)), list(range(10, 10 + step))
    head = blocks.head(source, 5)
    assert bytes(head.numpy()) == expected(blocks, source, 5)
    before = [torch.cat([tensor[page] for page in target]) for tensor, _ in blocks._tensors]
    blocks.put_head(head, target, 5)
    assert bytes(blocks.head(target, 5).numpy()) == bytes(head.numpy())
    for (tensor, _), rows in zip(blocks._tensors, before, strict=True):
        after = torch.cat([tensor[page] for page in target])
        assert torch.equal(after[5:], rows[5:])
        assert not torch.equal(after[:5], rows[:5])


def test_pages_that_do_not_fit_are_refused() -> None:
    tensor = torch.zeros(4, 8, 6, dtype=torch.bfloat16)
    rope = torch.zeros(4, 8, 2, dtype=torch.bfloat16)
    named = {"0.latent": tensor, "0.rope": rope, "1.latent": tensor, "1.rope": rope}
    whole = Shard(0, 1)
    blocks = PagedBlocks(MLA, whole, named)
    snapshot = Part("s", Kind.CONV, 1, 0, 1, (Tensor("t", "int8", (1,), ("a",)),))
    odd = Part(
        "o", Kind.KV, None, 1, 1,
        (Tensor("a", "int8", (1,), ("x",)), Tensor("b", "float32", (1,), ("x",))),
    )  # fmt: skip
    odd_named = {"a": torch.zeros(2, 1, 1, dtype=torch.int8), "b": torch.zeros(2, 1, 1)}
    for make, why in (
        (lambda: PagedBlocks(snapshot, whole, {"t": tensor}), "not kept in pages"),
        (lambda: PagedBlocks(MLA, whole, {"0.latent": tensor}), "not kept in pages"),
        (lambda: PagedBlocks(MLA, whole, {**named, "1.rope": tensor}), "in pages"),
        (lambda: PagedBlocks(MLA, whole, {**named, "1.rope": rope[:2]}), "different pages"),
        (lambda: PagedBlocks(MLA, whole, {k: t[:, :3] for k, t in named.items()}), "whole pages"),
        (lambda: PagedBlocks(odd, whole, odd_named), "whole items"),
        (lambda: blocks.scatter(torch.zeros(2, 3, dtype=torch.uint8), [0, 1]), "blocks are"),
        (lambda: blocks.head([0], 9), "no 9 tokens"),
        (lambda: blocks.put_head(torch.zeros(3, dtype=torch.uint8), [0], 2), "3 bytes"),
        (lambda: paged(MLA, whole, 4).gather([1, 2, 3]), "no whole blocks"),
    ):
        with pytest.raises(LayoutError, match=why):
            make()


def test_pages_of_a_partial_block_count_from_the_start() -> None:
    blocks = paged(MLA, Shard(0, 1), 4)
    data = blocks.head([3, -1], 4)  # The second page is not needed, and may be none.
    assert data.numpy().tobytes() == expected(blocks, [3], 4)
    before = [tensor.clone() for tensor, _ in blocks._tensors]
    for pages in ([-1, 3], [20, 3]):
        with pytest.raises(IndexError, match="of 20"):
            blocks.head(pages, 4)
        with pytest.raises(IndexError, match="of 20"):
            blocks.put_head(data, pages, 4)
    with pytest.raises(LayoutError, match=r"not torch\.int8"):
        blocks.put_head(data.view(torch.int8), [3, -1], 4)
    for (tensor, _), old in zip(blocks._tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
    blocks.put_head(data, [5, -1], 4)
    assert torch.equal(blocks.head([5, -1], 4), data)


# --- registration


class Recorded:
    """A registrar that writes down what it is asked, and fails at one of the calls."""

    def __init__(self, fails_at: int = 99) -> None:
        self.asked: list[tuple[int, int, bool]] = []
        self.held: set[int] = set()
        self.fails_at = fails_at
        self.go_on = threading.Event()
        self.go_on.set()

    def register(self, address: int, nbytes: int, read_only: bool) -> str:  # noqa: FBT001
        self.go_on.wait()
        if len(self.asked) == self.fails_at:
            return "out of memory"
        self.asked.append((address, nbytes, read_only))
        self.held.add(address)
        return ""

    def unregister(self, address: int) -> str:
        self.held.discard(address)
        return "" if address % 2 == 0 else "odd"

    def registrar(self) -> Registrar:
        return Registrar(self.register, self.unregister)


def test_large_segments_are_registered_in_chunks() -> None:
    segments = [memoryview(bytearray(1000)), memoryview(bytes(300))]
    recorded = Recorded()
    registration = Registration(segments, recorded.registrar(), chunk_bytes_max=400)
    registration.start()
    registration.wait()
    first, second = address_of(segments[0]), address_of(segments[1])
    assert recorded.asked == [
        (first, 400, False), (first + 400, 400, False), (first + 800, 200, False),
        (second, 300, True),
    ]  # fmt: skip
    assert (registration.nbytes, registration.failed) == (1300, "")
    registration.close()
    registration.close()
    assert not recorded.held
    assert registration.nbytes == 0


def test_the_rest_stays_as_it_is_after_a_failure() -> None:
    segments = [memoryview(bytearray(100)) for _ in range(3)]
    recorded = Recorded(fails_at=1)
    registration = Registration(segments, recorded.registrar())
    registration.start()
    registration.wait()
    assert (registration.nbytes, registration.failed) == (100, "out of memory")
    registration.close()
    assert not recorded.held


def test_closing_stops_it() -> None:
    recorded = Recorded()
    recorded.go_on.clear()
    registration = Registration([memoryview(bytearray(9))] * 5, recorded.registrar())
    registration.start()
    closing = threading.Thread(target=registration.close)
    closing.start()
    registration._stop.wait()
    recorded.go_on.set()
    closing.join()
    assert len(recorded.asked) == 1
    assert not recorded.held
    Registration([], recorded.registrar()).close()  # Never started.


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_cuda_nothing_is_registered() -> None:
    assert cuda_registrar() is None
    assert CHUNK_BYTES_MAX <= 64 << 30


# --- the record


def test_changes_of_codec_are_recorded(tmp_path: Path) -> None:
    journal = CodecJournal(tmp_path / "codecs.jsonl")
    assert journal.codec_of("kimi") == "native"
    assert journal.choose("kimi", "native", who="ops", at=1.0) is None
    first = journal.choose("kimi", "int8", who="ops", at=2.0)
    assert first == Change(2.0, "ops", "kimi", "native", "int8")
    assert journal.choose("kimi", "int8", who="ops", at=3.0) is None
    journal.choose("qwen", "bf16", who="ops", at=4.0)
    again = CodecJournal(tmp_path / "codecs.jsonl")
    last = again.choose("kimi", "native", who="someone", at=5.0)
    assert last == Change(5.0, "someone", "kimi", "int8", "native")
    assert again.codec_of("kimi") == "native"
    assert [change.at for change in journal.changes()] == [2.0, 4.0, 5.0]


def test_a_choice_that_cannot_be_recorded_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be recorded"):
        CodecJournal(tmp_path / "no" / "file").choose("kimi", "int8", who="ops", at=1.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        CodecJournal(tmp_path).changes()


LINE = b'{"at":2.0,"who":"ops","model":"kimi","was":"native","now":"int8"}\n'


def test_a_last_line_that_was_cut_off_is_passed_over_and_replaced(tmp_path: Path) -> None:
    """Whatever a killed writer left of its line, at every length of it."""
    path = tmp_path / "codecs.jsonl"
    for length in range(len(LINE) - 1):
        path.write_bytes(LINE + LINE[:length].replace(b"kimi", b"kim\xff"))
        journal = CodecJournal(path)
        assert journal.codec_of("kimi") == "int8"
        assert len(journal.read().torn) == length
        change = journal.choose("kimi", "bf16", who="ops", at=3.0)
        assert change is not None
        assert path.read_bytes().startswith(LINE)
        assert journal.read() == Read((Change(2.0, "ops", "kimi", "native", "int8"), change), b"")


def test_a_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "codecs.jsonl"
    path.write_bytes(LINE + LINE[:-1])
    journal = CodecJournal(path)
    assert len(journal.changes()) == 2
    journal.choose("kimi", "native", who="ops", at=3.0)
    assert [change.now for change in journal.changes()] == ["int8", "int8", "native"]


@pytest.mark.parametrize("damage", [b'{"at": "yesterday"}\n', b"\n", b"\xff\n", LINE[:20] + b"\n"])
def test_damage_elsewhere_is_reported_and_left_alone(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "codecs.jsonl"
    path.write_bytes(LINE + damage + LINE + LINE[:9])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="line 2 cannot be read"):
        CodecJournal(path).changes()
    with pytest.raises(ConfigError, match="line 2 cannot be read"):
        CodecJournal(path).choose("kimi", "native", who="ops", at=3.0)
    assert path.read_bytes() == before


def test_writers_of_one_record_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer was there while we waited for the lock: its choice is what ours changes."""
    path = tmp_path / "codecs.jsonl"

    def flock(file: BinaryIO, how: int) -> None:
        assert how == fcntl.LOCK_EX
        assert file.name
        path.write_bytes(LINE)

    monkeypatch.setattr("tiercache.device.journal.fcntl.flock", flock)
    change = CodecJournal(path).choose("kimi", "bf16", who="ops", at=3.0)
    assert change == Change(3.0, "ops", "kimi", "int8", "bf16")
    assert CodecJournal(path).read().changes[-1] == change
