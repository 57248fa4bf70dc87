"""Where and when something was measured: figures without that mean nothing."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tests.bench.nodes import ROOT


class Machine(msgspec.Struct, frozen=True):
    """This machine, this build, this run. `load1` is the load as the run began."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    date: str
    commit: str
    command: str
    load1: float


def here(arguments: list[str]) -> Machine:
    """Return what is known of this machine and this run."""
    return Machine(
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) * 1024,
        kernel=platform.release(),
        python=platform.python_version(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=_commit(),
        command=" ".join([Path(sys.executable).name, "-m", "tests.bench", *arguments]),
        load1=round(os.getloadavg()[0], 2),
    )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _commit() -> str:
    """Return the commit, with a plus when files differ from it; "unknown" outside a checkout."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"{commit}+" if _git("status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
