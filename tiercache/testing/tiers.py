"""What every tier must do. Subclass, say how to make one, and pytest runs it all.

class TestMyTier(TierContract):
    def open(self) -> Tier: ...
    def alter(self, segment: int, offset: int, content: bytes) -> None: ...
    def truncate(self, segment: int, size: int) -> None: ...
    def remove(self, segment: int) -> None: ...
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiercache.errors import Fault
from tiercache.state import Extent, Key, Kind, Label, Layout, Part, Tensor
from tiercache.testing.objects import (
    NAMESPACE,
    PAGE,
    content,
    faults,
    found_in,
    read_of,
    record_of,
    row,
    write_of,
)
from tiercache.tiers.base import Found, Tier, Write


class TierUnderTest:
    """How a contract gets at a tier. `SEGMENT_BYTES` is the segment size that `open` must use."""

    SEGMENT_BYTES = 1 << 20

    def open(self) -> Tier:
        """Return the tier of this test. After `close` it is opened again, with the same content."""
        raise NotImplementedError

    def alter(self, segment: int, offset: int, content: bytes) -> None:
        """Put `content` into a stored segment behind the tier's back."""
        raise NotImplementedError

    def truncate(self, segment: int, size: int) -> None:
        """Cut a stored segment short behind the tier's back."""
        raise NotImplementedError

    def remove(self, segment: int) -> None:
        """Take a stored segment away behind the tier's back."""
        raise NotImplementedError

    def reopen(self, tier: Tier) -> Tier:
        """Return the tier after a restart."""
        tier.close()
        return self.open()

    def stored(self, *batches: Sequence[Write]) -> Tier:
        """Return a tier that was restarted after these writes."""
        tier = self.open()
        for batch in batches:
            assert faults(tier.write(batch)) == [None] * len(batch)
        return self.reopen(tier)


