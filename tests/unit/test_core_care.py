"""What requests wish: ends, priorities, hints, and not to be stored at all."""

import msgspec
import pytest

from tests.unit.wishes import limits, new, plan, reserving, save
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.expiry import STALE_MAX
from tiercache.state import Care
from tiercache.state.care import TTL_MS_MAX
from tiercache.testing.sim.rig import (
    ADMIN,
    PAGE,
    TOKENS,
    Client,
    Rig,
    boundary,
    hybrid,
    outcomes,
    saved,
)

# --- ends


def test_an_expired_object_is_not_offered() -> None:
    client = new()
    save(client, 16, Care(ttl_ms=2000))
    client.rig.now += 1.9  # Nobody ticks.
    assert boundary(client) == 16
    client.rig.now += 0.2
    assert boundary(client) == 0
    assert client.rig.count("expired") == 6
    assert client.rig.gauge("bytes", "host") == 0


def test_a_tick_is_due_at_the_end_of_an_object() -> None:
    client = new()
    save(client, 16, Care(ttl_ms=2000))
    assert client.rig.gauge("expiring_objects") == 6
    assert client.rig.machine.wakeup() == client.rig.now + 2.0
    client.rig.wait(2.0)
    assert client.rig.gauge("expiring_objects") == client.rig.gauge("bytes", "host") == 0
    assert client.rig.machine.wakeup() is None


def test_an_object_that_is_used_at_its_end_stays_readable_and_is_found_by_nobody() -> None:
    client = new()
    save(client, 16, Care(ttl_ms=2000))
    client.plan("use", client.chain(TOKENS))
    client.rig.wait(3.0)
    assert boundary(client) == 0
    assert client.rig.gauge("bytes", "host") == 6 * PAGE
    assert outcomes(save(client, 16, Care(), request="again")) == {"granted": 6}
    client.release("use")
    assert client.rig.gauge("bytes", "host") == 6 * PAGE


def test_an_end_during_the_write_is_a_lost_commit() -> None:
    client = new()
    offers = client.offers(client.chain(TOKENS), 16)
    grants = client.rig.ask(reserving(client, "r", offers, Care(ttl_ms=2000)), cm.Reserved).grants
    client.rig.wait(3.0)
    client.commit(grants)
    assert client.rig.count("commits_lost") == 6
    assert client.rig.gauge("bytes", "host") == 0


def test_who_saves_again_prolongs_and_never_shortens() -> None:
    client = new()
    save(client, 16, Care(ttl_ms=2000))
    save(client, 16, Care(ttl_ms=5000), request="b")
    save(client, 16, Care(ttl_ms=1000), request="c")
    client.rig.wait(3.0)
    assert boundary(client) == 16
    client.rig.wait(2.5)
    assert boundary(client) == 0
    save(client, 16, Care(ttl_ms=2000), request="d")
    save(client, 16, Care(), request="e")
    save(client, 16, Care(ttl_ms=2000), request="f")
    client.rig.wait(1000.0)
    assert boundary(client) == 16
    assert client.rig.gauge("expiring_objects") == 0


def test_ends_that_count_no_more_are_swept_out() -> None:
    client = new()
    expiry = client.rig.machine._books.protection.expiry
    save(client, 4, Care(ttl_ms=1))
    for number in range(STALE_MAX):
        save(client, 4, Care(ttl_ms=1000 + number), request=f"r{number}")
    assert len(expiry._due) <= STALE_MAX + 6
    client.rig.wait(60.0)
    assert boundary(client, limit=4) == 0


def test_an_end_of_ones_own_keeps_objects_off_the_disk() -> None:
    """A start would not know of it."""
    client = new(limits(nvme_pages=64))
    save(client, 16, Care(ttl_ms=60_000))
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 0
    save(client, 16, Care(), request="b")
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 6


def test_a_namespace_gives_its_objects_an_end() -> None:
    client = new(limits(nvme_pages=64, ttl_s=10.0))
    saved(client, 16)
    client.rig.run()
    assert client.rig.gauge("objects", "nvme") == 6  # This end will be known again.
    client.rig.wait(9.0)
    save(client, 16, Care(), request="again")
    client.rig.wait(2.0)
    assert boundary(client) == 16
    client.rig.wait(9.0)
    assert boundary(client) == 0
    assert client.rig.gauge("objects", "nvme") == 0
    assert client.rig.gauge("bytes", "nvme") == 0
    (forget,) = client.rig.take(cm.Forget)
    assert len(forget.keys) == 6
    assert client.rig.take(cm.Reclaim)


