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
    left_s: float | None = None
    pinned: bool = False


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


class PinRow(msgspec.Struct, frozen=True):
    """One pin. `session` is 0 for an operator's, which ends at its age only."""

    number: int
    owner: str
    session: int
    objects: int
    nbytes: int
    left_s: float


class PinRows(msgspec.Struct, frozen=True):
    """The first of `count` pins, and how much of the budget all of them take."""

    pins: list[PinRow]
    count: int
    nbytes: int
    nbytes_max: int


class ShareRow(msgspec.Struct, frozen=True):
    """One tenant: its shares, what they are in bytes, what it takes, what became of its offers. `common`:
    the cluster says so of one tier, or both."""

    tenant: str
    host: float
    nvme: float
    allowed: dict[str, int]
    taken: dict[str, int]
    outcomes: dict[str, int]
    common: bool = False


class Shared(msgspec.Struct, frozen=True):
    """What the cluster says that a tenant may take; None for what it leaves to each node."""

    tenant: str
    host: float | None
    nvme: float | None


class ShareRows(msgspec.Struct, frozen=True):
    """Tenants by name, and the shares of those that are not named."""

    host: float
    nvme: float
    tenants: list[ShareRow]


class Cleared(msgspec.Struct, frozen=True):
    """A namespace was cleared on all nodes but those that are `behind`, which have not said so. One that
    was silent for `ttl_s` is waited for no more."""

    flush: int
    behind: list[str]
    ttl_s: int


class MemberRow(msgspec.Struct, frozen=True):
    """One node of a cluster: what it can hold, how many boundaries it has told, how it does."""

    name: str
    boot: str
    address: str
    protocols: tuple[int, int]
    host_bytes: int
    nvme_bytes: int
    boundaries: int
    health: str


class PoolRow(msgspec.Struct, frozen=True):
    """The pool: what it is, how many boundaries are known to be there, how it does."""

    kind: str
    name: str
    boundaries: int
    health: str
    state: str


class Members(msgspec.Struct, frozen=True):
    """A cluster as `node` sees it, "" without one. `standing_s`: how long that node may still give things
    out without a word from etcd. `behind`: by namespace, who has not carried out its last clear."""

    cluster: str
    node: str
    standing_s: float
    nodes: list[MemberRow]
    behind: dict[str, list[str]]
    pool: PoolRow | None = None


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


Answer = Rows | Evicted | Verified | Stats | PinRows | ShareRows | Shared | Cleared | Members
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
