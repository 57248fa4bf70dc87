"""What moves bytes between nodes.

One node listens and lends objects out of its memory; another one dials it and fetches ranges of them
into memory of its own. Nothing here chooses: what is fetched from whom, and whether it is worth it,
is the core's to say. An object is named by opaque bytes.

Who owns the memory is explicit. A target belongs to the transport from the call of `fetch` until
that call returns or raises, in whatever way, and not a moment longer: afterwards no byte of it changes.
What is lent belongs to the transport until it calls `release`, which it does exactly once.

Everything is of one event loop: calls and callbacks come on its thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from tiercache.errors import PeerFault, TransportFault

CHECKSUM_BYTES: Final = 16
"""XXH3-128, as in a record."""

KEY_BYTES_MAX: Final = 1024
"""Longest name of an object."""

WITHIN_S_MAX: Final = 86_400.0
"""No deadline is longer."""

OBJECT_BYTES_MAX: Final = 1 << 40
"""Largest object that can be spoken of."""

Count = Annotated[int, msgspec.Meta(ge=0, le=OBJECT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one end takes. Both ends of a connection work with the smaller of what they say.

    `window_bytes` may be under way to one receiver before it must say that it got them: the most
    that arrives for nothing after a cancel. `calls_max` requests wait on one connection. A listener has
    `connections_max` peers, and as many strangers who did not prove themselves yet: of those, the
    newest takes the place of the oldest.
    `send_buffer_bytes` is what the kernel holds of what a listener sends: little stays in the
    processor's caches, a long way needs the rate times its delay; 0 leaves it to the kernel.

    A listener lends for a request no longer than `serve_s_max`, and ends a connection that takes no
    bytes for `stall_s_max`, or on which nothing happens for `idle_s_max`.
    """

    frame_bytes_max: int = 256 << 10
    batch_max: int = 1024
    calls_max: int = 256
    chunk_bytes_max: int = 4 << 20
    window_bytes: int = 16 << 20
    connections_max: int = 256
    send_buffer_bytes: int = 512 << 10
    handshake_s_max: float = 5.0
    serve_s_max: float = 60.0
    stall_s_max: float = 20.0
    idle_s_max: float = 300.0

    def __post_init__(self) -> None:
        if min(self.calls_max, self.batch_max, self.connections_max, self.chunk_bytes_max) < 1:
            raise ValueError("every limit must be at least 1")
        if self.window_bytes < self.chunk_bytes_max:
            raise ValueError("window_bytes must be at least chunk_bytes_max")


class Want(NamedTuple):
    """A range of one object to be fetched: `len(target)` bytes from `offset` on.

    `object_bytes` is the size of the whole object: one of another size is another object. `target`
    is writable, contiguous, and of bytes. `checksum` is the XXH3-128 that the range must have; b""
    when only the peer knows it.
    """

    key: bytes
    object_bytes: int
    offset: int
    target: memoryview
    checksum: bytes = b""


class Asked(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A range of one object that a peer asks for: on the wire too."""

    key: Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)]
    object_bytes: Count
    offset: Count
    nbytes: Count


@dataclass(frozen=True, slots=True)
class Loan:
    """A whole object, lent until `release` is called.

    `view` is not changed while it is lent. `checksum` is its XXH3-128 as it was sealed: what is sent
    of the whole object is checked against it at the other end. A part of an object is summed as it
    is sent, which shows damage on the way only.
    """

    view: memoryview
    checksum: bytes
    release: Callable[[], None]


Lent: TypeAlias = Loan | PeerFault
"""The answer to one thing asked for; a fault is MISSING or BUSY."""


class Source(Protocol):
    """What a node lends to its peers."""

    def lend(
        self, peer: str, asked: Sequence[Asked], answer: Callable[[Sequence[Lent]], None]
    ) -> None:
        """Call `answer` once, now or later, with one loan or fault for each thing asked for.

        `peer` is the name of who asks: proved where certificates are used, a claim otherwise. Raises
        nothing. Loans that come too late are released at once.
        """
        ...

    def ask(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        """Call `answer` once, now or later, with what is said to a peer that asks `body`. Raises nothing.
        What comes too late is not sent; what does not fit into a frame is refused to the peer."""
        ...


class Peer(Protocol):
    """Another node, as one that fetches sees it."""

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """Fill each target, in `within_s` seconds at most (of a day), whatever the peer does.

        Returns one outcome per want: None only when the target holds the bytes, checked. A target
        whose outcome is a fault holds unspecified bytes. Cancelling the task cancels the fetch; then
        too the targets are the caller's again. Raises ValueError for what no peer can serve: more
        wants than `batch_max`, a range outside of its object.
        """
        ...

    async def ask(self, body: bytes, within_s: float) -> bytes:
        """Return what the peer says to `body`, in `within_s` seconds at most. Raises TransportFault, and
        ValueError for a body that does not fit into a frame."""
        ...

    async def probe(self, within_s: float) -> float:
        """Return how long a round trip takes, in seconds: the peer is alive. Raises TransportFault.

        It is PROTOCOL when the two ends disagree on how many bytes were sent and credited.
        """
        ...

    @property
    def closed(self) -> bool:
        """Whether every later fetch fails with LOST."""
        ...

    async def close(self) -> None:
        """End the connection; fetches that wait fail with LOST. Idempotent."""
        ...


class Listener(Protocol):
    """A node that lends."""

    @property
    def address(self) -> str:
        """What a peer dials; the port is the one that was really taken."""
        ...

    @property
    def connections(self) -> int:
        """How many peers are connected."""
        ...

    async def close(self) -> None:
        """Stop listening, end all connections and release every loan. Idempotent."""
        ...


class Transport(Protocol):
    """One way to move bytes. `address` is its own kind of text, such as "10.0.0.7:7411"."""

    async def listen(self, address: str, source: Source) -> Listener:
        """Lend what `source` has. Raises ConfigError for an address that cannot be used."""
        ...

    async def dial(self, address: str, within_s: float) -> Peer:
        """Return a connection that is ready. Raises TransportFault, and ConfigError for an address
        that must not be used."""
        ...


def check_wants(wants: Sequence[Want], batch_max: int) -> None:
    """Raise ValueError for wants that no peer can serve."""
    if len(wants) > batch_max:
        raise ValueError(f"{len(wants)} wants in one call; batch_max is {batch_max}")
    for want in wants:
        target = want.target
        flat = target.c_contiguous and target.itemsize == target.ndim == 1
        if target.readonly or not flat:
            raise ValueError("a target is a writable, contiguous view of bytes")
        if not 0 <= want.offset <= want.offset + len(target) <= want.object_bytes:
            raise ValueError(f"[{want.offset}, +{len(target)}) is outside of {want.object_bytes}")
        if want.object_bytes > OBJECT_BYTES_MAX or not 0 < len(want.key) <= KEY_BYTES_MAX:
            raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, an object {OBJECT_BYTES_MAX}")
        if want.checksum and len(want.checksum) != CHECKSUM_BYTES:
            raise ValueError(f"a checksum has {CHECKSUM_BYTES} bytes")
