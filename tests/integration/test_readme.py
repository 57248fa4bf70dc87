"""The example in the README, as it stands there, against a real node."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BEFORE = """
prompt_tokens = list(range(100))
kv, state = bytearray(b"k") * (64 * 7 * 576 * 2), bytearray(b"s") * (20 * 8192 * 4)
restored, computed = [], []
def restore(part, start, end, data): restored.append((part, start, end, bytes(data[:1]).decode()))
def compute(tokens): computed.append(len(tokens))
"""
AFTER = """
import json
assert client.flush().waiting == 0
print(json.dumps([restored, computed]))
"""


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    """The socket of a node that accepts clients."""
    path = tmp_path / "node.sock"
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[node]\nsocket = "{path}"\n[host]\nbytes = "16MiB"\n[metrics]\nbind = ""\n'
    )
    command = [sys.executable, "-m", "tiercache", "serve", "--config", str(settings)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        said = []
        for line in node.stderr:
            said.append(line)
            if "event=started" in line:
                break
        else:
            pytest.fail("".join(said))
        yield str(path)
        node.terminate()
        node.stderr.read()
    assert node.returncode == 0


@pytest.mark.slow
def test_the_readme_example_works(socket: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    named = '"/run/tiercache/tiercache.sock"'
    assert named in example
    script = tmp_path / "example.py"
    script.write_text(BEFORE + example.replace(named, repr(socket)) + AFTER)

    def run() -> object:
        result = subprocess.run(
            [sys.executable, str(script)],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    assert run() == [[], [100]]
    assert run() == [[["kv", 0, 64, "k"], ["kda", 0, 64, "s"]], [36]]
