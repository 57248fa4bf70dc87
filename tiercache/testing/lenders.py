"""Sources whose loans are counted, for tests of transports."""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache

import xxhash

from tiercache.errors import PeerFault
from tiercache.transport.base import Asked, Lent, Loan, Want

GUARD_BYTES = 64
GUARD = 0xA5


@lru_cache(maxsize=64)
def content_of(key: bytes, nbytes: int) -> bytes:
    """Return the bytes of an object that only this key gives."""
    return random.Random(key).randbytes(nbytes)


class Lender:
    """A `Source` of objects in memory. `loans` counts what is lent out, `asked` what was asked for.

    A key in `refused` gets that fault, one in `damaged` a wrong sum. While `held` is a list, answers
    are kept in it: call them to give them.
    """

    def __init__(self, objects: dict[bytes, int] | None = None) -> None:
        self.objects = {
            key: memoryview(bytearray(content_of(key, nbytes)))
            for key, nbytes in (objects or {}).items()
        }
        self._sums = {key: xxhash.xxh3_128_digest(view) for key, view in self.objects.items()}
        self.refused: dict[bytes, PeerFault] = {}
        self.damaged: set[bytes] = set()
        self.held: list[Callable[[], None]] | None = None
        self.loans = 0
        self.asked = 0
        self.questions = 0
        self.times = 1
        self.peers: set[str] = set()

    def lend(
        self, peer: str, asked: Sequence[Asked], answer: Callable[[Sequence[Lent]], None]
    ) -> None:
        """See `Source.lend`."""
        self.peers.add(peer)
        self.asked += len(asked)
        if self.held is None:
            answer([self._lent(each) for each in asked])
        else:
            self.held.append(lambda: answer([self._lent(each) for each in asked]))

    def ask(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        """See `Source.ask`. A body is answered with itself the other way round, `times` times."""
        self.peers.add(peer)
        self.questions += 1
        said = body[::-1] * self.times
        if self.held is None:
            answer(said)
        else:
            self.held.append(lambda: answer(said))

    def give(self) -> None:
        """Give all answers that were held, and hold no more."""
        held, self.held = self.held or [], None
        for each in held:
            each()

    def unchanged(self) -> bool:
        """Return whether what is lent is as it was."""
        return all(xxhash.xxh3_128_digest(v) == self._sums[k] for k, v in self.objects.items())

    def _lent(self, asked: Asked) -> Lent:
        if asked.key in self.refused:
            return self.refused[asked.key]
        view = self.objects.get(asked.key)
        if view is None:
            return PeerFault.MISSING
        checksum = bytes(16) if asked.key in self.damaged else self._sums[asked.key]
        self.loans += 1
        open_loan = [None]

        def release() -> None:
            open_loan.pop()  # IndexError when it was released before.
            self.loans -= 1

        return Loan(view, checksum, release)


class Target:
    """Memory to fetch into, with guards on both sides."""

    def __init__(
        self, key: bytes, object_bytes: int, offset: int = 0, nbytes: int | None = None
    ) -> None:
        self.nbytes = object_bytes - offset if nbytes is None else nbytes
        self._whole = bytearray([GUARD]) * (self.nbytes + 2 * GUARD_BYTES)
        self.view = memoryview(self._whole)[GUARD_BYTES : GUARD_BYTES + self.nbytes]
        self.want = Want(key, object_bytes, offset, self.view)
        self._expected = (key, object_bytes, offset)

    @property
    def right(self) -> bool:
        """Whether it holds the bytes asked for, and the guards are as they were."""
        key, object_bytes, offset = self._expected
        expected = content_of(key, object_bytes)[offset : offset + self.nbytes]
        return self.view == expected and self.guarded

    @property
    def guarded(self) -> bool:
        """Whether nothing was written around it."""
        guard = bytes([GUARD]) * GUARD_BYTES
        return self._whole.startswith(guard) and self._whole.endswith(guard)

    def wipe(self) -> None:
        """Fill it with what no peer sent."""
        self.view[:] = bytes([GUARD]) * self.nbytes

    @property
    def wiped(self) -> bool:
        """Whether nothing was written since `wipe`."""
        return self._whole.count(GUARD) == len(self._whole)