class DamageContract(TierUnderTest):
    """What a `Tier` makes of bytes that are not the ones that were sealed."""

    def test_a_flipped_bit_is_damage(self) -> None:
        """Of that object only, wherever the bit is; and it is never delivered as good."""
        batch = row(range(5))
        tier = self.stored(batch)
        for number, bit in ((0, 0), (2, 8 * (PAGE - 5) - 1)):
            write = batch[number]
            byte = write.source[bit // 8] ^ (1 << bit % 8)
            self.alter(1, write.extent.offset + bit // 8, bytes([byte]))
        damage = [Fault.DAMAGED, None, Fault.DAMAGED, None, None]
        assert faults(tier.read([read_of(write) for write in batch])) == damage
        tier.close()

    def test_a_lost_write_is_damage(self) -> None:
        """A page of zeros where a page was written."""
        write = write_of(1, content(1, 3 * PAGE), 1, 0)
        tier = self.stored([write])
        self.alter(1, PAGE, bytes(PAGE))
        assert faults(tier.read([read_of(write)])) == [Fault.DAMAGED]
        tier.close()

    def test_bytes_of_another_key_are_damage(self) -> None:
        """Even when they are whole and sealed."""
        mine, other = row(range(2))
        tier = self.stored([mine, other])
        self.alter(1, mine.extent.offset, bytes(other.source))
        assert faults(tier.read([read_of(mine), read_of(other)])) == [Fault.DAMAGED, None]
        tier.close()

    def test_a_truncated_segment_is_damage(self) -> None:
        """Of what was cut off; and a restart leaves that out and forgets it."""
        batch = row(range(4))
        tier = self.stored(batch)
        self.truncate(1, 2 * PAGE + 100)
        damage = [None, None, Fault.DAMAGED, Fault.DAMAGED]
        assert faults(tier.read([read_of(write) for write in batch])) == damage
        for _ in range(2):
            tier = self.reopen(tier)
            assert found_in(tier).keys() == {write.record.key for write in batch[:2]}
        tier.close()

    def test_a_missing_segment_is_missing(self) -> None:
        """Its objects are lost, the others are not; and a restart leaves them out."""
        tier = self.stored(row(range(3), segment=1), row(range(3, 6), segment=2))
        self.remove(1)
        reads = [read_of(row([0])[0]), read_of(row([3], segment=2)[0])]
        assert faults(tier.read(reads)) == [Fault.MISSING, None]
        tier = self.reopen(tier)
        assert {each.extent.segment for each in found_in(tier).values()} == {2}
        assert tier.segment_bytes() == {2: self.SEGMENT_BYTES}
        tier.close()

    def test_one_bad_object_spoils_no_other(self) -> None:
        """Outcomes are per object and in order, also across segments."""
        tier = self.open()
        batch = [*row(range(3), segment=1), *row(range(3, 6), segment=2)]
        tier.write(batch)
        elsewhere = batch[1]._replace(extent=Extent(7, 0, PAGE))
        mixed = [batch[0], elsewhere, batch[5], batch[4]]
        outcomes = faults(tier.read([read_of(write) for write in mixed]))
        assert outcomes == [None, Fault.MISSING, None, None]
        tier.close()


class TierContract(DamageContract):
    """What a `Tier` promises."""

    def test_gives_back_what_was_written(self) -> None:
        """Bytes come back as they were sealed, zeros beyond them."""
        tier = self.open()
        batch = [
            write_of(1, content(1, 10), 1, 0),
            write_of(2, content(2, PAGE), 1, PAGE),
            write_of(3, content(3, 3 * PAGE + 1), 1, 2 * PAGE),
            write_of(4, b"", 1, 6 * PAGE),
            write_of(5, content(5, 100), 2, 0),
        ]
        assert tier.write(batch) == [None] * 5
        reads = [read_of(write) for write in reversed(batch)]
        assert tier.read(reads) == [None] * 5
        for read, write in zip(reads, reversed(batch), strict=True):
            assert read.target == write.source
        tier.close()

    def test_nothing_is_nothing(self) -> None:
        """Empty batches are fine, and an empty tier holds nothing."""
        tier = self.open()
        assert (tier.write([]), tier.read([])) == ([], [])
        assert tier.forget([]) is None
        assert tier.reclaim([], []) is None
        assert (found_in(tier), tier.namespaces(), tier.segment_bytes()) == ({}, [], {})
        tier.close()

    def test_finds_after_a_restart_what_was_written(self) -> None:
        """The whole label and the place come back, and the bytes with them."""
        batch = row(range(20))
        tier = self.stored(batch[:7], batch[7:])
        found = found_in(tier)
        assert found == {w.record.key: Found(w.record, w.extent) for w in batch}
        reads = [read_of(each) for each in found.values()]
        assert tier.read(reads) == [None] * 20
        tier.close()

    @pytest.mark.parametrize("batch", [1, 7, 20, 1000])
    def test_scan_keeps_its_batch_size(self, batch: int) -> None:
        """No page is empty or larger than asked for, and none repeats an object."""
        tier = self.stored(row(range(20)))
        pages = list(tier.scan(batch))
        assert all(0 < len(page) <= batch for page in pages)
        assert len({each.record.key for page in pages for each in page}) == 20
        assert sum(map(len, pages)) == 20
        tier.close()

    def test_scan_knows_this_start_from_earlier_ones(self) -> None:
        """What is written beside a scan is not found by it, and is not lost."""
        tier = self.stored(row(range(10)))
        scan = tier.scan(2)
        seen = list(next(scan))
        late = row(range(100, 120), segment=9)
        assert tier.write(late) == [None] * 20
        seen += [each for page in scan for each in page]
        assert len(seen) == 10
        tier = self.reopen(tier)
        assert len(found_in(tier)) == 30
        tier.close()

    def test_scan_does_not_find_what_is_forgotten_beside_it(self) -> None:
        """An object that is forgotten while a scan runs is found before that, or not at all."""
        batch = row(range(10))
        tier = self.stored(batch)
        scan = tier.scan(1)
        first = next(scan)[0].record.key
        others = [write.record.key for write in batch if write.record.key != first]
        assert tier.forget(others) is None
        assert list(scan) == []
        tier.close()

    def test_the_last_write_of_a_key_counts(self) -> None:
        """A key that is written again is found once, at its last place."""
        again = write_of(3, content(33, 50), 2, 0)
        tier = self.stored(row(range(5)), [again])
        found = found_in(tier)
        assert len(found) == 5
        assert found[again.record.key] == Found(again.record, again.extent)
        tier.close()

    def test_forgotten_objects_are_not_found(self) -> None:
        """Neither now nor after a restart; unknown keys are no error."""
        batch = row(range(6))
        tier = self.stored(batch)
        gone = [batch[1].record.key, batch[4].record.key, record_of(77, b"").key]
        assert tier.forget(gone) is None
        kept = {write.record.key for write in batch} - set(gone)
        assert found_in(tier).keys() == kept
        tier = self.reopen(tier)
        assert found_in(tier).keys() == kept
        tier.close()

    def test_reclaim_gives_the_space_back(self) -> None:
        """Segments and their objects go, the others stay; what is missing is no error."""
        tier = self.open()
        first, second = row(range(5), segment=1), row(range(5, 9), segment=2)
        tier.write(first)
        tier.write(second)
        used = tier.used_bytes()
        assert tier.reclaim([1, 99], [write.record.key for write in first]) is None
        assert tier.segment_bytes() == {2: self.SEGMENT_BYTES}
        assert tier.used_bytes() <= used - self.SEGMENT_BYTES + (256 << 10)
        assert faults(tier.read([read_of(first[0])])) == [Fault.MISSING]
        assert tier.read([read_of(second[0])]) == [None]
        tier = self.reopen(tier)
        assert found_in(tier).keys() == {write.record.key for write in second}
        tier.close()

    def test_a_segment_number_can_be_used_again(self) -> None:
        """After reclaim nothing of the old segment shines through."""
        tier = self.open()
        old, new = row(range(5)), row(range(5, 10))
        tier.write(old)
        tier.read([read_of(old[0])])
        tier.reclaim([1], [write.record.key for write in old])
        assert tier.write(new) == [None] * 5
        assert tier.read([read_of(write) for write in new]) == [None] * 5
        assert faults(tier.read([read_of(old[0])])) == [Fault.DAMAGED]
        tier = self.reopen(tier)
        assert found_in(tier).keys() == {write.record.key for write in new}
        tier.close()

    def test_says_which_segments_exist(self) -> None:
        """Segments have their full size from the first write on; a larger object has its own."""
        large = write_of(8, content(8, self.SEGMENT_BYTES + 1), 5, 0)
        tier = self.stored([write_of(1, b"x", 1, 0)], [large])
        sizes = {1: self.SEGMENT_BYTES, 5: self.SEGMENT_BYTES + PAGE}
        assert tier.segment_bytes() == sizes
        assert tier.used_bytes() >= sum(sizes.values())
        assert tier.read([read_of(large)]) == [None]
        tier.close()

    def test_remembers_namespaces(self) -> None:
        """Labels and layouts come back equal after a restart; the last word on one counts."""
        tensor = Tensor("k", "bfloat16", (2, 64), ("head", "dim"), 0)
        state = Tensor("s", "float32", (2, 8), ("head", "dim"), 0, (1, 1))
        layout = Layout((Part("kv", Kind.KV, None, 64, 2, (tensor,)),), 64)
        hybrid = Layout((*layout.parts, Part("kda", Kind.RECURRENT, 1, 0, 1, (_whole(state),))), 64)
        label = Label(NAMESPACE, "model", "weights", "tokenizer", "", "tenant")
        other = Label(bytes(32), "model", "weights", "tokenizer", "lora", "")
        tier = self.open()
        for each in (layout, hybrid):
            assert tier.remember(label, each) is None
        assert tier.remember(other, layout) is None
        tier = self.reopen(tier)
        kept = sorted(tier.namespaces(), key=lambda pair: pair[0].digest)
        expected = sorted([(label, hybrid), (other, layout)], key=lambda pair: pair[0].digest)
        assert kept == expected
        assert [k[1].fingerprint for k in kept] == [e[1].fingerprint for e in expected]
        tier.close()

    def test_several_threads_may_read(self) -> None:
        """At once, and beside a writer."""
        tier = self.stored(*(row(range(8 * s, 8 * s + 8), segment=s) for s in range(1, 5)))
        batches = [row(range(8 * s, 8 * s + 8), segment=s) for s in range(1, 5)]

        def read(seed: int) -> int:
            chosen = random.Random(seed).choices([w for b in batches for w in b], k=24)
            reads = [read_of(write) for write in chosen]
            assert tier.read(reads) == [None] * 24
            return sum(r.target == w.source for r, w in zip(reads, chosen, strict=True))

        with ThreadPoolExecutor(4) as pool:
            results = pool.map(read, range(40))
            for segment in range(10, 20):
                assert tier.write(row(range(4), segment=segment)) == [None] * 4
            assert list(results) == [24] * 40
        tier.close()

    @pytest.mark.parametrize("seed", range(3))
    def test_a_random_history_matches_a_dict(self, seed: int) -> None:
        """Writes, forgets, reclaims and restarts; after each restart the tier holds what it must."""
        dice = random.Random(seed)
        tier = self.open()
        model: dict[Key, Write] = {}
        for step in range(60):
            match dice.choice(["write", "write", "forget", "reclaim", "restart"]):
                case "write":
                    numbers = dice.sample(range(40), dice.randint(1, 6))
                    nbytes = dice.randint(1, 3 * PAGE)
                    batch = row(numbers, segment=step + 1, nbytes=nbytes)
                    assert tier.write(batch) == [None] * len(batch)
                    model |= {write.record.key: write for write in batch}
                case "forget":
                    gone = dice.sample(sorted(model, key=Key.encode), min(len(model), 2))
                    tier.forget(gone)
                    for key in gone:
                        del model[key]
                case "reclaim":
                    segment = dice.randint(1, step + 1)
                    lost = [k for k, write in model.items() if write.extent.segment == segment]
                    tier.reclaim([segment], lost)
                    for key in lost:
                        del model[key]
                case "restart":
                    tier = self.reopen(tier)
                    expected = {k: Found(w.record, w.extent) for k, w in model.items()}
                    assert found_in(tier, dice.randint(1, 50)) == expected
            reads = [read_of(write) for write in model.values()]
            assert tier.read(reads) == [None] * len(reads)
        tier.close()

    def test_close_is_idempotent(self) -> None:
        """And lets the next one open."""
        tier = self.stored(row(range(3)))
        tier.close()
        tier.close()
        tier = self.open()
        assert len(found_in(tier)) == 3
        tier.close()


def _whole(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.axes)
