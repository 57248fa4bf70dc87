"""What sets in any store must do; see `tiercache.testing.stores`."""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
import xxhash

from tiercache.errors import Fault, StorageFault
from tiercache.state import Boundary, Key, Record, Shard
from tiercache.testing.objects import content, record_of
from tiercache.testing.store_objects import WITHIN_S, StoreUnderTest, flipped
from tiercache.tiers.remote import Get, Put, Store
from tiercache.tiers.remote_sealed import seal
from tiercache.tiers.remote_sets import (
    CANDIDATES_MAX,
    MANIFEST_PART,
    Announced,
    Sets,
    Slice,
    Sought,
    cut_of,
)

BLOCK = 64


def digest_at(tokens: int) -> bytes:
    """Return the digest of the one chain of these tests."""
    return hashlib.sha256(f"chain {tokens}".encode()).digest()


def put_at(part: str, start: int, end: int, *, seed: int = 0) -> Put:
    """Return the put of one member."""
    payload = content(end + 7 * seed + len(part), 300)
    record = record_of(1, payload, part=part)
    record = replace(record, key=replace(record.key, digest=digest_at(end)), start=start, end=end)
    return Put(record, memoryview(payload))


def puts_at(tokens: int, *, seed: int = 0) -> list[Put]:
    """Return all that a resume at this boundary needs: each block of `kv`, and one `state`."""
    blocks = [put_at("kv", at, at + BLOCK, seed=seed) for at in range(0, tokens, BLOCK)]
    return [*blocks, put_at("state", 0, tokens, seed=seed)]


def set_of(tokens: int, puts: Sequence[Put]) -> Announced:
    """Return the set of these objects."""
    boundary = Boundary(tokens, digest_at(tokens))
    namespace = puts[0].record.key.namespace
    return Announced(namespace, boundary, tuple(put.record for put in puts))


def sought(*tokens: int) -> list[Sought]:
    """Return what to look for, the deepest first."""
    cut = cut_of([Slice("kv", Shard(0, 1), "native"), Slice("state", Shard(0, 1), "native")])
    return [Sought(Boundary(each, digest_at(each)), cut) for each in tokens]


