"""What every store must do. Subclass, say how to make one, and pytest runs it all.

class TestMyStore(StoreContract):
    def connect(self) -> Pool: ...
"""

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tiercache.errors import Fault, StorageFault
from tiercache.state import Key, Record
from tiercache.testing.store_objects import (
    OTHER,
    SECRET,
    WITHIN_S,
    StoreUnderTest,
    brief,
    bumped,
    flipped,
    get_of,
    put_of,
)
from tiercache.tiers.remote import Blob, Get, Had, Kept, Put, Store
from tiercache.tiers.remote_sealed import HEADER_BYTES, Realm, seal


class DamageContract(StoreUnderTest):
    """What a store makes of bytes that are not the ones that were sealed."""

    def test_every_kind_of_damage_is_found(self) -> None:
        """A flipped bit anywhere, a cut, an addition, garbage: never delivered, and told apart."""
        put = put_of(1, 3000)
        whole = seal(put.record, self.realm) + bytes(put.source)
        dice = random.Random(7)
        size = len(whole)
        damaged = [flipped(whole, 8 * at + dice.randrange(8)) for at in (0, 9, 11, 13, 40, 700)]
        damaged += [flipped(whole, 8 * at) for at in (HEADER_BYTES - 1, HEADER_BYTES, size - 1)]
        damaged += [whole[:cut] for cut in (1, 27, HEADER_BYTES - 1, HEADER_BYTES, size - 1)]
        damaged += [whole + b"\0", dice.randbytes(size), bytes(size)]
        store = self.open()
        for raw in damaged:
            self.overwrite(put.record.key, raw)
            assert brief(store.get([get_of(put)], WITHIN_S)) == ["damaged"]
        self.overwrite(put.record.key, whole)
        assert store.get([get_of(put, checked=True)], WITHIN_S) == [put.record]

    def test_a_foreign_object_is_damage(self) -> None:
        """Whole objects, but of another key, another cluster, another secret, another format."""
        mine, other = put_of(1), put_of(2)
        body = bytes(mine.source)
        strange = [
            seal(other.record, self.realm),
            seal(mine.record, Realm(self.realm.cluster)),
            seal(mine.record, Realm(self.realm.cluster, SECRET[::-1])),
            bumped(seal(mine.record, self.realm)),
            seal(replace(mine.record, nbytes=mine.record.nbytes + 1), self.realm),
        ]
        store = self.open()
        for header in strange:
            self.overwrite(mine.record.key, header + body)
            assert brief(store.get([get_of(mine)], WITHIN_S)) == ["damaged"]

    def test_damage_is_of_one_object(self) -> None:
        """Its neighbours in the batch are delivered."""
        puts = [put_of(number) for number in range(5)]
        store = self.stored(*puts[:4])
        self.overwrite(puts[1].record.key, b"nonsense")
        gets = [get_of(put) for put in puts]
        assert brief(store.get(gets, WITHIN_S)) == ["whole", "damaged", "whole", "whole", "none"]
        keys = [put.record.key for put in puts]
        found = store.describe(keys, WITHIN_S)
        assert brief(found) == ["whole", "damaged", "whole", "whole", "none"]
        assert found[0] == puts[0].record

    def test_a_damaged_object_makes_room(self) -> None:
        """A put replaces what has no sound header; what is damaged inside is forgotten first."""
        put = put_of(1)
        store = self.stored(put)
        self.overwrite(put.record.key, b"nonsense")
        assert store.put([put], WITHIN_S) == [put.record]
        self.overwrite(put.record.key, seal(put.record, self.realm) + bytes(put.record.nbytes))
        get = get_of(put)
        assert brief(store.get([get], WITHIN_S)) == ["damaged"]
        assert store.forget([put.record.key], WITHIN_S) is None
        assert store.put([put], WITHIN_S) == [put.record]
        assert store.get([get], WITHIN_S) == [put.record]
        assert get.target == put.source

    def test_an_object_of_another_size_is_not_this_one(self) -> None:
        """The target says how large it must be."""
        put = put_of(1)
        store = self.stored(put)
        for size in (0, put.record.nbytes - 1, put.record.nbytes + 1):
            get = Get(put.record.key, memoryview(bytearray(size)))
            assert brief(store.get([get], WITHIN_S)) == ["damaged"]


