"""`python -m tiercache.testing.sim --seeds 1000 --first 0`: run histories until one fails."""

import argparse
import sys
import time
from collections import Counter

from tiercache.testing.sim.world import HistoryError, run_seed

STEPS = 800


def main(arguments: list[str]) -> int:
    """Run the seeds asked for; return 1 at the first that fails, having said all about it."""
    parser = argparse.ArgumentParser(prog="python -m tiercache.testing.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each history")
    asked = parser.parse_args(arguments)
    started = time.monotonic()
    sums: Counter[str] = Counter()
    for seed in range(asked.first, asked.first + asked.seeds):
        try:
            history = run_seed(seed, asked.steps)
        except HistoryError as failure:
            sys.stdout.write(f"{failure}\n")
            again = f"--seeds 1 --first {seed} --steps {asked.steps}"
            sys.stdout.write(f"failed; again: python -m tiercache.testing.sim {again}\n")
            return 1
        sums.update(
            events=history.events,
            requests=history.requests,
            resumed=history.resumed,
            tokens=history.resumed_tokens,
            restarts=history.restarts,
            deaths=history.deaths,
        )
    took = time.monotonic() - started
    said = ", ".join(f"{count} {name}" for name, count in sums.items())
    sys.stdout.write(f"{asked.seeds} histories passed in {took:.1f} s: {said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
