"""Doubles for the device tier: a lane that copies late, a node that only remembers. Needs torch."""

from collections.abc import Sequence

from tiercache.client import Blob, Saved, Scope
from tiercache.device import (
    CODECS,
    ActivePool,
    Checkpoint,
    CheckpointPool,
    DeviceTier,
    DirectOutlet,
    HostLane,
    Outlet,
    Ownership,
    Policies,
    Prompt,
    Run,
    Seat,
)
from tiercache.device.kinds import Columns, Heads, conv_qkv, recurrent
from tiercache.device.lanes import Copy
from tiercache.device.slots import Private
from tiercache.state import Chain, Layout, Namespace

LAYOUT = Layout(
    (recurrent(Heads(range(2), 4, 4, 4)), conv_qkv(Columns(range(2), 3), (4, 2), (4, 2))), 16
)
NAMESPACE = Namespace.of(LAYOUT, model="device", weights="w", tokenizer="t")
CHAIN = Chain(range(100), 16)
PROMPT = Prompt("r", CHAIN)


class LaterLane:
    """Copies when told, as a stream would at some time."""

    def __init__(self) -> None:
        self.queue: list[tuple[list[Copy], LaterFence]] = []

    def run(self, copies: Sequence[Copy]) -> "LaterFence":
        """Queue the copies."""
        fence = LaterFence(self)
        self.queue.append((list(copies), fence))
        return fence

    def go_on(self) -> None:
        """Do the oldest batch, and say that it is done."""
        copies, fence = self.queue.pop(0)
        fence.copy(copies)
        fence.passed = True

    def before(self, fence: "LaterFence") -> None:
        """Do all up to one batch, as a stream would before what is queued next; nobody is told yet."""
        for copies, other in self.queue:
            other.copy(copies)
            if other is fence:
                break


class LaterFence:
    """The end of one batch."""

    def __init__(self, lane: LaterLane) -> None:
        self.passed = False
        self._copied = False
        self._lane = lane

    def copy(self, copies: Sequence[Copy]) -> None:
        """Do the batch, once."""
        if not self._copied:
            HostLane().run(copies)
            self._copied = True

    def done(self) -> bool:
        """Whether the batch was done."""
        return self.passed

    def wait(self) -> None:
        """Do batches until this one is done."""
        while not self.passed:
            self._lane.go_on()

    def before(self) -> None:
        """What is done next finds the batch done, and only `done` does not say so yet."""
        self._lane.before(self)


class SavingNode:
    """Keeps what is saved, by where it ends, and the scope of that; declines everything when told to."""

    def __init__(self) -> None:
        self.saved: dict[int, list[Blob]] = {}
        self.scopes: dict[int, Scope] = {}
        self.full = False

    def save(self, request: str, chain: Chain, blobs: Sequence[Blob], *, scope: Scope) -> Saved:
        """Keep copies of the blobs by where they end."""
        del request, chain
        if self.full:
            return Saved(0, 0, {"full": len(blobs)})
        self.scopes[blobs[0].end] = scope
        self.saved[blobs[0].end] = [
            Blob(b.part, b.end, memoryview(bytes(b.data)), 0, b.shard, b.codec, b.requantised)
            for b in blobs
        ]
        return Saved(len(blobs), 0, {})


def tier_of(
    codec: str = "int8",
    outlet: Outlet | None = None,
    lane: HostLane | LaterLane | None = None,
    *,
    policies: Policies | None = None,
    slots: tuple[int, int] = (3, 2),
    host_bytes_max: int = 1 << 20,
) -> DeviceTier:
    """Return a tier over small pools: `slots` active ones, and for checkpoints."""
    seat = Seat(LAYOUT)
    owner = Ownership(ActivePool(seat, slots[0]), CheckpointPool(seat, CODECS[codec], slots[1]))
    return DeviceTier(
        owner,
        lane or HostLane(),
        policies or Policies.named("least_recent"),
        outlet or DirectOutlet(SavingNode()),
        namespace=NAMESPACE,
        host_bytes_max=host_bytes_max,
    )


def run_with(tier: DeviceTier, value: float) -> Run:
    """Return a new run whose state is `value` everywhere."""
    run = tier.start()
    assert isinstance(run, Run)
    write(tier, run, value)
    return run


def write(tier: DeviceTier, run: Run, value: float) -> None:
    """Set a run's state, as a step of the engine would."""
    slot = tier.owner.slot(run)
    assert isinstance(slot, Private)
    for tensor in tier.owner.active.store.tensors:
        tensor[:, slot.number] = value


def read(tier: DeviceTier, run: Run) -> float:
    """Return the one value that a run's state has everywhere."""
    slot = tier.owner.slot(run)
    assert isinstance(slot, Private)
    (found,) = {
        round(value, 3)
        for tensor in tier.owner.active.store.tensors
        for value in tensor[:, slot.number].double().flatten().tolist()
    }
    return float(found)


def kept(tier: DeviceTier, run: Run, tokens: int) -> Checkpoint:
    """Keep a run's state at `tokens`."""
    found = tier.keep(run, PROMPT, tokens)
    assert isinstance(found, Checkpoint)
    return found
