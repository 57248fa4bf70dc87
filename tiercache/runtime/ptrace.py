"""Requests as lines of a trace: times, lengths, and which blocks they have in common. Nothing else.

The format, `ptrace1`, is a gzip file of JSON lines: a header with the tokens of a block, then one array
for each request, in the order they came, `[ms, tokens in, tokens out, session, ref, common, tail,
shared]`. A request's path is the first `common` blocks of request `ref` (an index, -1: none) and the runs
`[start, count, ...]` of `tail`. A number names a block together with all blocks before it; numbers are
given out as blocks come, so that neither tokens nor digests leave the node.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

FORMAT: Final = "ptrace1"
NO_SESSION: Final = -1
NO_REQUEST: Final = -1
REST_BLOCKS: Final = 128


class Path(NamedTuple):
    """A request's blocks: `common` of request `ref`, then runs of new ones."""

    ref: int
    common: int
    tail: tuple[int, ...]


class _Block:
    __slots__ = ("before", "number", "request")

    def __init__(self, number: int, before: int, request: int) -> None:
        self.number = number
        self.before = before  # The number of the block before it: -1 for a first block.
        self.request = request  # The last one that had it.


def _no_rest() -> None:
    return


class Numbering:
    """Gives blocks numbers: equal numbers name equal blocks behind equal ways.

    The last `blocks_max` blocks are remembered. One that is forgotten and comes again gets a new number,
    and so do those behind it: the trace then shows less in common than there was, never more. `rest` is
    called every `REST_BLOCKS` blocks: whoever shares a processor may want it.
    """

    def __init__(self, blocks_max: int, rest: Callable[[], object] = _no_rest) -> None:
        self._rest = rest
        self._blocks_max = blocks_max
        self._known: OrderedDict[tuple[bytes, bytes], _Block] = OrderedDict()
        self._numbers = 0
        self._requests = 0

    def __len__(self) -> int:
        return len(self._known)

    def path(self, namespace: bytes, digests: Sequence[bytes]) -> Path:
        """Return the path of the next request, whose whole blocks have these digests."""
        known, request = self._known, self._requests
        self._requests += 1
        ref, common, before = NO_REQUEST, 0, -1
        for digest in digests:
            block = known.get((namespace, digest))
            if block is None or block.before != before:
                break
            known.move_to_end((namespace, digest))
            ref, common, before = block.request, common + 1, block.number
            block.request = request
            if not common % REST_BLOCKS:
                self._rest()
        first = self._numbers
        for digest in digests[common:]:
            known[namespace, digest] = _Block(self._numbers, before, request)
            known.move_to_end((namespace, digest))
            before = self._numbers
            self._numbers += 1
            if not self._numbers % REST_BLOCKS:
                self._rest()
        while len(known) > self._blocks_max:
            known.popitem(last=False)
        new = self._numbers - first
        return Path(ref, common, (first, new) if new else ())


def header(block_tokens: int, name: str) -> str:
    """Return the first line."""
    return json.dumps({"format": FORMAT, "block": block_tokens, "name": name}) + "\n"


def line(at_ms: int, tokens_in: int, tokens_out: int, path: Path) -> str:
    """Return a request's line."""
    row = [at_ms, tokens_in, tokens_out, NO_SESSION, path.ref, path.common, list(path.tail), 0]
    return json.dumps(row, separators=(",", ":")) + "\n"
