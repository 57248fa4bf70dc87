"""The Triton kernels on CPU tensors: the tests of the ops once more, in a process that interprets them.

Triton decides at import whether it interprets, so it needs a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_kernels_int8.py", "test_kernels_moves.py", "test_kernels_checksum.py")
HERE = Path(__file__).parent
PLUGIN = "tiercache_kernels.interpreted"


def python(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_kernels_leave_the_bits_of_the_reference() -> None:
    options = ["-q", "-p", PLUGIN, "-p", "no:cacheprovider"]
    result = python("-m", "pytest", *options, *(str(HERE / file) for file in FILES), interpret=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "failed" not in result.stdout


def test_the_interpreter_is_not_mended_where_it_does_not_run() -> None:
    result = python("-c", f"import {PLUGIN}", interpret=False)
    assert "set TRITON_INTERPRET=1" in result.stderr
