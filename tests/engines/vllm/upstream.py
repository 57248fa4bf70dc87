"""Run vLLM's own tests of schedulers and connectors on `TierCacheConnector`, from vLLM's source archive.

    VLLM_VERSION_OVERRIDE=0.32.0 VLLM_TARGET_DEVICE=empty \
        python -m pip download --no-deps --no-build-isolation --no-binary vllm vllm==0.32.0
    PYTHONPATH=.:adapters/vllm:kernels:tests/engines/vllm PYTHON_OF_VLLM -m tests.engines.vllm.upstream \
        vllm-0.32.0.tar.gz

Its tests are in no wheel. Every one is run twice, as it is and with our connector, attached to a real node
that is empty; `pointing` says how. What does not even pass as it is, for want of a GPU or of models from
the hub, says nothing. Prints which pass with ours and which do not; the exit status is 1 when any does not.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

from tests.engines.vllm import models
from tests.engines.vllm.engines import HERE
from tiercache.testing.nodes import Launcher, NodeProcess

_CORE, _CONNECTOR = "tests/v1/core", "tests/v1/kv_connector/unit"
RUN = (
    f"{_CORE}/test_scheduler.py",
    f"{_CORE}/test_async_scheduler.py",
    f"{_CORE}/test_priority_preemption_bug.py",
    f"{_CORE}/test_deferred_block_free.py",
    f"{_CORE}/test_repetition_detection.py",
    f"{_CORE}/test_worker_slot_overflow.py",
    f"{_CORE}/prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    f"{_CORE}/prefix_cache/test_partial_prefix_cache_hits.py",
    f"{_CORE}/prefix_cache/test_partial_prefix_cache_primitives.py",
    f"{_CONNECTOR}/test_kv_connector_lifecycle.py",
    f"{_CONNECTOR}/test_multi_connector.py",
    f"{_CONNECTOR}/test_hma_auto_config.py",
)
NEVER = f"{_CORE}/test_scheduler.py::test_reset_connector_cache_no_connector_is_no_op_success"
"""Wants a scheduler without a connector."""

_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (\S+(?: .*?)?)(?: - .*)?$")


def outcomes(root: Path, environment: dict[str, str], log: Path | None = None) -> dict[str, str]:
    """Return how each test ended; skipped ones are not told. `log`: where all that pytest says goes."""
    command = [sys.executable, "-m", "pytest", "-p", "pointing", "-c", "/dev/null"]
    command += ["--rootdir", str(root), "-q", "-rpfE", "--tb=short", "--timeout=60"]
    command += ["-p", "no:cacheprovider", "--deselect", NEVER]
    ran = subprocess.run(
        [*command, *(name for name in RUN if (root / name).exists())],
        cwd=root,
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if log is not None:
        log.write_text(ran.stdout)
    found = (_OUTCOME.match(line) for line in ran.stdout.splitlines())
    return {match[2]: match[1] for match in found if match}


def main(archive: Path, log: Path | None = None) -> int:
    """Run them, and print."""
    with tempfile.TemporaryDirectory(prefix="tc-") as name:
        root = Path(name)
        with tarfile.open(archive) as packed:
            for member in packed:
                _, _, member.name = member.name.partition("/")
                # Without the package itself, which would hide what is installed, and without the outermost
                # settings of pytest, which want more than is installed.
                if member.name.startswith("tests/") and member.name != "tests/conftest.py":
                    packed.extract(member, root, filter="data")
        for model in ("llama", "qwen2audio"):
            models.build(model, root / "models" / model)
        environment = {"POINTING_MODELS": str(root / "models"), "PYTHONPATH": _path(root)}
        plain = outcomes(root, environment)
        launcher = Launcher()
        with NodeProcess(launcher, root) as node:
            node.start()
            ours = outcomes(root, environment | {"POINTING_SOCKET": str(node.socket)}, log)
            asked = sum(node.figures().counters["lookups"].values())
        launcher.close()
    passed = {test for test, how in plain.items() if how == "PASSED"}
    worse = {test: ours.get(test, "no outcome") for test in passed if ours.get(test) != "PASSED"}
    files = Counter(test.split("::")[0] for test in passed - worse.keys())
    for file, count in sorted(files.items()):
        sys.stdout.write(f"{count:5} pass  {file}\n")
    for test, how in sorted(worse.items()):
        sys.stdout.write(f"{how}  {test}\n")
    sys.stdout.write(
        f"{len(passed) - len(worse)} of {len(passed)} pass with ours ({asked} plans); "
        f"{len(plain) - len(passed)} do not pass as they are\n"
    )
    return int(bool(worse))


def _path(root: Path) -> str:
    """Return a path on which vLLM's `tests` are found, and ours by their bare names."""
    return os.pathsep.join([str(root), str(HERE), os.environ.get("PYTHONPATH", "")])


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
