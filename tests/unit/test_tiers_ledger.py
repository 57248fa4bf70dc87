"""What a pool says of itself: pages of names, and marks of flushes."""

from collections.abc import Callable

import pytest
import xxhash

from tiercache.errors import Fault, StorageFault
from tiercache.state import Key, Record, Shard
from tiercache.testing.store_objects import SECRET, WITHIN_S
from tiercache.tiers.remote import Blob, Name, Put
from tiercache.tiers.remote_ledger import LOOKED_TOGETHER, MARKS_MAX, PAGES, Marks, Pages
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_store import SealedStore

SPACE = bytes(range(32))
NAMES_MAX = 100


class Fleet:
    """Nodes that share one pool in memory."""

    def __init__(self, pool: MemoryPool | None = None) -> None:
        self.pool = pool or MemoryPool()
        self.store = SealedStore(self.pool, Realm("test", SECRET))

    def node(self, writer: str = "a", epoch: int = 0, names_max: int = NAMES_MAX) -> Pages:
        return Pages(self.store, SPACE, epoch, writer, names_max)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def change(pages: Pages, *added: int, removed: tuple[int, ...] = ()) -> StorageFault | None:
    return pages.change(added, removed, WITHIN_S)


def test_what_one_node_says_the_others_read(fleet: Fleet) -> None:
    a, b = fleet.node("a"), fleet.node("b")
    assert change(a, 1, 2) is None
    assert change(b, 3) is None
    late = fleet.node("c")
    for each in (a, b, late):
        each.read(WITHIN_S)
        assert each.names == {1, 2, 3}
    assert change(a, 4, removed=(1,)) is None
    late.read(WITHIN_S)
    assert late.names == {2, 3, 4}


def test_an_epoch_has_pages_of_its_own_and_they_go_with_it(fleet: Fleet) -> None:
    change(fleet.node(), 1)
    new = fleet.node(epoch=1)
    new.read(WITHIN_S)
    assert new.names == set()
    fleet.store.flush(SPACE, 1, WITHIN_S)
    assert fleet.pool.objects == {}


def test_what_says_nothing_new_is_not_written(fleet: Fleet) -> None:
    a = fleet.node()
    change(a, 1)
    before = dict(fleet.pool.objects)
    assert change(a, 1, removed=(7,)) is None
    assert fleet.pool.objects == before
    assert change(a, removed=(1,)) is None
    assert fleet.pool.objects == {}, "an empty page is none"
    a.read(WITHIN_S)
    assert a.names == set()


def test_a_page_that_is_missing_is_empty_the_second_time(fleet: Fleet) -> None:
    a, b = fleet.node("a"), fleet.node("b")
    change(a, 1)
    b.read(WITHIN_S)
    fleet.pool.objects.clear()
    b.read(WITHIN_S)
    assert b.names == {1}, "it may be on its way"
    b.read(WITHIN_S)
    assert b.names == set()


def test_a_page_that_comes_back_was_never_missing(fleet: Fleet) -> None:
    a, b = fleet.node("a"), fleet.node("b")
    change(a, 1)
    held = dict(fleet.pool.objects)
    for _ in range(3):
        b.read(WITHIN_S)
        fleet.pool.objects.clear()
        b.read(WITHIN_S)
        assert b.names == {1}
        fleet.pool.objects.update(held)


def test_the_oldest_names_make_room(fleet: Fleet) -> None:
    a = fleet.node(names_max=3)
    change(a, 1, 2, 3)
    change(a, 4)
    assert list(a.own) == [2, 3, 4]
    b = fleet.node("b", names_max=2)
    b.read(WITHIN_S)
    assert b.names == set(), "a page that is too large is not read"


def test_all_pages_together_have_a_limit(fleet: Fleet) -> None:
    writers = [f"node-{number}" for number in range(40)]
    for number, writer in enumerate(writers):
        change(fleet.node(writer), 10 * number)
    reader = fleet.node(names_max=9)
    reader.read(WITHIN_S)
    assert len(reader.names) == 9
    assert len({fleet.node(writer)._own for writer in writers}) == PAGES, "they spread"


