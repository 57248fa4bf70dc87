"""Several checkpoints in one physical block.

A block of state stands for a range of tokens, as a block of KV does, and holds snapshots at some of its
*marks* (32, 64, 96 and 128 tokens into it, say). Each is restorable by itself. A mark without a snapshot
never is: between marks nothing can be rebuilt from a neighbour. One block is one taking of memory, so that
fine-grained hits do not fragment it. The same thread owns this as owns the pools.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.device.handles import Run
from tiercache.device.ownership import (
    NO_CHECKPOINT_SLOT,
    REQUANTISED_MAX,
    TOO_OFTEN_QUANTISED,
    Ownership,
)
from tiercache.device.pools import CheckpointPool
from tiercache.device.slots import Private, Skipped, Stale


@dataclass(frozen=True, slots=True)
class Block:
    """One block; its tokens follow the first `start` ones."""

    start: int
    slot: Private


class StateBlocks:
    """Blocks of checkpoints of the runs of `owner`, in a pool with one place per mark.

    `marks`: token counts inside a block at which a snapshot can stand, ascending; the last one is the
    length of a block.
    """

    def __init__(
        self,
        owner: Ownership,
        pool: CheckpointPool,
        marks: Sequence[int],
        *,
        requantised_max: int = REQUANTISED_MAX,
    ) -> None:
        if list(marks) != sorted(set(marks)) or not marks or marks[0] < 1:
            raise ValueError(f"marks must ascend from at least 1, not {list(marks)}")
        if pool.per_block != len(marks):
            raise ValueError(f"a block of the pool has {pool.per_block} places, not {len(marks)}")
        self.marks = tuple(marks)
        self.counters: Counter[str] = Counter()
        self.owner = owner
        self.pool = pool
        self._requantised_max = requantised_max
        self._filled: dict[Block, dict[int, int]] = {}  # Block -> mark -> requantised.

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.marks[-1]

    def open(self, start: int) -> Block | Skipped:
        """Return an empty block for the tokens after `start`; Skipped when there is no room.

        Raises ValueError when `start` is not where a block begins.
        """
        if start < 0 or start % self.block_tokens:
            raise ValueError(f"blocks of {self.block_tokens} tokens do not start at {start}")
        slot = self.pool.take()
        if slot is None:
            return self._skipped(NO_CHECKPOINT_SLOT)
        block = Block(start, slot)
        self._filled[block] = {}
        return block

    def snapshot(self, block: Block, run: Run, tokens: int) -> Skipped | Stale | None:
        """Keep the run's state, which must be after `tokens` tokens, at that mark of the block.

        Skipped when `tokens` is not at a mark of it. A snapshot that is there already stays: what a
        reader was offered does not change.
        """
        filled = self._filled.get(block)
        slot, rounded = self.owner.slot(run), self.owner.rounded(run)
        if filled is None or isinstance(slot, Stale) or isinstance(rounded, Stale):
            return Stale("block" if filled is None else "run")
        mark = tokens - block.start
        if mark not in self.marks:
            return self._skipped("no_mark")
        if mark in filled:
            return None
        if self.pool.lossy and rounded > self._requantised_max:
            return self._skipped(TOO_OFTEN_QUANTISED)
        self.pool.encode(self.owner.active, slot, block.slot, self.marks.index(mark))
        filled[mark] = rounded
        return None

    def marks_of(self, block: Block) -> tuple[int, ...]:
        """Return the token counts at which a block holds a snapshot, in the order they came."""
        return tuple(block.start + mark for mark in self._filled.get(block, ()))

    def held(self, block: Block, tokens: int) -> tuple[int, int] | Stale:
        """Return where in the pool's store the snapshot at exactly `tokens` is, to read, and how often it
        was quantised; Stale when there is none."""
        mark = tokens - block.start
        requantised = self._filled.get(block, {}).get(mark)
        if requantised is None:
            return Stale("snapshot")
        return self.pool.place(block.slot, self.marks.index(mark)), requantised

    def deepest(self, block: Block, limit: int) -> int:
        """Return the largest token count up to `limit` that the block can restore; 0 when none."""
        found = (block.start + mark for mark in self._filled.get(block, ()))
        return max((tokens for tokens in found if tokens <= limit), default=0)

    def resume(self, block: Block, tokens: int) -> Run | Skipped | Stale:
        """Return a run with a private copy of the snapshot at exactly `tokens`; Skipped if none."""
        filled = self._filled.get(block)
        if filled is None:
            return Stale("block")
        mark = tokens - block.start
        if mark not in filled:
            return self._skipped("no_snapshot")
        run = self.owner.enter()
        if isinstance(run, Run):
            place = self.marks.index(mark)
            self.owner.decode(run, self.pool, block.slot, filled[mark], place)
        return run

    def close(self, block: Block) -> Stale | None:
        """Give the block back, with every snapshot in it."""
        if self._filled.pop(block, None) is None:
            return Stale("block")
        return self.pool.table.give(block.slot)

    def _skipped(self, reason: str) -> Skipped:
        self.counters[f"skipped_{reason}"] += 1
        return Skipped(reason)
