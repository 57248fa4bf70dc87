"""What nodes could resume, as a router sees it: an index fed with what they tell. No I/O, no clock."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from tiercache.state.canonical import DIGEST_BYTES
from tiercache.state.names import short, unpacked
from tiercache.wire.residency import NOTHING_KNOWN, Ask, Batch, Buffer, batch_of

BOOTS_KEPT: Final = 8
"""Earlier starts of a node that are remembered, so that their last words are not believed."""


class _Told:
    """One node: what it could resume, as of `version` of its start `boot`."""

    def __init__(self, bit: int, boot: str, now: float) -> None:
        self.bit = bit
        self.boot = boot
        self.earlier: deque[str] = deque(maxlen=BOOTS_KEPT)
        self.version = NOTHING_KNOWN
        self.names: set[int] = set()
        self.heard_at = now
        self.asked_at: float | None = None


class Residency:
    """Feed it every batch that comes; `deepest` costs a dictionary look-up for each digest, however many
    nodes there are.

    `now` is monotonic seconds. What it says may be out of date, and two boundaries may share a name
    (about once in 2**64 pairs): only the node itself decides what is resumed. Until a node has told all
    there is, it is not found. Beyond `nodes_max` nodes new ones are not listened to; beyond `names_max`
    boundaries of one node, what came last is not found. `gaps` counts how often something was missing.
    """

    def __init__(
        self, *, nodes_max: int = 4096, names_max: int = 1_000_000, ask_again_s: float = 1.0
    ) -> None:
        self._nodes_max = nodes_max
        self._names_max = names_max
        self._ask_again_s = ask_again_s
        self._told: dict[str, _Told] = {}
        self._free: list[int] = []  # Bits that no node has.
        self._all = 0  # Mask of the bits that nodes have.
        self._at: dict[int, int] = {}  # Name -> mask of the nodes that could resume it.
        self._slower: dict[int, int] = {}  # Likewise, of those that need a slower tier for it.
        self.gaps = 0

    # --- what nodes tell

    def feed(self, frames: Sequence[Buffer], now: float) -> Ask | None:
        """Take in a batch that a node published; return what to ask that node, when something is missing.

        Raises ProtocolError for what is no batch; then nothing has changed.
        """
        batch = batch_of(frames)
        told = self._meet(batch, now)
        if told is None or batch.boot in told.earlier:
            return None
        if batch.boot != told.boot:  # It was started again: what it held is gone, or not.
            told.earlier.append(told.boot)
            self._forget(told)
            told.boot = batch.boot
            told.asked_at = None
        told.heard_at = now
        self._take(told, batch)
        return self._ask(told, batch, now)

    def replayed(self, frames: Sequence[Buffer], now: float) -> None:
        """Take in the answer to a question; of another start than is known, it is no answer.

        Raises ProtocolError for what is no batch.
        """
        batch = batch_of(frames)
        told = self._meet(batch, now)
        if told is not None and batch.boot == told.boot:
            told.heard_at = now
            self._take(told, batch)

    def _meet(self, batch: Batch, now: float) -> _Told | None:
        told = self._told.get(batch.node)
        if told is None and len(self._told) < self._nodes_max:
            bit = self._free.pop() if self._free else len(self._told)
            told = self._told[batch.node] = _Told(bit, batch.boot, now)
            self._all |= 1 << bit
        return told

    def _take(self, told: _Told, batch: Batch) -> None:
        """Make a batch's changes, unless they are known, or some before them are not."""
        if batch.whole:
            if batch.version < told.version:
                return
            self._forget(told)
        elif not batch.since <= told.version < batch.version:
            return
        self._drop(told, unpacked(batch.removed))
        self._add(told, unpacked(batch.nvme), slower=True)
        self._add(told, unpacked(batch.host), slower=False)
        told.version = batch.version
        told.asked_at = None

    def _ask(self, told: _Told, batch: Batch, now: float) -> Ask | None:
        if batch.version <= told.version:
            return None
        if told.asked_at is not None and now < told.asked_at + self._ask_again_s:
            return None  # The answer is on its way.
        if told.asked_at is None:
            self.gaps += 1
        told.asked_at = now
        return Ask(told.version, told.boot)

    def _add(self, told: _Told, names: list[int], *, slower: bool) -> None:
        bit, at, slow = 1 << told.bit, self._at, self._slower
        for name in names:
            if name not in told.names:
                if len(told.names) >= self._names_max:
                    continue
                told.names.add(name)
                at[name] = at.get(name, 0) | bit
            if slower:
                slow[name] = slow.get(name, 0) | bit
            else:
                _clear(slow, name, bit)

    def _drop(self, told: _Told, names: list[int]) -> None:
        bit = 1 << told.bit
        for name in names:
            if name in told.names:
                told.names.remove(name)
                _clear(self._at, name, bit)
                _clear(self._slower, name, bit)

    def _forget(self, told: _Told) -> None:
        self._drop(told, list(told.names))
        told.version = NOTHING_KNOWN

    # --- who is there

    def drop(self, node: str) -> None:
        """A node is gone. If it says something, it is met anew."""
        told = self._told.pop(node, None)
        if told is not None:
            self._forget(told)
            self._free.append(told.bit)
            self._all ^= 1 << told.bit

    def silent(self, now: float, for_s: float) -> list[str]:
        """Return the nodes that have said nothing for so long. They are still found until dropped."""
        return [name for name, told in self._told.items() if now - told.heard_at > for_s]

    def nodes(self) -> dict[str, int]:
        """Return how many boundaries each node could resume, as far as is known."""
        return {name: len(told.names) for name, told in self._told.items()}

    # --- who could resume what

    def deepest(
        self, namespace: bytes, chain: Sequence[bytes], block_tokens: int, *, memory: bool = False
    ) -> dict[str, int]:
        """Return how many tokens of a prompt each node could resume; those that could none are left out.

        `chain`: the digests of the prompt's whole blocks, in order. An engine that has to compute one
        token itself leaves the last block out when the prompt ends with it. `memory`: only what is in
        memory where the boundary is.
        """
        if not all(len(digest) == DIGEST_BYTES for digest in (namespace, *chain)):
            raise ValueError(f"digests are {DIGEST_BYTES} bytes each")
        at, slow, left = self._at, self._slower, self._all
        deepest: dict[int, int] = {}
        for count in range(len(chain), 0, -1):
            name = short(namespace, chain[count - 1])
            mask = at.get(name, 0) & left
            if mask and memory:
                mask &= ~slow.get(name, 0)
            if not mask:
                continue
            left &= ~mask
            while mask:
                bit = mask.bit_length() - 1
                deepest[bit] = count * block_tokens
                mask ^= 1 << bit
            if not left:
                break
        return {name: deepest[told.bit] for name, told in self._told.items() if told.bit in deepest}

    def check(self) -> None:
        """Raise AssertionError if the tables and what the nodes told disagree."""
        expected: dict[int, int] = {}
        for told in self._told.values():
            assert len(told.names) <= self._names_max
            for name in told.names:
                expected[name] = expected.get(name, 0) | 1 << told.bit
        assert expected == self._at
        assert all(self._slower.values())
        assert all(mask & ~self._at.get(name, 0) == 0 for name, mask in self._slower.items())
        bits = [told.bit for told in self._told.values()] + self._free
        assert sorted(bits) == list(range(len(bits)))
        assert self._all == sum(1 << told.bit for told in self._told.values())


def _clear(masks: dict[int, int], name: int, bit: int) -> None:
    rest = masks.get(name, 0) & ~bit
    if rest:
        masks[name] = rest
    else:
        masks.pop(name, None)