def test_a_request_may_ask_for_another_end_than_its_namespace() -> None:
    client = new(limits(ttl_s=10.0))
    save(client, 16, Care(ttl_ms=60_000))
    client.rig.wait(50.0)
    assert boundary(client) == 16


@pytest.mark.parametrize(
    ("name", "lasts"),
    [("m", False), ("digest", False), ("dig", True), ("w", True)],
    ids=["model", "digest", "too short", "no name"],
)
def test_some_namespaces_have_an_end_of_their_own(name: str, *, lasts: bool) -> None:
    digest = Client(Rig(), hybrid()).namespace.digest.hex()
    name = {"digest": digest[:12], "dig": digest[:11]}.get(name, name)
    client = new(limits(ttl_s_of=((name, 5.0),)))
    saved(client, 16)
    client.rig.wait(6.0)
    assert boundary(client) == (16 if lasts else 0)


def test_what_was_found_on_disk_gets_its_namespaces_end_anew() -> None:
    client = new(limits(nvme_pages=64, ttl_s=10.0))
    saved(client, 16)
    done = client.rig.run()
    stores = [command for command in done if isinstance(command, cm.Store)]
    found = [(record, place) for store in stores for record, _, place in store.objects]
    (name,) = [command for command in done if isinstance(command, cm.Remember)]
    later = Rig(client.rig.limits, opened=False)
    segments = dict.fromkeys({place.segment for _, place in found}, 4 * PAGE)
    later.tell(ev.NvmeOpened(segments, [(name.label, name.layout)]))
    later.tell(ev.Found(found))
    later.tell(ev.ScanEnded())
    assert later.gauge("objects", "nvme") == 6
    later.wait(10.0)
    assert later.gauge("objects", "nvme") == 0


# --- what cannot be wished for


@pytest.mark.parametrize(
    "care", [Care(ttl_ms=-1), Care(ttl_ms=TTL_MS_MAX + 1), Care(priority=3), Care(priority=-3)]
)
def test_wishes_outside_their_bounds_are_refused(care: Care) -> None:
    client = new()
    offers = client.offers(client.chain(TOKENS), 4)
    assert client.rig.ask(reserving(client, "r", offers, care), cm.Refused).text == care.why_not()
    asked = msgspec.structs.replace(client.planning("p", client.chain(TOKENS)), care=care)
    assert client.rig.ask(asked, cm.Refused).kind == "invalid"


# --- not stored


def test_nothing_of_a_request_that_says_so_is_stored() -> None:
    client = new(limits(nvme_pages=64))
    care = Care(store=False)
    planned = plan(client, "r", care)
    assert planned.checkpoints == []
    assert client.rig.gauge("sights") == 0
    assert outcomes(save(client, 16, care, request="r")) == {"do_not_store": 6}
    # It need not say so again.
    assert outcomes(save(client, 16, Care(), request="r")) == {"do_not_store": 6}
    assert client.rig.count("reserves", "do_not_store") == 12
    assert client.rig.gauge("sights") == client.rig.gauge("bytes", "host") == 0
    assert client.rig.take(cm.Store) == []
    rows = client.rig.ask(
        guard_events.SharesAsked(ADMIN, client.rig.number(), "", None, None), cm.ShareRows
    )
    assert rows.tenants[0].outcomes["declined"] == 12
    assert outcomes(save(client, 16, Care(), request="other")) == {"granted": 6}


def test_it_may_use_what_others_stored() -> None:
    client = new()
    saved(client, 16)
    assert plan(client, "r", Care(store=False)).boundary == 16


def test_requests_that_are_not_stored_are_remembered_within_a_limit() -> None:
    client = new(msgspec.structs.replace(limits(), recent_requests_max=2))
    for name in ("a", "b", "c"):
        save(client, 4, Care(store=False), request=name)
    assert outcomes(save(client, 4, Care(), request="c")) == {"do_not_store": 3}
    assert outcomes(save(client, 4, Care(), request="a")) == {"granted": 3}
