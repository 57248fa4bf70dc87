"""What tests do to a running connector: make loads fail, change what is loaded, hold it still."""

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any, TypeAlias

Theirs: TypeAlias = Any
"""An object of the connector or of its tests' doubles."""


class Hooks:
    """Stands between a worker and its blocks. One at a time; `mode` says what it does.

    ""        nothing
    fail      every load fails before anything is written
    random    every second load or so fails
    partial   half of the objects are written, as rubbish, then the load fails
    tamper    objects of `part` are written as zeros
    hold      a load waits for the file `go` before it writes, and says so by the file `held`
    hold_save likewise, between the first object that is saved and the rest
    """

    def __init__(self, worker: Theirs) -> None:
        from tiercache.client import arena

        self.mode = ""
        self.part = ""
        self.folder = Path()
        self._chance = random.Random(5)
        self._worker = worker
        self._write = worker.loading.write
        worker.loading.write = self._written
        self._rest = threading.Event()
        keep = arena.Arena.write
        hooks = self

        def write(arena: Theirs, segment: int, offset: int, *pieces: memoryview) -> bytes:
            checksum = keep(arena, segment, offset, *pieces)
            if hooks.mode == "hold_save":
                hooks._hold()
            return checksum

        arena.Arena.write = write  # type: ignore[assignment, method-assign]

    def _written(self, items: Theirs, blobs: Theirs, event: Theirs) -> int:
        match self.mode:
            case "fail":
                raise RuntimeError("made to fail")
            case "random" if self._chance.random() < 0.5:
                raise RuntimeError("made to fail by chance")
            case "partial":
                half = max(1, len(items) // 2)
                rubbish = [
                    dataclasses.replace(blob, data=memoryview(b"\x55" * blob.data.nbytes))
                    for blob in blobs[:half]
                ]
                self._write(items[:half], rubbish, event)
                raise RuntimeError("made to fail half way")
            case "tamper":
                blobs = [
                    dataclasses.replace(blob, data=memoryview(bytes(blob.data.nbytes)))
                    if blob.part.startswith(self.part)
                    else blob
                    for blob in blobs
                ]
            case "hold":
                self._hold()
        return int(self._write(items, blobs, event))

    def _hold(self) -> None:
        (self.folder / "held").touch()
        while not (self.folder / "go").exists():
            self._rest.wait(0.005)
