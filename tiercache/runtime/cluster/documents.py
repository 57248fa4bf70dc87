"""What a node tells operators of its cluster: the JSON inside a `Report`."""

import msgspec

from tiercache.core.cluster.peers import Known
from tiercache.registry.base import Member, View


class Cleared(msgspec.Struct, frozen=True):
    """What became of a flush: its number, the nodes that have not said that they carried it out, and how
    long one that went silent is still waited for."""

    flush: int
    behind: tuple[str, ...]
    ttl_s: int


class Shared(msgspec.Struct, frozen=True):
    """What the cluster says that a tenant may take; None for what it leaves to each node."""

    tenant: str
    host: float | None
    nvme: float | None


class Row(msgspec.Struct, frozen=True):
    """One node. `boundaries`: how many it has told that it could resume. `health`: "self", "well",
    "probed", "sick", or "other_protocol" for one that is left out."""

    name: str
    boot: str
    address: str
    protocols: tuple[int, int]
    host_bytes: int
    nvme_bytes: int
    boundaries: int
    health: str


class PoolRow(msgspec.Struct, frozen=True):
    """The pool. `boundaries`: how many are known to be there. `health` as of a node; `state` is "opening",
    "ready" or "unreachable: why"."""

    kind: str
    name: str
    boundaries: int
    health: str
    state: str


class Members(msgspec.Struct, frozen=True):
    """The nodes of a cluster as one of them, `node`, sees them.

    `standing_s`: how long that node may go on giving out what is shared without a word from etcd; 0 when
    it is isolated. `behind`: by namespace, who has not carried out its last flush.
    """

    cluster: str
    node: str
    standing_s: float
    nodes: list[Row]
    behind: dict[str, tuple[str, ...]]
    pool: PoolRow | None = None


def rows(view: View, own: str, told: int, known: dict[str, Known]) -> list[Row]:
    """Return the nodes of a view by name. `told`: the boundaries that this node, `own`, tells."""
    return [
        _row(member, *((told, "self") if name == own else _of(known.get(name))))
        for name, member in sorted(view.members.items())
    ]


def behind(view: View) -> dict[str, tuple[str, ...]]:
    """Return who has not carried out the last flush of each namespace, where there is somebody."""
    found = {name: view.behind(name, number) for name, number in view.flushes.items()}
    return {name: nodes for name, nodes in found.items() if nodes}


def _of(known: Known | None) -> tuple[int, str]:
    return (known.boundaries, known.health) if known is not None else (0, "other_protocol")


def _row(member: Member, boundaries: int, health: str) -> Row:
    return Row(
        member.name,
        member.boot,
        member.address,
        member.protocols,
        member.host_bytes,
        member.nvme_bytes,
        boundaries,
        health,
    )