class NamespaceContract(StoreUnderTest):
    """What is kept apart."""

    def test_clusters_never_meet(self) -> None:
        """Other names, other secrets: nothing is found, and nothing is removed."""
        put = put_of(1)
        store = self.stored(put)
        for realm in (Realm(self.realm.cluster + "x", SECRET), Realm(self.realm.cluster)):
            stranger = self.open(realm)
            assert brief(stranger.get([get_of(put)], WITHIN_S)) == ["none"]
            assert stranger.holds([put.record.key], WITHIN_S) == [False]
            assert stranger.forget([put.record.key], WITHIN_S) is None
            assert stranger.flush(put.record.key.namespace, 9, WITHIN_S) is None
        assert store.get([get_of(put)], WITHIN_S) == [put.record]

    def test_a_flush_leaves_nothing_readable(self) -> None:
        """Of its namespace, by no call; other namespaces stay."""
        puts = [put_of(number) for number in range(6)]
        kept = [put_of(number, namespace=OTHER) for number in range(6)]
        store = self.stored(*puts, *kept)
        namespace = puts[0].record.key.namespace
        names = [self.realm.name(put.record.key, 0) for put in puts]
        assert store.flush(namespace, 1, WITHIN_S) is None
        keys = [put.record.key for put in puts]
        assert store.holds(keys, WITHIN_S) == [False] * 6
        assert store.describe(keys, WITHIN_S) == [None] * 6
        assert store.get([get_of(put) for put in puts], WITHIN_S) == [None] * 6
        assert brief(store.get([get_of(put) for put in kept], WITHIN_S)) == ["whole"] * 6
        assert self.pool().holds(names, WITHIN_S) == [False] * 6
        assert store.flush(namespace, 1, WITHIN_S) is None

    def test_a_slow_writer_is_not_heard_after_a_flush(self) -> None:
        """What it puts under the old epoch is found by those in the old epoch only."""
        put, again = put_of(1), put_of(1, seed=5)
        namespace = put.record.key.namespace
        slow, store = self.open(), self.open()
        assert store.flush(namespace, 7, WITHIN_S) is None
        assert slow.put([put], WITHIN_S) == [put.record]
        assert brief(store.get([get_of(put)], WITHIN_S)) == ["none"]
        assert store.put([again], WITHIN_S) == [again.record]
        assert slow.get([get_of(put)], WITHIN_S) == [put.record]
        slow.enter(namespace, 7)
        assert slow.get([get_of(again)], WITHIN_S) == [again.record]
        slow.enter(namespace, 3)
        assert slow.get([get_of(again)], WITHIN_S) == [again.record]

    @pytest.mark.parametrize("epoch", [1, 9, 0x10, 0xA0F0, (1 << 64) - 1])
    def test_a_flush_removes_older_epochs_only(self, epoch: int) -> None:
        """Not the one that begins, nor later ones: others may be there already."""
        pool = self.pool()
        key = put_of(1).record.key
        epochs = {0, 1, 8, 9, 10, 15, 16, 17, 0xA0EF, 0xA0F0, 0xA100, (1 << 64) - 1}
        names = [self.realm.name(key, each) for each in sorted(epochs)]
        raw = memoryview(b"x" * HEADER_BYTES)
        blobs = [Blob(name, raw, memoryview(b"")) for name in names]
        assert pool.put(blobs, WITHIN_S) == [True] * len(names)
        assert pool.remove_before(names[0].space, epoch, WITHIN_S) is None
        assert pool.holds(names, WITHIN_S) == [each >= epoch for each in sorted(epochs)]

    def test_names_give_nothing_away(self) -> None:
        """Whatever a part or a codec is called, a name is hexadecimal digits and slashes."""
        put = put_of(1)
        key = replace(put.record.key, part="../../etc", codec=".*|$(x)\n\0")
        record = replace(put.record, key=key)
        assert re.fullmatch(r"[0-9a-f]{32}/0{16}/[0-9a-f]{64}", self.realm.name(key, 0).path)
        store = self.stored(Put(record, put.source))
        assert store.get([get_of(Put(record, put.source))], WITHIN_S) == [record]


