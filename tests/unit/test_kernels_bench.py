"""Measuring the ops: on a device, or that there is none; and never what is wrong."""

import pytest
import torch

from tiercache_kernels import bench, reference

TINY = bench.Model("tiny", 2, 2, 4, 6, 1, 8)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ALL_BYTES", {"cpu": 4096, "cuda": 4096})
    monkeypatch.setattr(bench, "COPY_BYTES", {"cpu": 4096, "cuda": 4096})
    monkeypatch.setattr(bench, "MODELS", (TINY,))


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 1
    shown = capsys.readouterr()
    assert shown.err == "There is no CUDA device here: nothing was measured.\n"
    assert shown.out == ""


def test_every_op_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--device", "cpu", "--repetitions", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ops = [line[:22].rstrip() for line in lines[3:]]
    assert ops == [
        "plain copy",
        "quantise float32",
        "dequantise float32",
        "quantise bfloat16",
        "dequantise bfloat16",
        "copy slots",
        "gather pages",
        "scatter pages",
        "checksum",
    ]


def test_what_moves_is_counted_as_read_and_written() -> None:
    """Per value of float32: four bytes and one, and a scale for each d_v values."""
    cases = {case.op: case for case in bench.cases(TINY, "cpu")}
    values = 2 * 2 * 4 * 6 * (4096 // (2 * 2 * 4 * 6 * 4))
    assert cases["quantise float32"].source_bytes == values * 4
    assert cases["quantise float32"].moved_bytes == values * 5 + values // 4 * 4
    assert cases["gather pages"].moved_bytes == 2 * cases["gather pages"].source_bytes
    assert cases["checksum"].moved_bytes == cases["checksum"].source_bytes


def test_a_wrong_result_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(bench.int8_cases(TINY, torch.float32, "cpu"))
    monkeypatch.setattr(reference, "dequantise", lambda *_: None)
    with pytest.raises(AssertionError, match="not what the reference leaves"):
        bench.measure(case, "cpu", 1)
