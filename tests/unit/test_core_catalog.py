"""The catalog: masks, boundaries inside blocks, and entries that say nothing."""

import pytest

from tiercache.core.catalog import COVERS_MAX, NUMBERS_SPARE, Catalog, Item, Shelf, Status
from tiercache.core.events import Tail
from tiercache.core.leases import Leases
from tiercache.state import Extent, Shard

WHOLE = Shard(0, 1)
HOST, NVME = Extent(0, 0, 4096), Extent(7, 0, 4096)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(b"n" * 32, None, None)


@pytest.fixture
def catalog(shelf: Shelf) -> Catalog:
    catalog = Catalog(tails_max=2)
    catalog.shelves[shelf.digest] = shelf
    return catalog


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(
    catalog: Catalog, shelf: Shelf, end: int, base: int | None = None, part: str = "kv"
) -> Item:
    where = Tail(end, digest(end), b"" if base is None else digest(base))
    item = catalog.create(shelf, shelf.slot(part, WHOLE, "native"), where, (0, end))
    item.nbytes = 10
    return item


def test_only_sealed_objects_are_held(catalog: Catalog, shelf: Shelf) -> None:
    item = put(catalog, shelf, 4)
    entry = item.entry
    for status in (Status.WRITING, Status.SEALING):
        item.status, item.host = status, HOST
        catalog.update(item)
        assert (entry.held, shelf.bytes["host"]) == (0, 0)
    item.status = Status.SEALED
    catalog.update(item)
    assert (entry.host, entry.nvme, entry.held) == (1, 0, 1)
    item.nvme = NVME
    catalog.update(item)
    item.host = None
    catalog.update(item)
    assert (entry.host, entry.nvme, entry.held) == (0, 1, 1)
    assert shelf.bytes == {"host": 0, "nvme": 10}
    assert catalog.objects() == {"host": 0.0, "nvme": 1.0}
    catalog.remove(item)
    assert (item.status, shelf.bytes["nvme"], shelf.entries) == (Status.DOOMED, 0, {})


def test_every_slot_has_its_bit(catalog: Catalog, shelf: Shelf) -> None:
    items = [put(catalog, shelf, 4, part=part) for part in ("kv", "conv", "recurrent")]
    assert [item.slot.bit for item in items] == [0, 1, 2]
    assert shelf.covers("conv", WHOLE, "native", reshard=False) == (2,)
    assert shelf.covers("conv", WHOLE, "int8", reshard=False) == ()  # Asking makes no slot.
    assert shelf.covers("conv", WHOLE, "int8", reshard=True) == ()
    assert len(shelf.slots) == 3
    catalog.remove(items[1])
    assert catalog.find(shelf, items[2].slot, digest(4)) is items[2]
    assert catalog.find(shelf, items[1].slot, digest(4)) is None
    assert catalog.find(shelf, items[1].slot, digest(9)) is None


def bits(shelf: Shelf, *shards: Shard) -> int:
    return sum(1 << shelf.slot("kv", shard, "native").bit for shard in shards)


def covers(shelf: Shelf, start: int, stop: int) -> tuple[int, ...]:
    return shelf.covers("kv", Shard(start, stop), "native", reshard=True)


def test_a_shard_is_covered_by_other_ways_to_split(shelf: Shelf) -> None:
    quarters = [Shard(at, at + 1) for at in range(4)]
    assert covers(shelf, 0, 2) == ()
    whole = bits(shelf, Shard(0, 4))
    assert covers(shelf, 0, 2) == covers(shelf, 0, 4) == covers(shelf, 3, 4) == (whole,)
    bits(shelf, *quarters[:3])
    assert covers(shelf, 0, 2) == (whole, bits(shelf, *quarters[:2]))
    assert covers(shelf, 0, 4) == (whole,)  # The last quarter was never stored.
    bits(shelf, quarters[3])
    assert covers(shelf, 0, 4) == (whole, bits(shelf, *quarters))
    half = bits(shelf, Shard(2, 4))
    assert covers(shelf, 2, 4) == (whole, half, bits(shelf, *quarters[2:]))  # Fewest first.
    assert covers(shelf, 0, 2) == (whole, bits(shelf, *quarters[:2]))
    assert covers(shelf, 1, 3) == (whole, bits(shelf, *quarters[1:3]))
    shelf.slot("kv", Shard(0, 4), "int8")
    shelf.slot("conv", Shard(0, 1), "native")
    assert covers(shelf, 0, 4) == (whole, bits(shelf, *quarters))


def test_shards_at_odd_places_cover_nothing(shelf: Shelf) -> None:
    bits(shelf, Shard(1, 3))
    assert covers(shelf, 1, 3) == covers(shelf, 1, 2) == ()
    assert shelf.covers("kv", Shard(1, 3), "native", reshard=False) != ()


def test_covering_very_many_units_takes_no_time(shelf: Shelf) -> None:
    bits(shelf, Shard(0, 1))
    assert covers(shelf, 0, 1 << 60) == ()


def test_what_is_remembered_of_covers_is_bounded(shelf: Shelf) -> None:
    for number in range(COVERS_MAX + 10):
        shelf.covers("kv", WHOLE, f"codec{number}", reshard=True)
    assert len(shelf._covers) <= COVERS_MAX


def test_a_taken_slot_is_not_given_again(catalog: Catalog, shelf: Shelf) -> None:
    put(catalog, shelf, 4)
    with pytest.raises(AssertionError):
        put(catalog, shelf, 4)


def tails(shelf: Shelf, base: int) -> list[int]:
    return [tail.tokens for tail in shelf.entries[digest(base)].tails]


