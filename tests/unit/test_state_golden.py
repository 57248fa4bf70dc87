"""Golden vectors: digests written down once are computed again by other processes.

A change here makes everything that is stored unfindable. It needs a new chain scheme or format version.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "data" / "golden_digests.json"

COMPUTE = '''
import json
import sys

from tiercache.state import Chain, Key, Kind, Layout, Namespace, Part, Shard, Tensor


def compute(given):
    """Return every digest of what a golden file gives."""
    found = {"chains": [], "namespaces": [], "layouts": [], "keys": []}
    for chain in given["chains"]:
        tokens = chain["tokens"]
        tokens = list(range(tokens["range"])) if isinstance(tokens, dict) else tokens
        extras = {int(at): bytes.fromhex(text) for at, text in chain["extras"].items()}
        made = Chain(tokens, chain["block_tokens"], extras)
        found["chains"].append([made.digest_at(end).hex() for end in chain["at"]])
    for namespace in given["namespaces"]:
        made = Namespace(**namespace)
        found["namespaces"].append([made.digest.hex(), made.tenant])
    for layout in given["layouts"]:
        parts = tuple(
            Part(name, Kind(kind), window, block, units, tuple(
                Tensor(tensor, dtype, tuple(shape), tuple(axes), axis, tuple(segments))
                for tensor, dtype, shape, axes, axis, segments in tensors
            ))
            for name, kind, window, block, units, tensors in layout["parts"]
        )
        found["layouts"].append(Layout(parts, layout["block_tokens"]).fingerprint)
    for key in given["keys"]:
        made = Key(
            bytes.fromhex(key["namespace"]),
            key["part"],
            Shard(*key["shard"]),
            key["codec"],
            bytes.fromhex(key["digest"]),
        )
        found["keys"].append([str(made), made.encode().hex()])
    return found
'''

MAIN = """
with open(sys.argv[1], encoding="utf-8") as file:
    print(json.dumps(compute(json.load(file))))
"""


@pytest.mark.parametrize("seed", [None, "0", "1", "4242"])
def test_other_processes_give_the_same_digests(seed: str | None) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = str(ROOT)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    answer = subprocess.run(
        [sys.executable, "-c", COMPUTE + MAIN, str(FILE)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    given = json.loads(FILE.read_text(encoding="utf-8"))
    assert json.loads(answer.stdout) == given["expected"]
