"""A child: another engine process, which restores what somebody else computed.

python restoring.py SOCKET RESULTS
"""

import sys
from pathlib import Path

from tests.engines.sglang.shapes import shapes
from tests.engines.sglang.trees import Rank, Tree, report

TOKENS = 32


def main(socket: str, results: str) -> None:
    """Restore one prompt in a tree of every shape."""
    found = {}
    for seed, shape in enumerate(shapes(), 1):
        tree = Tree(shape, Rank(socket))
        found[str(shape)] = tree.restore(seed, TOKENS)
        tree.close()
    report(Path(results), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
