"""What `plan`, `load`, `fetch` and `survey` return: what the node keeps until it is released."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

from tiercache.client.arena import Arena
from tiercache.client.session import Lease, Session
from tiercache.client.values import Blob, Scope
from tiercache.errors import ProtocolError
from tiercache.state import Chain, Layout, Piece, Shard


@dataclass(slots=True)
class Leased:
    """Where the bytes behind a plan are, and by which hold. `views` are made when asked for."""

    session: Session
    arena: Arena | None
    lease: Lease
    layout: Layout
    pieces: Sequence[Piece | None] = ()
    views: tuple[Blob | None, ...] | None = None

    def blobs(self) -> tuple[Blob | None, ...]:
        """Return the pieces as views; ProtocolError when the node named places that cannot be."""
        if self.lease.released:
            raise ValueError(
                f"request {self.lease.request!r} was released: its bytes may be others"
            )
        if self.views is None:
            self.views = self._make()
        return self.views

    def _make(self) -> tuple[Blob | None, ...]:
        self.lease.viewed = True
        assert self.arena is not None
        parts, view = self.layout.parts, self.arena.view
        shards: dict[tuple[int, int], Shard] = {}
        blobs: list[Blob | None] = []
        for piece in self.pieces:
            if piece is None:
                blobs.append(None)
                continue
            if not 0 <= piece.part < len(parts):
                raise ProtocolError(f"the layout has no part {piece.part}")
            bounds = (piece.shard_start, piece.shard_stop)
            shard = shards.get(bounds)
            if shard is None:
                shard = shards[bounds] = Shard(*bounds)
            data = view(piece.segment, piece.offset, piece.nbytes)
            name = parts[piece.part].name
            blobs.append(
                Blob(name, piece.end, data, piece.start, shard, piece.codec, piece.requantised)
            )
        return tuple(blobs)


class _Releasing:
    """A context manager: leaving it, however, releases."""

    leased: Leased | None

    @property
    def held(self) -> bool:
        """Whether the lease stands, as far as this process can tell: not released, and the node
        still connected. After copying bytes out, this says whether the copy can be trusted."""
        return self.leased is not None and self.leased.lease.held

    def release(self) -> None:
        """Let go of the bytes. Idempotent; never blocks."""
        if self.leased is not None:
            self.leased.lease.release()
            # A dead node's memory must not stay because somebody keeps a plan of it.
            self.leased.views = self.leased.arena = None
            self.leased.session.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, eq=False)
class Plan(_Releasing):
    """Where a request can resume.

    `boundary`: tokens that need not be computed, 0 for a miss, `digest` the chain's digest there (b"" at
    0 of a `GivenChain`).
    `ready`: all of it is in host memory and `blobs` are there; otherwise `load` waits for the rest,
    of which `ready_boundary` tokens are in host memory now. `checkpoints`: token counts worth
    capturing during this prefill. `reason` says why there is no more ("" when there is).
    A plan and what `load` made of it share one lease: releasing either releases both.
    """

    request: str
    boundary: int
    digest: bytes
    ready: bool
    ready_boundary: int
    checkpoints: tuple[int, ...]
    reason: str
    chain: Chain = field(repr=False)
    scope: Scope = field(repr=False)
    leased: Leased | None = field(default=None, repr=False)

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The objects of this boundary, each a view of arena memory, valid until the release.

        Empty unless `ready`. Raises ValueError after the release, and ProtocolError when the node
        named places that cannot be.
        """
        if self.leased is None or not self.ready:
            return ()
        return cast("tuple[Blob, ...]", self.leased.blobs())  # A plan has no piece None.


@dataclass(frozen=True, eq=False)
class Holding(_Releasing):
    """Objects fetched by name, leased as `request`. `reason` is "" when the node answered."""

    request: str
    count: int
    reason: str
    leased: Leased | None = field(default=None, repr=False)

    @property
    def blobs(self) -> tuple[Blob | None, ...]:
        """One view per object wanted, in order, None for what is not there; valid until the
        release. Raises as `Plan.blobs` does."""
        return (None,) * self.count if self.leased is None else self.leased.blobs()


@dataclass(frozen=True, eq=False)
class Survey(_Releasing):
    """What is held along a path of blocks, for this rank: kept until the release, or a while.

    `found`: for each part of the layout one byte per block, 1 where the object that ends there is
    held; cut off at the first block where a part that needs all its blocks has none. Empty when the
    node did not answer; `reason` says why. `start`: how many tokens come before the path, as what is held
    on it says; -1 when nothing is.
    """

    request: str
    found: tuple[bytes, ...]
    reason: str
    start: int
    leased: Leased | None = field(default=None, repr=False)
