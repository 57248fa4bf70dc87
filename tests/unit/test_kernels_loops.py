"""The compiled loops: loaded when used, kept between processes, and of the specification's constants."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core import caching
from numba.core.dispatcher import Dispatcher

import tiercache_kernels as kernels
from tiercache_kernels import reference
from tiercache_kernels.on_cpu import loops
from tiercache_kernels.on_cpu import ops as on_cpu
from tiercache_kernels.testing import poisoned, same, spaced

USE_ALL = """
import sys
import tiercache_kernels
tiercache_kernels.prepare_cpu()
from tiercache_kernels.on_cpu import loops
for loop in (loops.quantise_floats, loops.quantise_bfloats, loops.dequantise_floats,
             loops.dequantise_bfloats, loops.sum_words):
    assert len(loop.signatures) == 1, loop.signatures
    assert loop.targetoptions["nogil"]
    hits = sum(loop.stats.cache_hits.values())
    sys.stdout.write(f"{hits} ")
"""


def python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_constants_are_the_specifications() -> None:
    for name in ("STEPS", "SCALE_MIN", "GOLDEN", "FIRST_FACTOR", "SECOND_FACTOR"):
        assert getattr(loops, name) == getattr(reference, name), name


def test_importing_the_ops_loads_neither_numba_nor_triton() -> None:
    code = "import sys, tiercache_kernels; sys.stdout.write(str({'numba', 'triton'} & set(sys.modules)))"
    assert python(code) == "set()"


@pytest.mark.slow
def test_each_loop_is_compiled_once_and_kept(tmp_path: Path) -> None:
    """By the first process, for one set of types; the next one loads the code."""
    kept = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(USE_ALL, **kept) == "0 0 0 0 0"
    before = sorted(tmp_path.rglob("*.nbc"))
    assert python(USE_ALL, **kept) == "1 1 1 1 1"
    assert sorted(tmp_path.rglob("*.nbc")) == before


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def double(values: loops.Floats) -> None:
        for at in range(values.size):
            values[at] *= 2

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    values = np.ones(3, np.float32)
    loops.compiled(double)(values)
    assert values.tolist() == [2, 2, 2]


def test_no_later_call_compiles_again() -> None:
    """Types do not depend on shapes, strides or the dtype of the scale."""
    kernels.prepare_cpu()
    for dtype in on_cpu.COMPILED:
        for scale_dtype in (torch.float32, torch.bfloat16):
            source = spaced(2, 3, 2, 5, 6, dtype=dtype).zero_()
            qdata = spaced(2, 3, 2, 5, 6, dtype=torch.int8)
            scale = spaced(2, 3, 2, 1, 6, dtype=scale_dtype)
            slots = torch.tensor([2, 0])
            kernels.quantise(source, slots, qdata, scale, slots)
            kernels.dequantise(qdata, scale, slots, source, slots)
            kernels.checksum(source[0])
    for loop in (
        loops.quantise_floats,
        loops.quantise_bfloats,
        loops.dequantise_floats,
        loops.dequantise_bfloats,
        loops.sum_words,
    ):
        assert isinstance(loop, Dispatcher)
        assert len(loop.signatures) == 1


def test_without_numba_the_reference_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randn(1, 2, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([1, 0])

    def all_ops() -> list[torch.Tensor]:
        qdata = poisoned(1, 2, 2, 5, 6, dtype=torch.int8)
        scale = poisoned(1, 2, 2, 1, 6, dtype=torch.float32)
        restored = torch.full_like(source, torch.nan)
        kernels.quantise(source, order, qdata, scale, order)
        kernels.dequantise(qdata, scale, order, restored, order)
        return [qdata, scale, restored, kernels.checksum(source[0])]

    with_numba = all_ops()
    monkeypatch.setattr(on_cpu, "available", lambda: False)
    kernels.prepare_cpu()
    assert all(same(left, right) for left, right in zip(with_numba, all_ops(), strict=True))
