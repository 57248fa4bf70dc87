"""What a plan returned, made into what this rank needs: objects of other tensor-parallel sizes joined.

A node may answer a rank with several objects for one block or boundary, each for a range of the part's
units, saved by ranks of another size. Together they cover this rank's range.
"""

from collections.abc import Sequence

from tiercache.client import Blob
from tiercache.device.codecs import codec_named, encoded
from tiercache.device.resharding import Held, assemble
from tiercache.errors import LayoutError
from tiercache.state import NATIVE, Layout, Part, Shard


def gather(layout: Layout, blobs: Sequence[Blob], ranks: int, rank: int) -> list[Blob]:
    """Return for each block and boundary one blob with exactly the units of this rank.

    A blob that has them already is passed on as it is, a view of leased memory; others are copied. Of
    several that will do, none is preferred but by size. Raises LayoutError when they do not cover it,
    when pieces of one object come in different codecs, or one has another size than its units take.
    """
    groups: dict[tuple[str, int, int], list[Blob]] = {}
    for blob in blobs:
        groups.setdefault((blob.part, blob.start, blob.end), []).append(blob)
    return [_one(layout.part(name), group, ranks, rank) for (name, _, _), group in groups.items()]


def _one(part: Part, group: Sequence[Blob], ranks: int, rank: int) -> Blob:
    wanted = part.shards(ranks)[rank]
    first = group[0]
    for blob in group:
        if blob.shard in (None, wanted):
            _check_size(part, blob, wanted)
            return blob
    if len({blob.codec for blob in group}) > 1:
        raise LayoutError(f"part {part.name!r}: pieces of one object in different codecs")
    form = _form(part, first.codec)
    pieces = [Held(blob.shard, blob.data) for blob in group if blob.shard is not None]
    tokens = 0 if part.is_snapshot else first.end - first.start
    return Blob(
        part=part.name,
        end=first.end,
        data=assemble(form, tokens, pieces, wanted),
        start=first.start,
        shard=wanted,
        codec=first.codec,
        requantised=max(blob.requantised for blob in group),
    )


def _form(part: Part, codec: str) -> Part:
    return part if codec == NATIVE else encoded(codec_named(codec), part)


def _check_size(part: Part, blob: Blob, shard: Shard) -> None:
    tokens = 0 if part.is_snapshot else blob.end - blob.start
    nbytes = _form(part, blob.codec).nbytes(tokens, shard)
    if blob.data.nbytes != nbytes:
        raise LayoutError(
            f"part {part.name!r}: {blob.data.nbytes} bytes for units {shard}, not {nbytes}"
        )