@pytest.mark.parametrize("damage", ["bytes", "header", "foreign", "odd"])
def test_a_page_of_nonsense_has_no_names_and_is_replaced(fleet: Fleet, damage: str) -> None:
    a = fleet.node()
    change(a, 1)
    ((path, whole),) = fleet.pool.objects.items()
    match damage:
        case "bytes":
            fleet.pool.objects[path] = whole[:-1] + bytes([whole[-1] ^ 1])
        case "header":
            fleet.pool.objects[path] = b"x" * len(whole)
        case "foreign":
            other = Fleet()
            change(Pages(SealedStore(other.pool, Realm("other")), SPACE, 0, "a", 9), 2)
            fleet.pool.objects[path] = next(iter(other.pool.objects.values()))
        case "odd":
            del fleet.pool.objects[path]
            key = Key(SPACE, "/page", Shard(a._own, a._own + 1), "names", bytes(32))
            body = b"12345"
            record = Record(key, 0, 0, 5, xxhash.xxh3_128_digest(body), "", 0.0)
            assert fleet.store.put([Put(record, memoryview(body))], WITHIN_S) == [record]
    for _ in range(2):
        b = fleet.node("b")
        b.read(WITHIN_S)
        b.read(WITHIN_S)
        assert b.names == set()
    fresh = fleet.node()
    assert change(fresh, 3) is None
    b.read(WITHIN_S)
    assert b.names == {3}


class Overtaken(MemoryPool):
    """`first` is called before each put: somebody else is faster."""

    first: Callable[[Blob], None] | None = None
    fails: tuple[str, ...] = ()

    def put(self, blobs: list[Blob], within_s: float) -> list[bool | StorageFault]:  # type: ignore[override]
        if self.first is not None:
            self.first(blobs[0])
        if "put" in self.fails:
            return [StorageFault(Fault.NO_SPACE, "full")] * len(blobs)
        return super().put(blobs, within_s)

    def remove(self, names: list[Name], within_s: float) -> StorageFault | None:  # type: ignore[override]
        if "remove" in self.fails:
            return StorageFault(Fault.IO, "away")
        return super().remove(names, within_s)

    def heads(self, blobs: list[Blob], within_s: float) -> list[bool | StorageFault]:  # type: ignore[override]
        if "heads" in self.fails:
            return [StorageFault(Fault.IO, "away")] * len(blobs)
        return super().heads(blobs, within_s)

    def get(self, blobs: list[Blob], within_s: float) -> list[bool | StorageFault]:  # type: ignore[override]
        if "get" in self.fails:
            return [StorageFault(Fault.IO, "away")] * len(blobs)
        if "gone" in self.fails:
            return [False] * len(blobs)
        return super().get(blobs, within_s)


def test_one_that_is_overtaken_adds_to_what_the_other_said() -> None:
    pool = Overtaken()
    fleet = Fleet(pool)
    other = fleet.node()

    def faster(blob: Blob) -> None:
        del blob
        pool.first = None
        change(other, 9)

    pool.first = faster
    a = fleet.node()
    assert change(a, 1) is None
    other.read(WITHIN_S)
    assert other.names == {1, 9}


def test_one_that_is_always_overtaken_gives_up() -> None:
    pool = Overtaken()
    fleet = Fleet(pool)
    numbers = iter(range(100, 200))

    def faster(blob: Blob) -> None:
        del blob
        again, pool.first = pool.first, None
        change(fleet.node(), next(numbers))
        pool.first = again

    pool.first = faster
    fault = change(fleet.node(), 1)
    assert fault is not None
    assert fault.fault is Fault.IO


@pytest.mark.parametrize(
    ("what", "fault"),
    [("put", Fault.NO_SPACE), ("remove", Fault.IO), ("heads", Fault.IO), ("get", Fault.IO)],
)
def test_a_pool_that_fails_says_so_and_nothing_is_forgotten(what: str, fault: Fault) -> None:
    pool = Overtaken()
    fleet = Fleet(pool)
    a = fleet.node()
    change(a, 1)
    change(fleet.node(), 2)
    pool.fails = (what,)
    found = change(a, 3)
    assert found is not None
    assert found.fault is fault
    pool.fails = ()
    a.read(WITHIN_S)
    assert a.names >= {1}


