"""Whom a node deals with besides its engines: other nodes, and a pool. What that takes is loaded only
then."""

from typing import TYPE_CHECKING

from tiercache.config import Settings
from tiercache.runtime.node import Node
from tiercache.runtime.startup import Decided
from tiercache.tiers.base import Arena

if TYPE_CHECKING:
    from tiercache.runtime.cluster.service import Service
    from tiercache.runtime.pool.joining import Joining


def cluster_of(settings: Settings, decided: Decided, arena: Arena, node: Node) -> "Service | None":
    """Return the node's place in its cluster; None for a node that is alone."""
    if not settings.cluster.name:
        return None
    from tiercache.runtime.cluster.service import Capacity, Service

    capacity = Capacity(decided.arena_bytes, decided.nvme_bytes)
    return Service(settings, decided.boot, capacity, arena, node)


def pool_of(
    settings: Settings, arena: Arena, node: Node, cluster: "Service | None"
) -> "Joining | None":
    """Return the node's way to its pool; None when it has none. Raises ConfigError."""
    if not settings.pool.kind:
        return None
    from tiercache.runtime.pool.joining import Joining

    return Joining(settings, arena, node, cluster)
