"""One load: objects of a request from the node, or from the device's own checkpoints, into its blocks."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic

import torch

from tiercache.client import Blob, Capture, Client, Holding, Options, Plan, Scope, Wanted
from tiercache.device.gathering import gather
from tiercache.errors import LayoutError
from tiercache.state import GivenChain, Shard
from tiercache.state.seats import RanksOf
from tiercache_vllm.geometry import Geometry
from tiercache_vllm.hot import HotStates
from tiercache_vllm.pages import STAGED_BYTES, PartBlocks
from tiercache_vllm.settings import Item, Job, tagged


@dataclass(slots=True)
class Begun:
    """A load, and where the engine's stream stood."""

    job: Job
    client: Client
    deadline: float
    event: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended: `fault` is "" when well. `hot`: objects that came from the device itself.
    `requantised`: how often the bytes were derived from quantised ones."""

    fault: str
    objects: int = 0
    nbytes: int = 0
    hot: int = 0
    requantised: int = 0


class Turnstile:
    """Whether blocks may be touched. Who passes is let finish before it shuts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._within = 0
        self._shut = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Pass. Raises RuntimeError when it is shut."""
        with self._changed:
            if self._shut:
                raise RuntimeError("the engine sleeps: its blocks are gone")
            self._within += 1
        try:
            yield
        finally:
            with self._changed:
                self._within -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody pass any more; when this returns, nobody is within. Idempotent."""
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: not self._within)

    def open(self) -> None:
        """Let everybody pass. Idempotent."""
        with self._changed:
            self._shut = False


