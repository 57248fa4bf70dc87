"""What a start decides before anything is opened, from the settings and this machine."""

import os
import secrets
from dataclasses import dataclass

import tiercache
from tiercache import budget
from tiercache.config import Settings
from tiercache.core.limits import Limits
from tiercache.errors import ConfigError
from tiercache.tiers import crash
from tiercache.tiers.host import DESCRIPTORS_PER_SEGMENT, segment_sizes


@dataclass(frozen=True, slots=True)
class Decided:
    """The numbers of one run. `nvme_bytes`: what segment files may take, 0 without an NVMe tier."""

    boot: str
    version: str
    memory_limit_bytes: int
    descriptors: int
    segments: tuple[int, ...]
    nvme_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Size of the host tier."""
        return sum(self.segments)


def decide(settings: Settings) -> Decided:
    """Check the settings against this machine. Raises ConfigError; nothing was opened."""
    arm(settings.node.crash_at)
    limit = budget.memory_limit()
    host_bytes = budget.resolve_host_bytes(settings, limit)
    segments = tuple(segment_sizes(host_bytes, settings.host.segment_bytes))
    needed = budget.descriptors_needed(settings, DESCRIPTORS_PER_SEGMENT * len(segments))
    descriptors = budget.raise_descriptor_limit(needed)
    return Decided(
        boot=secrets.token_hex(8),
        version=tiercache.__version__,
        memory_limit_bytes=limit,
        descriptors=descriptors,
        segments=segments,
        nvme_bytes=_nvme_bytes(settings),
    )


def limits_of(settings: Settings, decided: Decided) -> Limits:
    """Return the core's bounds as the settings give them."""
    nvme, policy, limits = settings.nvme, settings.policy, settings.limits
    return Limits(
        host_segments=decided.segments,
        nvme_bytes=decided.nvme_bytes,
        nvme_segment_bytes=nvme.segment_bytes,
        eager=nvme.write_back == "eager",
        nvme_pause_s=nvme.pause_s,
        lease_s_max=limits.lease_s_max,
        batch_max=limits.batch_max,
        sights_max=policy.sights_max,
        plans_max=limits.plans_max,
        tails_max=policy.tails_max,
        checkpoints_max=policy.chunk_checkpoints_max,
        namespaces_max=limits.namespaces_max,
        objects_max=limits.objects_max,
        leases_per_session_max=limits.leases_per_session_max,
        evictions_per_reserve_max=limits.evictions_per_reserve_max,
        write_back_objects_max=limits.write_back_queue_max,
        request_bytes_max=limits.request_bytes_max,
    )


def allowed_uids(settings: Settings) -> frozenset[int]:
    """Return who may connect: this user, root, and whom the settings name."""
    return frozenset({os.geteuid(), 0, *settings.node.admin_uids})


def admits_others(settings: Settings) -> bool:
    """Return whether a user may connect for whom the socket's own mode must be opened."""
    return not allowed_uids(settings) <= {os.geteuid(), 0}


def arm(crash_at: str) -> None:
    """Arm the crash point named "name" or "name:count". Raises ConfigError for another text."""
    if not crash_at:
        return
    name, _, count = crash_at.partition(":")
    try:
        crash.arm(name, int(count or 1))
    except ValueError as error:
        raise ConfigError(f'node.crash_at "{crash_at}": {error}') from error


def _nvme_bytes(settings: Settings) -> int:
    if not settings.nvme.path:
        return 0
    from tiercache.tiers.nvme import index_reserve_bytes

    return settings.nvme.cap_bytes - index_reserve_bytes(settings.nvme.cap_bytes)
