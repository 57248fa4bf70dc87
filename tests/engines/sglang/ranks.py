"""A child: one of two tensor-parallel ranks, each of which lacks another checkpoint.

python ranks.py SOCKET RESULTS RANK PORT
"""

import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs

from tests.engines.sglang.shapes import Shape, shapes
from tests.engines.sglang.trees import Rank, Restored, Tree, report

STOPS = (8, 16, 24, 32)
INJECTED = 16
LACKS = {0: 24, 1: 32}
"""The deepest boundaries of the ranks are 32 and 24, of which the other one lacks either: the deepest that
both have is 16, less than the smaller of the two."""


def forgetful(tree: Tree, stop: int) -> None:
    """Have the tree's backend lose the state at one boundary."""
    save = tree.backend.batch_set_v2

    def losing(transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        page = tree.shape.page
        if (len(extra_info.prefix_keys) + 1) * page == stop:
            return {transfer.name: [False] * len(transfer.keys) for transfer in transfers}
        done: dict[str, list[bool]] = save(transfers, extra_info)
        return done

    tree.backend.batch_set_v2 = losing


def injected(socket: str, rank: int) -> dict[str, Restored]:
    """Restore under SGLang's own injected failures and delays, others on each rank."""
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.01),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.15),
    ):
        tree = Tree(
            Shape(), Rank(socket, rank, 2, {"engine": "injected"}), torch.distributed.group.WORLD
        )
    found = {}
    for seed in range(50, 50 + INJECTED):
        tree.compute(seed, STOPS[-1])
        tree.settle()
        tree.forget()
        torch.distributed.barrier()
        found[f"injected {seed}"] = tree.restore(seed, STOPS[-1])
        tree.forget()
    tree.close()
    return found


def main(socket: str, results: str, rank: str, port: str) -> None:
    """Compute prompts that share their beginnings, forget them, and restore the longest."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2
    )
    found = {}
    for seed, shape in enumerate((shape for shape in shapes() if shape.hybrid), 1):
        table = {"engine": "two ranks"}
        tree = Tree(shape, Rank(socket, int(rank), 2, table), torch.distributed.group.WORLD)
        forgetful(tree, LACKS[int(rank)])
        for stop in STOPS:
            tree.compute(seed, stop)
            tree.settle()
        tree.forget()
        torch.distributed.barrier()
        own = [stop // shape.page for stop in STOPS if stop != LACKS[int(rank)]]
        assert tree.stops(seed, STOPS[-1]) == own
        found[str(shape)] = tree.restore(seed, STOPS[-1])
        torch.distributed.barrier()
        if rank == "1":  # Its node is gone: nobody may count on what only the other one has.
            tree.backend.close()
        tree.forget()
        found[f"{shape} cut off"] = tree.restore(seed, STOPS[-1])
        torch.distributed.barrier()
        tree.close()
    found |= injected(socket, int(rank))
    report(Path(results), found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
