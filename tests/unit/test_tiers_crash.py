"""Crash points: harmless unless armed, and then final."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tiercache.tiers import crash


@pytest.fixture(autouse=True)
def harmless() -> Iterator[None]:
    yield
    crash.disarm()


def run(code: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom tiercache.tiers import crash\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout


def test_nothing_happens_unless_armed() -> None:
    for name in crash.CRASH_POINTS:
        crash.reach(name)


def test_arming_another_point_is_harmless() -> None:
    crash.arm("nvme.after_index")
    crash.reach("nvme.before_write")
    crash.disarm()
    crash.reach("nvme.after_index")


def test_the_nth_time_is_the_last() -> None:
    code = """
crash.arm("nvme.after_index", 3)
for turn in range(5):
    sys.stdout.write(f"{turn} ")
    sys.stdout.flush()
    crash.reach("nvme.after_index")
"""
    assert run(code) == (-9, "0 1 2 ")


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match=r"no crash point 'nvme\.nowhere'; there are nvme\."):
        crash.arm("nvme.nowhere")
    with pytest.raises(ValueError, match="at least 1"):
        crash.arm("nvme.after_index", 0)
    crash.arm("nvme.after_index")
    with pytest.raises(AssertionError, match="nowhere"):
        crash.reach("nvme.nowhere")
