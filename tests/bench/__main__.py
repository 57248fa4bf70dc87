"""`make bench`: measures tiercache beside memcpy, files and other stores, and prints one table.

    python -m tests.bench [PART ...] [--reps N] [--json FILE]

Every figure is the median of N repetitions, with the least and the largest. Nothing here passes or
fails: goals stand beside the figures, and a busy machine misses them.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from tests.bench import (
    cluster,
    disk,
    kernels,
    lookup,
    plan,
    policies,
    remote,
    start,
    tables,
    transfer,
    transport,
)
from tests.bench.figures import Figure, Verdict
from tests.bench.machine import Machine, here
from tests.bench.peers.harness import Result
from tests.bench.peers_run import against, run

PARTS: dict[str, Callable[[int], Iterator[Figure]]] = {
    "lookup": lookup.measure,
    "load": transfer.measure,
    "plan": plan.measure,
    "policies": policies.measure,
    "nvme": disk.measure,
    "start": start.measure,
    "kernels": kernels.measure,
    "remote": remote.measure,
    "transport": transport.measure,
    "cluster": cluster.measure,
}
PEERS = "peers"
TITLES = {
    "lookup": "Looking up",
    "load": "Loading and saving",
    "plan": "Planning",
    "policies": "Choosing what goes",
    "nvme": "NVMe",
    "start": "Starting and idling",
    "kernels": "INT8 and copies on the CPU",
    "remote": "Remote tier",
    "transport": "Between nodes, over loopback",
    "cluster": "Clusters",
    PEERS: "Other stores",
}


def main() -> None:
    """Measure the parts that the command line names, or all of them."""
    parser = argparse.ArgumentParser(prog="make bench", description="Measure tiercache.")
    parser.add_argument("part", nargs="*", help=f"some of {', '.join(TITLES)} (default: all)")
    parser.add_argument("--reps", type=int, default=3, help="repetitions of everything")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write JSON lines there")
    options = parser.parse_args()
    # `make bench BENCH="lookup plan"`: make hands its variables on.
    chosen = options.part or os.environ.get("BENCH", "").split() or list(TITLES)
    unknown = sorted(set(chosen) - TITLES.keys())
    if unknown or options.reps < 1:
        parser.error(f"no part {unknown[0]!r}" if unknown else "--reps must be at least 1")
    machine = here([*chosen, "--reps", str(options.reps)])
    with (options.json or Path(os.devnull)).open("wb") as file:
        _measure([part for part in TITLES if part in chosen], options.reps, machine, file)


def _measure(parts: list[str], reps: int, machine: Machine, file: BinaryIO) -> None:
    """Print a table per part as it comes, and write lines of JSON: the machine, then one per figure
    and per result of a peer."""
    _write(file, [machine])
    print(tables.heading(machine), flush=True)
    found: list[Figure] = []
    began = time.monotonic()
    for part in parts:
        print(f"\n## {TITLES[part]}\n", flush=True)
        if part == PEERS:
            results, troubles = run(reps)
            new = list(against(results))
            _write(file, results)
            if results:
                print(tables.peers(results) + "\n")
            print("".join(f"! {trouble}\n" for trouble in troubles))
        else:
            new = list(PARTS[part](reps))
        if new:
            print(tables.figures(new), flush=True)
        _write(file, [Verdict(each, each.median, *each.spread, each.verdict) for each in new])
        found += new
    missed = [figure.name for figure in found if figure.verdict == "missed"]
    goals = sum(figure.goal is not None for figure in found)
    seconds = time.monotonic() - began
    print(f"\n{goals - len(missed)} of {goals} goals met, in {seconds:.0f} s.")
    for name in missed:
        print(f"  missed: {name}")


def _write(file: BinaryIO, lines: Sequence[Machine | Verdict | Result]) -> None:
    for line in lines:
        file.write(msgspec.json.encode(line) + b"\n")
    file.flush()


if __name__ == "__main__":
    main()
