"""Plain files: one object is one file, written under another name and renamed.

`files-memory` lies in /dev/shm, `files-disk` in the folder that TIERCACHE_BENCH_DISK names, else in
/var/tmp, through the page cache: its reads are warm, its writes not yet on the disk.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.peers.harness import main
from tests.bench.peers.peer import DISK, Buffer, Context, Peer

SHARED_MEMORY = Path("/dev/shm")


class FilesDisk(Peer):
    """Through the page cache."""

    name = "files-disk"
    parent = Path(DISK)

    def start(self) -> Context:
        self._folder = tempfile.mkdtemp(prefix="tiercache-bench-files-", dir=self.parent)
        return {"folder": self._folder}

    def stop(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def version(self) -> str:
        return f"Linux {os.uname().release}"

    def connect(self, context: Context, rank: int) -> None:
        self._at = context["folder"]

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> None:
        for key, source in zip(keys, sources, strict=True):
            path = f"{self._at}/{key}"
            file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                left = source.data
                while left:
                    left = left[os.write(file, left) :]
            finally:
                os.close(file)
            os.rename(f"{path}.new", path)

    def get_into(self, keys: Sequence[str], targets: Sequence[Buffer]) -> None:
        for key, target in zip(keys, targets, strict=True):
            file = os.open(f"{self._at}/{key}", os.O_RDONLY)
            try:
                left = target.data
                while left:
                    count = os.readv(file, [left])
                    if not count:
                        raise EOFError(key)
                    left = left[count:]
            finally:
                os.close(file)

    def exists(self, keys: Sequence[str]) -> bool:
        return all(os.path.exists(f"{self._at}/{key}") for key in keys)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            os.unlink(f"{self._at}/{key}")


class FilesMemory(FilesDisk):
    """In memory."""

    name = "files-memory"
    parent = SHARED_MEMORY


if __name__ == "__main__":
    main([FilesMemory, FilesDisk])
