"""What each way to compress a recurrent state costs the trained models: `python -m tests.bench.codecs`.

Prints a Markdown table. The states go through each codec in memory; the shipped codecs are measured
through the whole path by `tiercache quality`.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from transformers import DynamicCache

from tiercache.cli.quality_path import Subject
from tiercache.client import Blob
from tiercache.state import Part
from tiercache.testing.quality import probes, score
from tiercache.testing.quality.scores import Logits
from tiercache.testing.recall import MODELS
from tiercache_transformers.state import restore, take_blocks, take_states

Codec = Callable[[torch.Tensor], torch.Tensor]
VALUE = -2
"""The axis along which scales are shared: states are [head, value, key]."""

EVERYTHING = (-1, -2, -3)
FP8_LARGEST = 448.0


def steps(axes: int | tuple[int, ...], largest: int, scale: torch.dtype = torch.float32) -> Codec:
    """Symmetric integers up to `largest`, one scale along `axes`, rounded before anything is divided."""

    def codec(state: torch.Tensor) -> torch.Tensor:
        unit = (state.abs().amax(axes, keepdim=True).clamp_min(1e-30) / largest).to(scale).float()
        return (state / unit).round().clamp(-largest, largest) * unit

    return codec


def fp8(axes: int | tuple[int, ...] | None) -> Codec:
    """FP8 e4m3 with one scale along `axes`; None: cast as it is."""

    def codec(state: torch.Tensor) -> torch.Tensor:
        if axes is None:
            return state.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).float()
        unit = state.abs().amax(axes, keepdim=True).clamp_min(1e-30) / FP8_LARGEST
        return (state / unit).to(torch.float8_e4m3fn).float() * unit

    return codec


CODECS: Mapping[str, Codec] = {
    "native": lambda state: state,
    "bf16": lambda state: state.to(torch.bfloat16).float(),
    "int8, one scale per (head, key), fp32": steps(VALUE, 127),
    "int8, the same with bf16 scales": steps(VALUE, 127, torch.bfloat16),
    "int8, one scale per (head, value): the wrong axis": steps(-1, 127),
    "int8, one scale per head": steps((-1, -2), 127),
    "int8, one scale per tensor": steps(EVERYTHING, 127),
    "FP8 e4m3, one scale per (head, key)": fp8(VALUE),
    "FP8 e4m3, one scale per head": fp8((-1, -2)),
    "FP8 e4m3, cast": fp8(None),
    "int6, one scale per (head, key)": steps(VALUE, 31),
    "int4, one scale per (head, key)": steps(VALUE, 7),
    "zero (control)": torch.zeros_like,
}


def through(codec: Codec, part: Part, blob: Blob) -> Blob:
    """Return the recurrent states of a blob after the codec."""
    flat = torch.frombuffer(bytearray(blob.data), dtype=torch.float32)
    sizes = [tensor.nbytes // 4 for tensor in part.tensors]
    pieces = [
        codec(piece.view(tensor.shape)).reshape(-1)
        for piece, tensor in zip(torch.split(flat, sizes), part.tensors, strict=True)
    ]
    return replace(blob, data=torch.cat(pieces).contiguous().view(torch.uint8).numpy().data)


@torch.no_grad()
def rows(name: str) -> list[str]:
    """Return one line per codec for one model."""
    subject, asked = Subject.load(name), probes()
    part = subject.layout.part("recurrent")
    exact: list[Logits] = []
    found: dict[str, list[Logits]] = {codec: [] for codec in CODECS}
    for probe in asked:
        boundary = len(probe.context)
        cache = DynamicCache(config=subject.model.config)
        subject.run(probe.context, cache)
        blobs = take_blocks(cache, subject.form, 0, boundary)
        states = take_states(cache, subject.form, boundary)
        exact.append(subject.answer(probe, cache))
        for label, codec in CODECS.items():
            changed = [through(codec, part, b) if b.part == part.name else b for b in states]
            again = restore(subject.model, subject.form, boundary, [*blobs, *changed])
            found[label].append(subject.answer(probe, again))
    lines = []
    for label, logits in found.items():
        one = score(asked, exact, logits)
        recall = "/".join(f"{100 * r:.1f}" for r in (one.front, one.middle, one.back))
        lines.append(
            f"| {name} | {label} | {recall} | {100 * one.straddle:.1f} | {one.agreement:.4f} | "
            f"{one.kl:.1e} |"
        )
    return lines


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(
        prog="python -m tests.bench.codecs",
        description="Print what each way to compress a recurrent state costs the trained models, as a "
        "Markdown table.",
    ).parse_args()
    torch.set_num_threads(1)
    print(
        "| model | recurrent state | recall %, front/middle/back | straddle % | top-1 agreement | KL |"
    )
    print("|---|---|---|---:|---:|---:|")
    for name in MODELS:
        print("\n".join(rows(name)), flush=True)


if __name__ == "__main__":
    main()
