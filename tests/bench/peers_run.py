"""The other stores, and tiercache among them: one table, repetitions interleaved.

Each repetition starts every peer anew, measures it and stops it: so all see the same neighbours, and
no peer's idle server takes from another. Peers that need an environment of their own
(`tests/bench/peers/setup-venvs`) are left out, and named, when it is not there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.bench.figures import Figure, at_least, size_label
from tests.bench.nodes import ROOT
from tests.bench.peers.harness import Result

HERE = ROOT / "tests" / "bench" / "peers"
SETUP = "tests/bench/peers/setup-venvs"
PEERS = ("memcpy", "files", "redis", "mooncake", "lmcache", "tiercache")
OWN_VENV = {"redis": "redis-server", "mooncake": "", "lmcache": ""}
"""Peers with an environment of their own, each with the program it needs besides."""

RUN_S_MAX = 300.0
GOAL_SIZE = 16 << 20
BATCH = "-b16"
GOALS = (("redis", 10.0), ("lmcache", 2.0), ("mooncake", 1.0))
"""At 16 MiB tiercache moves so many times the bytes per second: single calls against single calls,
batches against batches."""

WITHOUT_GOAL = ("lmcache", BATCH)
"""Twice what it does in batches would be more than memory gives."""

Rows = Mapping[tuple[str, str, int], Sequence[Result]]


def venvs() -> Path:
    """Return where the peers' environments lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("TIERCACHE_BENCH_VENVS") or f"{cache}/tiercache-bench")


def interpreter(peer: str) -> str:
    """Return the Python that measures a peer, "" when it is not installed."""
    if peer not in OWN_VENV:
        return sys.executable
    requirements = (HERE / f"requirements-{peer}.txt").read_bytes()
    venv = venvs() / f"{peer}-{hashlib.sha256(requirements).hexdigest()[:12]}"
    program = OWN_VENV[peer]
    if not (venv / "complete").exists() or (program and shutil.which(program) is None):
        return ""
    return str(venv / "bin" / "python")


def missing() -> list[str]:
    """Return what is not installed, each with what to do."""
    lines = []
    for peer, program in OWN_VENV.items():
        if not interpreter(peer):
            needs = f" (and install {program})" if program and not shutil.which(program) else ""
            lines.append(f"{peer} is not installed: run {SETUP} {peer}{needs}")
    return lines


def run(reps: int) -> tuple[list[Result], list[str]]:
    """Measure every peer that is there; return the results, and what went wrong."""
    results: list[Result] = []
    troubles = missing()
    failed: set[str] = set()
    for rep in range(reps):
        for peer in PEERS:
            python = interpreter(peer)
            if not python or peer in failed:
                continue
            sys.stderr.write(f"peers: {peer}, repetition {rep + 1} of {reps}\n")
            try:
                results += _run(python, peer, rep)
            except (subprocess.SubprocessError, msgspec.DecodeError) as error:
                failed.add(peer)
                troubles.append(f"{peer} failed: {error}")
    return results, troubles


def _run(python: str, peer: str, rep: int) -> list[Result]:
    command = [python, "-m", f"tests.bench.peers.bench_{peer}", "--reps", "1", "--rep", str(rep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"exit {done.returncode}: {done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [msgspec.json.decode(line, type=Result) for line in lines]


def rows(results: Sequence[Result]) -> Rows:
    """Return the repetitions of each cell, by peer, operation and size."""
    found: dict[tuple[str, str, int], list[Result]] = defaultdict(list)
    for result in results:
        found[result.peer, result.op, result.size].append(result)
    return found


def against(results: Sequence[Result]) -> Iterator[Figure]:
    """Yield tiercache over other stores at 16 MiB."""
    found = rows(results)
    for op, word in (("put", "save"), ("get_into", "load copied")):
        for peer, bound in GOALS:
            for way, calls in (("", "one by one"), (BATCH, "in batches")):
                ours = found.get((f"tiercache{way}", op, GOAL_SIZE), ())
                theirs = found.get((peer + way, op, GOAL_SIZE), ())
                ratios = tuple(
                    mine.ratio / other.ratio
                    for mine, other in zip(ours, theirs, strict=False)
                    if mine.ratio and other.ratio
                )
                if ratios:
                    goal = None if (peer, way) == WITHOUT_GOAL else at_least(bound)
                    name = f"{word}, {size_label(GOAL_SIZE)} {calls}, over {peer}"
                    yield Figure("peers", name, "x", ratios, goal)
