"""A child: one of two tensor-parallel ranks that compute on one node, or restore on another.

python apart.py compute|restore SOCKET RESULTS RANK PORT
"""

import sys
from pathlib import Path

import torch

from tests.engines.sglang.ranks import LACKS, STOPS, forgetful
from tests.engines.sglang.shapes import shapes
from tests.engines.sglang.trees import Rank, Tree, report

TABLE = {"engine": "apart"}


def main(task: str, socket: str, results: str, rank: str, port: str) -> None:
    """Compute prompts that share their beginnings, each rank without another state; or restore them."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2
    )
    found = {}
    for seed, shape in enumerate((shape for shape in shapes() if shape.hybrid), 1):
        at = Rank(socket, int(rank), 2, TABLE)
        tree = Tree(shape, at, torch.distributed.group.WORLD)
        if task == "restore":
            found[str(shape)] = tree.restore(seed, STOPS[-1])
        else:
            forgetful(tree, LACKS[int(rank)])
            for stop in STOPS:
                tree.compute(seed, stop)
                tree.settle()
        torch.distributed.barrier()
        tree.close()
    report(Path(results), found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
