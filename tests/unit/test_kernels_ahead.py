"""Every Triton kernel compiled ahead of time, for three generations of devices: that needs no GPU.

Compiled as it is launched at Kimi K3's shapes: the same tiles, and what Triton's launcher finds in such
arguments (pointers and strides that are multiples of 16). The assembly shows what a run here cannot.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from triton import compile as build
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from tiercache_kernels import reference
from tiercache_kernels.on_gpu import checksum, dequantise, quantise, rows

pytestmark = pytest.mark.slow

ARCHITECTURES = (80, 90, 100)
HEADS, D_V, D_K = 12, 128, 128
FLOAT_BYTES = {"fp32": 4, "bf16": 2}
NOT_ALIGNED = {"count", "nbytes"}
"""Integers that need not be a multiple of 16."""

Known = Mapping[str, int | float | bool]


class Build(NamedTuple):
    """A kernel, the element types of its pointers, and what is known when it is compiled."""

    kernel: JITFunction[None]
    pointers: Mapping[str, str]
    known: Known


def int8(name: str, floats: str, scale: str) -> Build:
    module, kernel, p_floats = {
        "quantise": (quantise, quantise.quantise_tiles, "p_source"),
        "dequantise": (dequantise, dequantise.dequantise_tiles, "p_target"),
    }[name]
    known = module.tile(HEADS, D_V, D_K, FLOAT_BYTES[floats])
    more = {"scale_min": reference.SCALE_MIN} if name == "quantise" else {}
    pointers = {p_floats: floats, "p_qdata": "i8", "p_scale": scale}
    return Build(kernel, pointers, {**known, **more})


def moved(source: str, target: str) -> Build:
    known = {"has_source_index": True, "has_target_index": True, "num_warps": rows.WARPS}
    block = rows.PROGRAM_BYTES // FLOAT_BYTES.get(source, 1)
    return Build(
        rows.copy_rows, {"p_source": source, "p_target": target}, {**known, "block": block}
    )


SUMMED = Build(
    checksum.sum_words,
    {},
    {
        "golden": reference.GOLDEN,
        "first": reference.FIRST_FACTOR,
        "second": reference.SECOND_FACTOR,
        "block": checksum.PROGRAM_WORDS,
        "num_warps": checksum.WARPS,
    },
)
BUILDS = {
    "quantise": int8("quantise", "fp32", "fp32"),
    "quantise bf16": int8("quantise", "bf16", "bf16"),
    "dequantise": int8("dequantise", "fp32", "fp32"),
    "dequantise bf16": int8("dequantise", "bf16", "bf16"),
    "move": moved("u8", "u8"),
    "cast": moved("fp32", "bf16"),
    "checksum": SUMMED,
}


@functools.cache
def compiled(name: str, architecture: int, integers: str = "i32") -> tuple[str, bytes]:
    """Return the PTX and the cubin; `integers` is how those arguments arrive: i32, i64, or one.

    The launcher makes an argument of 1 a constant, unless told not to.
    """
    kernel, pointers, known = BUILDS[name]
    names = kernel.arg_names
    warps = {"num_warps": int(known["num_warps"])}
    constants = {name: value for name, value in known.items() if name in names}
    if integers == "one":
        for parameter in kernel.params:
            plain = not parameter.name.startswith("p_") and not parameter.do_not_specialize
            if plain:
                constants.setdefault(parameter.name, 1)
    signature = {
        name: "constexpr"
        if name in constants
        else f"*{pointers.get(name, 'i64')}"
        if name.startswith("p_")
        else integers.replace("one", "i32")
        for name in names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name] != "constexpr" and name not in NOT_ALIGNED
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        made = build(source, target=GPUTarget("cuda", architecture, 32), options=warps)
        return made.asm["ptx"], made.asm["cubin"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BUILDS)
def test_it_compiles(name: str, architecture: int) -> None:
    ptx, cubin = compiled(name, architecture)
    assert re.search(rf"\.target sm_{architecture}a?\b", ptx)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("integers", ["one", "i64"])
@pytest.mark.parametrize("name", BUILDS)
def test_it_compiles_for_one_slot_and_for_far_ones(name: str, integers: str) -> None:
    assert compiled(name, 90, integers)


@pytest.mark.parametrize("name", BUILDS)
def test_memory_is_moved_16_bytes_at_a_time(name: str) -> None:
    """The wider side of a kernel decides its speed; the narrow side follows its tile."""
    ptx, _ = compiled(name, 90)
    wide = r"{}\.global[.\w:]*\.(v4\.b32|v2\.b64)"
    if not name.startswith("dequantise"):
        assert re.search(wide.format("ld"), ptx)
    if name in {"move", "dequantise", "dequantise bf16", "cast"}:
        assert re.search(wide.format("st"), ptx)


@pytest.mark.parametrize("name", BUILDS)
def test_nothing_is_rounded_loosely(name: str) -> None:
    """Results are compared bit by bit with the reference, so arithmetic is IEEE's."""
    ptx, _ = compiled(name, 90)
    assert not re.search(r"\.ftz|\.approx|div\.full", ptx)


def test_divisions_are_rounded_to_nearest() -> None:
    ptx, _ = compiled("quantise", 90)
    assert "div.rn.f32" in ptx
    assert "fma.rn.f32" in ptx


@pytest.mark.parametrize("name", ["quantise bf16", "dequantise bf16", "cast"])
def test_bfloat16_is_rounded_to_nearest(name: str) -> None:
    ptx, _ = compiled(name, 90)
    assert re.search(r"cvt\.rn\.bf16(x2)?\.f32", ptx)
    assert not re.search(r"cvt\.rz\.bf16", ptx)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BUILDS)
def test_nothing_spills(name: str, architecture: int, tmp_path: Path) -> None:
    """What does not fit the registers would go through memory, uncounted."""
    _, cubin = compiled(name, architecture)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = knobs.nvidia.cuobjdump.path
    usage = subprocess.run(
        [tool, "-res-usage", file], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"REG:\d+ STACK:0 .*LOCAL:0 ", usage), usage
