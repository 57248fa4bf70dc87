"""Sets in a pool that lost something: what is believed, and what is taken back."""

import pytest

from tiercache.errors import Fault, StorageFault
from tiercache.state import Boundary
from tiercache.testing.store_objects import SECRET, WITHIN_S, get_of, put_of
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_sets import Announced, Sets, Sought
from tiercache.tiers.remote_store import SealedStore


class Shelf:
    """A store, and one set of two objects in it."""

    def __init__(self) -> None:
        self.pool = MemoryPool()
        self.store = SealedStore(self.pool, Realm("test", SECRET))
        self.sets = Sets(self.store)
        self.puts = [put_of(number) for number in (1, 2)]
        records = [put.record for put in self.puts]
        assert self.store.put(self.puts, WITHIN_S) == records
        self.namespace = records[0].key.namespace
        boundary = Boundary(max(record.end for record in records), bytes(32))
        announced = Announced(self.namespace, boundary, tuple(records))
        assert self.sets.announce(announced, "a", WITHIN_S) is None
        self.sought = Sought(boundary, announced.cut)
        self.other = Sought(boundary, "another cut")

    def find(self, looked_max: int = 10) -> Announced | None:
        return self.sets.find(self.namespace, [self.sought], WITHIN_S, looked_max=looked_max)

    def lose_one(self) -> None:
        self.store.forget([self.puts[0].record.key], WITHIN_S)

    def held(self) -> list[bool]:
        return self.sets.holds(self.namespace, [self.sought, self.other], WITHIN_S)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_a_large_set_may_be_believed_without_a_look(shelf: Shelf) -> None:
    assert shelf.find() == shelf.find(looked_max=1)
    shelf.lose_one()
    assert shelf.find() is None
    assert shelf.find(looked_max=1) is not None


def test_only_what_is_not_whole_is_taken_back(shelf: Shelf) -> None:
    both = [shelf.sought, shelf.other]
    assert shelf.sets.retract(shelf.namespace, both, WITHIN_S) is None
    assert shelf.held() == [True, False]
    shelf.lose_one()
    assert shelf.held() == [True, False], "a manifest is a name, and no promise"
    assert shelf.sets.retract(shelf.namespace, both, WITHIN_S) is None
    assert shelf.held() == [False, False]


def test_a_pool_that_does_not_answer_takes_nothing_back(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.lose_one()
    away = StorageFault(Fault.IO, "away")
    with monkeypatch.context() as patch:
        patch.setattr(shelf.pool, "remove", lambda *_: away)
        assert shelf.sets.retract(shelf.namespace, [shelf.sought], WITHIN_S) is away
    late = shelf.sets.retract(shelf.namespace, [shelf.sought], 0.0)
    assert late is not None
    assert late.fault is Fault.IO
    assert shelf.held() == [True, False]


def test_a_store_in_one_epoch_stays_there(shelf: Shelf) -> None:
    """Whatever is entered meanwhile: what began before a flush must not end after it."""
    put = shelf.puts[0]
    old = shelf.store.at(shelf.namespace, 0)
    new = shelf.store.at(shelf.namespace, 7)
    shelf.store.enter(shelf.namespace, 7)
    assert old.get([get_of(put)], WITHIN_S) == [put.record]
    assert new.get([get_of(put)], WITHIN_S) == [None]
    late = put_of(3)
    assert old.put([late], WITHIN_S) == [late.record]
    assert shelf.store.get([get_of(late)], WITHIN_S) == [None]
    assert new.put([late], WITHIN_S) == [late.record]
    assert shelf.store.get([get_of(late)], WITHIN_S) == [late.record]