def test_a_page_that_is_replaced_while_it_is_read_is_read_the_next_time() -> None:
    pool = Overtaken()
    fleet = Fleet(pool)
    change(fleet.node(), 1)
    reader = fleet.node()
    pool.fails = ("gone",)
    reader.read(WITHIN_S)
    assert reader.names == set()
    pool.fails = ()
    reader.read(WITHIN_S)
    assert reader.names == {1}


# --- flushes


@pytest.fixture
def marks(fleet: Fleet) -> Marks:
    return Marks(fleet.store)


def begin(marks: Marks, number: int, nonce: int = 0) -> int:
    return marks.begin(SPACE, number, nonce.to_bytes(16), WITHIN_S)


def last(marks: Marks, space: bytes = SPACE) -> int:
    return marks.last(space, WITHIN_S)


def test_all_hear_of_a_flush(fleet: Fleet, marks: Marks) -> None:
    other = Marks(fleet.store)
    assert last(marks) == last(other) == 0
    for number in range(1, 2 * LOOKED_TOGETHER + 2):
        assert begin(marks, number) == number
        assert last(marks) == last(Marks(fleet.store)) == number
    assert last(other) == number
    assert last(marks, bytes(32)) == 0, "of another namespace"
    fleet.store.flush(SPACE, 99, WITHIN_S)
    assert last(Marks(fleet.store)) == number, "no flush removes them"


def test_of_two_who_flush_at_once_one_gets_the_next_number() -> None:
    pool = Overtaken()
    fleet = Fleet(pool)
    one, two = Marks(fleet.store), Marks(fleet.store)

    def faster(blob: Blob) -> None:
        del blob
        pool.first = None
        assert begin(two, 1, 2) == 1

    pool.first = faster
    assert begin(one, 1, 1) == 2
    assert begin(two, 1, 3) == 3
    assert last(one) == 3


def test_numbers_need_not_follow_one_another(fleet: Fleet, marks: Marks) -> None:
    marks.ensure(SPACE, 1_790_000_000_000, bytes(16), WITHIN_S)
    assert last(marks) == 1_790_000_000_000
    before = dict(fleet.pool.objects)
    marks.ensure(SPACE, 5, bytes(16), WITHIN_S)
    assert fleet.pool.objects == before
    assert begin(marks, 7) == 1_790_000_000_001


def test_two_who_mark_the_same_flush_both_have_it_marked() -> None:
    pool = Overtaken()
    fleet = Fleet(pool)
    one, two = Marks(fleet.store), Marks(fleet.store)

    def faster(blob: Blob) -> None:
        del blob
        pool.first = None
        two.ensure(SPACE, 9, bytes([2]) * 16, WITHIN_S)

    pool.first = faster
    one.ensure(SPACE, 9, bytes(16), WITHIN_S)
    assert last(one) == last(two) == 9


def test_a_pool_that_lost_its_marks_begins_again(fleet: Fleet, marks: Marks) -> None:
    other = Marks(fleet.store)
    for number in (1, 2, 3):
        begin(marks, number)
    assert last(other) == 3
    fleet.pool.objects.clear()
    assert last(marks) == 0
    marks.ensure(SPACE, 3, bytes(16), WITHIN_S)
    assert last(other) == last(Marks(fleet.store)) == 3
    assert begin(Marks(fleet.store), 1) == 4
    assert last(marks) == last(other) == 4


def test_there_is_a_limit_to_flushes(marks: Marks) -> None:
    marks._known[SPACE] = (MARKS_MAX, 3)
    with pytest.raises(StorageFault, match="more flushes"):
        begin(marks, 4)


@pytest.mark.parametrize("damage", ["damaged", "gone"])
def test_a_mark_that_cannot_be_read_may_be_any_flush(damage: str) -> None:
    pool = Overtaken()
    fleet = Fleet(pool)
    begin(Marks(fleet.store), 1)
    if damage == "gone":
        pool.fails = ("gone",)
    else:
        ((path, whole),) = pool.objects.items()
        pool.objects[path] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(StorageFault, match=r"moment ago|sealed"):
        last(Marks(fleet.store))


def test_a_pool_that_fails_is_no_pool_without_flushes() -> None:
    pool = Overtaken()
    marks = Marks(Fleet(pool).store)
    pool.fails = ("put",)
    with pytest.raises(StorageFault, match="full"):
        begin(marks, 1)
    with pytest.raises(StorageFault, match="deadline"):
        marks.last(SPACE, 0.0)
