"""The device tier of one rank: checkpoints by what they are checkpoints of.

A checkpoint is found by whose tokens it is of, and by the digest of its boundary: see `index`. When the
pool is full, the policy names one to go; it is *demoted*: copied to host memory beside the computation, its
slot free as soon as the copy is done, and offered to the node, which may decline. The other way, objects
that the node holds are *promoted*: into the pool when they are in its codec, else straight into the slot of
a new run. Nothing here blocks, and nothing raises for want of room: what cannot be kept is skipped and
counted. One thread owns this; `poll` is its turn to finish what copies have done.

One tier serves every adapter and tenant of one model. Who asks is part of each `Prompt`, and equal tokens
of two of them are two checkpoints.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiercache.client import Blob
from tiercache.device.arriving import Arriving
from tiercache.device.handles import Checkpoint, Run, Standing, Turn
from tiercache.device.index import Entry, Prompt
from tiercache.device.lanes import Fence, Lane, passed
from tiercache.device.leaving import Demoted, Leaving, Outlet
from tiercache.device.ownership import NO_CHECKPOINT_SLOT, Ownership
from tiercache.device.placement import Policies
from tiercache.device.roster import Roster
from tiercache.device.slots import Hold, Skipped, Stale
from tiercache.device.staging import Named, Outward, Staging
from tiercache.errors import LayoutError
from tiercache.state import NATIVE, Namespace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Restored:
    """A run whose state is on its way. The blobs must stay leased until `fence` is done; kernels queued
    after this on the current stream already see the state."""

    run: Run
    fence: Fence


class DeviceTier:
    """See the module. `namespace`: of the model, without adapter and salt. `host_bytes_max` bounds host
    memory for copies on their way out."""

    def __init__(
        self,
        owner: Ownership,
        lane: Lane,
        policies: Policies,
        outlet: Outlet,
        *,
        namespace: Namespace,
        host_bytes_max: int,
    ) -> None:
        if namespace.layout != owner.checkpoints.seat.layout.fingerprint:
            raise LayoutError("the namespace is of another layout than the pools")
        self.owner = owner
        self.counters: Counter[str] = Counter()
        self._pool = Staging(owner.checkpoints.store, lane, host_bytes_max)
        self._active = Staging(owner.active.store, lane, host_bytes_max)
        self._roster = Roster(owner, policies, namespace)
        self._leaving = Leaving(outlet, self.counters)
        self._arriving = Arriving(owner, lane)

    def __len__(self) -> int:
        """Checkpoints that can be found."""
        return len(self._roster)

    @property
    def host_bytes_left(self) -> int:
        """Host memory that copies of checkpoints on their way out may still take."""
        return self._pool.host_bytes_left

    @property
    def landing_nbytes(self) -> int:
        """Bytes of the device beside both pools, see `arriving`."""
        return self._arriving.landing_nbytes

    # --- runs

    def start(self) -> Run | Skipped:
        """Return a run whose state is zero; checkpoints in active slots make room for it."""
        run = self.owner.start()
        if isinstance(run, Skipped) and self.make_active_room():
            run = self.owner.start()
        return self._told(run)

    def resume(self, checkpoint: Checkpoint) -> Run | Skipped | Stale:
        """Return a run with a private copy of a checkpoint, making room as `start` does.

        What makes room is never that checkpoint. When nothing else can, and it sits in an active slot
        itself, the run takes that slot over: the checkpoint moves to the pool, or to the node when the
        policy lets it go. Otherwise Skipped, and the checkpoint stays.
        """
        run = self.owner.resume(checkpoint)
        if isinstance(run, Skipped):
            name = self._roster.name_of(checkpoint)
            spared = frozenset() if name is None else frozenset([name])
            if self.make_active_room(spared):
                run = self.owner.resume(checkpoint)
            elif name is not None:
                run = self._adopted(checkpoint, name)
        return self._told(run)

    def turn(self, run: Run) -> Turn | Skipped | Stale:
        """Take the second slot for the step over a boundary, making room as `start` does; see
        `Ownership.turn`."""
        found = self.owner.turn(run)
        if isinstance(found, Skipped) and self.make_active_room():
            found = self.owner.turn(run)
        return self._told(found)

    # --- checkpoints

    def keep(self, run: Run, prompt: Prompt, tokens: int) -> Checkpoint | Skipped | Stale:
        """Keep the run's state, which is after `tokens` tokens of its prompt, under their name."""
        name = self._roster.name(prompt, tokens)
        entry = self._roster.get(name)
        if entry is not None:
            self._roster.used(name, entry)
            return entry.held
        found = self.owner.snapshot(run, tokens)
        if found == Skipped(NO_CHECKPOINT_SLOT) and self.make_room():
            found = self.owner.snapshot(run, tokens)
        self._told(found)
        return self._roster.enter(name, found, prompt, tokens)

    def donate(self, run: Run, prompt: Prompt, tokens: int) -> Checkpoint | Stale:
        """End the run and keep its state without a copy, in its active slot, until that is needed.

        A checkpoint that is there already stays and is returned; the run's slot is free then.
        """
        name = self._roster.name(prompt, tokens)
        return self._roster.enter(name, self.owner.donate(run, tokens), prompt, tokens)

    def turned(self, run: Run, prompt: Prompt, tokens: int) -> Checkpoint | Stale:
        """The step over the boundary at `tokens` is done: what it read is a checkpoint, as after
        `donate`, and the run goes on in the other slot. Raises ValueError without a turn."""
        name = self._roster.name(prompt, tokens)
        return self._roster.enter(name, self.owner.turned(run, tokens), prompt, tokens)

    def find(self, prompt: Prompt, limit: int) -> tuple[int, Checkpoint] | None:
        """Return the deepest checkpoint of a prefix of a prompt up to `limit` tokens, and its depth."""
        for name, entry in self._roster.prefixes(prompt, limit):
            self._roster.used(name, entry)
            return entry.tokens, entry.held
        return None

    def drop(self, prompt: Prompt, tokens: int) -> bool:
        """Forget a checkpoint without offering it to the node; return whether there was one."""
        entry = self._roster.remove(self._roster.name(prompt, tokens))
        return entry is not None and self.owner.clear(entry.held) is None

    # --- down

    def make_room(self, spared: Collection[bytes] = ()) -> bool:
        """Demote the checkpoint that the policy names; return whether a slot is free for it now.

        `spared`: names of which none goes. On a GPU the copy is only begun: the slot is free some
        `poll` later.
        """
        before = len(self.owner.checkpoints.table)
        while (name := self._roster.victim(spared)) is not None:
            if self._demoted(name) != Stale("checkpoint"):
                self.poll()
                break
        return len(self.owner.checkpoints.table) < before

    def make_active_room(self, spared: Collection[bytes] = ()) -> bool:
        """Move a checkpoint out of its active slot: to the pool, or to the node when that is full."""
        before = len(self.owner.active.table)
        while (name := self._roster.active_victim(spared)) is not None:
            entry = self._roster.get(name)
            if entry is None:
                continue
            settled = self.owner.settle(entry.held)
            if settled == Skipped(NO_CHECKPOINT_SLOT) and self.make_room(spared):
                settled = self.owner.settle(entry.held)
            if settled is None:
                self._roster.settled(name)
            else:
                self._demoted(name)
                self.poll()
            break
        return len(self.owner.active.table) < before

    def demote(self, prompt: Prompt, tokens: int) -> Skipped | Stale | None:
        """Begin to move a checkpoint to the node. It cannot be found here from now on."""
        return self._demoted(self._roster.name(prompt, tokens))

    def poll(self) -> None:
        """Finish what copies have done since the last time. Call it once per step of the engine."""
        self._arriving.poll()
        self._leaving.poll()

    # --- up

    def restore(
        self, prompt: Prompt, tokens: int, blobs: Sequence[Blob]
    ) -> Restored | Skipped | Stale:
        """Return a run with the state that `blobs` hold at `tokens`, the snapshot parts of one plan.

        In the pool's codec they become a checkpoint first, found by its name from now on, if there is
        room for one; native ones go straight to the run. What is a checkpoint here already is resumed,
        and the blobs are not looked at. Raises LayoutError for blobs that are neither, do not fit, or
        end elsewhere.
        """
        if any(blob.end != tokens for blob in blobs):
            raise LayoutError(f"objects end at {sorted({b.end for b in blobs})}, not at {tokens}")
        name = self._roster.name(prompt, tokens)  # Raises now, and not with slots taken.
        codecs = {blob.part: blob.codec for blob in blobs}
        in_pool_codec = codecs == self._codecs(active=False)
        if not in_pool_codec and codecs != self._codecs(active=True):
            pool = self.owner.checkpoints.codec.name
            raise LayoutError(f"objects in {codecs} are neither native nor in {pool!r}")
        entry = self._roster.get(name)
        if in_pool_codec and entry is not None:
            self._roster.used(name, entry)
            again = self.resume(entry.held)
            return Restored(again, passed()) if isinstance(again, Run) else again
        requantised = max((blob.requantised for blob in blobs), default=0)
        run = self._room_for_run(requantised)
        if isinstance(run, Skipped):
            return self._told(run)
        try:
            found: Fence | Skipped
            if in_pool_codec:
                found = self._through_pool(run, prompt, tokens, blobs, requantised)
            else:
                found = self._arriving.to_run(run, blobs)
        except BaseException:
            self.owner.clear(run)
            raise
        if isinstance(found, Skipped):
            self.owner.clear(run)
            return self._told(found)
        self.counters["restored"] += 1
        return Restored(run, found)

    def export(self, run: Run, tokens: int) -> Outward | Skipped | Stale:
        """Begin to copy a run's state, which is after `tokens` tokens, to host memory: native blobs.

        It reads the live slot; kernels queued after this on the current stream wait for the copy.
        """
        slot, rounded = self.owner.slot(run), self.owner.rounded(run)
        if isinstance(slot, Stale) or isinstance(rounded, Stale):
            return Stale("run")
        hold = self.owner.active.table.hold(slot)
        assert isinstance(hold, Hold)
        named = Named(tokens, self._codecs(active=True), rounded)
        copy = self._active.outward(slot.number, named, hold)
        if isinstance(copy, Outward):
            copy.fence.before()
        return copy

    def _room_for_run(self, requantised: int) -> Run | Skipped:
        run = self.owner.enter(requantised)
        if isinstance(run, Skipped) and self.make_active_room():
            return self.owner.enter(requantised)
        return run

    def _through_pool(
        self, run: Run, prompt: Prompt, tokens: int, blobs: Sequence[Blob], requantised: int
    ) -> Fence | Skipped:
        slot = self.owner.receive()
        if slot == Skipped(NO_CHECKPOINT_SLOT) and self.make_room():
            slot = self.owner.receive()
        if isinstance(slot, Skipped):
            self.counters["past_pool"] += 1
            return self._arriving.past_pool(run, blobs, requantised)
        try:
            fence = self._arriving.to_checkpoint(slot, blobs)
        except BaseException:
            self.owner.refused(slot)
            raise
        found = self.owner.received(slot, tokens, requantised)
        kept = self._roster.enter(self._roster.name(prompt, tokens), found, prompt, tokens)
        assert isinstance(kept, Checkpoint)
        self.owner.fill(run, kept)
        return fence

    def _adopted(self, checkpoint: Checkpoint, name: bytes) -> Run | Skipped | Stale:
        """Let a run take the active slot of a checkpoint over; see `resume`."""
        run = self.owner.adopt(checkpoint)
        if run == Skipped(NO_CHECKPOINT_SLOT) and self.make_room([name]):
            run = self.owner.adopt(checkpoint)
        if isinstance(run, Run):
            self._roster.settled(name)
        elif isinstance(run, Skipped) and self._roster.active_victim() == name:
            last = self.owner.adopt(checkpoint, last=True)
            if isinstance(last, Run):
                entry = self._roster.remove(name)
                assert entry is not None
                try:
                    self._leaves(entry, self.export(last, entry.tokens))
                except BaseException:
                    self.owner.clear(last)
                    raise
                return last
        return run

    # --- small things

    def _demoted(self, name: bytes) -> Skipped | Stale | None:
        entry = self._roster.get(name)
        if entry is None:
            return Stale("checkpoint")
        self._roster.remove(name)
        standing = self.owner.standing(entry.held)
        place, hold = self.owner.place(entry.held), self.owner.hold(entry.held)
        assert isinstance(standing, Standing)
        assert isinstance(hold, Hold)
        assert not isinstance(place, Stale)
        staging = self._active if standing.active else self._pool
        named = Named(standing.tokens, self._codecs(active=standing.active), standing.requantised)
        self.owner.clear(entry.held)  # The hold keeps the slot until the copy is done.
        return self._leaves(entry, staging.outward(place[1], named, hold))

    def _leaves(
        self, entry: Entry[Checkpoint], copy: Outward | Skipped | Stale
    ) -> Skipped | Stale | None:
        """Let the node have the copy of what left; without one it is lost, and counted."""
        if isinstance(copy, Outward):
            self._leaving.add(Demoted(entry.prompt, entry.tokens, copy))
            return None
        if isinstance(copy, Skipped):
            self.counters[f"lost_{copy.reason}"] += 1
        return copy

    def _codecs(self, *, active: bool) -> dict[str, str]:
        pool = self.owner.checkpoints
        return {
            part.name: NATIVE if active else pool.codec_in(part.name) for part in pool.seat.parts
        }

    def _told(self, found: T) -> T:
        """Count what was skipped, once, whatever was tried before."""
        if isinstance(found, Skipped):
            self.counters[f"skipped_{found.reason}"] += 1
        return found