class SetsContract(StoreUnderTest):
    """What is announced is whole, and what is found is."""

    def announced(self, store: Store, *tokens: int) -> list[Announced]:
        """Store and announce the sets of these boundaries."""
        made = []
        for each in tokens:
            puts = puts_at(each)
            assert store.put(puts, WITHIN_S) == [put.record for put in puts]
            made.append(set_of(each, puts))
            assert Sets(store).announce(made[-1], "engine-0", WITHIN_S) is None
        return made

    def find(self, store: Store, *tokens: int) -> int:
        """Return the depth of the first of these boundaries that is found, 0 for none."""
        found = Sets(store).find(put_at("kv", 0, 1).record.key.namespace, sought(*tokens), WITHIN_S)
        return found.boundary.tokens if found else 0

    def test_the_deepest_whole_set_is_found(self) -> None:
        """By another node; with every record, in order, and the bytes are theirs."""
        _, deep = self.announced(self.open(), 128, 256)
        store = self.open()
        found = Sets(store).find(deep.namespace, sought(320, 256, 128), WITHIN_S)
        assert found == deep
        gets = [
            Get(record.key, memoryview(bytearray(record.nbytes)), record.checksum)
            for record in found.members
        ]
        assert store.get(gets, WITHIN_S) == list(found.members)
        assert self.find(store, 320) == 0

    def test_a_set_that_lost_a_member_is_a_shorter_boundary(self) -> None:
        """Whichever it lost, its manifest included; a member that both need takes both."""
        store = self.open()
        _, deep = self.announced(store, 128, 256)
        lost = put_at("kv", 192, 256)
        assert store.forget([lost.record.key], WITHIN_S) is None
        assert self.find(self.open(), 256, 128) == 128
        store.put([lost], WITHIN_S)
        assert self.find(store, 256, 128) == 256
        assert Sets(store).withdraw(deep, WITHIN_S) is None
        assert self.find(store, 256, 128) == 128
        store.forget([put_at("kv", 0, 64).record.key], WITHIN_S)
        assert self.find(store, 256, 128) == 0

    def test_nothing_is_announced_before_all_is_there(self) -> None:
        """A member that is missing is said to be."""
        store, puts = self.open(), puts_at(192)
        store.put(puts[1:], WITHIN_S)
        fault = Sets(store).announce(set_of(192, puts), "engine-0", WITHIN_S)
        assert fault is not None
        assert fault.fault is Fault.MISSING
        assert self.find(store, 192) == 0
        store.put(puts[:1], WITHIN_S)
        assert self.find(store, 192) == 0
        assert Sets(store).announce(set_of(192, puts), "engine-0", WITHIN_S) is None
        assert self.find(store, 192) == 192

    def test_two_nodes_may_announce_at_once(self) -> None:
        """The first one's set stays, and is whole; the second uses its records."""
        nodes = [self.open(), self.open()]
        start = threading.Barrier(2)

        def announce(node: int) -> StorageFault | None:
            store = nodes[node]
            start.wait(WITHIN_S)
            kept = store.put(puts_at(256, seed=node), WITHIN_S)
            records = [each for each in kept if isinstance(each, Record)]
            assert len(records) == len(kept)
            boundary = Boundary(256, digest_at(256))
            made = Announced(records[0].key.namespace, boundary, tuple(records))
            return Sets(store).announce(made, f"engine-{node}", WITHIN_S)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(announce, range(2))) == [None, None]
        found = Sets(nodes[0]).find(record_of(1, b"").key.namespace, sought(256), WITHIN_S)
        assert found is not None
        for record in found.members:
            get = Get(record.key, memoryview(bytearray(record.nbytes)), record.checksum)
            assert nodes[1].get([get], WITHIN_S) == [record]

    def test_a_set_whose_members_were_replaced_is_replaced(self) -> None:
        """A stale manifest does not keep a new set from being announced."""
        store = self.open()
        (old,) = self.announced(store, 128)
        gone = put_at("kv", 0, 64)
        store.forget([gone.record.key], WITHIN_S)
        new = puts_at(128)
        new[0] = put_at("kv", 0, 64, seed=3)
        assert store.put(new, WITHIN_S) == [put.record for put in new]
        stale = Sets(store).find(old.namespace, sought(128), WITHIN_S)
        assert stale == old  # It looks whole, and its first member is another one.
        record = old.members[0]
        get = Get(record.key, memoryview(bytearray(record.nbytes)), record.checksum)
        assert store.get([get], WITHIN_S) == [None]
        assert Sets(store).announce(set_of(128, new), "engine-0", WITHIN_S) is None
        found = Sets(store).find(old.namespace, sought(128), WITHIN_S)
        assert found is not None
        assert found.members == tuple(put.record for put in new)

    def test_a_flush_ends_every_set(self) -> None:
        """Of its namespace."""
        store = self.open()
        (made,) = self.announced(store, 128)
        assert store.flush(made.namespace, 1, WITHIN_S) is None
        assert self.find(store, 128) == 0

    def test_another_cut_is_another_set(self) -> None:
        """Other ranks, other codecs: each is announced beside the others."""
        store = self.open()
        self.announced(store, 128)
        halves = [
            Put(replace(put.record, key=replace(put.record.key, shard=Shard(1, 2))), put.source)
            for put in puts_at(128)
        ]
        store.put(halves, WITHIN_S)
        made = set_of(128, halves)
        assert Sets(store).announce(made, "engine-0", WITHIN_S) is None
        assert made.cut != sought(128)[0].cut
        wanted = [Sought(made.boundary, made.cut)]
        assert Sets(store).find(made.namespace, wanted, WITHIN_S) == made
        assert self.find(store, 128) == 128

    def test_a_manifest_of_nonsense_announces_nothing(self) -> None:
        """Damaged, sealed but meaningless, or of another boundary: the next one is found."""
        store = self.open()
        shallow, deep = self.announced(store, 64, 128)
        key = Key(deep.namespace, MANIFEST_PART, Shard(0, 128), deep.cut, deep.boundary.digest)
        (record,) = store.describe([key], WITHIN_S)
        assert isinstance(record, Record)
        body = bytearray(record.nbytes)
        assert store.get([Get(key, memoryview(body))], WITHIN_S) == [record]
        raw = seal(record, self.realm) + bytes(body)
        for damaged in (flipped(raw, 8 * len(raw) - 1), raw[:-1], b"\0", b"\0" * 5000):
            self.overwrite(key, damaged)
            assert self.find(store, 128, 64) == 64
        tokens, slices, members = msgspec.msgpack.decode(bytes(body))
        assert shallow.members
        for wrong in (
            [tokens + 1, slices, members],
            [tokens, slices[:1], members],
            [tokens, slices, []],
            [tokens, slices, [*members, members[-1]]],
            [tokens, slices, [[-1, *members[0][1:]], *members[1:]]],
            [tokens, slices, [[*members[0][:3], tokens + 1, *members[0][4:]], *members[1:]]],
            [tokens, [["kv", 0, 1, "native", 5]], members],
            {"tokens": tokens},
        ):
            self.overwrite(key, b"gone")
            payload = msgspec.msgpack.encode(wrong)
            assert store.forget([key], WITHIN_S) is None
            sealed = put_of_bytes(record, payload)
            assert store.put([sealed], WITHIN_S) == [sealed.record]
            assert self.find(store, 128, 64) == 64

    def test_what_is_no_set_is_refused(self) -> None:
        """No members, another namespace, beyond the boundary, one twice."""
        store, puts = self.open(), puts_at(128)
        foreign = replace(puts[0].record, key=replace(puts[0].record.key, namespace=bytes(32)))
        good = set_of(128, puts)
        for members in (
            (),
            (foreign, *good.members),
            (replace(good.members[0], end=129), *good.members[1:]),
            (good.members[0], *good.members),
        ):
            with pytest.raises(ValueError, match="no set"):
                Sets(store).announce(replace(good, members=members), "engine-0", WITHIN_S)

    def test_only_so_many_manifests_are_read(self) -> None:
        """Many broken sets do not make one question long."""
        store = self.open()
        depths = [BLOCK * n for n in range(1, CANDIDATES_MAX + 3)]
        self.announced(store, *depths)
        store.forget([put_at("state", 0, each).record.key for each in depths[1:]], WITHIN_S)
        assert self.find(store, *reversed(depths)) == 0
        assert self.find(store, *reversed(depths[: CANDIDATES_MAX - 1])) == depths[0]

    def test_sets_need_time_too(self) -> None:
        """To announce returns it, to find raises it."""
        store = self.open()
        (made,) = self.announced(store, 128)
        fault = Sets(store).announce(made, "engine-0", 0.0)
        assert fault is not None
        assert fault.fault is Fault.IO
        with pytest.raises(StorageFault):
            Sets(store).find(made.namespace, sought(128), 0.0)


def put_of_bytes(record: Record, payload: bytes) -> Put:
    """Return the put of other bytes under the label of a record."""
    checksum = xxhash.xxh3_128_digest(payload)
    return Put(replace(record, nbytes=len(payload), checksum=checksum), memoryview(payload))
