"""What can be wrong with a caller's arguments, found before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.client.values import Blob, Options, Wanted
from tiercache.errors import LayoutError
from tiercache.state import NATIVE, Chain, Layout, Namespace, Part, Shard
from tiercache.wire import messages as wire


@dataclass(frozen=True, slots=True)
class Job:
    """One blob to be stored: what is offered, and its flat bytes, piece by piece."""

    offer: wire.Offer
    pieces: tuple[memoryview, ...]


class Form:
    """The layout as one rank sees it. Raises LayoutError when it does not fit the namespace, or
    does not split over the ranks."""

    def __init__(self, namespace: Namespace, layout: Layout, options: Options) -> None:
        if namespace.layout != layout.fingerprint:
            raise LayoutError("the namespace was made for another layout; use Namespace.of(layout)")
        self.namespace = namespace
        self.layout = layout
        self._own = {p.name: p.shards(options.ranks)[options.rank] for p in layout.parts}
        self._index = {part.name: index for index, part in enumerate(layout.parts)}

    def check_request(self, request: str, chain: Chain | None = None) -> None:
        """Raise ValueError for a request without a name or a chain with other blocks."""
        if not request:
            raise ValueError("a request needs a name: leases go by it")
        if chain is not None and chain.block_tokens != self.layout.block_tokens:
            raise ValueError(
                f"the chain has blocks of {chain.block_tokens} tokens, the layout "
                f"{self.layout.block_tokens}"
            )

    def wanted(self, wanted: Sequence[Wanted]) -> list[wire.Wanted]:
        """Return what to ask for; LayoutError for a part or a shard that does not exist."""
        asked = []
        for want in wanted:
            part, shard = self._find(want.part, want.shard)
            asked.append(wire.Wanted(part, shard.start, shard.stop, want.codec, want.digest))
        return asked

    def jobs(self, chain: Chain, blobs: Sequence[Blob], parent: bytes) -> list[Job]:
        """Return the blobs as offers; LayoutError or ValueError for the first that cannot be."""
        return [self._job(chain, blob, parent) for blob in blobs]

    def _job(self, chain: Chain, blob: Blob, parent: bytes) -> Job:
        index, shard = self._find(blob.part, blob.shard)
        part = self.layout.parts[index]
        _check_range(part, blob, len(chain))
        try:
            pieces = tuple(memoryview(piece).cast("B") for piece in (blob.data, *blob.more))
        except TypeError as fault:
            raise ValueError(f"part {part.name!r}: the bytes must be contiguous") from fault
        expected = part.nbytes(blob.end - blob.start, shard)
        nbytes = sum(piece.nbytes for piece in pieces)
        if not nbytes or (blob.codec == NATIVE and nbytes != expected):
            raise LayoutError(
                f"part {part.name!r}: {nbytes} bytes for tokens [{blob.start}, {blob.end}) of "
                f"shard {shard}, which takes {expected}"
            )
        inside = blob.end % chain.block_tokens
        offer = wire.Offer(
            part=index,
            shard_start=shard.start,
            shard_stop=shard.stop,
            codec=blob.codec,
            digest=chain.digest_at(blob.end),
            base=chain.digests[blob.end // chain.block_tokens] if inside else b"",
            start=blob.start,
            end=blob.end,
            nbytes=nbytes,
            parent=parent,
            requantised=blob.requantised,
        )
        return Job(offer, pieces)

    def _find(self, name: str, shard: Shard | None) -> tuple[int, Shard]:
        part = self.layout.part(name)
        if shard is None:
            shard = self._own[name]
        elif not 0 <= shard.start < shard.stop <= part.units:
            raise LayoutError(f"part {name!r} has units 0-{part.units}, not {shard}")
        return self._index[name], shard


def _check_range(part: Part, blob: Blob, tokens: int) -> None:
    if not 0 < blob.end <= tokens:
        raise ValueError(f"part {part.name!r}: the chain has {tokens} tokens, not {blob.end}")
    block = part.block_tokens
    start = 0 if part.is_snapshot else blob.end - (blob.end % block or block)
    if blob.start != start:
        raise ValueError(
            f"part {part.name!r}: bytes that end at {blob.end} start at {start}, not {blob.start}"
        )
