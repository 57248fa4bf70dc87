"""Shares of the disk: segments of ones own, within ones share, whoever else writes."""

import msgspec

from tests.unit.shares import A, B, flood, limits, row, setting, tenant
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.tenants import Share
from tiercache.testing.sim.rig import (
    ADMIN,
    PAGE,
    TOKENS,
    Rig,
    saved,
)

# --- the disk


def disk(*shares: tuple[str, float, float], pages: int = 40) -> Rig:
    """A node that writes everything to a disk of segments of four pages."""
    return Rig(limits(*shares, pages=400, nvme_pages=pages))


def test_a_flood_leaves_the_others_their_disk() -> None:
    rig = disk((A, 1.0, 0.8), (B, 1.0, 0.2))
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    rig.run()
    for _ in range(3):
        flood(a, 60)
        rig.run()
    told = row(rig, A)
    assert told.taken["nvme"] <= told.allowed["nvme"] == 32 * PAGE
    assert row(rig, B).taken["nvme"] == 6 * PAGE
    assert rig.count("quota_evictions", "nvme") > 100
    rig.ask(ev.EvictAsked(ADMIN, rig.number(), "", "host", 0), cm.Evicted)
    planned = b.plan("p", b.chain(TOKENS))
    assert (planned.boundary, planned.ready) == (16, False)


def test_others_do_not_write_over_a_share() -> None:
    rig = disk((B, 1.0, 0.5), pages=16)
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    rig.run()
    flood(a, 20)
    rig.run()
    assert row(rig, B).taken["nvme"] == 6 * PAGE
    assert row(rig, A).taken["nvme"] <= 8 * PAGE


def test_a_share_smaller_than_a_segment_stores_nothing() -> None:
    rig = disk((A, 1.0, 0.05))
    a = tenant(rig, A)
    flood(a, 2)
    rig.run()
    assert row(rig, A).taken["nvme"] == 0
    assert rig.count("writeback_dropped", "quota") == 6
    assert a.rig.gauge("writeback_queue") == 0


def test_what_no_job_makes_room_for_is_dropped() -> None:
    """All of the disk is promised to others, who have filled it."""
    rig = disk((A, 1.0, 0.5), (B, 1.0, 0.5), pages=16)
    for salt in (A, B):
        flood(tenant(rig, salt), 2)
        rig.run()
        assert row(rig, salt).taken["nvme"] == 6 * PAGE
    flood(tenant(rig, "tenant c"), 1)
    rig.run()
    assert rig.count("writeback_dropped", "quota") == 3
    assert row(rig, A).taken["nvme"] == row(rig, B).taken["nvme"] == 6 * PAGE
    assert rig.gauge("writeback_queue") == 0


def test_shares_of_the_disk_are_known_again_after_a_start() -> None:
    rig = disk((B, 1.0, 0.5), pages=16)
    b = tenant(rig, B)
    saved(b, 16)
    done = rig.run()
    stores = [command for command in done if isinstance(command, cm.Store)]
    found = [(record, place) for store in stores for record, _, place in store.objects]
    names = [command for command in done if isinstance(command, cm.Remember)]
    later = Rig(rig.limits, opened=False)
    segments = dict.fromkeys({place.segment for _, place in found}, 4 * PAGE)
    later.tell(ev.NvmeOpened(segments, [(name.label, name.layout) for name in names]))
    later.tell(ev.Found(found))
    later.tell(ev.ScanEnded())
    assert row(later, B).taken["nvme"] == 6 * PAGE
    a = tenant(later, A)
    flood(a, 20)
    later.run()
    assert row(later, B).taken["nvme"] == 6 * PAGE


def test_objects_of_a_nameless_namespace_become_a_tenants_when_it_comes() -> None:
    rig = disk((B, 1.0, 0.5), pages=16)
    b = tenant(rig, B)
    saved(b, 16)
    stores = [command for command in rig.run() if isinstance(command, cm.Store)]
    found = [(record, place) for store in stores for record, _, place in store.objects]
    later = Rig(rig.limits, opened=False)
    segments = dict.fromkeys({place.segment for _, place in found}, 4 * PAGE)
    later.tell(ev.NvmeOpened(segments, []))
    later.tell(ev.Found(found))
    later.tell(ev.ScanEnded())
    prefix = found[0][0].key.namespace.hex()[:12]
    pin = guard_events.KeysPinAsked(ADMIN, later.number(), prefix, "ops", 5.0)
    assert later.ask(pin, cm.Pinned) == cm.Pinned("nothing")
    client = tenant(later, B)
    assert client.plan("p", client.chain(TOKENS)).boundary == 16
    assert row(later, B).taken["nvme"] == 6 * PAGE


def test_a_share_of_the_disk_that_was_lifted_is_everybodys() -> None:
    rig = disk((B, 1.0, 0.5), pages=16)
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    rig.run()
    setting(rig, B, nvme=1.0)
    flood(a, 20)
    rig.run()
    assert row(rig, B).taken["nvme"] == 0


def test_too_much_disk_is_given_back() -> None:
    rig = disk((B, 1.0, 0.5), pages=32)
    a, b = tenant(rig, A), tenant(rig, B)
    flood(b, 5)
    rig.run()
    setting(rig, B, nvme=0.2)
    flood(a, 30)
    rig.run()
    assert row(rig, B).taken["nvme"] <= 8 * PAGE
    assert row(rig, A).taken["nvme"] > 16 * PAGE


def test_a_share_is_between_nothing_and_all() -> None:
    assert Share().why_not() == Share(0, 0).why_not() == ""
    assert Share(host=1.01).why_not()
    assert Share(nvme=-0.01).why_not()


def test_a_nameless_namespace_that_is_empty_makes_room_for_others() -> None:
    rig = disk((B, 1.0, 0.5), pages=16)
    b = tenant(rig, B)
    saved(b, 4)
    stores = [command for command in rig.run() if isinstance(command, cm.Store)]
    found = [(record, place) for store in stores for record, _, place in store.objects]
    later = Rig(msgspec.structs.replace(rig.limits, namespaces_max=1), opened=False)
    segments = dict.fromkeys({place.segment for _, place in found}, 4 * PAGE)
    later.tell(ev.NvmeOpened(segments, []))
    later.tell(ev.Found(found))
    later.tell(ev.ScanEnded())
    later.ask(ev.EvictAsked(ADMIN, later.number(), "", "", 0), cm.Evicted)
    assert tenant(later, "").plan("p", b.chain(TOKENS)).boundary == 0
    assert later.gauge("namespaces") == 1
