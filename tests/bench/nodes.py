"""A sidecar process of its own for a measurement, and what the machine says of it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.peers.peer import pause
from tiercache.cli.admin import Admin
from tiercache.cli.replies import Stats
from tiercache.state import Kind, Layout, Part, Tensor

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 60.0
STOP_S_MAX = 20.0
ANSWER_S_MAX = 60.0
LOOK_S = 0.02
STARTED = "event=started"
OBJECTS_MAX = 2_000_000
"""Above what is stored to show that the cost of a plan does not grow with it."""


class Sidecar:
    """`tiercache serve` with a configuration of its own; `stop` removes all that it made.

    `module` names another module to run instead of the `serve` command: it gets the path of the
    configuration and `arguments`.
    """

    def __init__(
        self,
        *,
        arena_bytes: int,
        segment_bytes: int = 1 << 30,
        nvme: Path | None = None,
        nvme_keys: str = "",
        metrics: str = "",
        module: str = "",
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tiercache-bench-"))
        self.socket = self.folder / "node.sock"
        config = self.folder / "node.toml"
        disk = f'[nvme]\npath = "{nvme}"\n{nvme_keys}' if nvme else ""
        config.write_text(
            f'[node]\nsocket = "{self.socket}"\n'
            f"[host]\nbytes = {arena_bytes}\nsegment_bytes = {segment_bytes}\n"
            f'[metrics]\nbind = "{metrics}"\n[policy]\nretention = "chunk"\n'
            f"[limits]\nobjects_max = {OBJECTS_MAX}\n{disk}",
            encoding="utf-8",
        )
        command = [sys.executable, "-m", module or "tiercache"]
        command += [str(config), *arguments] if module else ["serve", "--config", str(config)]
        self.spawned_at = time.monotonic()
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._started = threading.Event()
        self.started_after_s = 0.0
        self._reading = threading.Thread(target=self._read_log, daemon=True)
        self._reading.start()
        self._started.wait(START_S_MAX)
        if not self.started_after_s:
            self.stop()
            raise RuntimeError(f"the node did not start:\n{self.last_words()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is not None:
            error.add_note(f"the node's log ends with:\n{self.last_words()}")

    def stop(self) -> None:
        """End the node in good order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reading.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def stats(self) -> Stats:
        """Return what the node says of itself."""
        with self.admin() as admin:
            return admin.stats()

    def admin(self) -> Admin:
        """Return an operator's connection."""
        return Admin(str(self.socket), ANSWER_S_MAX)

    def wait_prefaulted(self) -> None:
        """Return once the whole arena is memory."""
        while (node := self.stats().node).arena_prefaulted_bytes < node.arena_bytes:
            pause(LOOK_S)

    def wait_scanned(self) -> None:
        """Return once everything on disk was found."""
        while (state := self.stats().node.nvme) != "ready":
            if state.startswith("failed"):
                raise RuntimeError(state)
            pause(LOOK_S)

    def cpu_s(self) -> float:
        """Return the seconds of processor time that the process took so far."""
        fields = self._proc("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[str, int]:
        """Return resident bytes by kind: RssAnon, RssFile and RssShmem (the arena)."""
        return {
            name: int(value.split()[0]) * 1024
            for name, _, value in (
                line.partition(":") for line in self._proc("status").splitlines()
            )
            if name.startswith("Rss")
        }

    def device_bytes(self) -> tuple[int, int]:
        """Return what the process had the disk read and write so far."""
        found = dict(line.split(": ") for line in self._proc("io").splitlines())
        return int(found["read_bytes"]), int(found["write_bytes"])

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self.process.pid}/{name}").read_text(encoding="utf-8")

    def last_words(self) -> str:
        """Return the end of its log."""
        return "".join(self.log[-30:])

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if STARTED in line and not self.started_after_s:
                self.started_after_s = time.monotonic() - self.spawned_at
                self._started.set()
        self._started.set()


def blob_layout(nbytes: int, block_tokens: int = 16) -> Layout:
    """Return a layout with one part, "kv", whose block is `nbytes`."""
    return Layout((_kv("kv", nbytes // block_tokens, block_tokens, 1),), block_tokens)


def hybrid_layout(block_tokens: int = 64, units: int = 1) -> Layout:
    """Return three parts as a hybrid model has them: KV blocks, recurrent and conv snapshots.

    Their objects are as small as can be: what is measured with them is not the copying.
    """
    return Layout(
        (
            _kv("mla", 4 * units, block_tokens, units),
            _snapshot("recurrent", Kind.RECURRENT, units),
            _snapshot("conv", Kind.CONV, units),
        ),
        block_tokens,
    )


def _kv(name: str, token_bytes: int, block_tokens: int, units: int) -> Part:
    axis = 0 if units > 1 else None
    tensor = Tensor("kv", "uint8", (token_bytes,), ("channel",), axis)
    return Part(name, Kind.KV, None, block_tokens, units, (tensor,))


def _snapshot(name: str, kind: Kind, units: int) -> Part:
    axis = 0 if units > 1 else None
    tensor = Tensor(name, "uint8", (64 * units,), ("channel",), axis)
    return Part(name, kind, 1, 0, units, (tensor,))
