"""Which flushes this node has carried out, kept where its objects are kept."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tiercache.errors import ConfigError
from tiercache.state.canonical import DIGEST_BYTES

NAME = "flushes.json"
NAMESPACES_MAX = 65_536

_decoder = msgspec.json.Decoder(dict[str, int])


class Flushed:
    """The last flush of each namespace that was carried out here, by hex digest.

    `folder`: where it is kept, "" for a node that keeps nothing over a restart. What is lost of it costs
    a flush that is carried out once more. Calls block for as long as a small file takes.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / NAME if folder else None
        self._flushes: dict[str, int] = {}

    def load(self) -> None:
        """Read what an earlier start wrote. Raises ConfigError when it cannot be read.

        Anything else in the file than `done` writes is no account of a flush, and is left out.
        """
        if self._path is None:
            return
        try:
            found = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = {}  # Torn, or not ours: all flushes are carried out once more.
        except OSError as fault:
            raise ConfigError(f"cannot read {self._path}: {fault}") from fault
        self._flushes = {
            name: number for name, number in found.items() if is_digest(name) and number > 0
        }

    def due(self, flushes: Mapping[str, int]) -> dict[str, int]:
        """Return what of these was not carried out here."""
        return {
            name: flush for name, flush in flushes.items() if self._flushes.get(name, 0) < flush
        }

    def done(self, namespace: str, flush: int) -> None:
        """This one is carried out. Raises OSError when that cannot be kept: then it is not."""
        flushes = {**self._flushes, namespace: max(flush, self._flushes.get(namespace, 0))}
        while len(flushes) > NAMESPACES_MAX:
            del flushes[next(iter(flushes))]
        if self._path is not None:
            spare = self._path.with_suffix(".new")
            with spare.open("wb") as file:
                file.write(msgspec.json.encode(flushes))
                file.flush()
                os.fsync(file.fileno())
            spare.replace(self._path)
        self._flushes = flushes

    def all(self) -> Mapping[str, int]:
        """Return every one that is known."""
        return self._flushes


def is_digest(namespace: str) -> bool:
    """Return whether this is the hexadecimal digest of a namespace."""
    try:
        return len(bytes.fromhex(namespace)) == DIGEST_BYTES and namespace == namespace.lower()
    except ValueError:
        return False
