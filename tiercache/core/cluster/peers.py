"""What the other nodes hold, as far as they told, and whom to ask."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple, TypeAlias

from tiercache.core.cluster.breaker import Breaker
from tiercache.core.limits import MIB, Clustering
from tiercache.core.pace import Pace
from tiercache.state.names import short

POOL = "/pool"
"""What the pool is called among the peers: no node has such a name."""

LACKED_MAX: Final = 64
"""Ranks of which is remembered that a node had nothing."""

Ranks: TypeAlias = tuple[bytes, int, int, int]
"""Whose state is sought: the namespace, and of so many ranks those from one up to before another."""


class Peer:
    """One other node, or the pool: what it told last, and how it does."""

    def __init__(self, name: str, bit: int, breaker: Breaker, pace: Pace) -> None:
        self.name = name
        self.bit = bit
        self.boot = ""
        self.version = -1
        self.names: set[int] = set()
        self.breaker = breaker
        self.pace = pace  # How fast it gives.
        self.lacked: OrderedDict[Ranks, None] = OrderedDict()  # Whose state it did not have.

    def lacks(self, name: Ranks, *, nothing: bool) -> None:
        """It had nothing for these ranks, or it had."""
        self.lacked.pop(name, None)
        if nothing:
            self.lacked[name] = None
            if len(self.lacked) > LACKED_MAX:
                self.lacked.popitem(last=False)


class Whom(NamedTuple):
    """Who may be asked: `below` says of a node to fewer than how many blocks a boundary must belong, 0 for
    none; nodes in `last` come last. `counts`: of how many blocks a boundary is of use; None: of any."""

    name: Ranks
    below: Callable[[str], float]
    last: frozenset[str] = frozenset()
    counts: frozenset[int] | None = None


ANY: Final = Whom((b"", 0, 0, 0), lambda name: inf)
"""Anybody, for all ranks."""


class Known(NamedTuple):
    """What one node knows of another: how many boundaries it has told, and how it does."""

    boundaries: int
    health: str


class Peers:
    """All other nodes. Looking for a prefix costs one dictionary look-up for each digest, however many
    nodes there are, and no message."""

    def __init__(self, limits: Clustering, sample_bytes_min: int = MIB) -> None:
        self._limits = limits
        self._sample_bytes_min = sample_bytes_min
        self._peers: dict[str, Peer] = {}
        self._at: dict[int, int] = {}  # Short name -> mask of the peers that told it.
        self._free: list[int] = []  # Bits that nobody has.
        self._bits = 0
        self.pool = self._new(POOL) if limits.pool else None
        """It is no node: it neither joins nor leaves, and is not counted."""

    def _new(self, name: str) -> Peer:
        limits = self._limits
        breaker = Breaker(limits.peer_failures_max, limits.peer_sick_s, limits.peer_sick_s_max)
        if not self._free:
            self._free.append(self._bits)
            self._bits += 1
        return Peer(name, self._free.pop(), breaker, Pace(self._sample_bytes_min))

    def teller(self, name: str) -> Peer | None:
        """Return who tells what it could resume under that name: a member, or the pool."""
        return self.pool if name == POOL else self._peers.get(name)

    def _all(self) -> Iterator[Peer]:
        yield from self._peers.values()
        if self.pool is not None:
            yield self.pool

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def is_empty(self) -> bool:
        """Whether there is nobody to ask: no other node, and no pool."""
        return not self._peers and self.pool is None

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def known(self, now: float) -> dict[str, Known]:
        """Return what is known of each, by name."""
        return {
            name: Known(len(peer.names), peer.breaker.health(now))
            for name, peer in self._peers.items()
        }

    def get(self, name: str) -> Peer | None:
        """Return a peer that is a member; None for another."""
        return self._peers.get(name)

    def members(self, boots: dict[str, str]) -> None:
        """These nodes are there now, by name, each with its boot token; others are not."""
        for name in [name for name in self._peers if name not in boots]:
            self._leave(self._peers.pop(name))
        for name, boot in boots.items():
            peer = self._peers.get(name)
            if peer is None:
                if len(self._peers) >= self._limits.peers_max:
                    continue
                peer = self._peers[name] = self._new(name)
            if peer.boot != boot:  # What an earlier start held may be gone.
                self._forget(peer)
                peer.boot = boot

    def _leave(self, peer: Peer) -> None:
        self._forget(peer)
        self._free.append(peer.bit)

    def _forget(self, peer: Peer) -> None:
        self._drop(peer, list(peer.names))
        peer.version = -1

    def _drop(self, peer: Peer, names: list[int]) -> None:
        bit = 1 << peer.bit
        for name in names:
            if name in peer.names:
                peer.names.remove(name)
                rest = self._at[name] & ~bit
                if rest:
                    self._at[name] = rest
                else:
                    del self._at[name]

    def told(
        self, name: str, version: int, added: list[int], removed: list[int], *, whole: bool
    ) -> None:
        """A peer said what it could resume: all of it, or what changed."""
        peer = self.teller(name)
        if peer is None:
            return
        if whole:
            self._forget(peer)
        self._drop(peer, removed)
        bit = 1 << peer.bit
        # What is told anew takes no more room.
        fresh = [short_name for short_name in added if short_name not in peer.names]
        spare = self._limits.peer_names_max - len(peer.names)
        for short_name in fresh[: max(spare, 0)]:
            peer.names.add(short_name)
            self._at[short_name] = self._at.get(short_name, 0) | bit
        peer.version = version

    def deepest(
        self,
        namespace: bytes,
        digests: Sequence[bytes],
        above: int,
        now: float,
        whom: "Whom | None" = None,
    ) -> tuple[int, list[Peer]]:
        """Return how many of `digests` lead to the deepest boundary that some peer may resume, beyond
        `above` of them, and the peers that may, the best to ask first; (0, []) when there is none."""
        at, whom = self._at, whom or ANY
        # What many told whom nobody may ask now is not looked at, boundary by boundary.
        below = self._below(whom, now) if at else {}
        ready = sum(1 << peer.bit for peer in below)
        deepest = min(len(digests), max(below.values(), default=0) - 1)
        for count in _down(int(deepest), above, whom.counts):
            mask = at.get(short(namespace, digests[count - 1]), 0) & ready
            if mask:
                peers = [peer for peer in below if mask >> peer.bit & 1 and count < below[peer]]
                if peers:  # The same one is asked for the same prefix, as long as it does well.
                    return count, sorted(
                        peers, key=lambda peer: self._order(peer, digests[0], whom)
                    )
        return 0, []

    def _below(self, whom: Whom, now: float) -> dict[Peer, float]:
        """Return who may be asked now, and for less than how many blocks."""
        peers = (peer for peer in self._all() if peer.names and peer.breaker.may_ask(now))
        return {peer: below for peer in peers if (below := whom.below(peer.name))}

    def _order(self, peer: Peer, digest: bytes, whom: "Whom") -> tuple[bool, bool, bool, bytes]:
        """A node's memory is nearer than the pool. What a node had nothing of, it may have nothing of
        again: of the ranks of an engine, the state of some is here, and of some there."""
        unlikely = peer.name in whom.last
        lacked = whom.name in peer.lacked
        return unlikely, lacked, peer is self.pool, _rank(peer.name, digest)

    def depths(self, namespace: bytes, digests: Sequence[bytes]) -> list[tuple[Peer, int]]:
        """Return every peer, the pool too, that may resume something of `digests`, and how many."""
        found: list[tuple[Peer, int]] = []
        seen = 0
        for count in range(len(digests), 0, -1):
            mask = self._at.get(short(namespace, digests[count - 1]), 0) & ~seen
            if mask:
                seen |= mask
                found += [(peer, count) for peer in self._all() if mask >> peer.bit & 1]
        return found

    def check(self) -> None:
        """Raise AssertionError if the table and what the peers told disagree."""
        told: dict[int, int] = {}
        for peer in self._all():
            assert len(peer.names) <= self._limits.peer_names_max
            for name in peer.names:
                told[name] = told.get(name, 0) | 1 << peer.bit
        assert told == self._at
        bits = [peer.bit for peer in self._all()]
        assert len(set(bits)) == len(bits)


def _down(deepest: int, above: int, of_use: frozenset[int] | None) -> Sequence[int]:
    """Return the numbers of blocks to look at, the deepest first."""
    if of_use is None:
        return range(deepest, above, -1)
    return sorted((count for count in of_use if above < count <= deepest), reverse=True)


def _rank(name: str, digest: bytes) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): peers come in an order that a prefix chooses."""
    return hashlib.sha256(name.encode() + digest).digest()
