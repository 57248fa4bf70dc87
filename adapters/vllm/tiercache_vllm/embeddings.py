"""Encoder embeddings as objects of a node, by what was encoded and by which encoder. Needs no vLLM.

An embedding is a snapshot part of a layout of its own, at the end of a chain of one token whose content is
the identity of the input. Its shape is not known beforehand, so its bytes carry it, and it has a codec of
its own: `rows`, a header and the values.
"""

import logging
import queue
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from tiercache.client import Blob, Client, Wanted
from tiercache.errors import LayoutError, ProtocolError
from tiercache.state import Chain, Kind, Layout, Part, Tensor
from tiercache.state.canonical import digest

_log = logging.getLogger(__name__)

CODEC = "rows"
PART = "embedding"
LAYOUT = Layout(
    (Part(PART, Kind.EMBEDDING, 1, 0, 1, (Tensor(PART, "uint8", (1,), ("byte",)),)),), 1
)
DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}
CLOSE_S = 5.0
IDLE_S = 0.005
_HEADER = struct.Struct("<4sIII")
_MAGIC = b"tcE1"


def chain_of(identifier: str) -> Chain:
    """Return the chain that names an embedding."""
    return Chain((0,), 1, {0: digest("encoder input", identifier)})


def packed(tensor: torch.Tensor) -> bytes | None:
    """Return `[rows, width]` values as bytes; None for anything else."""
    code = next((code for code, dtype in DTYPES.items() if dtype == tensor.dtype), None)
    if code is None or tensor.ndim != 2 or not tensor.numel():
        return None
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return _HEADER.pack(_MAGIC, code, *tensor.shape) + values


def unpacked(data: bytes) -> torch.Tensor:
    """Return the values; LayoutError for bytes that are none."""
    if len(data) < _HEADER.size:
        raise LayoutError("an embedding without a header")
    magic, code, rows, width = _HEADER.unpack_from(data)
    dtype = DTYPES.get(code)
    if magic != _MAGIC or dtype is None:
        raise LayoutError("an embedding of an unknown form")
    if len(data) - _HEADER.size != rows * width * dtype.itemsize:
        raise LayoutError(f"an embedding of {rows} x {width} in {len(data)} bytes")
    values = bytearray(data[_HEADER.size :])
    return torch.frombuffer(values, dtype=dtype).reshape(rows, width)


class Shelf:
    """Embeddings fetched ahead, in private memory: what is promised here cannot be lost any more.

    Bounded: beyond `bytes_max` nothing is fetched, and inputs are encoded.
    """

    def __init__(self, client: Client, *, bytes_max: int, wait_s: float, threads: int) -> None:
        self.counts: Counter[str] = Counter()
        self._client = client
        self._bytes_max = bytes_max
        self._wait_s = wait_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiercache-embedding")
        self._pending: dict[str, Future[bytes | None]] = {}
        self._here: OrderedDict[str, bytes | None] = OrderedDict()
        self._users: dict[str, set[str]] = {}
        self._bytes = 0

    def wants(self, request: str, identifier: str) -> bool:
        """Whether it is known if the node has an embedding; asks when it is not. Never waits."""
        self._users.setdefault(identifier, set()).add(request)
        if identifier in self._here:
            return True
        if self._bytes > self._bytes_max:
            return True
        future = self._pending.get(identifier)
        if future is None:
            self._pending[identifier] = self._pool.submit(self._fetch, identifier)
            return False
        if not future.done():
            return False
        del self._pending[identifier]
        data = future.result()
        self.counts["hits" if data else "misses"] += 1
        self._here[identifier] = data
        self._bytes += len(data or b"")
        return True

    def get(self, identifier: str) -> bytes | None:
        """Return an embedding that is here."""
        return self._here.get(identifier)

    def idle(self) -> None:
        """Nothing is computed in this step: wait a moment for an answer that is due."""
        if self._pending:
            wait(self._pending.values(), IDLE_S, FIRST_COMPLETED)

    def forget(self, request: str) -> None:
        """A request is over: what nobody else uses goes."""
        for identifier in [name for name, users in self._users.items() if request in users]:
            users = self._users[identifier]
            users.discard(request)
            if not users:
                del self._users[identifier]
                self._bytes -= len(self._here.pop(identifier, None) or b"")
                # An answer that is still to come is thrown away.
                self._pending.pop(identifier, None)

    def close(self) -> None:
        """Stop."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _fetch(self, identifier: str) -> bytes | None:
        wanted = [Wanted(PART, chain_of(identifier).digest_at(1), codec=CODEC)]
        name = f"embedding-{digest('name', identifier).hex()}"
        try:
            with self._client.fetch(name, wanted, wait_s=self._wait_s) as holding:
                (blob,) = holding.blobs
                if blob is None:
                    return None
                data = bytes(blob.data)
                if not holding.held:
                    return None
            unpacked(data)
        except (LayoutError, ProtocolError, ValueError) as fault:
            _log.warning("an embedding is not used: %s", fault)
            return None
        return data


class Saver:
    """Saves embeddings on a thread of its own; what is too much is dropped and counted."""

    def __init__(self, client: Client, *, bytes_max: int) -> None:
        self.counts: Counter[str] = Counter()
        self._client = client
        self._bytes_max = bytes_max
        self._bytes = 0
        self._idle = threading.Condition()
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tiercache-embedding", daemon=True)
        self._thread.start()

    def save(self, identifier: str, tensor: torch.Tensor) -> None:
        """Save one embedding, later."""
        nbytes = tensor.numel() * tensor.element_size() + _HEADER.size
        with self._idle:
            full = self._bytes + nbytes > self._bytes_max
        data = None if full else packed(tensor)
        if data is None:
            self.counts["dropped"] += 1
            return
        with self._idle:
            self._bytes += len(data)
        self._queue.put((identifier, data))

    def flush(self, wait_s: float) -> bool:
        """Wait until all was offered to the node; return whether it was."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._bytes, timeout=wait_s)

    def close(self) -> None:
        """Stop."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        self._client.close()

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            identifier, data = one
            blob = Blob(PART, 1, memoryview(data), codec=CODEC)
            name = f"embedding-{digest('name', identifier).hex()}"
            try:
                saved = self._client.save(name, chain_of(identifier), [blob])
                self.counts["saved"] += saved.stored
                self._declined(saved.declined)
            except (LayoutError, ProtocolError, ValueError) as fault:
                _log.warning("an embedding is not saved: %s", fault)
                self.counts["dropped"] += 1
            with self._idle:
                self._bytes -= len(data)
                self._idle.notify_all()

    def _declined(self, declined: Mapping[str, int]) -> None:
        for why, count in declined.items():
            self.counts[f"declined_{why}"] += count
