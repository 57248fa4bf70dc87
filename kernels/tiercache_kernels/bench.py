"""How fast the ops are: `python -m tiercache_kernels.bench` measures them on a CUDA device.

Rates count what is read plus what is written, and stand beside the rate of a plain copy between two
buffers of the device, measured in the same run. The goal is 80 % of that for what moves or compresses
state. Each op is first compared with its reference, bit by bit. `--device cpu` measures the forms for the
CPU, on one thread.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

import tiercache_kernels as kernels
from tiercache_kernels import reference
from tiercache_kernels.testing import poisoned, same

REPETITIONS = 20
WARM_UPS = 3
GOAL_SHARE = 0.8
WITHOUT_GOAL = ("plain copy", "checksum")
COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
"""Of the plain copy: far more than any cache holds."""

ALL_BYTES = {"cuda": 512 << 20, "cpu": 256 << 20}
"""Of state or pages that one call moves, at least one slot of it."""

CHECKED_SLOTS = 1
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Model:
    """What one rank holds of a model: recurrent state of `[layers, heads, d_v, d_k]`, and KV pages.

    `token_bytes` is the KV of one token in one layer.
    """

    name: str
    layers: int
    heads: int
    d_v: int
    d_k: int
    kv_layers: int
    token_bytes: int


MODELS = (
    Model("Kimi K3, 1 of 8 ranks", 69, 12, 128, 128, 24, (512 + 64) * 2),
    Model("Qwen3-Next, 1 of 2 ranks", 36, 16, 128, 128, 12, 2 * 256 * 2),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape. `source_bytes` is the floating-point state, pages or blocks it is about."""

    op: str
    model: str
    source_bytes: int
    moved_bytes: int
    run: Callable[[], None]
    check: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a case came to: seconds of each repetition."""

    case: Case
    seconds: tuple[float, ...]

    @property
    def moved(self) -> float:
        """Bytes per second, read and written, at the median."""
        return self.case.moved_bytes / statistics.median(self.seconds)

    @property
    def source(self) -> float:
        """Bytes of source per second, at the median."""
        return self.case.source_bytes / statistics.median(self.seconds)


def cases(model: Model, device: str) -> Iterator[Case]:
    """Yield every op at the shapes of a model; memory is that of one case at a time."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from int8_cases(model, dtype, device)
    yield slots_case(model, device)
    yield from page_cases(model, device)
    yield checksum_case(model, device)


