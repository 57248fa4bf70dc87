"""What makes two sets of weights or tokenizers the same, as far as files tell."""

import hashlib
import re
from pathlib import Path
from typing import Final

from tiercache.errors import ConfigError
from tiercache.state.canonical import encode

SAMPLE_BYTES: Final = 64 << 10
SAMPLES_MAX: Final = 64
"""Places of each weights file that are hashed: a fine-tune changes nearly every one of them."""

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.index.json")
_MODEL = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "quant*.json",
)
_TOKENIZER = (
    "tokenizer*.json",
    "tokenizer*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "special*.json",
)


def weights_of(path: str) -> str:
    """Return a name for the weights at `path`.

    The commit of a Hub snapshot is one. Other folders are hashed: configuration whole, of every weights
    file the size and samples spread over it. That tells fine-tunes apart, not every edit of a single
    weight: name such weights yourself. Raises ConfigError when there are no files to look at.
    """
    folder = Path(path)
    commit = _COMMIT.search(f"{folder.resolve()}/")
    if commit is not None:
        return f"hub:{commit.group(1)}"
    files = _files(folder, _WEIGHTS)
    if not any(file.suffix != ".json" for file in files):
        raise ConfigError(
            f"no weights files in {path!r} to tell the weights by: name them in "
            '"tiercache": {"weights": "..."} of --hicache-storage-backend-extra-config'
        )
    hasher = hashlib.sha256(b"tiercache/sglang/weights")
    for file in [*_files(folder, _MODEL), *files]:
        _add(hasher, file)
    return f"files:{hasher.hexdigest()}"


def tokenizer_of(path: str) -> str:
    """Return a name for the tokenizer at `path`; "none" without any files of one."""
    hasher = hashlib.sha256(b"tiercache/sglang/tokenizer")
    files = _files(Path(path), _TOKENIZER)
    for file in files:
        _add(hasher, file)
    return f"files:{hasher.hexdigest()}" if files else "none"


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _add(hasher: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    hasher.update(encode((file.name, size)))
    step = max(SAMPLE_BYTES, size // SAMPLES_MAX)
    with file.open("rb") as opened:
        for offset in range(0, size, step):
            opened.seek(offset)
            hasher.update(opened.read(SAMPLE_BYTES))
