"""Fine-grained checkpoints by what they are checkpoints of, several to a physical block.

The same names, policies and way to the node as in `tier`, for states that come close after one another: a
block of state holds the snapshots of one prompt at its marks, is one taking of memory, and goes as a whole.
It stands beside a `DeviceTier`, of whose runs it keeps states. Objects say nothing of blocks: what either
of them gave to the node is restored by the `DeviceTier`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from tiercache.device.blocks import Block, StateBlocks
from tiercache.device.handles import Run
from tiercache.device.index import Entry, Index, Prompt
from tiercache.device.lanes import Lane
from tiercache.device.leaving import Demoted, Leaving, Outlet
from tiercache.device.ownership import NO_CHECKPOINT_SLOT
from tiercache.device.placement import Placement, Worth
from tiercache.device.slots import Hold, Skipped, Stale
from tiercache.device.staging import Named, Outward, Staging
from tiercache.errors import LayoutError
from tiercache.state import Namespace

NOT_HERE: Final = "not_here"
NO_MARK: Final = "no_mark"


@dataclass(frozen=True, slots=True)
class _Mark:
    """One snapshot: in which block, and after how many tokens."""

    block: Block
    tokens: int


class MarkedTier:
    """See the module. `placement` knows blocks, under names of its own."""

    def __init__(
        self,
        blocks: StateBlocks,
        lane: Lane,
        placement: Placement,
        outlet: Outlet,
        *,
        namespace: Namespace,
        host_bytes_max: int,
    ) -> None:
        if namespace.layout != blocks.pool.seat.layout.fingerprint:
            raise LayoutError("the namespace is of another layout than the pool")
        self.counters: Counter[str] = Counter()
        self._blocks = blocks
        self._policy = placement
        self._index: Index[_Mark] = Index(namespace)
        self._open: dict[bytes, Block] = {}
        self._staging = Staging(blocks.pool.store, lane, host_bytes_max)
        self._leaving = Leaving(outlet, self.counters)

    def __len__(self) -> int:
        """Snapshots that can be found."""
        return len(self._index)

    def keep(self, run: Run, prompt: Prompt, tokens: int) -> Skipped | Stale | None:
        """Keep the run's state, which is after `tokens` tokens, if that is at a mark of a block.

        It goes into the block of the next shallower snapshot of its prompt, else into a new one.
        """
        name = self._index.name(prompt, tokens)
        entry = self._index.get(name)
        if entry is not None:
            self._policy.used(_key(entry.held.block))
            return None
        start = (tokens - 1) // self._blocks.block_tokens * self._blocks.block_tokens
        if tokens < 1 or tokens - start not in self._blocks.marks:
            return self._told(Skipped(NO_MARK))
        block = self._block(prompt, start, tokens)
        if isinstance(block, Skipped):
            return self._told(block)
        answer = self._blocks.snapshot(block, run, tokens)
        if answer is None:
            self._index.add(name, Entry(_Mark(block, tokens), prompt, tokens))
            self._open[_key(block)] = block
            self._policy.used(_key(block))
        elif not self._blocks.marks_of(block):
            self._blocks.close(block)
        return self._told(answer) if isinstance(answer, Skipped) else answer

    def find(self, prompt: Prompt, limit: int) -> int:
        """Return the most tokens of a prompt, up to `limit`, after which a snapshot is here; 0 for none."""
        found = next(self._index.prefixes(prompt, limit), None)
        if found is None:
            return 0
        self._policy.used(_key(found[1].held.block))
        return found[1].tokens

    def resume(self, prompt: Prompt, tokens: int) -> Run | Skipped:
        """Return a run with a private copy of the snapshot after exactly `tokens` tokens."""
        entry = self._index.get(self._index.name(prompt, tokens))
        if entry is None:
            return self._told(Skipped(NOT_HERE))
        self._policy.used(_key(entry.held.block))
        run = self._blocks.resume(entry.held.block, tokens)
        assert not isinstance(run, Stale)
        return self._told(run) if isinstance(run, Skipped) else run

    def make_room(self) -> bool:
        """Demote the block that the policy names, each of its snapshots by itself; return whether a block
        is free for it now. On a GPU the copies are only begun."""
        key = self._policy.victim(self._worth)
        if key is None:
            return False
        before = len(self._blocks.pool.table)
        block = self._open.pop(key)
        self._policy.gone(key)
        entries = [self._index.remove(name) for name in self._names(block)]
        try:
            for entry in entries:
                assert entry is not None
                self._leaves(entry)
        finally:
            self._blocks.close(block)  # Holds keep it until all copies are done.
        self.poll()
        return len(self._blocks.pool.table) < before

    def poll(self) -> None:
        """Finish what copies have done since the last time. Never blocks."""
        self._leaving.poll()

    def _block(self, prompt: Prompt, start: int, tokens: int) -> Block | Skipped:
        below = next(self._index.prefixes(prompt, tokens - 1), None)
        if below is not None and below[1].tokens > start:
            block = below[1].held.block
            # Else the place is taken by a prompt that forked off.
            if isinstance(self._blocks.held(block, tokens), Stale):
                return block
        found = self._blocks.open(start)
        if found == Skipped(NO_CHECKPOINT_SLOT) and self.make_room():
            found = self._blocks.open(start)
        return found

    def _leaves(self, entry: Entry[_Mark]) -> None:
        pool, block = self._blocks.pool, entry.held.block
        held, hold = self._blocks.held(block, entry.tokens), pool.table.hold(block.slot)
        assert not isinstance(held, Stale)
        assert isinstance(hold, Hold)
        codecs = {part.name: pool.codec_in(part.name) for part in pool.seat.parts}
        copy = self._staging.outward(held[0], Named(entry.tokens, codecs, held[1]), hold)
        if isinstance(copy, Outward):
            self._leaving.add(Demoted(entry.prompt, entry.tokens, copy))
        else:
            self.counters[f"lost_{copy.reason}"] += 1

    def _names(self, block: Block) -> list[bytes]:
        found = (self._index.name_of(_Mark(block, n)) for n in self._blocks.marks_of(block))
        return [name for name in found if name is not None]

    def _worth(self, key: bytes) -> Worth:
        block = self._open[key]
        tokens = sum(self._index.marginal(name) for name in self._names(block))
        return Worth(tokens, self._blocks.pool.store.slot_nbytes * len(self._blocks.marks))

    def _told(self, skipped: Skipped) -> Skipped:
        self.counters[f"skipped_{skipped.reason}"] += 1
        return skipped


def _key(block: Block) -> bytes:
    """Return a block's name for the policy: no other taking ever has its generation."""
    return block.slot.generation.to_bytes(8, "big")