def int8_cases(model: Model, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Yield quantise and dequantise: slots in another order, scales in float32."""
    values = model.layers * model.heads * model.d_v * model.d_k
    floats = values * dtype.itemsize
    count = max(1, ALL_BYTES[device] // floats)
    tile = (model.heads, model.d_v, model.d_k)
    pool = torch.randn(model.layers, count, *tile, device=device, dtype=dtype)
    qdata = poisoned(model.layers, count, *tile, dtype=torch.int8, device=device)
    scale = poisoned(
        model.layers, count, model.heads, 1, model.d_k, dtype=torch.float32, device=device
    )
    restored = torch.empty_like(pool)
    slots = torch.arange(count, device=device)
    others = slots.flip(0)
    moved = (floats + values + values // model.d_v * 4) * count
    name = str(dtype).removeprefix("torch.")

    def quantise() -> None:
        kernels.quantise(pool, slots, qdata, scale, others)

    def dequantise() -> None:
        kernels.dequantise(qdata, scale, others, restored, slots)

    def check() -> bool:
        quantise()
        dequantise()
        some = slots[:CHECKED_SLOTS]
        one_qdata, one_scale, one = (
            poisoned(*tensor[:, :1].shape, dtype=tensor.dtype, device=device)
            for tensor in (qdata, scale, pool)
        )
        reference.quantise(pool, some, one_qdata, one_scale, some)
        reference.dequantise(one_qdata, one_scale, some, one, some)
        return (
            same(qdata[:, -1], one_qdata[:, 0])
            and same(scale[:, -1], one_scale[:, 0])
            and same(restored[:, 0], one[:, 0])
        )

    yield Case(f"quantise {name}", model.name, floats * count, moved, quantise, check)
    yield Case(f"dequantise {name}", model.name, floats * count, moved, dequantise, check)


def slots_case(model: Model, device: str) -> Case:
    """Return the copy of slots from one pool to another, in another order."""
    tile = (model.heads, model.d_v, model.d_k)
    nbytes = model.layers * model.heads * model.d_v * model.d_k * 4
    count = max(1, ALL_BYTES[device] // nbytes)
    pool = torch.randn(model.layers, count, *tile, device=device)
    other = torch.empty_like(pool)
    slots = torch.arange(count, device=device)
    others = slots.flip(0)

    def run() -> None:
        kernels.copy_slots(pool, slots, other, others)

    def check() -> bool:
        run()
        return same(other, pool.flip(1))

    return Case("copy slots", model.name, nbytes * count, 2 * nbytes * count, run, check)


def page_cases(model: Model, device: str) -> Iterator[Case]:
    """Yield gather and scatter of pages: half of the pages, in a random order."""
    page = model.token_bytes * PAGE_TOKENS
    count = max(1, ALL_BYTES[device] // page)
    paged = torch.randint(0, 256, (2 * count, page), dtype=torch.uint8, device=device)
    staging = torch.empty(count, page, dtype=torch.uint8, device=device)
    dice = torch.Generator().manual_seed(1)
    pages = torch.randperm(2 * count, generator=dice)[:count].to(device)

    def gather() -> None:
        kernels.gather_pages(paged, pages, staging)

    def scatter() -> None:
        kernels.scatter_pages(staging, paged, pages)

    def gathered() -> bool:
        gather()
        return same(staging, paged[pages])

    def scattered() -> bool:
        staging.random_(0, 256)
        scatter()
        return same(staging, paged[pages])

    nbytes = count * page
    yield Case("gather pages", model.name, nbytes, 2 * nbytes, gather, gathered)
    yield Case("scatter pages", model.name, nbytes, 2 * nbytes, scatter, scattered)


def checksum_case(model: Model, device: str) -> Case:
    """Return the checksum of checkpoints, one block each."""
    nbytes = model.layers * model.heads * model.d_v * model.d_k
    count = max(1, ALL_BYTES[device] // nbytes)
    blocks = torch.randint(0, 256, (count, nbytes), dtype=torch.uint8, device=device)

    def run() -> None:
        kernels.checksum(blocks)

    def check() -> bool:
        return torch.equal(kernels.checksum(blocks)[:1], reference.checksum(blocks[:1]))

    return Case("checksum", model.name, count * nbytes, count * nbytes, run, check)


def copy_case(device: str) -> Case:
    """Return the plain copy that the others are compared with."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return Case("plain copy", "", source.nbytes, 2 * source.nbytes, run, lambda: True)


def measure(case: Case, device: str, repetitions: int = REPETITIONS) -> Rate:
    """Return the rate of a case; AssertionError when it does not what its reference does."""
    assert case.check(), f"{case.op}, {case.model}: not what the reference leaves"
    for _ in range(WARM_UPS):
        case.run()
    timed = seconds_on_device if device == "cuda" else seconds_here
    return Rate(case, tuple(timed(case.run) for _ in range(repetitions)))


def seconds_on_device(work: Callable[[], None]) -> float:
    """Return how long the device was at it, by its own clock."""
    began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def seconds_here(work: Callable[[], None]) -> float:
    """Return how long a call took."""
    began = perf_counter()
    work()
    return perf_counter() - began


def line(rate: Rate, copy: float, device: str) -> str:
    """Return a case as one line: rates, share of the plain copy, and on a device whether it is enough."""
    share = rate.moved / copy
    spread = f"{min(rate.seconds) * 1e3:.2f} .. {max(rate.seconds) * 1e3:.2f} ms"
    goal = "met" if share >= GOAL_SHARE else "missed"
    if device == "cpu" or rate.case.op in WITHOUT_GOAL:
        goal = ""
    return (
        f"{rate.case.op:22}{rate.case.model:26}{rate.source / 1e9:9.1f}{rate.moved / 1e9:9.1f}"
        f"{share:8.2f}  {goal:8}{spread}\n"
    )


def heading(device: str) -> str:
    """Return what was measured, and the columns."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, 1 thread"
    return (
        f"{name}; PyTorch {torch.__version__}; CUDA {torch.version.cuda}\n"
        f"GB/s of source, GB/s read and written, share of a plain copy\n\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line per op; 1 where there is no device to measure."""
    parser = argparse.ArgumentParser(prog="python -m tiercache_kernels.bench", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("There is no CUDA device here: nothing was measured.\n")
        return 1
    torch.set_num_threads(1)
    sys.stdout.write(heading(options.device))
    plain = measure(copy_case(options.device), options.device, options.repetitions)
    sys.stdout.write(line(plain, plain.moved, options.device))
    for model in MODELS:
        for case in cases(model, options.device):
            rate = measure(case, options.device, options.repetitions)
            sys.stdout.write(line(rate, plain.moved, options.device))
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
