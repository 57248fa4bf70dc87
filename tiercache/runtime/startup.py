"""What a start decides before anything is opened, from the settings and this machine."""

import os
import secrets
from dataclasses import dataclass

import tiercache
from tiercache import budget
from tiercache.config import Settings
from tiercache.core.limits import Clustering, Evicting, Limits, Protecting, Retaining
from tiercache.errors import ConfigError
from tiercache.models import MODELS
from tiercache.tiers import crash
from tiercache.tiers.host import DESCRIPTORS_PER_SEGMENT, segment_sizes

PEERS_MAX = 4096
"""Other nodes that one node deals with."""


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
        evicting=Evicting(
            policy.eviction,
            works=tuple((name, shape.work) for name, shape in MODELS.items()),
            ghosts_max=policy.ghosts_max,
        ),
        retaining=retaining_of(settings),
        protecting=protecting_of(settings),
        clustering=clustering_of(settings),
        namespaces_max=limits.namespaces_max,
        objects_max=limits.objects_max,
        leases_per_session_max=limits.leases_per_session_max,
        evictions_per_reserve_max=limits.evictions_per_reserve_max,
        write_back_objects_max=limits.write_back_queue_max,
        request_bytes_max=limits.request_bytes_max,
    )


def clustering_of(settings: Settings) -> Clustering:
    """Return what bounds the dealings with other nodes and routers; without a cluster's name there are no
    other nodes."""
    cluster, pool = settings.cluster, settings.pool
    return Clustering(
        peers_max=PEERS_MAX if cluster.name else 0,
        peer_names_max=max(cluster.boundaries_max, pool.boundaries_max if pool.kind else 0),
        names_max=cluster.boundaries_max,
        name_changes_max=cluster.boundaries_max,
        tells_routers=bool(settings.events.bind),
        peer_answer_s_max=cluster.answer_s_max,
        pool=bool(pool.kind),
        pool_answer_s_max=pool.answer_s_max,
        deposit_resumes_min=pool.resumes_min,
        deposit_share_max=pool.deposit_share_max,
        deposit_bytes_per_s=pool.deposit_bytes_per_s,
    )


def retaining_of(settings: Settings) -> Retaining:
    """Return which checkpoints are taken, as the settings say."""
    policy = settings.policy
    return Retaining(
        mode=policy.retention,
        interval_tokens=policy.retention_interval_tokens,
        decode_interval_tokens=policy.decode_interval_tokens,
        checkpoints_per_path_max=policy.checkpoints_per_path_max,
        prefill_tokens_per_s=policy.prefill_tokens_per_s,
    )


def protecting_of(settings: Settings) -> Protecting:
    """Return what is protected, as the settings say."""
    wanted = settings.protection
    names = dict.fromkeys((*wanted.host_shares, *wanted.nvme_shares))
    return Protecting(
        pinned_share_max=wanted.pinned_share_max,
        pin_s_max=wanted.pin_s_max,
        shared_share_max=wanted.shared_share_max,
        shared_sights_min=wanted.shared_sights_min,
        shared_s_max=wanted.shared_s_max,
        tool_call_s_max=wanted.tool_call_s_max,
        ttl_s=wanted.ttl_s,
        ttl_s_of=tuple(wanted.ttl_s_of.items()),
        host_share=wanted.host_share,
        nvme_share=wanted.nvme_share,
        shares=tuple(
            (
                name,
                wanted.host_shares.get(name, wanted.host_share),
                wanted.nvme_shares.get(name, wanted.nvme_share),
            )
            for name in names
        ),
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