class Loading:
    """Loads jobs, one at a time on each thread that calls it. It touches blocks behind `turnstile` only."""

    def __init__(
        self,
        geometry: Geometry,
        parts: Sequence[PartBlocks],
        shards: Sequence[Shard],
        options: Options,
        hot: tuple[int, HotStates] | None,
        seats: Sequence[RanksOf] = (),
    ) -> None:
        self.turnstile = Turnstile()
        self._layout = geometry.layout
        self._parts = parts
        self._shards = shards
        self._options = options
        self._hot = hot
        self._seats = tuple(seats)
        self._device = parts[0].device
        self._stream = _stream_of(self._device)

    def load(self, begun: Begun) -> Loaded:
        """Load one job. Raises LayoutError, ProtocolError, ValueError, LookupError or RuntimeError when
        what came does not fit; then, too, nothing is written any more."""
        job = begun.job
        warm = self._warm(job)
        items = [item for item in job.items if item not in warm]
        wanted = [
            Wanted(self._layout.parts[i.part].name, i.digest, self._shards[i.part]) for i in items
        ]
        scope = Scope(lora=job.lora, salt=job.salt)
        wait_s = self._left(begun)
        with begun.client.fetch(job.name, wanted, scope=scope, wait_s=wait_s) as holding:
            if holding.reason:
                return Loaded(holding.reason)
            blobs = [blob for blob in holding.blobs if blob is not None]
            if len(blobs) == len(items):
                return self._take(begun, list(zip(items, blobs, strict=True)), holding, warm)
        return self._joined(begun) if job.chain else Loaded("an object is gone")

    def _joined(self, begun: Begun) -> Loaded:
        """Load one job from objects of another tensor-parallel size, joined to what this rank holds."""
        job, layout = begun.job, self._layout
        chain = GivenChain(job.chain, layout.block_tokens)
        capture = Capture(grain=layout.block_tokens)
        scope = Scope(
            lora=job.lora, salt=job.salt, capture=capture, reshard=True, seats=self._seats
        )
        with begun.client.plan(job.name, chain, limit=len(chain), scope=scope) as planned:
            plan = begun.client.load(planned, wait_s=self._left(begun))
            if plan.boundary != len(chain):
                return Loaded(plan.reason or "an object is gone")
            joined = gather(layout, plan.blobs, self._options.ranks, self._options.rank)
            by_place = {(blob.part, blob.end): blob for blob in joined}
            found = [(i, by_place[layout.parts[i.part].name, i.end]) for i in job.items]
            return self._take(begun, found, plan, {})

    def _left(self, begun: Begun) -> float:
        """Return how long a call may wait beside its own deadline."""
        return max(0.0, begun.deadline - monotonic() - self._options.deadline_s)

    def _warm(self, job: Job) -> dict[Item, tuple[torch.Tensor, int]]:
        """Return the objects that the device has itself."""
        found: dict[Item, tuple[torch.Tensor, int]] = {}
        if self._hot is not None:
            part, states = self._hot
            for item in job.items:
                if item.part == part:
                    with self.turnstile.passing():
                        state = states.restore(tagged(item.digest, job.lora, job.salt))
                    if state is not None:
                        found[item] = state
        return found

    def _take(
        self,
        begun: Begun,
        found: Sequence[tuple[Item, Blob]],
        held: Plan | Holding,
        warm: dict[Item, tuple[torch.Tensor, int]],
    ) -> Loaded:
        """Write all objects of a job into their blocks."""
        nbytes = 0
        for chunk in _chunks(found, self._parts):
            if monotonic() > begun.deadline:
                return Loaded("deadline")
            items, blobs = zip(*chunk, strict=True)
            nbytes += self.write(items, blobs, begun.event)
        if not held.held:
            return Loaded("the lease was lost while its bytes were copied")
        for item, (state, _) in warm.items():
            self._scatter([item], state.view(1, -1), begun.event)
        self._heat(begun.job, found)
        generations = [blob.requantised for _, blob in found] + [
            times for _, times in warm.values()
        ]
        return Loaded("", len(found), nbytes, len(warm), max(generations, default=0))

    def _heat(self, job: Job, found: Sequence[tuple[Item, Blob]]) -> None:
        """Keep on the device what came from the node."""
        if self._hot is None:
            return
        part, states = self._hot
        for item, blob in found:
            if item.part == part:
                key = tagged(item.digest, job.lora, job.salt)
                with self.turnstile.passing():
                    state = self._parts[part].gather([item.blocks])
                    states.keep([key], state, blob.requantised)

    def write(
        self, items: Sequence[Item], blobs: Sequence[Blob], event: torch.cuda.Event | None
    ) -> int:
        """Write objects of one part into their blocks, and wait until they are there; return their
        bytes."""
        nbytes = self._parts[items[0].part].nbytes
        host = torch.empty((len(items), nbytes), dtype=torch.uint8)
        target = host.numpy()
        for row, blob in enumerate(blobs):
            if blob.data.nbytes != nbytes:
                raise LayoutError(f"{blob.part}: {blob.data.nbytes} bytes, not {nbytes}")
            target[row] = memoryview(blob.data)
        self._scatter(items, host, event)
        return host.nbytes

    def _scatter(
        self, items: Sequence[Item], objects: torch.Tensor, event: torch.cuda.Event | None
    ) -> None:
        blocks = self._parts[items[0].part]
        stream = self._stream
        on_stream = torch.cuda.stream(stream) if stream is not None else nullcontext()
        with self.turnstile.passing(), on_stream:
            if stream is not None and event is not None:
                stream.wait_event(event)
            blocks.scatter([item.blocks for item in items], objects.to(self._device))
            if stream is not None:
                stream.synchronize()


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream of its own for what is loaded; None on a CPU, where everything is in order."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _chunks(
    found: Sequence[tuple[Item, Blob]], parts: Sequence[PartBlocks]
) -> list[list[tuple[Item, Blob]]]:
    """Return runs of one part, each of at most STAGED_BYTES (but at least one object)."""
    chunks: list[list[tuple[Item, Blob]]] = []
    for one in found:
        item = one[0]
        last = chunks[-1] if chunks else None
        limit = max(1, STAGED_BYTES // parts[item.part].nbytes)
        if last is None or last[0][0].part != item.part or len(last) >= limit:
            chunks.append([one])
        else:
            last.append(one)
    return chunks
