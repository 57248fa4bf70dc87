"""What an operator sets in `kv_connector_extra_config`, and what one step carries to the workers."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tiercache.errors import ConfigError
from tiercache.state import Namespace
from tiercache.state.seats import RanksOf, why_not
from tiercache_vllm.handover import NODE_NAME

SOURCE_WAIT_S_MAX = 60.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the connector.

    `socket`: where the node listens. `weights`: an exact, immutable name of the weights; found out
    where it is not given, by hashing up to `weights_hash_bytes_max` bytes of files. `tokenizer`,
    `model`: likewise. `naming_wait_s`: how long after its start an engine lets requests wait until it
    knows what its model is called; hashing that takes longer holds up nobody. `deadline_s`: how long one
    call may wait for the node. `plan_wait_s`: how long a request may wait for state that has to come
    from NVMe or another node. `node`: what the node is called in its cluster; answers then carry it, for
    the engine that goes on with a request. `seats`: which ranks have which node, by the node's name in its
    cluster, when they do not all share one: {"a": [0, 8], "b": [8, 16]}. `source_wait_s`: how long a
    request that names the node that prefilled it may wait for what that node has still to save.
    `load_s`: when a load is given up, from
    its start. `retry_s`: attempts to attach are at least this far apart. `failure_s`: how long a boundary
    whose load failed is left alone. `save_bytes_max`: bytes that wait to be saved, on each worker; what
    comes beyond is not saved.
    `step_bytes_max`: bytes that one request hands over in one step. `seen_max`: objects that are
    remembered as handed over. `planners`, `loaders`: threads. `reshard`: whether state saved at another
    tensor-parallel size will do. `device_checkpoint_bytes`: memory of the device for INT8 checkpoints of
    recurrent states, 0 for none. `reads`, `writes`: whether it restores, and whether it saves; vLLM's
    role of the engine narrows both.
    """

    socket: str
    model: str = ""
    weights: str = ""
    tokenizer: str = ""
    deadline_s: float = 0.5
    plan_wait_s: float = 2.0
    node: str = ""
    source_wait_s: float = 0.2
    load_s: float = 10.0
    retry_s: float = 0.5
    failure_s: float = 30.0
    naming_wait_s: float = 1.0
    save_bytes_max: int = 1 << 30
    step_bytes_max: int = 256 << 20
    weights_hash_bytes_max: int = 64 << 30
    seen_max: int = 1 << 18
    planners: int = 4
    loaders: int = 2
    reshard: bool = True
    device_checkpoint_bytes: int = 0
    reads: bool = True
    writes: bool = True
    seats: dict[str, tuple[int, int]] = {}

    def seats_of(self, ranks: int, rank: int) -> tuple[RanksOf, ...]:
        """Return where the ranks sit, as this one sees it. Raises ConfigError."""
        seats = tuple(
            RanksOf("" if first <= rank < stop else node, first, stop)
            for node, (first, stop) in self.seats.items()
        )
        if problem := why_not(seats, ranks, rank):
            raise ConfigError(f"kv_connector_extra_config: `seats`: {problem}")
        return seats


def settings_of(table: Mapping[str, object]) -> Settings:
    """Return the settings in `kv_connector_extra_config`; ConfigError says what is wrong with them."""
    try:
        settings = msgspec.convert(dict(table), Settings)
    except msgspec.ValidationError as fault:
        raise ConfigError(f"kv_connector_extra_config: {fault}") from None
    for name in ("deadline_s", "plan_wait_s", "load_s", "retry_s", "failure_s", "naming_wait_s"):
        if not 0 < getattr(settings, name) < 3600:
            raise ConfigError(f"kv_connector_extra_config: `{name}` must be above 0, in seconds")
    for name in ("save_bytes_max", "step_bytes_max", "seen_max", "planners", "loaders"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"kv_connector_extra_config: `{name}` must be at least 1")
    if not 0 <= settings.source_wait_s <= SOURCE_WAIT_S_MAX:
        raise ConfigError(
            f"kv_connector_extra_config: `source_wait_s` must be 0 to {SOURCE_WAIT_S_MAX:g} seconds"
        )
    if settings.node and not NODE_NAME.fullmatch(settings.node):
        raise ConfigError("kv_connector_extra_config: `node` must be a node's name in its cluster")
    if not all(map(NODE_NAME.fullmatch, settings.seats)):
        raise ConfigError("kv_connector_extra_config: `seats` go by the names of nodes")
    if settings.device_checkpoint_bytes < 0:
        raise ConfigError("kv_connector_extra_config: `device_checkpoint_bytes` must be at least 0")
    if not settings.socket.startswith("/"):
        raise ConfigError("kv_connector_extra_config: `socket` must be an absolute path")
    return settings


@dataclass(frozen=True, slots=True)
class Item:
    """One object and where it is on a worker: one block per group of its part."""

    part: int
    end: int
    digest: bytes
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Objects of one request to be loaded or saved.

    `name`: the request as the node knows it. `parent`: digest of the checkpoint it resumed from.
    `chain`: where state of another tensor-parallel size will do, the digests of all blocks of the
    prefix, concatenated.
    """

    request: str
    name: str
    lora: str
    salt: str
    items: tuple[Item, ...]
    parent: bytes = b""
    chain: bytes = b""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step asks of every worker.

    `namespace`: None until it is known. `doomed`: requests whose load cannot begin. `idle`: nothing is
    computed in this step, so that a worker may wait a moment for what it loads.
    """

    namespace: Namespace | None = None
    loads: tuple[Job, ...] = ()
    saves: tuple[Job, ...] = ()
    doomed: frozenset[str] = frozenset()
    idle: bool = False


def tagged(digest: bytes, lora: str, salt: str) -> bytes:
    """Return what tells a digest of one scope from the same digest of another."""
    return digest + f"{lora}/{salt}".encode() if lora or salt else digest
