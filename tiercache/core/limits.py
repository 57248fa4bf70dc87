"""The numbers that bound the core. Every queue, map, wait and retry has its limit here."""

from typing import Literal, TypeAlias

import msgspec

from tiercache.core.cost import Work
from tiercache.core.policy.retention import Retention

GIB = 1 << 30
MIB = 1 << 20


class Protecting(msgspec.Struct, frozen=True):
    """What may be protected, and from what. Shares are parts of host memory, 0 to 1.

    `ttl_s_of` and `shares` pair names with values: of a namespace, its model or how its digest begins
    in hexadecimal; of a tenant, its label. `chances_max` 0 switches the bias of classes off.
    """

    pinned_share_max: float = 0.2
    pin_s_max: float = 3600.0
    pins_per_owner_max: int = 1024
    shared_share_max: float = 0.0
    shared_sights_min: int = 8
    shared_s_max: float = 3600.0
    chances_max: int = 2
    tool_call_s_max: float = 300.0
    ttl_s: float = 0.0
    ttl_s_of: tuple[tuple[str, float], ...] = ()
    host_share: float = 1.0
    nvme_share: float = 1.0
    shares: tuple[tuple[str, float, float], ...] = ()
    shares_max: int = 4096


class Retaining(msgspec.Struct, frozen=True):
    """Which checkpoints are taken and stored: the policy, by name, and its numbers.

    `prefill_tokens_per_s`: how fast engines compute the start of a prompt that do not say so themselves (0:
    not known).
    """

    mode: Retention = "marconi"
    interval_tokens: int = 8192
    decode_interval_tokens: int = 0
    checkpoints_per_path_max: int = 64
    prefill_tokens_per_s: float = 0.0


Order: TypeAlias = Literal["auto", "index", "hyper", "marconi", "point-lru", "lru"]


class Evicting(msgspec.Struct, frozen=True):
    """What goes first from memory: the policy, by name. It remembers `ghosts_max` boundaries.

    `works`: what the prefill of models costs, by name.
    """

    policy: Order = "auto"
    works: tuple[tuple[str, Work], ...] = ()
    ghosts_max: int = 65_536


class Clustering(msgspec.Struct, frozen=True):
    """What bounds the dealings with other nodes; `peers_max` 0: there are none.

    `names_max` boundaries of this node are told to others, `name_changes_max` changes remembered for
    them; with `tells_routers` also where there are no other nodes. A plan waits `peer_answer_s_max` at
    most for what another node says. Who asks where a prompt could be resumed is told `places_max` others.

    `pool`: there is one, and a plan waits `pool_answer_s_max` for it. The resumes of `resumes_max`
    boundaries are counted; one that was resumed `deposit_resumes_min` times goes there. `deposits_max` are
    on their way at once, and take `deposit_share_max` of host memory at most; `deposit_bytes_per_s` go
    there on average, and of one second at once.
    """

    peers_max: int = 0
    peer_names_max: int = 65_536
    names_max: int = 65_536
    name_changes_max: int = 65_536
    tells_routers: bool = False
    peer_failures_max: int = 3
    peer_sick_s: float = 1.0
    peer_sick_s_max: float = 60.0
    peer_answer_s_max: float = 0.05
    peer_objects_max: int = 32_768
    pull_batch_bytes_max: int = 64 * MIB
    pulls_max: int = 1024
    lends_max: int = 4096
    lent_objects_max: int = 1_048_576
    places_max: int = 256
    pool: bool = False
    pool_answer_s_max: float = 0.5
    resumes_max: int = 65_536
    deposit_resumes_min: int = 2
    deposits_max: int = 4
    deposit_share_max: float = 0.25
    deposit_bytes_per_s: int = 1024 * MIB


class Limits(msgspec.Struct, frozen=True):
    """Bounds and sizes of one node; `runtime` fills them from the settings.

    `host_segments`: bytes of each segment of the arena. `nvme_bytes`: what segment files may take (0:
    no NVMe tier). `eager`: write to NVMe at first sight.
    """

    host_segments: tuple[int, ...]
    nvme_bytes: int = 0
    nvme_segment_bytes: int = 256 * MIB
    eager: bool = False
    nvme_pause_s: float = 5.0
    lease_s_max: float = 60.0
    batch_max: int = 65536
    sights_max: int = 262_144
    recent_requests_max: int = 65_536
    plans_max: int = 65_536
    surveys_max: int = 4096
    surveyed_objects_max: int = 1_048_576
    waiting_max: int = 65_536
    operations_max: int = 64
    tails_max: int = 8
    advice_max: int = 16_384
    sample_bytes_min: int = MIB
    namespaces_max: int = 1024
    objects_max: int = 262_144
    reservations_per_session_max: int = 65_536
    leases_per_session_max: int = 1_048_576
    evictions_per_reserve_max: int = 4096
    write_back_objects_max: int = 65_536
    write_back_batch_bytes_max: int = 16 * MIB
    write_back_in_flight_bytes_max: int = 64 * MIB
    fill_batch_bytes_max: int = 64 * MIB
    request_bytes_max: int = 256
    name_bytes_max: int = 1024
    ranks_max: int = 1024
    parts_max: int = 256
    codecs_max: int = 16
    slots_max: int = 4096
    list_rows_max: int = 10_000
    list_scan_max: int = 100_000
    way_blocks_max: int = 1 << 20
    retaining: Retaining = Retaining()
    evicting: Evicting = Evicting()
    protecting: Protecting = Protecting()
    clustering: Clustering = Clustering()
