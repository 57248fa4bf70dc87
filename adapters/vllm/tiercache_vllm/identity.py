"""What must be equal before state may be used again: found out, or the request is not cached.

Every field errs on the side of a miss: a difference that would not have mattered costs a recomputation, one
that was left out would give wrong tokens.
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercache.errors import ConfigError
from tiercache.state.canonical import digest

READ_BYTES = 8 << 20
ADAPTERS_MAX = 1024
SALT_BYTES_MAX = 200
ADAPTER_BYTES_MAX = 4 << 30

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "chat_template*", "*.model", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Feature:
    """One multimodal input of a request: the content identity of what stands at the placeholder tokens
    from `offset` on; None when the engine has none for it."""

    modality: str
    identifier: str | None
    offset: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as a request names it."""

    name: str
    number: int
    path: str
    inplace: bool = False


def extras_of(features: Iterable[Feature]) -> dict[int, bytes] | None:
    """Return what a chain needs to know of a request's inputs, by position; None when one of them has no
    identity, so that the request must not be cached."""
    at: dict[int, list[tuple[str, str]]] = {}
    for feature in features:
        if not feature.identifier:
            return None
        at.setdefault(feature.offset, []).append((feature.modality, feature.identifier))
    return {offset: digest("inputs", tuple(sorted(found))) for offset, found in at.items()}


def salt_of(salt: str, epoch: str) -> str:
    """Return the salt of a tenant's objects. A new epoch, after the cache was reset, is another salt.

    A tenant may send any text: a long one is hashed, and one that is no text raises ValueError.
    """
    if epoch or len(salt.encode()) > SALT_BYTES_MAX:
        return digest("epoch", epoch, salt).hex()
    return salt


class Adapters:
    """The contents of LoRA adapters, hashed when they are first seen. Thread-safe.

    The engine reads an adapter when it likes, also again. So an adapter whose files changed since they
    were first seen has no identity any more, unless it is reloaded under the engine's eyes
    (`inplace`): what it means cannot be known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, str], tuple[str, str]] = {}

    def content(self, adapter: Adapter) -> str | None:
        """Return the identity of an adapter's name and content, None when it has none. Reads its files
        the first time."""
        key = (adapter.name, adapter.number, adapter.path)
        with self._lock:
            try:
                files = _files(Path(adapter.path), ("*",))
                stamp = _stamp(files)
                known = self._known.get(key)
                if known is not None and not (adapter.inplace and known[0] != stamp):
                    return known[1] if known[0] == stamp else None
                if not files or len(self._known) >= ADAPTERS_MAX:
                    return None
                if sum(path.stat().st_size for path in files) > ADAPTER_BYTES_MAX:
                    return None
                content = _content(files, Path(adapter.path))
                if _stamp(files) != stamp:
                    return None
            except OSError:
                return None
            identity = digest("lora", adapter.name, content).hex()
            self._known[key] = (stamp, identity)
            return identity


def weights_of(
    folder: str, *, stated: str, load_format: str, hash_bytes_max: int, revision: str = ""
) -> str:
    """Return the identity of the weights in a model's folder.

    `stated`: what the operator says, which is believed. `revision`: an immutable commit that the
    folder is a snapshot of. Otherwise the files are hashed, which takes a second or two per gigabyte.
    Raises ConfigError when there is no way to know.
    """
    if stated:
        return stated
    if load_format == "dummy":
        raise ConfigError(
            "dummy weights have no identity: set `weights` in kv_connector_extra_config"
        )
    if revision:
        return revision
    files = _files(Path(folder), _WEIGHTS)
    nbytes = sum(path.stat().st_size for path in files)
    if not files or nbytes > hash_bytes_max:
        raise ConfigError(
            f"the weights of {folder!r} ({nbytes} bytes in {len(files)} files) cannot be hashed: set "
            f"`weights` in kv_connector_extra_config to an exact, immutable name of them"
        )
    return _content(files, Path(folder))


def tokenizer_of(folder: str, *, stated: str) -> str:
    """Return the identity of the tokenizer in a folder: the contents of its files."""
    if stated:
        return stated
    files = _files(Path(folder), _TOKENIZER)
    if not files:
        raise ConfigError(
            f"there is no tokenizer in {folder!r}: set `tokenizer` in kv_connector_extra_config"
        )
    return _content(files, Path(folder))


def arithmetic_of(config: Mapping[str, object], facts: Sequence[str]) -> str:
    """Return a digest (hex) of what changes results and is no weight: the model's configuration, and
    facts such as dtypes, backends and versions."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    text = json.dumps(kept, sort_keys=True, default=str)
    return digest("arithmetic", text, tuple(facts)).hex()


_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def revision_in(folder: str) -> str:
    """Return the commit that a folder of the Hugging Face cache is a snapshot of, "" for any other."""
    path = Path(folder)
    name = path.name
    commit = len(name) == 40 and all(letter in "0123456789abcdef" for letter in name)
    return name if commit and path.parent.name == "snapshots" else ""


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def _stamp(files: Sequence[Path]) -> str:
    """Return what changes when a file is written or replaced."""
    stats = [(str(path), path.stat()) for path in files]
    parts = tuple((name, s.st_size, s.st_mtime_ns, s.st_ino, s.st_ctime_ns) for name, s in stats)
    return digest("stamp", parts).hex()


def _content(files: Sequence[Path], folder: Path) -> str:
    hasher = hashlib.sha256(b"tiercache/files")
    for path in files:
        inner = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                inner.update(chunk)
        hasher.update(digest("file", str(path.relative_to(folder)), inner.digest()))
    return hasher.hexdigest()
