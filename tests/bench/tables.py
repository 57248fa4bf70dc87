"""How results are shown: text that fits a terminal and can be pasted into a document."""

import statistics
from collections.abc import Sequence

from tests.bench.figures import Figure, number, size_label
from tests.bench.machine import Machine
from tests.bench.peers.harness import Result
from tests.bench.peers_run import Rows, rows

OPS = (
    ("get_into", "load copied into the caller's buffer"),
    ("put", "save"),
    ("get", "load as the store likes it best (a view, bytes)"),
)


def heading(machine: Machine) -> str:
    """Return where and when this was measured."""
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / (1 << 30):.0f} GiB; "
        f"Linux {machine.kernel}; Python {machine.python}\n"
        f"{machine.date}; commit {machine.commit}; load {machine.load1} at the start\n"
        f"$ {machine.command}"
    )


def figures(found: Sequence[Figure]) -> str:
    """Return one line per figure: median, spread, goal, verdict."""
    lines = [("", "median", "unit", "min .. max", "goal", "")]
    for figure in found:
        least, largest = figure.spread
        spread = "" if least == largest else f"{number(least)} .. {number(largest)}"
        goal = str(figure.goal) if figure.goal else ""
        lines.append(
            (figure.name, number(figure.median), figure.unit, spread, goal, figure.verdict)
        )
        if figure.note:
            lines.append((f"    ({figure.note})", "", "", "", "", ""))
    return _aligned(lines)


def peers(results: Sequence[Result]) -> str:
    """Return one table per operation: rates as multiples of memcpy, and medians of latency."""
    found = rows(results)
    names = list(dict.fromkeys(result.peer for result in results))
    sizes = sorted({result.size for result in results})
    texts = []
    for op, what in OPS:
        head = (what, *(size_label(size) for size in sizes))
        lines = [head]
        for name in names:
            cells = [_rate(found, name, op, size) for size in sizes]
            if any(cells):
                lines.append((name, *cells))
        texts.append(_aligned(lines))
    head = ("is it there", *(size_label(size) for size in sizes))
    looks = [(name, *(_latency(found, name, size) for size in sizes)) for name in names]
    texts.append(_aligned([head, *(line for line in looks if any(line[1:]))]))
    versions = ", ".join(
        f"{name} {version}"
        for name, version in dict.fromkeys((r.peer.partition("-b")[0], r.version) for r in results)
    )
    reference = [result.memcpy_gbps for result in results]
    texts.append(
        "x memcpy (least..largest of the repetitions), median time per object; "
        "-b16: 16 objects per call.\n"
        f"memcpy: {statistics.median(reference):.1f} GB/s "
        f"({min(reference):.1f} .. {max(reference):.1f}). {versions}"
    )
    return "\n\n".join(texts)


def _rate(found: Rows, peer: str, op: str, size: int) -> str:
    cells = found.get((peer, op, size), ())
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    if not ratios:
        return ""
    time_us = statistics.median(cell.p50_us for cell in cells)
    spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
    return f"{statistics.median(ratios):.2f} ({spread}) {number(time_us)} us"


def _latency(found: Rows, peer: str, size: int) -> str:
    cells = found.get((peer, "exists", size), ())
    return f"{number(statistics.median(cell.p50_us for cell in cells))} us" if cells else ""


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [
        max(len(line[at]) for line in lines if len(line[0]) < 90) for at in range(len(lines[0]))
    ]
    texts = []
    for number_of_line, line in enumerate(lines):
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        texts.append("  ".join(cells).rstrip())
        if number_of_line == 0:
            texts.append("-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(texts)
