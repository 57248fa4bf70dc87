"""Places on NVMe: appended, never moved, given back by the segment, within the cap."""

import random

import pytest

from tiercache.core.catalog import Catalog, Item, Shelf
from tiercache.core.counters import NAMES, Counters
from tiercache.core.events import Tail
from tiercache.core.log import Log
from tiercache.state import Extent, Shard

PAGE = 4096


class Things:
    """Objects to be placed."""

    def __init__(self) -> None:
        self.catalog = Catalog(8)
        self.shelf = Shelf(b"n" * 32, None, None)

    def one(self, extent: Extent) -> Item:
        """Return an object that lives there."""
        number = len(self.catalog.items) + 1
        slot = self.shelf.slot("kv", Shard(0, 1), "native")
        where = Tail(number, number.to_bytes(32, "big"), b"")
        item = self.catalog.create(self.shelf, slot, where, (0, number))
        item.nvme = extent
        return item


@pytest.fixture
def things() -> Things:
    return Things()


def opened(capacity: int, segment: int = 4 * PAGE) -> Log:
    log = Log(capacity, segment, PAGE)
    log.adopt({})
    log.scanned()
    return log


def stored(log: Log, things: Things, nbytes: int = PAGE) -> Item:
    extent = log.place(nbytes)
    assert extent is not None
    log.finished(extent)
    item = things.one(extent)
    log.keep(item)
    return item


def test_nothing_is_placed_before_earlier_segments_are_known() -> None:
    log = Log(16 * PAGE, 4 * PAGE, PAGE)
    assert log.place(PAGE) is None
    log.adopt({3: 4 * PAGE})
    assert log.place(PAGE) == Extent(4, 0, PAGE)  # Never in a segment that exists.


def test_objects_lie_side_by_side() -> None:
    log = opened(16 * PAGE)
    places = [log.place(nbytes) for nbytes in (1, PAGE + 1, PAGE, PAGE)]
    assert places == [
        Extent(1, 0, PAGE), Extent(1, PAGE, 2 * PAGE), Extent(1, 3 * PAGE, PAGE), Extent(2, 0, PAGE)
    ]  # fmt: skip


def test_an_object_larger_than_a_segment_has_its_own() -> None:
    log = opened(16 * PAGE)
    assert log.place(PAGE) == Extent(1, 0, PAGE)
    assert log.place(6 * PAGE) == Extent(2, 0, 6 * PAGE)
    assert log.place(PAGE) == Extent(1, PAGE, PAGE)  # The open one goes on.
    assert log.segments_bytes == 10 * PAGE


def test_a_segment_is_no_larger_than_the_cap() -> None:
    log = opened(3 * PAGE + 1, segment=8 * PAGE)
    assert [log.place(PAGE) for _ in range(3)] == [Extent(1, n * PAGE, PAGE) for n in range(3)]
    assert log.segments_bytes == 3 * PAGE


def test_the_cap_is_a_cap(things: Things) -> None:
    log = opened(8 * PAGE)
    chance = random.Random(3)
    for _ in range(2000):
        nbytes = chance.randint(1, 8 * PAGE)
        extent = log.place(nbytes)
        while extent is None:
            victim = log.victim()
            assert victim is not None
            for item in list(victim.items):
                log.drop(item)
            log.remove(victim)
            extent = log.place(nbytes)
        assert log.segments_bytes <= log.capacity
        log.finished(extent)
        log.keep(things.one(extent))


def test_the_segment_used_longest_ago_goes_first(things: Things) -> None:
    log = opened(12 * PAGE)
    for _ in range(12):
        stored(log, things)
    assert log.place(PAGE) is None
    log.touch(1)
    victim = log.victim()
    assert victim is not None
    assert victim.number == 2


def test_an_empty_segment_goes_before_any_other(things: Things) -> None:
    log = opened(12 * PAGE)
    items = [stored(log, things) for _ in range(12)]
    for item in items[8:]:
        log.drop(item)
    assert [segment.number for segment in log.empty()] == [3]
    victim = log.victim()
    assert victim is not None
    assert victim.number == 3
    assert victim.live_bytes == 0


def test_a_segment_in_use_stays(things: Things) -> None:
    log = opened(8 * PAGE)
    items = [stored(log, things) for _ in range(8)]
    for item in (items[0], items[4]):
        assert item.nvme is not None
        log.started(item.nvme)
    assert log.victim() is None
    assert items[4].nvme is not None
    log.finished(items[4].nvme)
    victim = log.victim()
    assert victim is not None
    assert victim.number == 2


def test_the_open_segment_goes_only_when_it_is_the_last(things: Things) -> None:
    log = opened(8 * PAGE)
    for _ in range(5):
        stored(log, things)
    victim = log.victim()
    assert victim is not None
    assert victim.number == 1
    for item in list(victim.items):
        log.drop(item)
    log.remove(victim)
    last = log.victim()
    assert last is not None
    assert last.number == 2
    for item in list(last.items):
        log.drop(item)
    log.remove(last)
    assert (log.victim(), log.segments_bytes) == (None, 0)
    assert log.place(PAGE) == Extent(3, 0, PAGE)  # Numbers are not used again.


def test_the_open_segment_stays_while_it_is_written(things: Things) -> None:
    log = opened(4 * PAGE)
    assert log.place(PAGE) is not None
    assert log.victim() is None


def test_a_device_that_failed_in_a_segment_is_not_written_there_again() -> None:
    log = opened(16 * PAGE)
    assert log.place(PAGE) == Extent(1, 0, PAGE)
    log.seal_open()
    assert log.place(PAGE) == Extent(2, 0, PAGE)


def test_adopted_segments_are_kept_until_all_is_found(things: Things) -> None:
    log = Log(8 * PAGE, 4 * PAGE, PAGE)
    log.adopt({1: 4 * PAGE, 2: 4 * PAGE})
    assert (log.victim(), log.empty(), log.place(PAGE)) == (None, [], None)
    log.keep(things.one(Extent(1, 0, PAGE)))
    log.scanned()
    victim = log.victim()
    assert victim is not None
    assert victim.number == 2


def test_a_segment_with_objects_is_not_removed(things: Things) -> None:
    log = opened(8 * PAGE)
    stored(log, things)
    (segment,) = log.segments.values()
    with pytest.raises(AssertionError):
        log.remove(segment)


# --- counters


def test_every_counter_is_there_from_the_start() -> None:
    counters = Counters()
    assert counters.values == {name: dict.fromkeys(labels, 0) for name, labels in NAMES.items()}
    counters.add("lookups", "miss")
    counters.add("lookup_tokens", amount=5)
    assert counters.values["lookups"]["miss"] == 1
    assert counters.values["lookup_tokens"][""] == 5


@pytest.mark.parametrize(("name", "label"), [("nothing", ""), ("lookups", "unheard of")])
def test_a_new_series_is_a_bug(name: str, label: str) -> None:
    with pytest.raises(KeyError):
        Counters().add(name, label)
