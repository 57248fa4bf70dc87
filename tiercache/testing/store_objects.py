"""Objects of a shared pool that anybody can tell again, and how tests get at a store."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tiercache.errors import StorageFault
from tiercache.state import Key, Record
from tiercache.testing.objects import content, record_of
from tiercache.tiers.remote import Blob, Get, Had, Pool, Put, Store
from tiercache.tiers.remote_sealed import FORMAT, Realm
from tiercache.tiers.remote_store import SealedStore

WITHIN_S = 20.0
SECRET = b"known to the nodes of one cluster"
OTHER = hashlib.sha256(b"another namespace").digest()


def put_of(number: int, nbytes: int = 5000, *, seed: int = 0, namespace: bytes = b"") -> Put:
    """Return the put of an object; the number names its key, number and seed its bytes."""
    payload = content(1000 * seed + number, nbytes)
    record = record_of(number, payload)
    if namespace:
        record = replace(record, key=replace(record.key, namespace=namespace))
    return Put(record, memoryview(payload))


def get_of(put: Put, *, checked: bool = False) -> Get:
    """Return the get of what was put, into memory that is full of something else."""
    target = memoryview(bytearray(b"\xa5" * put.record.nbytes))
    return Get(put.record.key, target, put.record.checksum if checked else b"")


def brief(outcomes: Sequence[Had]) -> list[str]:
    """Return each outcome as a word: "whole", "none", or how it failed."""
    words = []
    for outcome in outcomes:
        match outcome:
            case Record():
                words.append("whole")
            case None:
                words.append("none")
            case StorageFault():
                words.append(outcome.fault.value)
    return words


class StoreUnderTest:
    """How a contract gets at a store."""

    OPERATIONS = 5000
    """Of the random history: a slow store does fewer."""

    @pytest.fixture(autouse=True)
    def own_realm(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Give each test a cluster of its own: they may share one pool."""
        self.realm = Realm(f"{type(self).__name__}/{request.node.name}", SECRET)
        self._pools: list[Pool] = []
        self._behind: Pool | None = None
        yield
        for pool in self._pools:
            pool.close(WITHIN_S)

    def connect(self) -> Pool:
        """Return a handle on the pool of this test: each is another node's."""
        raise NotImplementedError

    def pool(self) -> Pool:
        """Return another handle; it is closed after the test."""
        self._pools.append(self.connect())
        return self._pools[-1]

    def open(self, realm: Realm | None = None) -> Store:
        """Return the store of another node."""
        return SealedStore(self.pool(), realm or self.realm)

    def overwrite(self, key: Key, raw: bytes) -> None:
        """Put these bytes where the object of a key is, behind the store's back."""
        self._behind = pool = self._behind or self.pool()
        name = self.realm.name(key, 0)
        assert pool.remove([name], WITHIN_S) is None
        assert pool.put([Blob(name, memoryview(raw), memoryview(b""))], WITHIN_S) == [True]

    def stored(self, *puts: Put) -> Store:
        """Return a store into which these were put."""
        store = self.open()
        assert store.put(puts, WITHIN_S) == [put.record for put in puts]
        return store


def flipped(raw: bytes, bit: int) -> bytes:
    """Return the bytes with one bit changed."""
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bumped(header: bytes) -> bytes:
    """Return the header as another format would begin."""
    return header[:8] + (FORMAT + 1).to_bytes(2, "little") + header[10:]
