"""Boundaries in a pool: sets of objects that count together, or not at all.

A pool gives no transaction. So the objects of a set are stored first, and then a manifest is, which
names them all with their checksums. What is announced was there; what is found is looked for again,
member by member, and a set that has lost one is passed over for the next shallower boundary. A
manifest is a sealed object like any other, and may be lost like any other: then its boundary is not
found.

A manifest names everything that a resume there needs. So each stands for itself, and nothing here
knows what a window or a recurrence is.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
import xxhash

from tiercache.errors import Fault, StorageFault
from tiercache.state import Boundary, Key, Record, Shard
from tiercache.state.canonical import DIGEST_BYTES, digest
from tiercache.tiers.remote import Get, Put, Store
from tiercache.tiers.remote_sealed import CHECKSUM_BYTES

MANIFEST_PART = "/manifest"
"""No part of a layout is called that: their names have no slash."""

MEMBERS_MAX = 65_536
MANIFEST_BYTES_MAX = 16 << 20
CANDIDATES_MAX = 8
"""How many manifests one `find` reads, at most."""

CUT_DIGITS = 32


class Slice(NamedTuple):
    """One kind of member: the objects of one part, for one shard, in one codec."""

    part: str
    shard: Shard
    codec: str


class Sought(NamedTuple):
    """A boundary that would do, with all its objects cut in one way: see `cut_of`."""

    boundary: Boundary
    cut: str


@dataclass(frozen=True, slots=True)
class Announced:
    """A boundary and the records of all objects that a resume there needs.

    `members` are ordered by part, shard, codec, and tokens, and all of one namespace.
    """

    namespace: bytes
    boundary: Boundary
    members: tuple[Record, ...]

    @property
    def cut(self) -> str:
        """How the objects are cut; see `cut_of`."""
        return cut_of(_slice(record) for record in self.members)


def cut_of(slices: Iterable[Slice]) -> str:
    """Return the name of one way to cut a state: which parts, which shards of each, which codecs.

    Ranks that split a model in another way, or store it in another codec, announce other sets.
    """
    each = sorted({(part, shard.start, shard.stop, codec) for part, shard, codec in slices})
    return digest("pool/cut", each).hex()[:CUT_DIGITS]


class _Member(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    slice: int
    digest: bytes
    start: int
    end: int
    nbytes: int
    checksum: bytes
    writer: str
    sealed_at: float
    parent: bytes
    base: bytes
    requantised: int


class _Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tokens: int
    slices: list[tuple[str, int, int, str]]
    members: list[_Member]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Manifest).decode


class Sets:
    """Announces sets in a `Store`, and finds them. Any number of threads may call."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock

    def announce(self, announced: Announced, writer: str, within_s: float) -> StorageFault | None:
        """Store the manifest, after a look that all members are there.

        The records must be those that `Store.put` returned. MISSING, and nothing is stored, when a
        member is gone. When the same boundary is announced already it stays, if its set is whole; if
        not it is replaced. ValueError for what cannot be a set: no members, too many, members of
        another namespace, beyond the boundary, or named twice.
        """
        until = self._clock() + within_s
        payload = _encoded(announced)
        key = _key(announced.namespace, announced.boundary, announced.cut)
        record = _label(key, announced.boundary, payload, writer)
        try:
            if not self._whole(announced, until):
                return StorageFault(Fault.MISSING, f"{key}: a member is not there any more")
            for _ in range(2):
                (kept,) = self._store.put([Put(record, memoryview(payload))], self._left(until))
                if isinstance(kept, StorageFault):
                    return kept
                if kept.checksum == record.checksum:
                    return None
                earlier = self._read(key, announced.boundary, until)
                if earlier is not None and self._same(earlier, until):
                    return None
                fault = self._store.forget([key], self._left(until))
                if fault is not None:
                    return fault
        except StorageFault as fault:
            return fault
        return StorageFault(Fault.IO, f"{key}: others announce and lose it all the time")

    def find(
        self,
        namespace: bytes,
        sought: Sequence[Sought],
        within_s: float,
        *,
        looked_max: int = MEMBERS_MAX,
    ) -> Announced | None:
        """Return the first of `sought` whose set is whole, None when there is none.

        Give the deepest boundary first. Whole means: there is something under the key of every
        member; a set of more than `looked_max` is taken to be whole. Only `Store.get`, with the
        checksum of its record, shows that it is the member; if it is not, `withdraw` the set and look
        again. Raises StorageFault.
        """
        until = self._clock() + within_s
        keys = [_key(namespace, *each) for each in sought]
        held = self._store.holds(keys, self._left(until))
        candidates = [at for at, there in enumerate(held) if there]
        for at in candidates[:CANDIDATES_MAX]:
            announced = self._read(keys[at], sought[at].boundary, until)
            if announced is None or announced.cut != sought[at].cut:
                continue
            if len(announced.members) > looked_max or self._whole(announced, until):
                return announced
        return None

    def holds(self, namespace: bytes, sought: Sequence[Sought], within_s: float) -> list[bool]:
        """Return which of these are announced; raises StorageFault."""
        return self._store.holds([_key(namespace, *each) for each in sought], within_s)

    def withdraw(self, announced: Announced, within_s: float) -> StorageFault | None:
        """Remove the manifest, for everybody; the members stay."""
        key = _key(announced.namespace, announced.boundary, announced.cut)
        return self._store.forget([key], within_s)

    def retract(
        self, namespace: bytes, sought: Sequence[Sought], within_s: float
    ) -> StorageFault | None:
        """Remove the manifests of those of these sets that are not whole, for everybody.

        Who has put them there may do so again: what is announced is not.
        """
        until = self._clock() + within_s
        try:
            held = self.holds(namespace, sought, within_s)
            for each in (each for each, there in zip(sought, held, strict=True) if there):
                if self.find(namespace, [each], self._left(until)) is None:
                    fault = self._store.forget([_key(namespace, *each)], self._left(until))
                    if fault is not None:
                        return fault
        except StorageFault as fault:
            return fault
        return None

    def _read(self, key: Key, boundary: Boundary, until: float) -> Announced | None:
        """Return the set that a manifest names; None when it is lost, damaged or foreign.

        Raises StorageFault when the pool does not answer.
        """
        (record,) = self._store.describe([key], self._left(until))
        if isinstance(record, Record) and record.nbytes <= MANIFEST_BYTES_MAX:
            payload = bytearray(record.nbytes)
            get = Get(key, memoryview(payload), record.checksum)
            (record,) = self._store.get([get], self._left(until))
            if isinstance(record, Record):
                return _decoded(key.namespace, boundary, payload)
        if isinstance(record, StorageFault) and record.fault is Fault.IO:
            raise record
        return None

    def _whole(self, announced: Announced, until: float) -> bool:
        keys = [record.key for record in announced.members]
        return all(self._store.holds(keys, self._left(until)))

    def _same(self, announced: Announced, until: float) -> bool:
        """Return whether the members are there, and are the ones that were announced."""
        keys = [record.key for record in announced.members]
        found = self._store.describe(keys, self._left(until))
        for each in found:
            if isinstance(each, StorageFault) and each.fault is Fault.IO:
                raise each
        return found == list(announced.members)

    def _left(self, until: float) -> float:
        return until - self._clock()


