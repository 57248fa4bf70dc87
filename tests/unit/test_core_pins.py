"""Pins: kept within a budget, for a while, by an owner who ends; never a lock."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.expiry import STALE_MAX
from tiercache.core.limits import Evicting, Limits, Protecting
from tiercache.state import Care, Chain, Kind, Layout
from tiercache.testing.sim.rig import (
    ADMIN,
    BLOCK,
    PAGE,
    TOKENS,
    Client,
    Rig,
    boundary,
    evict,
    hybrid,
    on_disk,
    outcomes,
    part,
    saved,
    small,
)

OTHERS = [5] * 20


def limits(pages: int = 20, nvme_pages: int = 0, **terms: float) -> Limits:
    """A pool of which half may be pinned."""
    protecting = msgspec.structs.replace(Protecting(pinned_share_max=0.5), **terms)
    return msgspec.structs.replace(
        small(pages, nvme_pages), protecting=protecting, evicting=Evicting("lru")
    )


@pytest.fixture
def rig() -> Rig:
    return Rig(limits())


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


def pinning(
    client: Client, chain: Chain, tokens: int, age_s: float = 60.0
) -> guard_events.PinAsked:
    step = client.layout.block_tokens
    tail = chain.digest_at(tokens) if tokens % step else b""
    digests = list(chain.digests[1 : tokens // step + 1])
    number = client.rig.number()
    return guard_events.PinAsked(
        client.session, number, client.lora, client.salt, digests, tokens, tail, age_s
    )


def pin(client: Client, tokens: int = 16, age_s: float = 60.0) -> cm.Pinned:
    return client.rig.ask(pinning(client, client.chain(TOKENS), tokens, age_s), cm.Pinned)


def pin_keys(rig: Rig, prefix: str, owner: str = "ops", age_s: float = 60.0) -> cm.Pinned:
    return rig.ask(guard_events.KeysPinAsked(ADMIN, rig.number(), prefix, owner, age_s), cm.Pinned)


def unpin(rig: Rig, number: int, owner: str = "", session: int = ADMIN) -> cm.Pinned:
    return rig.ask(guard_events.UnpinAsked(session, rig.number(), number, owner), cm.Pinned)


def flood(client: Client, count: int = 40) -> int:
    """Save prompts that nobody needs; return how many objects found room."""
    stored = 0
    for number in range(count):
        chain = client.chain([1000 + number] * 5)
        stored += outcomes(client.save(f"flood-{number}", client.offers(chain, 4)))["granted"]
    return stored


def test_what_is_pinned_survives_a_flood(client: Client) -> None:
    saved(client, 16)
    pinned = pin(client)
    assert pinned == cm.Pinned("pinned", 1, 6, 6 * PAGE, 60.0)
    assert flood(client) == 120
    assert boundary(client) == 16
    rig = client.rig
    assert rig.gauge("pinned_bytes") == 6 * PAGE
    assert rig.gauge("pinned_bytes_max") == 10 * PAGE
    assert (rig.gauge("pins_open"), rig.gauge("pinned_objects")) == (1, 6)
    rows = rig.ask(guard_events.PinsAsked(ADMIN, rig.number()), cm.PinRows)
    row = cm.PinRow(1, "engine", client.session, 6, 6 * PAGE, 60.0)
    assert rows == cm.PinRows([row], 1, 6 * PAGE, 10 * PAGE)


def test_a_pin_ends_at_its_age(client: Client) -> None:
    saved(client, 16)
    pin(client, age_s=5.0)
    assert client.rig.machine.wakeup() == client.rig.now + 5.0
    client.rig.wait(4.9)
    flood(client)
    assert boundary(client) == 16
    client.rig.wait(0.2)
    assert client.rig.gauge("pins_open") == 0
    assert client.rig.count("pins_ended", "expired") == 1
    flood(client)
    assert boundary(client) == 0


def test_what_is_pinned_twice_lasts_for_the_longer_pin(client: Client) -> None:
    saved(client, 16)
    pin(client, age_s=5.0)
    pin(client, age_s=10.0)
    assert client.rig.gauge("pinned_bytes") == 6 * PAGE
    client.rig.wait(6.0)
    flood(client)
    assert boundary(client) == 16
    client.rig.wait(6.0)
    flood(client)
    assert boundary(client) == 0


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_session_takes_its_pins_with_it(client: Client, *, acknowledged: bool) -> None:
    saved(client, 16)
    pin(client)
    client.close(acknowledged=acknowledged)
    assert client.rig.gauge("pins_open") == client.rig.gauge("pinned_bytes") == 0
    assert client.rig.count("pins_ended", "session") == 1
    other = Client(client.rig, hybrid()).attach()
    flood(other)
    assert boundary(other) == 0


def test_an_operators_pin_outlives_sessions(client: Client) -> None:
    saved(client, 16)
    prefix = client.namespace.digest.hex()[:12]
    assert pin_keys(client.rig, prefix).objects == 6
    client.close()
    other = Client(client.rig, hybrid()).attach()
    flood(other)
    assert boundary(other) == 16
    rows = client.rig.ask(guard_events.PinsAsked(ADMIN, client.rig.number()), cm.PinRows)
    assert [(row.owner, row.session) for row in rows.pins] == [("ops", 0)]


# --- the budget


def test_more_than_the_budget_is_refused_and_new_objects_find_room(client: Client) -> None:
    """Pin 120 % of the pool."""
    rig = client.rig
    pinned = refused = 0
    for number in range(24):  # Of one page each; 20 pages are there.
        chain = client.chain([number] * 5)
        client.save(f"r{number}", client.offers(chain, 4, parts=["kv"]))
        done = pin_keys(rig, f"{client.namespace.digest.hex()[:12]}/{chain.digest_at(4).hex()}")
        pinned += done.outcome == "pinned"
        refused += done.outcome == "over_budget"
    assert (pinned, refused) == (10, 14)
    assert rig.gauge("pinned_bytes") == 10 * PAGE
    assert (rig.count("pins", "pinned"), rig.count("pins", "over_budget")) == (10, 14)
    assert flood(client) == 120  # Every one of them.
    rig.wait(61.0)
    assert rig.gauge("pinned_bytes") == 0
    assert pin_keys(rig, client.namespace.digest.hex()[:12]).outcome == "over_budget"  # 20 pages.


def test_a_tenant_with_a_share_has_its_part_of_the_budget() -> None:
    rig = Rig(limits(pages=40))
    client = Client(rig, hybrid())
    client.salt = "secret"
    tenant = client.namespace.narrow(salt="secret").tenant
    client.attach()
    rig.ask(guard_events.SharesAsked(ADMIN, rig.number(), tenant, 0.5, None), cm.ShareRows)
    saved(client, 16)
    saved(client, 16, tokens=OTHERS)
    assert pin(client).outcome == "pinned"  # 6 of 10 pages.
    other = pinning(client, client.chain(OTHERS), 16)
    assert rig.ask(other, cm.Pinned) == cm.Pinned("over_budget")
    client.salt = ""
    saved(client, 16)
    assert pin(client).outcome == "pinned"  # Nobody else's part.


def test_pins_of_one_owner_are_bounded() -> None:
    rig = Rig(limits(pins_per_owner_max=2))
    client = Client(rig, hybrid()).attach()
    saved(client, 16)
    assert [pin(client).outcome for _ in range(3)] == ["pinned", "pinned", "too_many"]
    assert pin_keys(rig, client.namespace.digest.hex()[:12]).outcome == "pinned"
    unpin(rig, 1)
    assert pin(client).outcome == "pinned"


def test_a_long_list_of_pins_is_cut() -> None:
    rig = Rig(msgspec.structs.replace(limits(), list_rows_max=2))
    client = Client(rig, hybrid()).attach()
    saved(client, 4)
    for _ in range(3):
        pin(client, 4)
    rows = rig.ask(guard_events.PinsAsked(ADMIN, rig.number()), cm.PinRows)
    assert ([row.number for row in rows.pins], rows.count) == ([1, 2], 3)


def test_a_pin_that_was_ended_has_no_second_end(client: Client) -> None:
    saved(client, 16)
    unpin(client.rig, pin(client, age_s=5.0).number)
    client.rig.wait(6.0)
    assert client.rig.count("pins_ended", "expired") == 0


def test_ends_that_count_no_more_are_swept_out(client: Client) -> None:
    saved(client, 4)
    pins = client.rig.machine._books.protection.pins
    for _ in range(STALE_MAX + 10):
        assert unpin(client.rig, pin(client, 4).number).outcome == "unpinned"
    assert len(pins._due) <= STALE_MAX + 2


# --- what cannot be pinned


def test_only_a_whole_boundary_is_pinned(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.save("r", client.offers(chain, 16, parts=["kv", "conv"]))
    assert pin(client) == cm.Pinned("incomplete")
    other = pinning(client, client.chain(OTHERS), 4)
    assert client.rig.ask(other, cm.Pinned) == cm.Pinned("incomplete")


def test_a_boundary_inside_a_block_can_be_pinned(client: Client) -> None:
    saved(client, 10)
    assert pin(client, 10).objects == 5  # Two blocks, the start of a third, and two states.
    flood(client)
    wanted = [client.wanted(client.chain(TOKENS), 0, end) for end in (4, 8, 10)]
    pieces = client.rig.ask(client.fetching("f", wanted), cm.Fetched).pieces
    assert all(pieces)


def test_a_window_is_all_that_a_boundary_needs() -> None:
    rig = Rig(limits())
    layout = Layout((part("sliding", Kind.KV, 2, BLOCK), part("state", Kind.CONV, 1, 0)), BLOCK)
    client = Client(rig, layout).attach()
    saved(client, 16)
    assert pin(client).objects == 3


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tokens", 0, "digests"),
        ("digests", [], "digests"),
        ("tail", b"x", "a digest of its own"),
        ("salt", "x" * 2000, "at most 1024 bytes"),
        ("lora", "x" * 2000, "at most 1024 bytes"),
    ],
)
def test_a_pin_that_cannot_be_is_refused(
    client: Client, field: str, value: object, says: str
) -> None:
    asked = msgspec.structs.replace(pinning(client, client.chain(TOKENS), 16), **{field: value})
    answer = client.rig.ask(asked, cm.Refused)
    assert (answer.kind, says in answer.text) == ("invalid", True)


def test_a_pin_of_very_many_blocks_is_refused() -> None:
    rig = Rig(msgspec.structs.replace(limits(), batch_max=3))
    client = Client(rig, hybrid()).attach()
    asked = pinning(client, client.chain(TOKENS), 16)
    assert rig.ask(asked, cm.Refused).text == "more than 3 digests"


def test_a_pin_of_nobody_is_refused(client: Client) -> None:
    client.close()
    asked = pinning(client, client.chain(TOKENS), 16)
    assert client.rig.ask(asked, cm.Refused).kind == "refused"


def test_a_pin_in_one_namespace_too_many_is_refused() -> None:
    rig = Rig(msgspec.structs.replace(limits(), namespaces_max=1))
    client = Client(rig, hybrid()).attach()
    client.salt = "other"
    answer = rig.ask(pinning(client, client.chain(TOKENS), 16), cm.Refused)
    assert answer == cm.Refused("refused", "too many namespaces")


@pytest.mark.parametrize("age_s", [0.0, -1.0, 3600.1, float("nan"), float("inf")])
def test_every_pin_has_an_end(client: Client, age_s: float) -> None:
    saved(client, 16)
    assert pin(client, age_s=age_s) == cm.Pinned("invalid", age_s=3600.0)
    assert client.rig.gauge("pins_open") == 0


def test_an_operator_names_keys_and_a_short_owner(client: Client) -> None:
    rig = client.rig
    assert pin_keys(rig, "nothing") == cm.Pinned("nothing")
    for prefix, owner in (("", "ops"), ("ab", "o" * 2000)):
        asked = guard_events.KeysPinAsked(ADMIN, rig.number(), prefix, owner, 60.0)
        assert rig.ask(asked, cm.Refused).kind == "invalid"


def test_what_is_not_sealed_is_not_pinned(client: Client) -> None:
    client.reserve("r", client.offers(client.chain(TOKENS), 16))
    assert pin(client) == cm.Pinned("incomplete")
    assert pin_keys(client.rig, client.namespace.digest.hex()[:12]).outcome == "nothing"


# --- ending


def test_a_session_ends_its_own_pins_only(client: Client) -> None:
    rig = client.rig
    saved(client, 16)
    mine = pin(client).number
    other = Client(rig, hybrid()).attach()
    assert unpin(rig, mine, session=other.session) == cm.Pinned("nothing")
    assert unpin(rig, 0, "engine", session=other.session) == cm.Pinned("nothing")
    assert unpin(rig, mine, session=client.session) == cm.Pinned("unpinned", mine, 6, 6 * PAGE)
    assert unpin(rig, mine, session=client.session) == cm.Pinned("nothing")
    assert rig.count("pins_ended", "unpinned") == 1
    flood(client)
    assert boundary(client) == 0


def test_an_operator_ends_any_pin_and_all_of_an_owner(client: Client) -> None:
    rig = client.rig
    saved(client, 16)
    prefix = client.namespace.digest.hex()[:12]
    mine = pin(client).number
    pin_keys(rig, prefix, "a")
    pin_keys(rig, prefix, "b")
    pin_keys(rig, prefix, "b")
    assert unpin(rig, 0, "b").objects == 12
    assert unpin(rig, 0, "engine") == cm.Pinned("nothing")  # A session's.
    assert unpin(rig, mine).outcome == "unpinned"
    assert unpin(rig, 99) == cm.Pinned("nothing")
    assert rig.gauge("pins_open") == 1


# --- with all else


def test_a_pin_outlives_the_lease_and_the_lease_the_pin(client: Client) -> None:
    rig = client.rig
    saved(client, 16)
    client.plan("use", client.chain(TOKENS))
    pinned = pin(client)
    client.release("use")
    flood(client)
    assert boundary(client) == 16
    client.plan("use", client.chain(TOKENS))
    unpin(rig, pinned.number)
    flood(client)
    client.release("use")
    assert boundary(client) == 16
    flood(client)
    assert boundary(client) == 0


def test_an_operator_does_not_evict_what_is_pinned(client: Client) -> None:
    saved(client, 16)
    pin(client)
    assert evict(client.rig) == cm.Evicted(0, 0, 6)


def test_a_clear_takes_what_is_pinned(client: Client) -> None:
    saved(client, 16)
    pinned = pin(client)
    client.rig.ask(ev.ClearAsked(ADMIN, client.rig.number(), ""), cm.Evicted)
    assert client.rig.gauge("pinned_bytes") == 0
    assert unpin(client.rig, pinned.number) == cm.Pinned("unpinned", 1, 0, 0)


def test_a_pin_brings_objects_back_from_disk() -> None:
    rig = Rig(msgspec.structs.replace(limits(20, 64), eager=True))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    assert pin(client).objects == 6
    rig.run()
    assert rig.gauge("objects", "host") == 6
    flood(client)
    planned = client.plan("p", client.chain(TOKENS))
    assert (planned.boundary, planned.ready) == (16, True)


def test_the_end_of_an_object_is_stronger_than_a_pin(client: Client) -> None:
    chain = client.chain(TOKENS)
    event = ev.ReserveAsked(
        client.session, client.rig.number(), "r", "", "", client.offers(chain, 16),
        Care(ttl_ms=2000),
    )  # fmt: skip
    client.commit(client.rig.ask(event, cm.Reserved).grants)
    client.rig.run()
    assert pin(client).outcome == "pinned"
    client.rig.wait(2.1)
    assert boundary(client) == 0
    assert client.rig.gauge("pinned_bytes") == 0
