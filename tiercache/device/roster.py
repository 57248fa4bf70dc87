"""The checkpoints of one owner that can be found, and what the policies are told of them."""

from collections.abc import Collection, Iterator
from typing import TypeVar

from tiercache.device.handles import Checkpoint, Standing
from tiercache.device.index import Entry, Index, Prompt
from tiercache.device.ownership import Ownership
from tiercache.device.placement import Policies, Worth
from tiercache.device.slots import Stale
from tiercache.state import Namespace

T = TypeVar("T")


class Roster:
    """Entries by name, each known to the policy of the pool that it sits in.

    The owner may clear a checkpoint without a word: then it is found no more, and forgotten.
    """

    def __init__(self, owner: Ownership, policies: Policies, namespace: Namespace) -> None:
        self._owner = owner
        self._policies = policies
        self._index: Index[Checkpoint] = Index(namespace)

    def __len__(self) -> int:
        return len(self._index)

    def name(self, prompt: Prompt, tokens: int) -> bytes:
        """See `Index.name`."""
        return self._index.name(prompt, tokens)

    def name_of(self, checkpoint: Checkpoint) -> bytes | None:
        """See `Index.name_of`."""
        return self._index.name_of(checkpoint)

    def get(self, name: bytes) -> Entry[Checkpoint] | None:
        """Return what has that name."""
        entry = self._index.get(name)
        if entry is not None and isinstance(self._owner.standing(entry.held), Stale):
            self.remove(name)
            return None
        return entry

    def prefixes(self, prompt: Prompt, limit: int) -> Iterator[tuple[bytes, Entry[Checkpoint]]]:
        """See `Index.prefixes`."""
        for name, entry in self._index.prefixes(prompt, limit):
            if self.get(name) is not None:
                yield name, entry

    def enter(
        self, name: bytes, found: T | Checkpoint, prompt: Prompt, tokens: int
    ) -> T | Checkpoint:
        """Let a new checkpoint be found; anything else is passed on.

        When one of that name is there, that stays and is returned, and the new one ends: what somebody
        was offered does not change.
        """
        if not isinstance(found, Checkpoint):
            return found
        entry = self.get(name)
        if entry is not None:
            self._owner.clear(found)
        else:
            entry = Entry(found, prompt, tokens)
            self._sweep()
            self._index.add(name, entry)
        self.used(name, entry)
        return entry.held

    def used(self, name: bytes, entry: Entry[Checkpoint]) -> None:
        """A checkpoint came, or somebody resumes from it."""
        standing = self._owner.standing(entry.held)
        assert isinstance(standing, Standing)
        (self._policies.active if standing.active else self._policies.pool).used(name)

    def settled(self, name: bytes) -> None:
        """A checkpoint moved from its active slot to the pool."""
        self._policies.active.gone(name)
        self._policies.pool.used(name)

    def remove(self, name: bytes) -> Entry[Checkpoint] | None:
        """Forget what has that name, and return it. Its owner still has it."""
        self._policies.pool.gone(name)
        self._policies.active.gone(name)
        return self._index.remove(name)

    def victim(self, spared: Collection[bytes] = ()) -> bytes | None:
        """Return who goes when the checkpoint pool is full."""
        return self._policies.pool.victim(self._worth, spared)

    def active_victim(self, spared: Collection[bytes] = ()) -> bytes | None:
        """Return who goes when the active slots are taken."""
        return self._policies.active.victim(self._worth, spared)

    def _sweep(self) -> None:
        """Forget what was cleared without a word, once there are more entries than slots."""
        if len(self._index) >= self._owner.active.store.slots + self._owner.checkpoints.store.slots:
            for name in list(self._index):
                self.get(name)

    def _worth(self, name: bytes) -> Worth:
        entry = self._index.get(name)
        standing = None if entry is None else self._owner.standing(entry.held)
        if not isinstance(standing, Standing):
            return Worth(0, 1)  # Cleared: nothing is lost with it.
        pool = self._owner.active if standing.active else self._owner.checkpoints
        return Worth(self._index.marginal(name), pool.store.slot_nbytes)
