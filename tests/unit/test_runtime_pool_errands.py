"""What is done about an object that comes damaged, by how it does."""

from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster.peers import POOL
from tiercache.errors import Fault, StorageFault
from tiercache.runtime.pool import errands
from tiercache.state import Extent
from tiercache.testing.store_objects import SECRET, WITHIN_S, flipped, put_of
from tiercache.tiers.memory import MemoryArena
from tiercache.tiers.remote import Blob, Put
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_sealed import HEADER_BYTES, Realm
from tiercache.tiers.remote_store import SealedStore

BIT = 8 * HEADER_BYTES + 77


class Way(MemoryPool):
    """A pool that is sound, and a way from there that flips a bit of each body, another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.bits: Iterator[int] = iter(())

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        outcomes = super().get(blobs, within_s)
        for blob, bit in zip(blobs, self.bits, strict=False):
            blob.body[0] ^= 1 + bit % 255
        return outcomes


def fetched(pool: MemoryPool, puts: Sequence[Put]) -> list[Fault | None]:
    store = SealedStore(pool, Realm("test", SECRET))
    objects = [(put.record, Extent(0, at * 4096, 4096)) for at, put in enumerate(puts)]
    pull = ccm.Pull(1, POOL, "", objects, 0)
    return errands.fetch(store, MemoryArena([1 << 20]), pull, WITHIN_S)


@pytest.mark.parametrize("how", ["flipped", "longer"])
@pytest.mark.parametrize("objects", [1, 3])
def test_what_lies_there_damaged_is_removed_however_few_came_with_it(
    how: str, objects: int
) -> None:
    """A large state is fetched alone: nothing that came whole beside it shows that the way is sound."""
    pool, puts = MemoryPool(), [put_of(number, 4000) for number in range(1, objects + 1)]
    store = SealedStore(pool, Realm("test", SECRET))
    store.put(puts, WITHIN_S)
    for path, whole in pool.objects.items():
        pool.objects[path] = flipped(whole, BIT) if how == "flipped" else whole + b"\0"
    assert fetched(pool, puts) == [Fault.DAMAGED] * objects
    assert pool.objects == {}
    store.put(puts, WITHIN_S)
    assert fetched(pool, puts) == [None] * objects


def test_what_a_bad_way_damages_stays_there() -> None:
    pool, puts = Way(), [put_of(number, 4000) for number in (1, 2)]
    SealedStore(pool, Realm("test", SECRET)).put(puts, WITHIN_S)
    pool.bits = count()
    assert fetched(pool, puts) == [Fault.DAMAGED] * 2
    assert len(pool.objects) == 2
    pool.bits = iter(())
    assert fetched(pool, puts) == [None] * 2