class StoreContract(DamageContract, NamespaceContract):
    """What a `Store` promises."""

    def test_gives_back_what_was_put(self) -> None:
        """To every node, whatever the size; memory may be registered or not."""
        arena = memoryview(bytearray(4 << 20))
        store = self.open()
        store.register(arena)
        puts = [put_of(at, nbytes) for at, nbytes in enumerate((0, 1, 10, 4096, 100_001, 1 << 20))]
        assert store.put(puts, WITHIN_S) == [put.record for put in puts]
        for node in (store, self.open()):
            gets = [get_of(put, checked=True) for put in reversed(puts)]
            gets[0] = gets[0]._replace(target=arena[4096 : 4096 + (1 << 20)])
            assert node.get(gets, WITHIN_S) == [put.record for put in reversed(puts)]
            for get, put in zip(gets, reversed(puts), strict=True):
                assert get.target == put.source

    def test_nothing_is_nothing(self) -> None:
        """Empty batches are fine, and what was never put is a miss."""
        store = self.open()
        assert (store.put([], WITHIN_S), store.get([], WITHIN_S)) == ([], [])
        assert (store.describe([], WITHIN_S), store.holds([], WITHIN_S)) == ([], [])
        assert store.forget([], WITHIN_S) is None
        put = put_of(1)
        assert store.get([get_of(put)], WITHIN_S) == [None]
        assert store.describe([put.record.key], WITHIN_S) == [None]
        assert store.holds([put.record.key], WITHIN_S) == [False]
        assert store.forget([put.record.key], WITHIN_S) is None

    def test_the_first_put_of_a_key_stays(self) -> None:
        """Later ones learn what is there, in the same batch too; and it is what they get."""
        first, second = put_of(1, 3000), put_of(1, 4000, seed=1)
        other = put_of(2)
        store, late = self.stored(first), self.open()
        outcomes: list[Kept] = [first.record, other.record, other.record]
        assert late.put([second, other, other], WITHIN_S) == outcomes
        get = get_of(first)
        assert late.get([get], WITHIN_S) == [first.record]
        assert get.target == first.source
        assert store.describe([first.record.key], WITHIN_S) == [first.record]

    def test_another_checksum_is_a_miss(self) -> None:
        """The same state, computed and stored by somebody else, is not the one that was meant."""
        first, second = put_of(1), put_of(1, seed=1)
        store = self.stored(first)
        assert store.get([get_of(second, checked=True)], WITHIN_S) == [None]

    def test_holds_answers_in_order(self) -> None:
        """Of many keys at once."""
        puts = [put_of(number, 10) for number in range(0, 600, 2)]
        store = self.stored(*puts)
        keys = [put_of(number, 0).record.key for number in range(600)]
        assert store.holds(keys, WITHIN_S) == [True, False] * 300

    def test_what_is_forgotten_is_gone(self) -> None:
        """For every node; and the key is free again."""
        puts = [put_of(number) for number in range(4)]
        store, other = self.stored(*puts), self.open()
        gone = [puts[1].record.key, puts[2].record.key, put_of(9).record.key]
        assert store.forget(gone, WITHIN_S) is None
        gets = [get_of(put) for put in puts]
        assert brief(other.get(gets, WITHIN_S)) == ["whole", "none", "none", "whole"]
        again = put_of(1, seed=3)
        assert other.put([again], WITHIN_S) == [again.record]
        assert store.get([get_of(again)], WITHIN_S) == [again.record]

    def test_no_time_is_a_fault(self) -> None:
        """At once, with the memory free again."""
        put = put_of(1)
        store = self.stored(put)
        begun = time.monotonic()
        outcomes: list[Had] = [
            *store.put([put_of(2)], 0.0),
            *store.get([get_of(put)], -1.0),
            *store.describe([put.record.key], 0.0),
            store.forget([put.record.key], 0.0),
            store.flush(OTHER, 1, 0.0),
        ]
        assert brief(outcomes) == ["io"] * 5
        assert [type(outcome) for outcome in outcomes] == [StorageFault] * 5
        with pytest.raises(StorageFault) as raised:
            store.holds([put.record.key], 0.0)
        assert raised.value.fault is Fault.IO
        assert time.monotonic() - begun < WITHIN_S / 2
        assert store.get([get_of(put)], WITHIN_S) == [put.record]

    def test_two_nodes_may_put_one_key_at_once(self) -> None:
        """One of them wins whole; both learn the same, and get it."""
        nodes = [self.open(), self.open()]
        start = threading.Barrier(2)

        def put(node: int) -> list[Kept]:
            puts = [put_of(number, 60_000, seed=node) for number in range(20)]
            start.wait(WITHIN_S)
            return nodes[node].put(puts, WITHIN_S)

        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(put, range(2))
        assert brief(one) == ["whole"] * 20
        assert one == two
        for record in one:
            assert isinstance(record, Record)
            get = Get(record.key, memoryview(bytearray(60_000)), record.checksum)
            assert nodes[0].get([get], WITHIN_S) == [record]

    def test_several_threads_may_call(self) -> None:
        """At once: what they get is theirs."""
        puts = [put_of(number, 5000 + number) for number in range(32)]
        store = self.stored(*puts)

        def get(seed: int) -> bool:
            chosen = random.Random(seed).choices(puts, k=8)
            gets = [get_of(put, checked=True) for put in chosen]
            assert store.get(gets, WITHIN_S) == [put.record for put in chosen]
            return all(g.target == p.source for g, p in zip(gets, chosen, strict=True))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(get, range(24)))

    def test_a_random_history_matches_a_model(self) -> None:
        """Of two nodes: puts, gets, forgets, flushes and questions."""
        history = History([self.open(), self.open()], random.Random(11))
        while history.operations < self.OPERATIONS:
            history.step()

    def test_close_is_idempotent(self) -> None:
        """Closing twice is fine."""
        store = self.stored(put_of(1))
        assert store.close(WITHIN_S) is None
        assert store.close(WITHIN_S) is None


