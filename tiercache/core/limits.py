"""The numbers that bound the core. Every queue, map, wait and retry has its limit here."""

import msgspec

GIB = 1 << 30
MIB = 1 << 20


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
    waiting_max: int = 65_536
    operations_max: int = 64
    tails_max: int = 8
    checkpoints_max: int = 64
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