def test_tails_are_bounded_and_the_oldest_goes(catalog: Catalog, shelf: Shelf) -> None:
    for end in (65, 66, 67):
        put(catalog, shelf, end, base=64)
    assert tails(shelf, 64) == [66, 67]
    assert digest(65) in shelf.entries  # It is held still, only not offered.


def test_a_tail_that_is_used_stays(catalog: Catalog, shelf: Shelf) -> None:
    first = put(catalog, shelf, 65, base=64)
    put(catalog, shelf, 66, base=64)
    catalog.mention(first.entry)
    put(catalog, shelf, 67, base=64)
    assert tails(shelf, 64) == [65, 67]
    catalog.mention(shelf.entries[digest(66)])
    assert tails(shelf, 64) == [67, 66]


def test_a_tail_has_one_mention_for_all_its_parts(catalog: Catalog, shelf: Shelf) -> None:
    kv = put(catalog, shelf, 65, base=64)
    state = put(catalog, shelf, 65, base=64, part="recurrent")
    assert tails(shelf, 64) == [65]
    catalog.remove(kv)
    assert tails(shelf, 64) == [65]
    catalog.remove(state)
    assert shelf.entries == {}


def test_the_block_below_lives_as_long_as_its_tails(catalog: Catalog, shelf: Shelf) -> None:
    block = put(catalog, shelf, 64)
    tail = put(catalog, shelf, 65, base=64)
    catalog.remove(block)
    assert tails(shelf, 64) == [65]
    catalog.mention(shelf.entries[digest(64)])  # A block is no tail: nothing to mention.
    again = put(catalog, shelf, 64)
    catalog.remove(tail)
    assert shelf.entries.keys() == {digest(64)}
    catalog.remove(again)
    assert shelf.entries == {}


def test_a_tail_whose_mention_made_room_leaves_quietly(catalog: Catalog, shelf: Shelf) -> None:
    items = [put(catalog, shelf, end, base=64) for end in (65, 66, 67)]
    for item in items[1:]:
        catalog.remove(item)
    assert shelf.entries.keys() == {digest(65)}
    catalog.remove(items[0])
    assert shelf.entries == {}


def test_a_tail_of_itself_is_no_trap(catalog: Catalog, shelf: Shelf) -> None:
    item = put(catalog, shelf, 65, base=65)
    catalog.remove(item)
    assert shelf.entries == {}


def test_tails_of_each_other_are_no_trap(catalog: Catalog, shelf: Shelf) -> None:
    one, other = put(catalog, shelf, 65, base=66), put(catalog, shelf, 66, base=65)
    catalog.remove(one)
    catalog.remove(other)
    assert shelf.entries == {}


def test_no_tails_are_kept_when_none_may_be(shelf: Shelf) -> None:
    catalog = Catalog(tails_max=0)
    catalog.shelves[shelf.digest] = shelf
    put(catalog, shelf, 65, base=64)
    assert shelf.entries.keys() == {digest(65)}


def test_a_digest_names_one_boundary(catalog: Catalog, shelf: Shelf) -> None:
    entry = put(catalog, shelf, 65, base=64).entry
    assert entry.agrees(65, digest(64))
    assert not entry.agrees(66, digest(64))
    assert not entry.agrees(65, b"")
    assert shelf.entries[digest(64)].agrees(64, b"")


def test_the_order_outlives_many_that_are_gone(catalog: Catalog, shelf: Shelf) -> None:
    kept = put(catalog, shelf, 1)
    for end in range(2, 4 * NUMBERS_SPARE):
        catalog.remove(put(catalog, shelf, end))
    last = put(catalog, shelf, 4 * NUMBERS_SPARE)
    assert list(catalog.after(0)) == [kept, last]
    assert list(catalog.after(kept.id)) == [last]
    assert len(catalog._numbers) <= 2 * NUMBERS_SPARE


def test_objects_are_found_in_the_order_they_came(catalog: Catalog, shelf: Shelf) -> None:
    items = [put(catalog, shelf, end) for end in (4, 8, 12)]
    catalog.remove(items[1])
    assert [item.id for item in catalog] == [1, 3]
    assert str(items[0].key).endswith("/kv/0-1/native")


# --- leases


def test_leases_belong_to_a_request_of_a_session(catalog: Catalog, shelf: Shelf) -> None:
    items = [put(catalog, shelf, end) for end in (4, 8, 12)]
    leases = Leases()
    assert leases.take(1, "r", items[:2], 5.0) == items[:2]
    assert leases.take(1, "r", [*items[1:], items[2]], 6.0) == items[2:]
    assert leases.take(1, "r", items, 7.0) == []
    assert leases.take(2, "r", items[:1], 8.0) == items[:1]
    assert (leases.count, leases.held(1), leases.held(2), leases.held(3)) == (4, 3, 1, 0)
    assert leases.overdue(5.5) == 3
    assert leases.overdue(9.0) == 4
    assert leases.end(1, "other") == []
    assert leases.end(1, "r") == items
    assert leases.end(1, "r") == []
    assert leases.end_session(2) == items[:1]
    assert leases.end_session(2) == []
    assert (leases.count, leases.held(1), leases.all()) == (0, 0, [])


def test_a_lease_of_nothing_leaves_no_trace() -> None:
    leases = Leases()
    for number in range(10):
        assert leases.take(1, f"r{number}", [], 0.0) == []
    assert leases.all() == []
    assert leases.end_session(1) == []


def test_a_session_ends_with_all_its_requests(catalog: Catalog, shelf: Shelf) -> None:
    items = [put(catalog, shelf, end) for end in (4, 8)]
    leases = Leases()
    leases.take(1, "a", items, 0.0)
    leases.take(1, "b", items[:1], 0.0)
    assert leases.end_session(1) == [*items, items[0]]
    assert leases.count == 0
