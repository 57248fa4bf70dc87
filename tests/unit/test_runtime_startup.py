"""What a start decides from its settings."""

import os
from collections.abc import Iterator

import pytest

from tiercache.config import Settings, parse
from tiercache.core.limits import Protecting, Retaining
from tiercache.errors import ConfigError
from tiercache.runtime.startup import (
    admits_others,
    allowed_uids,
    arm,
    decide,
    limits_of,
    protecting_of,
)
from tiercache.tiers import crash

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def harmless() -> Iterator[None]:
    yield
    crash.disarm()


def settings(**tables: dict[str, object]) -> Settings:
    return parse({"host": {"bytes": "64MiB", "segment_bytes": "24MiB"}, **tables}, "test")


def test_the_arena_is_made_of_segments() -> None:
    decided = decide(settings())
    assert decided.segments == (24 * MIB, 24 * MIB, 16 * MIB)
    assert decided.arena_bytes == 64 * MIB
    assert decided.nvme_bytes == 0
    assert decided.memory_limit_bytes > decided.arena_bytes


def test_every_start_has_its_own_boot_token() -> None:
    assert decide(settings()).boot != decide(settings()).boot


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host\.bytes"):
        decide(settings(host={"bytes": 1 << 50}))


def test_the_index_has_its_share_of_the_disk() -> None:
    decided = decide(settings(nvme={"path": "/x", "cap_bytes": "4GiB"}))
    assert 0.9 < decided.nvme_bytes / (4 << 30) < 1


def test_what_is_protected_reaches_the_core() -> None:
    given = settings(
        protection={
            "pinned_share_max": 0.1,
            "pin_s_max": 11.0,
            "shared_share_max": 0.3,
            "shared_sights_min": 12,
            "shared_s_max": 13.0,
            "tool_call_s_max": 14.0,
            "ttl_s": 15.0,
            "ttl_s_of": {"m": 16.0},
            "host_share": 0.5,
            "nvme_share": 0.6,
            "host_shares": {"-": 0.7},
            "nvme_shares": {"0123abcd": 0.8},
        }
    )
    assert protecting_of(given) == Protecting(
        pinned_share_max=0.1,
        pin_s_max=11.0,
        shared_share_max=0.3,
        shared_sights_min=12,
        shared_s_max=13.0,
        tool_call_s_max=14.0,
        ttl_s=15.0,
        ttl_s_of=(("m", 16.0),),
        host_share=0.5,
        nvme_share=0.6,
        shares=(("-", 0.7, 0.6), ("0123abcd", 0.5, 0.8)),
    )
    assert limits_of(given, decide(given)).protecting == protecting_of(given)


def test_every_setting_reaches_the_core() -> None:
    given = settings(
        nvme={
            "path": "/x",
            "cap_bytes": "64MiB",
            "segment_bytes": "8MiB",
            "write_back": "eager",
            "pause_s": 2.5,
        },
        policy={
            "sights_max": 11,
            "tails_max": 12,
            "retention": "interval",
            "retention_interval_tokens": 14,
            "decode_interval_tokens": 15,
            "checkpoints_per_path_max": 13,
            "prefill_tokens_per_s": 16.5,
        },
        limits={
            "batch_max": 21,
            "namespaces_max": 22,
            "request_bytes_max": 23,
            "leases_per_session_max": 24,
            "lease_s_max": 25.5,
            "plans_max": 26,
            "write_back_queue_max": 27,
            "evictions_per_reserve_max": 28,
        },
    )
    decided = decide(given)
    limits = limits_of(given, decided)
    assert limits.host_segments == decided.segments
    assert (limits.nvme_bytes, limits.nvme_segment_bytes) == (decided.nvme_bytes, 8 * MIB)
    assert limits.eager
    assert limits.nvme_pause_s == 2.5
    assert (limits.sights_max, limits.tails_max) == (11, 12)
    assert limits.retaining == Retaining("interval", 14, 15, 13, 16.5)
    assert (limits.batch_max, limits.namespaces_max, limits.request_bytes_max) == (21, 22, 23)
    assert (limits.leases_per_session_max, limits.lease_s_max, limits.plans_max) == (24, 25.5, 26)
    assert (limits.write_back_objects_max, limits.evictions_per_reserve_max) == (27, 28)


@pytest.mark.parametrize(("kind", "names"), [("", 7), ("s3", 9)])
def test_there_is_room_for_what_a_pool_may_tell(kind: str, names: int) -> None:
    pool = {"kind": kind, "s3_bucket": "b" if kind else "", "boundaries_max": 9}
    given = parse({"cluster": {"boundaries_max": 7}, "pool": pool}, "test")
    assert limits_of(given, decide(given)).clustering.peer_names_max == names


def test_this_user_root_and_whom_the_settings_name_may_connect() -> None:
    assert allowed_uids(settings(node={"admin_uids": [1234]})) == {os.geteuid(), 0, 1234}


@pytest.mark.parametrize(
    ("uids", "others"), [([], False), ([0], False), ([os.geteuid()], False), ([1234], True)]
)
def test_the_socket_is_opened_only_for_other_users(uids: list[int], others: bool) -> None:  # noqa: FBT001
    assert admits_others(settings(node={"admin_uids": uids})) is others


def test_a_crash_point_is_armed_by_name_and_count() -> None:
    arm("")
    arm("runtime.after_attach:3")
    crash.reach("runtime.after_attach")
    crash.reach("runtime.after_attach")


@pytest.mark.parametrize("text", ["nowhere", "runtime.after_attach:x", "runtime.after_attach:0"])
def test_a_wrong_crash_point_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.crash_at"):
        arm(text)
