"""A worker's side: loads into blocks and saves from them, on threads of their own. Needs torch, no vLLM.

Loads never hold up a step. Their bytes are written on a stream of their own, after all that the engine's
stream had to do when they began. Saves are copied off the blocks within the step, on the engine's
stream: whoever uses a block next comes after them. What is still to be done waits in a queue with a limit.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from tiercache.client import Blob, Client, Options, Scope
from tiercache.errors import LayoutError, ProtocolError
from tiercache.state import Namespace, Shard
from tiercache.state.seats import here
from tiercache_vllm.chains import KnownChain
from tiercache_vllm.geometry import Geometry
from tiercache_vllm.hot import HotStates
from tiercache_vllm.loading import Begun, Loaded, Loading
from tiercache_vllm.pages import PartBlocks
from tiercache_vllm.settings import Item, Job, Settings, Work, tagged

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long closing waits for what is under way."""

IDLE_S = 0.005
"""How long a step that computes nothing waits for a load."""


@dataclass(frozen=True, slots=True)
class Results:
    """Loads that ended since the last look; `failed` ones are in `ended` too."""

    ended: frozenset[str]
    failed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker tells the scheduler. `unsaved`: digests, `tagged`, that were handed over and are not
    stored."""

    unsaved: frozenset[bytes]
    counts: Mapping[str, int]


@dataclass(slots=True)
class _Copied:
    """Objects copied off their blocks, in one buffer in host memory that is ready when `event` is."""

    job: Job
    part: int
    items: Sequence[Item]
    buffer: torch.Tensor
    event: torch.cuda.Event | None
    requantised: int


class Worker:
    """Moves objects between this rank's blocks and the node.

    One thread, the engine's, calls everything here. Nothing it calls waits for the node, or raises for
    anything that the node does.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        tensors: Mapping[str, torch.Tensor],
        blocks: int,
        options: Options,
    ) -> None:
        self.geometry = geometry
        self._settings = settings
        self._options = options
        parts = geometry.layout.parts
        self._parts = [PartBlocks(geometry, at, tensors, blocks) for at in range(len(parts))]
        self._shards = [part.shards(options.ranks)[options.rank] for part in parts]
        seats = settings.seats_of(options.ranks, options.rank)
        first, _ = here(seats)
        self._own = [_first(part.shards(options.ranks), options.rank, first) for part in parts]
        self._device = self._parts[0].device
        self._hot = self._hot_states()
        self.loading = Loading(geometry, self._parts, self._shards, options, self._hot, seats)
        self._derived: dict[str, int] = {}
        self._lock = threading.Condition()
        self._client: Client | None = None
        self._namespace: Namespace | None = None
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._unsaved: set[bytes] = set()
        self._counts: Counter[str] = Counter()
        self._loading = 0
        self._saving_bytes = 0
        self._closed = False
        self._asleep = False
        self._loads: queue.SimpleQueue[Begun | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[Client, list[_Copied]] | None] = queue.SimpleQueue()
        self._loaders = [
            threading.Thread(target=self._load_all, name=f"tiercache-load-{n}", daemon=True)
            for n in range(settings.loaders)
        ]
        self._saver = threading.Thread(target=self._save_all, name="tiercache-save", daemon=True)
        for thread in (*self._loaders, self._saver):
            thread.start()

    def begin(self, work: Work) -> None:
        """Start the loads of a step."""
        client = self._attached(work.namespace)
        for request in work.doomed:
            self._end(request, "no place to load into")
        for job in work.loads:
            if client is None or not self._awake():
                self._end(job.request, "nothing to load with")
                continue
            with self._lock:
                self._loading += 1
            deadline = monotonic() + self._settings.load_s
            self._loads.put(Begun(job, client, deadline, self._mark()))

    def save(self, work: Work) -> None:
        """Copy what a step offers off its blocks; the bytes go to the node later."""
        client = self._attached(work.namespace)
        for job in work.saves:
            items = [item for item in job.items if self._own[item.part]]
            nbytes = sum(self._parts[item.part].nbytes for item in items)
            if client is None or not self._awake() or not self._room(client, nbytes):
                self._note_unsaved(job, items, "save_dropped")
                continue
            try:
                copied = self._copied(job, items)
            except RuntimeError as error:
                # A device without memory for a copy costs a save, and not the engine.
                _log.warning("a save failed: %s", error)
                self._note_unsaved(job, items, "save_failed")
                copied = []
            if copied:
                self._saves.put((client, copied))
            else:
                self._done(nbytes)

    def _copied(self, job: Job, items: Sequence[Item]) -> list[_Copied]:
        """Return the objects, on their way into host memory on the engine's stream."""
        derived = self._derived.get(job.request, 0)
        copied = []
        for part in sorted({item.part for item in items}):
            chosen = [item for item in items if item.part == part]
            buffer = self._parts[part].gather([item.blocks for item in chosen])
            self._warm(job, part, chosen, buffer)
            if self._device.type == "cuda":
                host = torch.empty(buffer.shape, dtype=torch.uint8, pin_memory=True)
                buffer = host.copy_(buffer, non_blocking=True)
            copied.append(_Copied(job, part, chosen, buffer, None, derived))
        event = self._mark()
        for one in copied:
            one.event = event
        return copied

    def _done(self, nbytes: int) -> None:
        with self._lock:
            self._saving_bytes -= nbytes
            self._lock.notify_all()

    def results(self, *, idle: bool = False) -> Results:
        """Return the loads that ended; an idle step waits a moment for one."""
        if self._loading and not any(thread.is_alive() for thread in self._loaders):
            self._abandon()
        with self._lock:
            if idle and self._loading and not self._ended:
                self._lock.wait(IDLE_S)
            found = Results(frozenset(self._ended), frozenset(self._failed))
            self._ended.clear()
            self._failed.clear()
        return found

    def report(self) -> Report | None:
        """Return what happened since the last report, None when nothing did."""
        with self._lock:
            if not self._unsaved and not self._counts:
                return None
            found = Report(frozenset(self._unsaved), dict(self._counts))
            self._unsaved.clear()
            self._counts.clear()
        return found

    def forget(self, requests: Iterable[str]) -> None:
        """Requests are over."""
        for request in requests:
            self._derived.pop(request, None)

    def flush(self, wait_s: float) -> bool:
        """Wait until all that was handed over was offered to the node; return whether it was."""
        with self._lock:
            return self._lock.wait_for(
                lambda: not self._saving_bytes and not self._loading, timeout=wait_s
            )

    def sleep(self) -> None:
        """The blocks are about to go, with all that lies beside them on the device: when this returns, no
        thread touches them any more, and loads that have not ended fail. What was copied off them is
        saved all the same. Idempotent."""
        self._asleep = True
        self.loading.turnstile.shut()
        if self._hot is not None:
            self._hot[1].clear()

    def wake(self) -> None:
        """The blocks are back, at the same addresses, with anything in them. Idempotent."""
        self._asleep = False
        self.loading.turnstile.open()

    def close(self) -> None:
        """Stop. Loads that have not ended are not reported any more; their blocks are left alone."""
        self._closed = True
        for _ in range(self._settings.loaders):
            self._loads.put(None)
        self._saves.put(None)
        for thread in (*self._loaders, self._saver):
            thread.join(CLOSE_S)
        if self._client is not None:
            self._client.close()

    def _attached(self, namespace: Namespace | None) -> Client | None:
        """Return the client of a namespace; nothing is sent before it is used."""
        if namespace is not None and namespace != self._namespace:
            if self._client is not None:
                self._client.close()
            if self._hot is not None:
                self._hot[1].clear()
            self._namespace = namespace
            self._client = Client(
                self._settings.socket, namespace, self.geometry.layout, self._options
            )
        return self._client

    def _room(self, client: Client, nbytes: int) -> bool:
        """Whether that many bytes may wait. While the node is away one save at a time may, so that the
        client attaches again."""
        with self._lock:
            away = self._saving_bytes and not client.status.startswith("attached")
            if away or self._saving_bytes + nbytes > self._settings.save_bytes_max:
                return False
            self._saving_bytes += nbytes
            return True

    def _mark(self) -> torch.cuda.Event | None:
        """Return where the engine's stream stands."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _end(self, request: str, fault: str) -> None:
        with self._lock:
            self._ended.add(request)
            self._counts["loads"] += 1
            if fault:
                self._failed.add(request)
                self._counts["loads_failed"] += 1
                _log.debug("load of %s failed: %s", request, fault)
            self._lock.notify_all()

    def _note_unsaved(self, job: Job, items: Sequence[Item], why: str) -> None:
        with self._lock:
            self._unsaved.update(tagged(item.digest, job.lora, job.salt) for item in items)
            self._counts[why] += len(items)

    def _load_all(self) -> None:
        while (begun := self._loads.get()) is not None:
            loaded = Loaded("the thread that loads has ended")
            try:
                loaded = self.loading.load(begun)
            except (LayoutError, ProtocolError, ValueError, LookupError, RuntimeError) as error:
                # What the node answered does not fit, or the device refused: the request computes.
                _log.warning("a load failed; the request is computed: %s", error)
                loaded = Loaded(str(error) or type(error).__name__)
            finally:
                self._note_loaded(begun.job.request, loaded)

    def _note_loaded(self, request: str, loaded: Loaded) -> None:
        with self._lock:
            self._loading -= 1
            self._counts["loaded_objects"] += loaded.objects
            self._counts["loaded_bytes"] += loaded.nbytes
            self._counts["hot_objects"] += loaded.hot
            if loaded.requantised:
                self._derived[request] = loaded.requantised
        self._end(request, loaded.fault)

    def _abandon(self) -> None:
        """Nothing loads any more: what waits has failed."""
        while not self._loads.empty():
            begun = self._loads.get()
            if begun is not None:
                self._note_loaded(begun.job.request, Loaded("no thread loads"))

    def _awake(self) -> bool:
        return not self._closed and not self._asleep

    def _hot_states(self) -> tuple[int, HotStates] | None:
        """Return the pool of checkpoints on the device, and the part that it is of."""
        if not self._settings.device_checkpoint_bytes:
            return None
        for at, part in enumerate(self.geometry.layout.parts):
            if part.name == "recurrent":
                nbytes = self._settings.device_checkpoint_bytes
                return at, HotStates(part, self._shards[at], nbytes, self._device)
        raise LayoutError("device_checkpoint_bytes is set, and the model has no recurrent states")

    def _warm(self, job: Job, part: int, items: Sequence[Item], buffer: torch.Tensor) -> None:
        if self._hot is not None and part == self._hot[0]:
            keys = [tagged(item.digest, job.lora, job.salt) for item in items]
            self._hot[1].keep(keys, buffer, self._derived.get(job.request, 0))

    def _save_all(self) -> None:
        while (queued := self._saves.get()) is not None:
            client, copied = queued
            nbytes = sum(one.buffer.nbytes for one in copied)
            try:
                self._store(client, copied)
            except (LayoutError, ProtocolError, ValueError, RuntimeError) as error:
                _log.warning("a save failed: %s", error)
                for one in copied:
                    self._note_unsaved(one.job, one.items, "save_failed")
            self._done(nbytes)

    def _store(self, client: Client, copied: Sequence[_Copied]) -> None:
        job = copied[0].job
        blobs: list[Blob] = []
        known: dict[int, bytes] = {}
        for one in copied:
            if one.event is not None:
                one.event.synchronize()
            rows = one.buffer.numpy()
            part = self.geometry.layout.parts[one.part]
            for row, item in enumerate(one.items):
                known[item.end] = item.digest
                start = item.end - part.block_tokens if part.block_tokens else 0
                place = (part.name, item.end, rows[row].data, start, self._shards[one.part])
                blobs.append(Blob(*place, requantised=one.requantised))
        chain = KnownChain(known, self.geometry.layout.block_tokens)
        scope = Scope(lora=job.lora, salt=job.salt)
        saved = client.save(job.name, chain, blobs, scope=scope, parent=job.parent)
        with self._lock:
            self._counts["saved_objects"] += saved.stored
            self._counts["held_objects"] += saved.held
            self._counts["saved_bytes"] += sum(one.buffer.nbytes for one in copied)
            for why, count in saved.declined.items():
                self._counts[f"declined_{why}"] += count
            if saved.declined:
                self._unsaved.update(tagged(d, job.lora, job.salt) for d in known.values())


def _first(shards: Sequence[Shard], rank: int, start: int) -> bool:
    """Whether this rank stores its shard: of ranks that hold the same and share a node, of which `start` is
    the first, the first does."""
    return shards.index(shards[rank], start) == rank
