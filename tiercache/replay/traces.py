"""Reading request traces: times, lengths and the identities of blocks, no text.

Two formats. `ptrace1` is a gzip file of JSON lines: a header with the tokens of a block, then one array
for each request, `[ms, tokens in, tokens out, session, ref, common, tail, shared]`: its path is the first
`common` blocks of request `ref` (-1: none) and the runs `[start, count, ...]` of `tail`. Mooncake's JSON
lines have a dictionary for each request, with the ids of blocks of 512 tokens. In both an id names a
block together with all blocks before it.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK_TOKENS = 512
PTRACE = "ptrace1"


class TraceError(ValueError):
    """The file is not a trace, or is damaged; it says where."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it came (seconds), its tokens, and the ids of its whole pages."""

    at: float
    tokens: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order they came. `page` is the tokens of one page, `name` the file's."""

    name: str
    page: int
    requests: list[Request]


def read_trace(path: Path, page: int = 0) -> Trace:
    """Return the trace in a file, of either format.

    `page` must be a multiple of the file's block (0: the block itself).
    """
    try:
        with gzip.open(path, "rt") if _is_gzip(path) else path.open() as lines:
            first = lines.readline()
            head = json.loads(first)
            if isinstance(head, dict) and head.get("format") == PTRACE:
                block = int(head["block"])
                rows = _ptrace(lines)
            elif isinstance(head, dict) and "hash_ids" in head:
                block = MOONCAKE_BLOCK_TOKENS
                rows = _mooncake(first, lines)
            else:
                raise TraceError(f"{path}: neither {PTRACE} nor Mooncake JSON lines")
            page = page or block
            if page < block or page % block:
                raise TraceError(f"{path}: a page is a multiple of {block} tokens, not {page}")
            requests = [_paged(*row, page, page // block) for row in rows]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as problem:
        if isinstance(problem, TraceError | FileNotFoundError):
            raise
        raise TraceError(f"{path}: not a trace that can be read: {problem!r}") from problem
    if not requests:
        raise TraceError(f"{path}: no requests")
    return Trace(path.name, page, requests)


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


_Row = tuple[float, int, "np.ndarray[tuple[int], np.dtype[np.int64]]"]


def _ptrace(lines: Iterator[str]) -> Iterator[_Row]:
    paths: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for number, line in enumerate(lines):
        at, tokens, _, _, ref, common, tail, *_ = json.loads(line)
        if not -1 <= ref < number:
            raise TraceError(f"request {number} refers to request {ref}")
        runs = [
            np.arange(a, a + n, dtype=np.int64) for a, n in zip(tail[::2], tail[1::2], strict=True)
        ]
        if ref >= 0:
            if common > len(paths[ref]):
                raise TraceError(f"request {number} has more in common than request {ref} has")
            runs.insert(0, paths[ref][:common])
        path = np.concatenate(runs) if runs else np.empty(0, np.int64)
        paths.append(path)
        yield float(at), int(tokens), path


def _mooncake(first: str, lines: Iterator[str]) -> Iterator[_Row]:
    yield _mooncake_row(first)
    for line in lines:
        if line.strip():
            yield _mooncake_row(line)


def _mooncake_row(line: str) -> _Row:
    row = json.loads(line)
    ids = np.array(row["hash_ids"], np.int64).reshape(-1)
    return float(row["timestamp"]), int(row["input_length"]), ids


def _paged(
    at: float,
    tokens: int,
    ids: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    page: int,
    blocks: int,
) -> Request:
    if tokens < 1:
        raise TraceError(f"a request of {tokens} tokens")
    whole = min(tokens // page, len(ids) // blocks)
    return Request(at / 1000, tokens, ids[blocks - 1 : whole * blocks : blocks].tolist())
