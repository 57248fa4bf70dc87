"""Making the arena's memory known to CUDA, so that copies to the device need no bounce buffer.

Registering pins pages, at a few gigabytes per second, and an arena may be hundreds. So it is done in a
thread, segment by segment in chunks, while the engine serves already: copies from memory that is not
registered yet work as well, they only block. Nothing is registered where there is no CUDA.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tiercache.device.staging import address_of

_log = logging.getLogger(__name__)

CHUNK_BYTES_MAX: Final = 64 << 30
"""Bytes of one registration; larger ones fail on some drivers."""

_PORTABLE, _READ_ONLY = 1, 8


@dataclass(frozen=True, slots=True)
class Registrar:
    """How memory is registered. Both take an address; `register` a size and whether the memory is
    mapped read-only, too. Both return "" or what went wrong."""

    register: Callable[[int, int, bool], str]
    unregister: Callable[[int], str]


def cuda_registrar() -> Registrar | None:
    """Return CUDA's own, None where there is no CUDA."""
    if not torch.cuda.is_available():
        return None
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, nbytes: int, read_only: bool) -> str:  # noqa: FBT001 - a C-like call
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        return _text(runtime.cudaHostRegister(address, nbytes, flags))

    def unregister(address: int) -> str:
        return _text(runtime.cudaHostUnregister(address))

    return Registrar(register, unregister)


class Registration:
    """The registration of some memory, in the background from `start` on; `close` undoes it.

    `segments` must stay mapped until after `close`. Registering stops at the first failure, which is
    logged: the rest stays as it is, and copies from there are slower.
    """

    def __init__(
        self,
        segments: Sequence[memoryview],
        registrar: Registrar,
        *,
        chunk_bytes_max: int = CHUNK_BYTES_MAX,
    ) -> None:
        self.failed = ""
        self.nbytes = 0
        self._registrar = registrar
        self._chunks = list(chunks(segments, chunk_bytes_max))
        self._done: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tiercache-register", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self) -> None:
        """Return when all that will be registered is."""
        self._thread.join()

    def close(self) -> None:
        """Stop, and give back what was registered. No copy may be under way. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        while self._done:
            fault = self._registrar.unregister(self._done.pop())
            if fault:
                _log.warning("memory stays registered: %s", fault)
        self.nbytes = 0

    def _work(self) -> None:
        for chunk in self._chunks:
            if self._stop.is_set():
                return
            address = address_of(chunk)
            fault = self._registrar.register(address, chunk.nbytes, chunk.readonly)
            if fault:
                self.failed = fault
                _log.warning(
                    "memory is registered up to %d bytes only: %s; copies from the rest are slower",
                    self.nbytes,
                    fault,
                )
                return
            self._done.append(address)
            self.nbytes += chunk.nbytes


def chunks(segments: Sequence[memoryview], chunk_bytes_max: int) -> list[memoryview]:
    """Return the segments, cut where they are larger than `chunk_bytes_max`."""
    return [
        segment[start : start + chunk_bytes_max]
        for segment in segments
        for start in range(0, segment.nbytes, chunk_bytes_max)
    ]


def _text(code: object) -> str:
    """Return what a result of the CUDA runtime says; "" for success."""
    return "" if int(code) == 0 else str(code)  # type: ignore[call-overload]
