"""What policies are told: which way a request goes, and what the state along it weighs."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tiercache.core.cost import Work

Path: TypeAlias = Sequence[Hashable]
"""The digests of a prompt's whole blocks, in order."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the state of a namespace weighs: bytes of a block's KV and of a checkpoint, and its work.

    Without checkpoints (`state_bytes` 0) a resume is possible after every block.
    """

    block_tokens: int
    block_bytes: float
    state_bytes: float
    work: Work


@dataclass(frozen=True, slots=True)
class Tree:
    """The prefixes of one namespace, by its name; equal digests of two trees never meet."""

    name: Hashable
    shape: Shape


@dataclass(frozen=True, slots=True)
class Visit:
    """One request at `now` seconds: its path in a tree, and how many blocks of it a resume may use.

    `ends`: after how many blocks checkpoints are taken, ascending, where nothing deeper is resumed.
    """

    tree: Tree
    path: Path
    usable: int
    ends: tuple[int, ...]
    now: float


def sound(visit: Visit, held: int, known: Collection[Hashable]) -> Visit:
    """Return a visit that ends before the first digest that is elsewhere in its tree, or in its path twice.

    Digests are chained, so there is none, unless a client makes them up.
    """
    seen: set[Hashable] = set()
    bottom = max(visit.ends, default=0)
    for depth in range(held, bottom):
        digest = visit.path[depth]
        if digest in known or digest in seen:
            return replace(visit, ends=tuple(end for end in visit.ends if end <= depth))
        seen.add(digest)
    return visit
