"""Write down what the modules of a vLLM release look like, from its wheel, without installing it.

    python -m pip download --no-deps --only-binary :all: vllm==0.33.0
    python -m tests.engines.vllm.releases vllm-0.33.0-*.whl > tests/data/vllm/0.33.0.json

`tests/unit/test_vllm_gate.py` checks the connectors against every release that is written down.
"""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

from tiercache_vllm.gate import LATER, NEEDED
from tiercache_vllm.signatures import found_in

READ_BYTES = 1 << 20


def main(wheel: Path) -> None:
    """Print one release as JSON: only what is needed of it, and the classes' other names."""
    hasher = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
    modules = {}
    with zipfile.ZipFile(wheel) as archive:
        for module, names in NEEDED.items():
            found = found_in(archive.read(f"{module.replace('.', '/')}.py").decode())
            classes = {name.split(".")[0] for name in names}
            later = [name for name in LATER.get(module, ()) if name in found.signatures]
            modules[module] = {
                "signatures": {name: found.signatures[name] for name in sorted([*names, *later])},
                "abstract": {n: m for n, m in found.abstract.items() if n in classes},
            }
    told = {"wheel": wheel.name, "sha256": hasher.hexdigest(), "modules": modules}
    sys.stdout.write(json.dumps(told, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