def _key(namespace: bytes, boundary: Boundary, cut: str) -> Key:
    # The token count is part of the name: a digest alone says it only to who knows the chain.
    return Key(namespace, MANIFEST_PART, Shard(0, boundary.tokens), cut, boundary.digest)


def _label(key: Key, boundary: Boundary, payload: bytes, writer: str) -> Record:
    checksum = xxhash.xxh3_128_digest(payload)
    return Record(key, 0, boundary.tokens, len(payload), checksum, writer, 0.0)


def _slice(record: Record) -> Slice:
    return Slice(record.key.part, record.key.shard, record.key.codec)


def _order(record: Record) -> tuple[str, Shard, str, int, int]:
    return (*_slice(record), record.start, record.end)


def _encoded(announced: Announced) -> bytes:
    """Return the manifest; ValueError when it names no set."""
    members = sorted(announced.members, key=_order)
    if not _is_set(announced.namespace, announced.boundary, members):
        raise ValueError(f"no set at {announced.boundary}: {len(members)} members")
    slices = sorted({_slice(record) for record in members})
    number = {each: at for at, each in enumerate(slices)}
    payload = _encode(
        _Manifest(
            announced.boundary.tokens,
            [(part, shard.start, shard.stop, codec) for part, shard, codec in slices],
            [
                _Member(
                    number[_slice(record)],
                    record.key.digest,
                    record.start,
                    record.end,
                    record.nbytes,
                    record.checksum,
                    record.writer,
                    record.sealed_at,
                    record.parent,
                    record.base,
                    record.requantised,
                )
                for record in members
            ],
        )
    )
    if len(payload) > MANIFEST_BYTES_MAX:
        raise ValueError(
            f"a manifest of {len(payload)} bytes, and {MANIFEST_BYTES_MAX} are allowed"
        )
    return payload


def _decoded(namespace: bytes, boundary: Boundary, payload: bytearray) -> Announced | None:
    """Return what a manifest names; None when it is none of this boundary. Any bytes are fine."""
    try:
        manifest = _decode(payload)
        slices = [Slice(part, Shard(a, b), codec) for part, a, b, codec in manifest.slices]
        members = [_record(namespace, slices, member) for member in manifest.members]
    except (msgspec.DecodeError, ValueError, IndexError):
        return None
    if manifest.tokens != boundary.tokens or not _is_set(namespace, boundary, members):
        return None
    return Announced(namespace, boundary, tuple(members))


def _record(namespace: bytes, slices: Sequence[Slice], member: _Member) -> Record:
    if member.slice < 0:
        raise IndexError(member.slice)
    part, shard, codec = slices[member.slice]
    return Record(
        Key(namespace, part, shard, codec, member.digest),
        member.start,
        member.end,
        member.nbytes,
        member.checksum,
        member.writer,
        member.sealed_at,
        member.parent,
        member.base,
        member.requantised,
    )


def _is_set(namespace: bytes, boundary: Boundary, members: Sequence[Record]) -> bool:
    """Return whether these may be a set: in order, none twice, none beyond the boundary."""
    if not 0 < len(members) <= MEMBERS_MAX or len(boundary.digest) != DIGEST_BYTES:
        return False
    return all(
        record.key.namespace == namespace
        and record.key.part != MANIFEST_PART
        and 0 <= record.start <= record.end <= boundary.tokens
        and record.nbytes >= 0
        and len(record.checksum) == CHECKSUM_BYTES
        for record in members
    ) and all(_order(before) < _order(after) for before, after in pairwise(members))
