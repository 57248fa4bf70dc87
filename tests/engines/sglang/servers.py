"""A whole SGLang server on the CPU, in processes of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S = 420.0
ANSWER_S = 60.0
ADMIN = "admin"
_LOOK_S = 0.2


@dataclass(frozen=True)
class Answer:
    """What a server made of a prompt: greedy tokens, their log probabilities, and how many tokens of the
    prompt it did not compute, by where they came from."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: dict[str, int]
    seconds: float

    @property
    def from_storage(self) -> int:
        """Tokens whose state came from the node."""
        return self.cached.get("storage", 0)

    def is_like(self, other: "Answer", tolerance: float) -> bool:
        """Whether tokens are equal and log probabilities within `tolerance`."""
        near = (abs(a - b) <= tolerance for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and all(near)


class Server:
    """One `launch_server`. Leaving it kills all its processes."""

    def __init__(self, folder: Path, model: Path, flags: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        self.model = model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        _plugin(folder / "plugin")
        environment = dict(os.environ)
        environment["PYTHONPATH"] = f"{folder / 'plugin'}{os.pathsep}{environment['PYTHONPATH']}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sglang.launch_server"),
                    *("--model-path", str(model), "--served-model-name", "tiny"),
                    *("--host", "127.0.0.1", "--port", str(self.port)),
                    *("--admin-api-key", ADMIN),
                    *flags,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End it and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text()[-6000:]

    def generate(self, tokens: Sequence[int], count: int = 6) -> Answer:
        """Answer a prompt greedily."""
        began = time.monotonic()
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        got = self.call(
            "/generate",
            {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True},
        )
        about = got["meta_info"]
        cached = about.get("cached_tokens_details") or {}
        return Answer(
            tuple(got["output_ids"]),
            tuple(each[0] for each in about["output_token_logprobs"]),
            {name: amount for name, amount in cached.items() if isinstance(amount, int)},
            time.monotonic() - began,
        )

    def flush(self) -> None:
        """Drop what it holds itself; it refuses while it is busy."""
        self._until("/flush_cache", None)

    def attach(self, extra_config: str, policy: str = "wait_complete") -> str:
        """Attach a storage backend; return what the server said."""
        asked = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": extra_config,
            "hicache_storage_prefetch_policy": policy,
            "hicache_write_policy": "write_through",
        }
        return str(self.call("/hicache/storage-backend", asked, "PUT"))

    def detach(self) -> None:
        """Detach the storage backend, once it is idle."""
        self._until("/hicache/storage-backend", None, "DELETE")

    def clear(self) -> None:
        """Clear the storage backend."""
        self._until("/hicache/storage-backend/clear", None)

    def metrics(self) -> str:
        """Return its metrics."""
        return str(self.call("/metrics", None, "GET"))

    def call(self, path: str, asked: object, method: str = "POST") -> Any:
        """Send a request; return the answer, from JSON if it is any. HTTPError when refused."""
        body = b"" if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            body if method != "GET" else None,
            {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _until(self, path: str, asked: object, method: str = "POST") -> None:
        """Call until it is done: what needs an idle server is refused while anything runs."""
        until = time.monotonic() + ANSWER_S
        while True:
            try:
                self.call(path, asked, method)
            except urllib.error.HTTPError as error:
                if time.monotonic() > until:
                    raise AssertionError(
                        f"{path}: {error.read().decode()}\n{self.said()}"
                    ) from None
                threading.Event().wait(_LOOK_S)
            else:
                return

    def _wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            try:
                self.call("/health", None, "GET")
            except OSError:
                threading.Event().wait(_LOOK_S)
            else:
                return


def flags_of(extra_config: str, *, page: int, hybrid: bool, memory: str = "cache") -> list[str]:
    """Return the flags of a CPU server with a storage backend. `memory`: what SGLang's own host memory is
    for, a cache ("cache") or the way to the backend ("buffer_only")."""
    flags = [
        *("--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init"),
        *("--attention-backend", "torch_native", "--disable-overlap-schedule"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        *("--mem-fraction-static", "0.5", "--max-total-tokens", "4096"),
        *("--max-running-requests", "4", "--page-size", str(page)),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-write-policy", "write_through", "--hicache-mem-layout", "page_first"),
        *("--hicache-io-backend", "kernel", "--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-host-memory-mode", memory),
        *("--hicache-storage-backend-extra-config", extra_config),
        *("--enable-metrics", "--enable-cache-report"),
    ]
    if hybrid:
        flags += ["--max-mamba-cache-size", "48", "--mamba-radix-cache-strategy", "no_buffer"]
    return flags


def _plugin(folder: Path) -> None:
    """Make the stand-ins known as installed: SGLang looks for its plugins, and for torchvision, there."""
    for name, version, entries in (
        (
            "tiercache_cpu_plugin",
            "0",
            "[sglang.srt.plugins]\ntiercache_cpu = tests.engines.sglang.stand_ins.cpu_plugin:register\n",
        ),
        ("torchvision", "0.28.0", ""),
    ):
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (about / "entry_points.txt").write_text(entries)
