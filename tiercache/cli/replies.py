"""What a node answers to an operator: the JSON inside a `Report`, as typed values.

Fields that are not known are ignored, so that a newer node can still be asked; one that is missing
or mistyped is an error of the protocol.
"""

from typing import TypeVar

import msgspec

from tiercache.errors import ProtocolError
from tiercache.state import Extent, Label, Record


class Row(msgspec.Struct, frozen=True):
    """One object. `label` is None while the node does not know what the namespace is called."""

    id: int
    key: str
    record: Record
    kind: str
    label: Label | None
    layout: str
    host: Extent | None
    nvme: Extent | None
    status: str
    leases: int
    sights: int
    dtype: str = ""


class Rows(msgspec.Struct, frozen=True):
    """A page of objects; `cursor` continues after it, 0 when it was the last."""

    rows: list[Row]
    cursor: int


class Evicted(msgspec.Struct, frozen=True):
    """What went, and how many objects were in use and did not (yet).

    `failed` names a tier that could not be cleared for good.
    """

    objects: int
    nbytes: int
    busy: int
    failed: str = ""


class Verified(msgspec.Struct, frozen=True):
    """A page of copies that were read back; `failed` holds key, tier and fault of each bad one."""

    checked: int
    nbytes: int
    failed: list[tuple[str, str, str]]
    cursor: int


class NodeFacts(msgspec.Struct, frozen=True):
    """What a node says of itself."""

    version: str
    protocol: int
    boot: str
    pid: int
    socket: str
    uptime_s: float
    connections: int
    arena_bytes: int
    arena_prefaulted_bytes: int
    nvme: str


class Stats(msgspec.Struct, frozen=True):
    """Counters and gauges by name and label, and what each namespace holds."""

    node: NodeFacts
    counters: dict[str, dict[str, int]]
    gauges: dict[str, dict[str, float]]
    namespaces: list[tuple[Label, dict[str, int]]]


Answer = Rows | Evicted | Verified | Stats
Asked = TypeVar("Asked", bound=Answer)


def parse(body: bytes, kind: type[Asked]) -> Asked:
    """Return the answer in `body`. Raises ProtocolError when it is not one of `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"the node's answer is not understood ({error}): use the `tiercache` command of the "
            f"node's own version"
        ) from error
