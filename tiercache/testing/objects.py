"""Sealed objects with bytes that anybody can tell again: what tests of tiers write and read."""

import hashlib
import random
from collections.abc import Iterable, Sequence

import xxhash

from tiercache.errors import Fault, StorageFault
from tiercache.state import Extent, Key, Record, Shard
from tiercache.tiers.base import ALIGNMENT, Found, Read, Tier, Write

NAMESPACE = hashlib.sha256(b"a namespace").digest()
PAGE = ALIGNMENT


def content(seed: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes that only this seed gives."""
    return random.Random(seed).randbytes(nbytes)


def record_of(number: int, payload: bytes, *, part: str = "kv") -> Record:
    """Return the label of a sealed object; equal numbers and parts give equal keys."""
    digest = hashlib.sha256(f"prefix {number}".encode()).digest()
    return Record(
        key=Key(NAMESPACE, part, Shard(0, 1), "native", digest),
        start=64 * number,
        end=64 * number + 64,
        nbytes=len(payload),
        checksum=xxhash.xxh3_128_digest(payload),
        writer="engine-0",
        sealed_at=1_700_000_000.5,
        parent=hashlib.sha256(b"parent").digest(),
        base=hashlib.sha256(b"base").digest() if number % 2 else b"",
        requantised=number % 3,
    )


def padded(payload: bytes) -> bytearray:
    """Return the payload with zeros up to whole pages: what an extent holds."""
    return bytearray(payload).ljust(-(-max(len(payload), 1) // PAGE) * PAGE, b"\0")


def write_of(number: int, payload: bytes, segment: int, offset: int) -> Write:
    """Return the write of one object to the place given."""
    source = padded(payload)
    extent = Extent(segment, offset, len(source))
    return Write(record_of(number, payload), extent, memoryview(source))


def row(numbers: Iterable[int], *, segment: int = 1, nbytes: int = PAGE - 5) -> list[Write]:
    """Return writes of neighbouring objects, from the start of a segment on."""
    writes, offset = [], 0
    for number in numbers:
        write = write_of(number, content(number, nbytes), segment, offset)
        writes.append(write)
        offset += write.extent.size
    return writes


def read_of(found: Write | Found) -> Read:
    """Return the read of what was written or found, into memory that is full of something else."""
    size = found.extent.size
    return Read(found.record, found.extent, memoryview(bytearray(b"\xa5" * size)))


def found_in(tier: Tier, batch: int = 64) -> dict[Key, Found]:
    """Return everything that a scan yields."""
    return {each.record.key: each for page in tier.scan(batch) for each in page}


def faults(outcomes: Sequence[StorageFault | None]) -> list[Fault | None]:
    """Return how each object failed."""
    return [outcome.fault if outcome else None for outcome in outcomes]