class History:
    """Random operations on a store that several nodes share, beside a dictionary."""

    KEYS = 60

    def __init__(self, nodes: Sequence[Store], dice: random.Random) -> None:
        self.operations = 0
        self._nodes = nodes
        self._dice = dice
        self._model: dict[Key, Put] = {}
        self._epochs = {put_of(0).record.key.namespace: 0, OTHER: 0}

    def step(self) -> None:
        """Do one call, of some objects, on some node, and compare."""
        store = self._dice.choice(self._nodes)
        count = self._dice.choice((1, 2, 5, 16))
        puts = [self._put() for _ in range(count)]
        calls: list[Callable[[Store, Sequence[Put]], None]] = [
            self._store, self._store, self._fetch, self._fetch, self._ask, self._forget,
        ]  # fmt: skip
        if self._dice.random() < 0.01:
            self._flush(store)
        self._dice.choice(calls)(store, puts)
        self.operations += count

    def _put(self) -> Put:
        number = self._dice.randrange(self.KEYS)
        namespace = self._dice.choice(list(self._epochs))
        nbytes = self._dice.choice((0, 1, 100, 5000))
        return put_of(number, nbytes, seed=self._dice.randrange(100), namespace=namespace)

    def _store(self, store: Store, puts: Sequence[Put]) -> None:
        for put in puts:
            self._model.setdefault(put.record.key, put)
        assert store.put(puts, WITHIN_S) == [self._model[put.record.key].record for put in puts]

    def _fetch(self, store: Store, puts: Sequence[Put]) -> None:
        there = [self._model.get(put.record.key) for put in puts]
        gets = [get_of(kept or put) for kept, put in zip(there, puts, strict=True)]
        assert store.get(gets, WITHIN_S) == [kept and kept.record for kept in there]
        for get, kept in zip(gets, there, strict=True):
            assert kept is None or get.target == kept.source

    def _ask(self, store: Store, puts: Sequence[Put]) -> None:
        keys = [put.record.key for put in puts]
        assert store.holds(keys, WITHIN_S) == [key in self._model for key in keys]

    def _forget(self, store: Store, puts: Sequence[Put]) -> None:
        assert store.forget([put.record.key for put in puts], WITHIN_S) is None
        for put in puts:
            self._model.pop(put.record.key, None)

    def _flush(self, store: Store) -> None:
        namespace = self._dice.choice(list(self._epochs))
        self._epochs[namespace] += self._dice.randint(1, 20)
        assert store.flush(namespace, self._epochs[namespace], WITHIN_S) is None
        for node in self._nodes:
            node.enter(namespace, self._epochs[namespace])
        self._model = {k: put for k, put in self._model.items() if k.namespace != namespace}
