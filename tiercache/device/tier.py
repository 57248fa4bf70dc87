"""The device tier of one rank: checkpoints by what they are checkpoints of.

A checkpoint is found by the digest of its boundary. When the pool is full, the policy names one to go;
it is *demoted*: copied to host memory beside the computation, its slot free as soon as the copy is done,
and offered to the node, which may decline. The other way, objects that the node holds are *promoted*:
into the pool when they are in its codec, else straight into the slot of a new run. Nothing here blocks,
and nothing raises for want of room: what cannot be kept is skipped and counted. One thread owns this;
`poll` is its turn to finish what copies have done.

A tier serves one namespace: digests carry no model, no LoRA and no salt. Each adapter and each tenant
has a tier, and an outlet, of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiercache.client import Blob
from tiercache.device.lanes import Fence, Lane
from tiercache.device.ownership import NO_CHECKPOINT_SLOT, Checkpoint, Ownership, Run, Standing
from tiercache.device.placement import Placement
from tiercache.device.slots import Hold, Private, Skipped, Stale
from tiercache.device.staging import Named, Outward, Staging
from tiercache.errors import LayoutError
from tiercache.state import NATIVE, Chain


@dataclass(frozen=True, slots=True)
class Demoted:
    """A checkpoint that left the device: what to offer to the node."""

    request: str
    chain: Chain
    tokens: int
    copy: Outward


class Outlet(Protocol):
    """Takes what leaves the device. Never blocks."""

    def offer(self, demoted: Demoted) -> bool:
        """Take it and, once it is saved, `finished` it; False to decline."""
        ...

    def finished(self) -> list[Demoted]:
        """Return what is done with since the last call; its host memory is given back then."""
        ...


@dataclass(frozen=True, slots=True)
class Restored:
    """A run whose state is on its way. The blobs must stay leased until `fence` is done; kernels queued
    after this on the current stream already see the state."""

    run: Run
    fence: Fence


@dataclass(frozen=True, slots=True)
class Policies:
    """Who goes when the checkpoint pool is full, and who of those in active slots when they are."""

    pool: Placement
    active: Placement


@dataclass(frozen=True, slots=True)
class _Entry:
    checkpoint: Checkpoint
    request: str
    chain: Chain
    tokens: int


class DeviceTier:
    """See the module. `host_bytes_max` bounds host memory for copies on their way out."""

    def __init__(
        self,
        owner: Ownership,
        lane: Lane,
        policies: Policies,
        outlet: Outlet,
        *,
        host_bytes_max: int,
    ) -> None:
        self.owner = owner
        self.counters: Counter[str] = Counter()
        self._policies = policies
        self._outlet = outlet
        self._pool = Staging(owner.checkpoints.store, lane, host_bytes_max)
        self._active = Staging(owner.active.store, lane, host_bytes_max)
        self._entries: dict[bytes, _Entry] = {}
        self._depths: Counter[int] = Counter()
        self._leaving: list[Demoted] = []
        self._arriving: list[tuple[Fence, Hold]] = []

    def __len__(self) -> int:
        """Checkpoints that can be found."""
        return len(self._entries)

    @property
    def host_bytes_left(self) -> int:
        """Host memory that copies of checkpoints on their way out may still take."""
        return self._pool.host_bytes_left

    # --- on the device

    def keep(
        self, run: Run, request: str, chain: Chain, tokens: int
    ) -> Checkpoint | Skipped | Stale:
        """Keep the run's state, which is after `tokens` tokens of `chain`, under its digest."""
        digest = chain.digest_at(tokens)
        entry = self._entry(digest)
        if entry is not None:
            self._use(digest, entry)
            return entry.checkpoint
        found = self.owner.snapshot(run, tokens)
        if found == Skipped(NO_CHECKPOINT_SLOT) and self.make_room():
            found = self.owner.snapshot(run, tokens)
        if isinstance(found, Checkpoint):
            self._add(digest, _Entry(found, request, chain, tokens))
        return found

    def donate(self, run: Run, request: str, chain: Chain, tokens: int) -> Checkpoint | Stale:
        """End the run and keep its state without a copy, in its active slot, until that is needed."""
        digest = chain.digest_at(tokens)
        found = self.owner.donate(run, tokens)
        if isinstance(found, Checkpoint):
            self.drop(digest)
            self._add(digest, _Entry(found, request, chain, tokens))
        return found

    def start(self) -> Run | Skipped:
        """Return a run whose state is zero; checkpoints in active slots make room for it."""
        run = self.owner.start()
        return self.owner.start() if isinstance(run, Skipped) and self.make_active_room() else run

    def resume(self, checkpoint: Checkpoint) -> Run | Skipped | Stale:
        """Return a run with a private copy of a checkpoint, making room as `start` does."""
        run = self.owner.resume(checkpoint)
        if isinstance(run, Skipped) and self.make_active_room():
            return self.owner.resume(checkpoint)
        return run

    def find(self, chain: Chain, limit: int) -> tuple[int, Checkpoint] | None:
        """Return the deepest checkpoint of a prefix of `chain` up to `limit` tokens, and its depth."""
        for tokens in sorted(+self._depths, reverse=True):
            if tokens <= min(limit, len(chain)):
                digest = chain.digest_at(tokens)
                entry = self._entry(digest)
                if entry is not None:
                    self._use(digest, entry)
                    return tokens, entry.checkpoint
        return None

    def drop(self, digest: bytes) -> bool:
        """Forget a checkpoint without offering it to the node; return whether there was one."""
        entry = self._remove(digest)
        if entry is None:
            return False
        self.owner.clear(entry.checkpoint)
        return True

    # --- down

    def make_room(self) -> bool:
        """Demote the checkpoint that the policy names; return whether a slot is free for it now.

        On a GPU the copy is only begun: the slot is free some `poll` later.
        """
        digest = self._policies.pool.victim()
        if digest is None:
            return False
        before = len(self.owner.checkpoints.table)
        self.demote(digest)
        self.poll()
        return len(self.owner.checkpoints.table) < before

    def make_active_room(self) -> bool:
        """Move a checkpoint out of its active slot: to the pool, or to the node when that is full."""
        digest = self._policies.active.victim()
        if digest is None:
            return False
        entry = self._entries[digest]
        before = len(self.owner.active.table)
        settled = self.owner.settle(entry.checkpoint)
        if settled == Skipped(NO_CHECKPOINT_SLOT) and self.make_room():
            settled = self.owner.settle(entry.checkpoint)
        if settled is None:
            self._policies.active.gone(digest)
            self._policies.pool.used(digest)
        else:
            self.demote(digest)
            self.poll()
        return len(self.owner.active.table) < before

    def demote(self, digest: bytes) -> Skipped | Stale | None:
        """Begin to move a checkpoint to the node. It cannot be found here from now on."""
        entry = self._entry(digest)
        if entry is None:
            return Stale("checkpoint")
        self._remove(digest)
        standing = self.owner.standing(entry.checkpoint)
        place, hold = self.owner.place(entry.checkpoint), self.owner.hold(entry.checkpoint)
        assert isinstance(standing, Standing)
        assert isinstance(hold, Hold)
        assert not isinstance(place, Stale)
        staging = self._active if standing.active else self._pool
        named = Named(standing.tokens, self._codecs(active=standing.active), standing.requantised)
        self.owner.clear(entry.checkpoint)  # The hold keeps the slot until the copy is done.
        copy = staging.outward(place[1], named, hold)
        if isinstance(copy, Skipped):
            self.counters[f"lost_{copy.reason}"] += 1
            return copy
        self._leaving.append(Demoted(entry.request, entry.chain, entry.tokens, copy))
        self.counters["demoted"] += 1
        return None

    def poll(self) -> None:
        """Finish what copies have done since the last time. Call it once per step of the engine."""
        for demoted in [one for one in self._leaving if one.copy.done()]:
            self._leaving.remove(demoted)
            try:
                taken = self._outlet.offer(demoted)
            except BaseException:
                demoted.copy.close()
                raise
            if not taken:
                self.counters["lost_declined"] += 1
                demoted.copy.close()
        for demoted in self._outlet.finished():
            demoted.copy.close()
        for arrived in [one for one in self._arriving if one[0].done()]:
            self._arriving.remove(arrived)
            arrived[1].release()

    # --- up

    def restore(
        self, request: str, chain: Chain, tokens: int, blobs: Sequence[Blob]
    ) -> Restored | Skipped:
        """Return a run with the state that `blobs` hold at `tokens`, the snapshot parts of one plan.

        In the pool's codec they become a checkpoint first, found by its digest from now on; native
        ones go straight to the run. Raises LayoutError for blobs that are neither, do not fit, or end
        elsewhere.
        """
        if any(blob.end != tokens for blob in blobs):
            raise LayoutError(f"objects end at {sorted({b.end for b in blobs})}, not at {tokens}")
        chain.digest_at(tokens)  # Raises now, and not with slots taken.
        codecs = {blob.part: blob.codec for blob in blobs}
        requantised = max((blob.requantised for blob in blobs), default=0)
        through_pool = codecs == self._codecs(active=False)
        if not through_pool and codecs != self._codecs(active=True):
            pool = self.owner.checkpoints.codec.name
            raise LayoutError(f"objects in {codecs} are neither native nor in {pool!r}")
        run = self._room_for_run(requantised)
        if isinstance(run, Skipped):
            return run
        try:
            if through_pool:
                entry = (request, chain, tokens)
                found = self._through_pool(run, entry, blobs, requantised)
            else:
                found = self._straight(run, blobs)
        except BaseException:
            self.owner.clear(run)
            raise
        if isinstance(found, Skipped):
            self.owner.clear(run)
            return found
        self.counters["restored"] += 1
        return Restored(run, found)

    def _through_pool(
        self, run: Run, entry: tuple[str, Chain, int], blobs: Sequence[Blob], requantised: int
    ) -> Fence | Skipped:
        request, chain, tokens = entry
        slot = self.owner.receive()
        if slot == Skipped(NO_CHECKPOINT_SLOT) and self.make_room():
            slot = self.owner.receive()
        if isinstance(slot, Skipped):
            return slot
        hold = self.owner.checkpoints.table.hold(slot)
        assert isinstance(hold, Hold)
        try:
            fence = self._pool.inward(blobs, slot.number)
        except BaseException:
            hold.release()
            self.owner.refused(slot)
            raise
        self._arrives(fence, hold)
        checkpoint = self.owner.received(slot, tokens, requantised)
        assert isinstance(checkpoint, Checkpoint)
        digest = chain.digest_at(tokens)
        self.drop(digest)
        self._add(digest, _Entry(checkpoint, request, chain, tokens))
        self.owner.fill(run, checkpoint)
        return fence

    def _straight(self, run: Run, blobs: Sequence[Blob]) -> Fence:
        slot = self.owner.slot(run)
        assert isinstance(slot, Private)
        hold = self.owner.active.table.hold(slot)
        assert isinstance(hold, Hold)
        try:
            fence = self._active.inward(blobs, slot.number)
        except BaseException:
            hold.release()
            raise
        self._arrives(fence, hold)
        return fence

    def export(self, run: Run, tokens: int) -> Outward | Skipped | Stale:
        """Begin to copy a run's state, which is after `tokens` tokens, to host memory: native blobs.

        Until the copy is done the run may not be stepped: it reads the live slot.
        """
        slot, rounded = self.owner.slot(run), self.owner.rounded(run)
        if isinstance(slot, Stale) or isinstance(rounded, Stale):
            return Stale("run")
        hold = self.owner.active.table.hold(slot)
        assert isinstance(hold, Hold)
        named = Named(tokens, self._codecs(active=True), rounded)
        return self._active.outward(slot.number, named, hold)

    def _room_for_run(self, requantised: int) -> Run | Skipped:
        run = self.owner.enter(requantised)
        if isinstance(run, Skipped) and self.make_active_room():
            return self.owner.enter(requantised)
        return run

    def _arrives(self, fence: Fence, hold: Hold) -> None:
        """Keep a slot that is being written, and let nothing that is queued from now on overtake it."""
        fence.before()
        if fence.done():
            hold.release()
        else:
            self._arriving.append((fence, hold))

    # --- small things

    def _entry(self, digest: bytes) -> _Entry | None:
        """Return what is known of a digest; nothing when its owner has cleared the checkpoint."""
        entry = self._entries.get(digest)
        if entry is not None and isinstance(self.owner.standing(entry.checkpoint), Stale):
            self._remove(digest)
            return None
        return entry

    def _add(self, digest: bytes, entry: _Entry) -> None:
        self._entries[digest] = entry
        self._depths[entry.tokens] += 1
        self._use(digest, entry)

    def _use(self, digest: bytes, entry: _Entry) -> None:
        standing = self.owner.standing(entry.checkpoint)
        assert isinstance(standing, Standing)
        (self._policies.active if standing.active else self._policies.pool).used(digest)

    def _remove(self, digest: bytes) -> _Entry | None:
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._depths[entry.tokens] -= 1
            self._policies.pool.gone(digest)
            self._policies.active.gone(digest)
        return entry

    def _codecs(self, *, active: bool) -> dict[str, str]:
        pool = self.owner.checkpoints
        return {
            part.name: NATIVE if active else pool.codec_in(part.name) for part in pool.seat.parts
        }
