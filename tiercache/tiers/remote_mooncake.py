"""A `Pool` in Mooncake Store: the memory of many machines, found through a master.

The extra `mooncake` brings the client, which needs the system's libibverbs1 and libnuma1. The node
is a client and no more: whose memory the pool is made of, a store process beside the node or
elsewhere, is the operator's to say, so that the node's end loses nobody's objects.

What Mooncake itself promises is little: memory is lost with its store process unless `replicas` is
larger than one, everything is lost with a master that has no log of its operations and no snapshot, and
checksums are optional. Nothing above this file believes it more than that.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from tiercache.errors import Fault, StorageFault
from tiercache.tiers.remote import Blob, Late, Name, epoch_text, other_size
from tiercache.tiers.remote_mooncake_client import (
    KEPT,
    KEPT_MAX,
    MooncakeSettings,
    Native,
    answers,
    config_of,
    load,
)
from tiercache.tiers.remote_staging import Staging
from tiercache.tiers.remote_waiting import Workers

CONNECT_RETRY_S = 1.0
"""After the master refused or could not be reached, how long until the next attempt."""

PIECE_BYTES = 4 << 20
RANGED_BYTES_MIN = 2 * PIECE_BYTES
"""From here on a body is fetched in pieces."""

_NO_HANDLE = -200
_NOT_READY, _NOT_FOUND, _EXISTS, _REPLICA_NOT_FOUND, _REPLICA_GONE = -703, -704, -705, -710, -712
_MISSING = {_NOT_READY, _NOT_FOUND, _REPLICA_NOT_FOUND, _REPLICA_GONE}

_Answer = TypeVar("_Answer")


class MooncakePool:
    """See `Pool`. It connects at the first call, and again at later ones until it has succeeded.

    Mooncake reads its limits from the environment of the process, once: the first pool of a process
    sets them. A process that was connected where masters are elected takes half a minute to exit, in
    Mooncake's own code, unless it ends with `os._exit`. ConfigError when the client is not installed.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self.name = "mooncake"
        self._settings = settings
        self._module = load(settings)
        self._workers = Workers("mooncake", settings.threads)
        self._connecting = Workers("mooncake-connect", 1)
        self._lock = threading.Lock()
        self._client: Native | None = None
        self._retry_at = 0.0
        self._closed = False
        self._staging = Staging(settings.threads)

    def register(self, memory: memoryview) -> None:
        """See `Pool.register`."""
        self._staging.add(memory.cast("B"))

    def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.put`."""
        return self._batch(self._put, blobs, within_s)

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.get`."""
        return self._batch(self._get, blobs, within_s)

    def heads(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.heads`."""
        return self._batch(self._heads, blobs, within_s)

    def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
        """See `Pool.holds`."""
        paths = [name.path for name in names]
        codes = self._run(lambda client: client.batch_is_exist(paths), within_s)
        failed = [code for code in codes if code < 0]
        if failed:
            raise _fault(failed[0], "looking for objects")
        return [code == 1 for code in codes]

    def remove(self, names: Sequence[Name], within_s: float) -> StorageFault | None:
        """See `Pool.remove`. Objects that somebody reads just now go too."""
        paths = [name.path for name in names]
        try:
            codes = self._run(lambda client: client.batch_remove(paths, True), within_s)
        except StorageFault as fault:
            return fault
        failed = [code for code in codes if code < 0 and code not in _MISSING]
        return _fault(failed[0], "removing objects") if failed else None

    def remove_before(self, space: str, epoch: int, within_s: float) -> StorageFault | None:
        """See `Pool.remove_before`."""
        if epoch == 0:
            return None
        pattern = f"^{space}/({below(epoch)})/"
        try:
            code = self._run(lambda client: client.remove_by_regex(pattern, True), within_s)
        except StorageFault as fault:
            return fault
        return _fault(code, "removing a namespace") if code < 0 else None

    def close(self, within_s: float) -> StorageFault | None:
        """See `Pool.close`."""
        until = time.monotonic() + within_s
        with self._lock:
            self._closed = True
        waiting = [*self._workers.unsettled(), *self._connecting.unsettled()]
        if not all(event.wait(max(0.0, until - time.monotonic())) for event in waiting):
            return StorageFault(Fault.IO, "calls of the pool hang, and hold memory")
        with self._lock:
            self._client = None
        self._staging.leave()
        self._workers.close()
        self._connecting.close()
        return None

    def _batch(
        self,
        work: Callable[[Native, Sequence[Blob]], list[bool | StorageFault]],
        blobs: Sequence[Blob],
        within_s: float,
    ) -> list[bool | StorageFault]:
        if not blobs:
            return []
        try:
            return self._run(lambda client: work(client, blobs), within_s)
        except StorageFault as fault:
            return [fault] * len(blobs)

    def _put(self, client: Native, blobs: Sequence[Blob]) -> list[bool | StorageFault]:
        """A name that is taken is no error to Mooncake: who was first is seen from the header."""
        there = client.batch_is_exist([blob.name.path for blob in blobs])
        outcomes: list[bool | StorageFault] = [
            _fault(code, "looking for an object") if code < 0 else False for code in there
        ]
        free = [at for at, code in enumerate(there) if code == 0]
        if not free:
            return outcomes
        some = [blobs[at] for at in free]
        with self._staging.staged(client, some, with_bodies=True) as staged:
            staged.take_in()
            codes = client.batch_put_from_multi_buffers(
                [blob.name.path for blob in some], staged.addresses, staged.sizes, self._replicate()
            )
        copies = [blob._replace(header=memoryview(bytearray(len(blob.header)))) for blob in some]
        seen = self._heads(client, copies)
        for at, code, blob, copy, found in zip(free, codes, some, copies, seen, strict=True):
            if code not in {0, _EXISTS}:
                outcomes[at] = _fault(code, f"storing {blob.name.path}")
            elif isinstance(found, StorageFault):
                outcomes[at] = found if found.fault is Fault.IO else False
            else:
                outcomes[at] = found and copy.header == blob.header
        return outcomes

    def _get(self, client: Native, blobs: Sequence[Blob]) -> list[bool | StorageFault]:
        large = [len(blob.body) >= RANGED_BYTES_MIN for blob in blobs]
        outcomes: dict[Name, bool | StorageFault] = {}
        for ways, is_large in ((self._get_ranges, True), (self._get_whole, False)):
            some = [blob for blob, each in zip(blobs, large, strict=True) if each is is_large]
            if some:
                found = ways(client, some)
                outcomes |= {blob.name: each for blob, each in zip(some, found, strict=True)}
        return [outcomes[blob.name] for blob in blobs]

    def _get_ranges(self, client: Native, blobs: Sequence[Blob]) -> list[bool | StorageFault]:
        """Fetch in pieces, which Mooncake moves side by side: faster than one large move."""
        buffers, keys, to, at, sizes = [], [], [], [], []
        with self._staging.staged(client, blobs, with_bodies=True) as staged:
            for blob, places, lengths in zip(blobs, staged.addresses, staged.sizes, strict=True):
                offset = 0
                for place, length in zip(places, lengths, strict=True):
                    offsets = list(range(0, length, PIECE_BYTES))
                    buffers.append(place)
                    keys.append([blob.name.path])
                    to.append([offsets])
                    at.append([[offset + each for each in offsets]])
                    sizes.append([[min(PIECE_BYTES, length - each) for each in offsets]])
                    offset += length
            codes = client.get_into_ranges(buffers, keys, to, at, sizes)
            staged.give_out()
        moved = iter(zip(codes, sizes, strict=True))
        outcomes = []
        for blob, places in zip(blobs, staged.addresses, strict=True):
            nbytes = len(blob.header) + len(blob.body)
            pairs = [next(moved) for _ in places]
            wrong = [code for (got,), (wanted,) in pairs for code in got if code not in wanted]
            whole = all(got == wanted for (got,), (wanted,) in pairs)
            code = nbytes if whole else next(iter(wrong), -1)
            if whole and client.get_size(blob.name.path) != nbytes:
                code = -1  # Longer than both: ranges do not show that.
            outcomes.append(self._outcome(client, blob, code, nbytes))
        return outcomes

    def _get_whole(self, client: Native, blobs: Sequence[Blob]) -> list[bool | StorageFault]:
        paths = [blob.name.path for blob in blobs]
        with self._staging.staged(client, blobs, with_bodies=True) as staged:
            codes = client.batch_get_into_multi_buffers(paths, staged.addresses, staged.sizes)
            staged.give_out()
        return [
            self._outcome(client, blob, code, len(blob.header) + len(blob.body))
            for blob, code in zip(blobs, codes, strict=True)
        ]

    def _heads(self, client: Native, blobs: Sequence[Blob]) -> list[bool | StorageFault]:
        with self._staging.staged(client, blobs, with_bodies=False) as staged:
            offsets = [[address - staged.base for address in each] for each in staged.addresses]
            (codes,) = client.get_into_ranges(
                [staged.base],
                [[blob.name.path for blob in blobs]],
                [offsets],
                [[[0]] * len(blobs)],
                [staged.sizes],
            )
            staged.give_out()
        return [
            self._outcome(client, blob, code, len(blob.header), at_least=True)
            for blob, (code,) in zip(blobs, codes, strict=True)
        ]

    def _outcome(
        self, client: Native, blob: Blob, code: int, nbytes: int, *, at_least: bool = False
    ) -> bool | StorageFault:
        """Say what a code means; for one of another size Mooncake has none of its own."""
        if code == nbytes:
            return True
        if code in _MISSING:
            return False
        size = client.get_size(blob.name.path)
        if size in _MISSING:
            return False
        if 0 <= size < nbytes or (size > nbytes and not at_least):
            return other_size(blob.name)
        return _fault(code, f"reading {blob.name.path}")

    def _run(self, work: Callable[[Native], _Answer], within_s: float) -> _Answer:
        until = time.monotonic() + within_s
        client = self._connected(within_s)

        def unless_closed() -> _Answer:
            if self._closed:
                raise StorageFault(Fault.IO, "the pool is closed")
            return work(client)

        return self._workers.call(unless_closed, until - time.monotonic())

    def _connected(self, within_s: float) -> Native:
        """Return the client; raises StorageFault. A late attempt goes on, for later calls."""
        with self._lock:
            if self._closed:
                raise StorageFault(Fault.IO, "the pool is closed")
            if self._client is not None:
                return self._client
            if time.monotonic() < self._retry_at:
                raise StorageFault(Fault.IO, "the master could not be reached a moment ago")
        try:
            return self._connecting.call(self._connect, within_s)
        except Late as late:
            raise StorageFault(Fault.IO, "the master does not answer") from late

    def _connect(self) -> Native:
        with self._lock:
            if self._client is not None:
                return self._client
        config = config_of(self._settings)
        client = cast("Native", self._module.MooncakeDistributedStore())
        reached = len(KEPT) < KEPT_MAX and answers(config)
        if reached:
            KEPT.append(client)
            reached = client.setup(config) == 0
        try:
            if not reached:
                where = self._settings.master
                raise StorageFault(Fault.IO, f"no connection to the master at {where}")
            self._staging.use(client)
        except StorageFault:
            with self._lock:
                self._retry_at = time.monotonic() + CONNECT_RETRY_S
            raise
        with self._lock:
            self._client = client
        return client

    def _replicate(self) -> object:
        config = self._module.ReplicateConfig()
        config.replica_num = self._settings.replicas
        return config


def below(epoch: int) -> str:
    """Return a regular expression for the texts of all epochs before this one, at least 1."""
    text = epoch_text(epoch)
    digits = "0123456789abcdef"
    cases = [
        f"{text[:at]}[{digits[: digits.index(digit)]}].{{{len(text) - at - 1}}}"
        for at, digit in enumerate(text)
        if digit != "0"
    ]
    return "|".join(cases)


def _fault(code: int, doing: str) -> StorageFault:
    fault = Fault.NO_SPACE if code == _NO_HANDLE else Fault.IO
    return StorageFault(fault, f"Mooncake answered {code} to {doing}")
