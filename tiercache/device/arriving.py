"""Objects on their way into slots: a run's, or a checkpoint's.

Objects in the codec of the pool become a checkpoint first. When the pool has no room for it they go by the
*landing*, one slot in that codec that is nobody's checkpoint, and are dequantised into the run's slot from
there. Where the codec loses nothing, bytes are the run's own and need no landing.
"""

from collections.abc import Sequence
from typing import Final

from tiercache.client import Blob
from tiercache.device.handles import Run
from tiercache.device.lanes import Fence, Lane
from tiercache.device.ownership import Ownership
from tiercache.device.pools import CheckpointPool
from tiercache.device.slots import Hold, Private, Skipped, SlotTable
from tiercache.device.staging import Staging

NO_LANDING: Final = "no_landing"


class Arriving:
    """Writes objects into slots of `owner`, and keeps those slots until they are written."""

    def __init__(self, owner: Ownership, lane: Lane) -> None:
        pool = owner.checkpoints
        self._owner = owner
        self._active = Staging(owner.active.store, lane, 0)
        self._pool = Staging(pool.store, lane, 0)
        self._landing = CheckpointPool(pool.seat, pool.codec, 1) if pool.lossy else None
        self._landed = Staging(self._landing.store, lane, 0) if self._landing else None
        self._under_way: list[tuple[Fence, Hold]] = []

    @property
    def landing_nbytes(self) -> int:
        """Bytes of the device that the landing takes."""
        return 0 if self._landing is None else self._landing.store.slot_nbytes

    def to_run(self, run: Run, blobs: Sequence[Blob]) -> Fence:
        """Begin to write native objects into a run's slot."""
        slot = self._owner.slot(run)
        assert isinstance(slot, Private)
        return self._begin(self._active, self._owner.active.table, slot, blobs)

    def to_checkpoint(self, slot: Private, blobs: Sequence[Blob]) -> Fence:
        """Begin to write objects in the pool's codec into a slot from `Ownership.receive`."""
        return self._begin(self._pool, self._owner.checkpoints.table, slot, blobs)

    def past_pool(self, run: Run, blobs: Sequence[Blob], requantised: int) -> Fence | Skipped:
        """Begin to write objects in the pool's codec into a run's slot, without a checkpoint.

        Skipped while the landing is still being written for another.
        """
        if self._landing is None or self._landed is None:
            return self.to_run(run, blobs)
        slot = self._landing.take()
        if slot is None:
            return Skipped(NO_LANDING)
        try:
            fence = self._begin(self._landed, self._landing.table, slot, blobs)
            self._owner.decode(run, self._landing, slot, requantised)
        finally:
            # The next copy that lands is queued behind what has just been.
            self._landing.table.give(slot)
        return fence

    def poll(self) -> None:
        """Let go of slots that have been written."""
        for arrived in [one for one in self._under_way if one[0].done()]:
            self._under_way.remove(arrived)
            arrived[1].release()

    def _begin(
        self, staging: Staging, table: SlotTable, slot: Private, blobs: Sequence[Blob]
    ) -> Fence:
        hold = table.hold(slot)
        assert isinstance(hold, Hold)
        try:
            fence = staging.inward(blobs, slot.number)
        except BaseException:
            hold.release()
            raise
        fence.before()  # Nothing that is queued from now on overtakes it.
        if fence.done():
            hold.release()
        else:
            self._under_way.append((fence, hold))
        return fence
