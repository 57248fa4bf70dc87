"""What a scheduler remembers of the node: what it was given, and what could not be had from it."""

from collections import OrderedDict
from collections.abc import Iterable


class Seen:
    """Objects that were handed over, so that none is copied off the device again. Bounded: what was used
    longest ago is forgotten, and then offered once more."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        if key not in self._known:
            return False
        self._known.move_to_end(key)
        return True

    def add(self, key: bytes) -> None:
        """Remember a key."""
        self._known[key] = None
        self._known.move_to_end(key)
        while len(self._known) > self._count_max:
            self._known.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget keys."""
        for key in keys:
            self._known.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


class Failures:
    """Boundaries whose load failed lately. vLLM asks again at once; the same answer would spin forever."""

    def __init__(self, lasting_s: float, count_max: int = 4096) -> None:
        self._lasting_s = lasting_s
        self._count_max = count_max
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, digest: bytes, now: float) -> None:
        """Remember a failure."""
        self._until[digest] = now + self._lasting_s
        self._until.move_to_end(digest)
        while len(self._until) > self._count_max:
            self._until.popitem(last=False)

    def holds(self, digest: bytes, now: float) -> bool:
        """Whether a boundary is to be left alone."""
        until = self._until.get(digest)
        if until is None:
            return False
        if now >= until:
            del self._until[digest]
            return False
        return True
