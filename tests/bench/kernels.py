"""Compressing and moving state on the CPU, beside memcpy: what demotion to NVMe would wait for.

One thread, memory that exceeds the caches, the shapes of one rank of Kimi K3. Rates are of floating-point
source. `python -m tiercache_kernels.bench` measures the ops on a GPU.
"""

from collections.abc import Iterator

import torch

from tests.bench.figures import Figure, Goal, at_least
from tests.bench.tables import figures
from tiercache_kernels import bench

GOALS: dict[str, Goal] = {
    "quantise float32": at_least(1.5),
    "quantise bfloat16": at_least(1.5),
    "dequantise float32": at_least(3.0),
    "dequantise bfloat16": at_least(3.0),
}
CALLS = 3
"""Per repetition, of an op and of memcpy in turn: both see the same neighbours."""


def measure(reps: int) -> Iterator[Figure]:
    """Yield a figure per op, and one of a plain copy in the same run."""
    torch.set_num_threads(1)
    copy = bench.copy_case("cpu")
    copy.run()
    for case in bench.cases(bench.MODELS[0], "cpu"):
        assert case.check(), case.op
        ours, plain = [], []
        for _ in range(reps):
            turns = [(_rate(case), _rate(copy)) for _ in range(CALLS)]
            ours.append(max(mine for mine, _ in turns))
            plain.append(max(other for _, other in turns))
        yield Figure("kernels", case.op, "GB/s", tuple(ours), GOALS.get(case.op))
        yield Figure("kernels", f"{case.op}: memcpy beside it", "GB/s", tuple(plain))


def _rate(case: bench.Case) -> float:
    return case.source_bytes / bench.seconds_here(case.run) / 1e9


if __name__ == "__main__":
    print(figures(list(measure(reps=3))))
