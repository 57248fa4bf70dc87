"""One engine process, as tests see it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from tiercache.testing.nodes import NodeProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
Json: TypeAlias = Any
"""What JSON is decoded to."""


class Engine:
    """One engine process; see `driver`."""

    def __init__(self, order: dict[str, Any], log: Path) -> None:
        self.log = log
        self._file = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env=environment(log.parent) | order.pop("environment", {}),
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        began = time.monotonic()
        self._answer()
        self.start_s = time.monotonic() - began

    def ask(self, what: str, **order: object) -> Json:
        """Return the answer to one order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def generate(
        self,
        *prompts: Sequence[int],
        tokens: int = 8,
        allowed: list[int] | None = None,
        **more: Json,
    ) -> list[Json]:
        """Run prompts one after the other, each by itself."""
        how = {"tokens": tokens, "allowed": allowed}
        return [
            self.ask("generate", prompts=[{"ids": list(prompt), **more}], **how)[0]
            for prompt in prompts
        ]

    def close(self) -> None:
        """End it, and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()

    def _answer(self) -> Json:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended\n{self.log.read_text(errors='replace')[-4000:]}"
        return json.loads(line)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of an engine: one process, one thread, no network, and the project's entry
    points as if it were installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = folder / f"{project['name']}-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


NewEngine = Callable[..., Engine]
NewNode = Callable[..., NodeProcess]


def prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    chance = random.Random(seed)
    return [chance.randrange(500) for _ in range(tokens)]


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of a log-probability of the same token at the same step, as far as
    both chose the same tokens; infinity when not even the first is the same."""
    worst = 0.0 if one["tokens"][0] == other["tokens"][0] else float("inf")
    steps = zip(one["logprobs"], other["logprobs"], one["tokens"], other["tokens"], strict=True)
    for left, right, token, same in steps:
        worst = max([worst, *(abs(left[t] - right[t]) for t in left if t in right)])
        if token != same:
            break
    return worst
