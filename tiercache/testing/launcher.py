"""Forks nodes from one process that has imported everything: a start takes milliseconds.

Run as `python -m tiercache.testing.launcher`. Reads one JSON array per line: `["start", settings
file, log file]` answers with the new process's id, `["wait", id]` with how it ended (an exit code, or
minus the signal). When its input ends it kills its process group, so nothing outlives whoever
started it, however that ended.
"""

import json
import os
import signal
import sys

import tiercache.tiers.nvme
from tiercache.config import load
from tiercache.errors import ConfigError
from tiercache.runtime.serve import run

__all__ = ["main"]

EXIT_CONFIG = 2
assert tiercache.tiers.nvme.__name__  # Imported for the children: RocksDB is not opened here.


def main() -> None:
    """Serve one parent until its end of the pipe closes."""
    for line in sys.stdin:
        match json.loads(line):
            case ["start", str(settings), str(log)]:
                answer = _start(settings, log)
            case ["wait", int(pid)]:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            case _:
                raise SystemExit(f"not a command: {line}")
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)


def _start(settings: str, log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        code = run(load(settings))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        code = EXIT_CONFIG
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
