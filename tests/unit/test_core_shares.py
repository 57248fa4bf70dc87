"""Shares: who takes more than its share drops its own, and everybody else keeps theirs."""

from collections import OrderedDict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.shares import OTHERS, A, B, flood, label, limits, row, setting, tenant
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.limits import Protecting
from tiercache.core.tenants import OUTCOMES
from tiercache.state import Kind, Layout
from tiercache.testing.sim.rig import (
    ADMIN,
    BLOCK,
    PAGE,
    TOKENS,
    Client,
    Rig,
    boundary,
    hybrid,
    outcomes,
    part,
    saved,
    small,
)

# --- memory


@pytest.mark.parametrize(
    "shares", [((A, 0.8, 1.0), (B, 0.2, 1.0)), ((B, 0.2, 1.0),)], ids=["both", "only-b"]
)
def test_a_flood_leaves_the_others_their_share(
    shares: tuple[tuple[str, float, float], ...],
) -> None:
    """A floods ten times the pool; B holds a fifth of it."""
    rig = Rig(limits(*shares))
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    assert row(rig, B).taken["host"] == 6 * PAGE
    grants = flood(a, 134)  # Of three pages each.
    assert boundary(b) == 16
    told = row(rig, A)
    assert outcomes(grants) == {"granted": 402}
    assert sum(told.outcomes.values()) == 402
    if len(shares) == 2:
        assert told.outcomes == {
            "stored": 32, "evicted_own": 370, "rejected": 0, "held": 0, "declined": 0
        }  # fmt: skip
        assert sum(grant.own for grant in grants) == 370 == rig.count("quota_evictions", "host")
        assert told.taken["host"] == told.allowed["host"] == 32 * PAGE
        assert rig.count("reserves", "evicted_own") == 370
        assert rig.count("reserves", "granted") == 6 + 32
    assert row(rig, B).outcomes["stored"] == 6


def test_what_cannot_make_room_of_its_own_is_rejected() -> None:
    rig = Rig(limits((A, 0.2, 1.0)))
    a = tenant(rig, A)
    saved(a, 16)
    a.plan("use", a.chain(TOKENS))
    offers = [offer for number in (1, 2) for offer in a.offers(a.chain([number] * 5), 4)]
    grants = a.reserve("x", offers)
    assert [grant.outcome for grant in grants] == ["granted"] * 2 + ["quota"] * 4
    assert row(rig, A).outcomes == {
        "stored": 8, "evicted_own": 0, "rejected": 4, "held": 0, "declined": 0
    }  # fmt: skip
    assert rig.count("reserves", "quota") == 4
    assert rig.gauge("bytes", "host") == 8 * PAGE  # The pool is nearly empty.
    a.release("use")
    assert outcomes(flood(a, 3)) == {"granted": 9}


def test_an_object_larger_than_the_share_costs_nothing() -> None:
    rig = Rig(limits((A, 0.1, 1.0)))
    layout = Layout((part("kv", Kind.KV, None, BLOCK), part("big", Kind.CONV, 1, 0, 4096)), BLOCK)
    client = Client(rig, layout)
    client.salt = A
    client.attach()
    client.save("r", client.offers(client.chain(TOKENS), 4, parts=["kv"]))
    assert outcomes(client.reserve("big", [client.offer(client.chain(TOKENS), 1, 16)])) == {
        "quota": 1
    }
    assert rig.count("quota_evictions", "host") == 0


def test_making_room_of_ones_own_is_bounded() -> None:
    rig = Rig(msgspec.structs.replace(limits((A, 0.5, 1.0)), evictions_per_reserve_max=2))
    layout = Layout((part("kv", Kind.KV, None, BLOCK), part("big", Kind.CONV, 1, 0, 4096)), BLOCK)
    client = Client(rig, layout)
    client.salt = A
    client.attach()
    for number in range(20):
        chain = client.chain([number] * 5)
        client.save(f"r{number}", client.offers(chain, 4, parts=["kv"]))
    offer = client.offer(client.chain(TOKENS), 1, 16)
    assert outcomes(client.reserve("big", [offer])) == {"quota": 1}
    assert rig.count("quota_evictions", "host") == 2


def test_a_flood_of_reservations_does_not_take_a_share() -> None:
    """What is being written cannot go, but neither can what others were promised."""
    rig = Rig(limits((B, 0.2, 1.0)))
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    offers = [o for n in range(20) for o in a.offers(a.chain([n] * 5), 4)]
    assert outcomes(a.reserve("r", offers)) == {"granted": 34, "full": 26}
    assert boundary(b) == 16
    assert outcomes(flood(b, 1)) == {"granted": 3}  # Its own goes for it.


def test_ones_own_goes_where_nothing_else_may() -> None:
    """Within its share, but the pool is full of what is in use."""
    rig = Rig(limits((A, 0.5, 1.0), pages=12))
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    b.plan("use", b.chain(TOKENS))
    flood(a, 2)
    assert row(rig, A).taken["host"] == 6 * PAGE
    b.save("more", b.offers(b.chain(OTHERS), 4))
    assert outcomes(a.reserve("x", a.offers(a.chain(OTHERS), 4))) == {"granted": 3}


def test_more_promised_than_there_is_goes_to_the_emptiest() -> None:
    rig = Rig(limits(host_share=0.75))
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    assert outcomes(flood(a, 20)) == {"granted": 60}
    assert row(rig, A).taken["host"] == 30 * PAGE
    other = tenant(rig, "tenant c")
    flood(other, 8)
    assert boundary(b) == 16  # A was the fullest.
    assert row(rig, A).taken["host"] + row(rig, "tenant c").taken["host"] == 34 * PAGE


def test_all_namespaces_of_a_tenant_have_one_share() -> None:
    rig = Rig(limits((A, 0.2, 1.0)))
    a = tenant(rig, A)
    saved(a, 16)
    a.lora = "adapter"
    saved(a, 16)
    assert row(rig, A).taken["host"] == 8 * PAGE
    assert boundary(a) == 16
    a.lora = ""
    assert boundary(a) == 0


def test_tenants_without_a_share_are_one_pool() -> None:
    rig = Rig(limits())
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    flood(a)
    assert boundary(b) == 0
    assert row(rig, A).allowed == {"host": 40 * PAGE, "nvme": 0}


def test_a_share_can_be_set_while_things_are_held() -> None:
    rig = Rig(limits())
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    flood(a, 11)
    setting(rig, B, host=0.2)
    flood(a, 20)
    assert boundary(b) == 16
    setting(rig, A, host=0.25)  # It holds more: that goes as it saves.
    assert row(rig, A).taken["host"] == 34 * PAGE
    flood(a, 40)
    assert row(rig, A).taken["host"] == 10 * PAGE
    setting(rig, A, host=1.0)
    flood(a, 80)
    assert row(rig, A).taken["host"] == 34 * PAGE
    setting(rig, B, host=1.0)
    flood(a, 120)
    assert boundary(b) == 0


def test_who_has_more_than_its_share_gives_to_others() -> None:
    rig = Rig(limits())
    a, b = tenant(rig, A), tenant(rig, B)
    flood(a, 14)
    setting(rig, A, host=0.25)
    assert outcomes(flood(b, 10)) == {"granted": 30}
    assert row(rig, A).taken["host"] == 10 * PAGE


def test_the_order_of_eviction_survives_a_change_of_share() -> None:
    rig = Rig(limits(pages=10))
    a = tenant(rig, A)
    for number in range(3):
        saved(a, 4, tokens=[number] * 20)
    setting(rig, A, host=0.999)
    saved(a, 4, tokens=[9] * 20)
    assert [boundary(a, [number] * 20) for number in (0, 1, 2, 9)] == [0, 4, 4, 4]


@pytest.mark.parametrize(
    ("name", "host", "says"),
    [
        ("", 0.5, "a tenant's name"),
        ("x" * 2000, 0.5, "a tenant's name"),
        ("ab", 1.5, "between 0 and 1"),
        ("ab", -0.1, "between 0 and 1"),
        ("ab", float("nan"), "between 0 and 1"),
    ],
)
def test_a_share_that_cannot_be_is_refused(name: str, host: float, says: str) -> None:
    rig = Rig(limits())
    answer = rig.ask(guard_events.SharesAsked(ADMIN, rig.number(), name, host, None), cm.Refused)
    assert (answer.kind, says in answer.text) == ("invalid", True)


def test_shares_are_bounded() -> None:
    terms = Protecting(shares_max=1)
    rig = Rig(msgspec.structs.replace(small(), protecting=terms))
    setting(rig, A, host=0.5)
    setting(rig, A, nvme=0.5)
    refused = guard_events.SharesAsked(ADMIN, rig.number(), label(B), 0.5, None)
    assert rig.ask(refused, cm.Refused).text == "1 tenants have shares already"
    assert (row(rig, A).host, row(rig, A).nvme) == (0.5, 0.5)


def agreed(rig: Rig, **shares: tuple[float | None, float | None]) -> None:
    """The cluster says what these tenants may take, named by their salts in lower case."""
    salts = {"a": A, "b": B}
    rig.tell(guard_events.SharesTold({label(salts[name]): each for name, each in shares.items()}))


def test_what_the_cluster_says_goes_before_what_the_node_says() -> None:
    rig = Rig(limits((A, 0.8, 0.5)))
    a = tenant(rig, A)
    saved(a, 16)
    assert (row(rig, A).host, row(rig, A).nvme, row(rig, A).common) == (0.8, 0.5, False)
    agreed(rig, a=(0.1, None), b=(None, 0.25))
    assert (row(rig, A).host, row(rig, A).nvme, row(rig, A).common) == (0.1, 0.5, True)
    assert (row(rig, B).host, row(rig, B).nvme) == (1.0, 0.25)
    refused = rig.ask(
        guard_events.SharesAsked(ADMIN, rig.number(), label(A), 0.5, None), cm.Refused
    )
    assert "the cluster says" in refused.text
    assert row(rig, A).host == 0.1
    flood(a, 20)
    assert row(rig, A).taken["host"] <= row(rig, A).allowed["host"] == 4 * PAGE
    agreed(rig, b=(None, 0.25))
    assert (row(rig, A).host, row(rig, A).common) == (0.8, False)
    setting(rig, A, 0.5)
    assert row(rig, A).host == 0.5
    agreed(rig)
    assert label(B) not in {each.tenant for each in rows(rig)}


def test_what_the_cluster_leaves_to_the_node_can_be_set_there() -> None:
    rig = Rig(limits((A, 0.8, 0.5)))
    agreed(rig, a=(0.1, None))
    setting(rig, A, nvme=0.25)
    assert (row(rig, A).host, row(rig, A).nvme) == (0.1, 0.25)
    for host, nvme in ((0.5, None), (0.5, 0.5)):
        asked = guard_events.SharesAsked(ADMIN, rig.number(), label(A), host, nvme)
        assert "the cluster says" in rig.ask(asked, cm.Refused).text
    agreed(rig)
    assert (row(rig, A).host, row(rig, A).nvme) == (0.8, 0.25)
    agreed(rig, a=(None, None))
    assert (row(rig, A).host, row(rig, A).common) == (0.8, False)


def rows(rig: Rig) -> list[cm.ShareRow]:
    asked = guard_events.SharesAsked(ADMIN, rig.number(), "", None, None)
    return rig.ask(asked, cm.ShareRows).tenants


def test_a_share_of_the_cluster_that_is_no_limit_shelters_nobody() -> None:
    rig = Rig(limits((A, 0.8, 1.0)))
    a = tenant(rig, A)
    saved(a, 16)
    agreed(rig, a=(1.0, 1.0))
    agreed(rig, a=(1.0, 1.0))
    assert (row(rig, A).host, row(rig, A).common) == (1.0, True)


def test_of_what_the_cluster_says_only_sense_is_taken_and_not_too_much() -> None:
    terms = msgspec.structs.replace(small(), protecting=Protecting(shares_max=2), name_bytes_max=16)
    rig = Rig(terms)
    said: dict[str, tuple[float | None, float | None]] = {
        "": (0.1, 0.1), "n" * 17: (0.1, None), "high": (1.5, None), "low": (None, -0.1),
        "nan": (float("nan"), None), "c": (0.3, None), "b": (0.2, None), "a": (0.1, 1.0),
    }  # fmt: skip
    rig.tell(guard_events.SharesTold(said))
    assert [(each.tenant, each.host, each.nvme) for each in rows(rig)] == [
        ("a", 0.1, 1.0), ("b", 0.2, 1.0),
    ]  # fmt: skip


def test_everybodys_shares_are_told() -> None:
    rig = Rig(limits((B, 0.2, 0.3), host_share=0.6, nvme_share=0.7))
    tenant(rig, "")
    told = rig.ask(guard_events.SharesAsked(ADMIN, rig.number(), "", None, None), cm.ShareRows)
    assert (told.host, told.nvme) == (0.6, 0.7)
    assert [(r.tenant, r.host, r.nvme) for r in told.tenants] == [
        ("-", 0.6, 0.7),
        (label(B), 0.2, 0.3),
    ]
    assert told.tenants[1].outcomes == dict.fromkeys(OUTCOMES, 0)
    unknown = rig.ask(guard_events.SharesAsked(ADMIN, rig.number(), "ab", None, None), cm.ShareRows)
    assert unknown.tenants == []


def test_tenants_that_hold_nothing_are_forgotten() -> None:
    rig = Rig(msgspec.structs.replace(limits(host_share=0.5), namespaces_max=2))
    client = Client(rig, hybrid()).attach()
    for number in range(10):
        client.salt = f"tenant {number}"
        saved(client, 4)
        rig.ask(ev.ClearAsked(ADMIN, rig.number(), ""), cm.Evicted)
    assert rig.gauge("tenants") <= 3
    assert len(rig.machine._books.eviction._own) <= 3


def test_a_tenant_is_remembered_while_memory_is_kept_back_for_it() -> None:
    rig = Rig(msgspec.structs.replace(limits(host_share=0.5), namespaces_max=2))
    client = Client(rig, hybrid()).attach()
    client.salt = A
    saved(client, 4)
    client.plan("use", client.chain(TOKENS))
    rig.ask(ev.ClearAsked(ADMIN, rig.number(), ""), cm.Evicted)
    for number in range(3):
        client.salt = f"tenant {number}"
        saved(client, 4)
        rig.ask(ev.ClearAsked(ADMIN, rig.number(), ""), cm.Evicted)
    assert row(rig, A).taken["host"] == 3 * PAGE
    client.release("use")
    assert row(rig, A).taken["host"] == 0


def test_counts_of_the_catalog_take_ones_own_too() -> None:
    """A flood of small objects fills the catalog: what others were promised stays."""
    rig = Rig(msgspec.structs.replace(limits((A, 0.8, 1.0), (B, 0.2, 1.0)), objects_max=12))
    a, b = tenant(rig, A), tenant(rig, B)
    saved(b, 16)
    assert outcomes(flood(a, 20)) == {"granted": 60}
    assert boundary(b) == 16


# --- against the plainest model


OPS = st.lists(
    st.tuples(st.sampled_from("aabbc"), st.integers(0, 11), st.sampled_from(("save", "use"))),
    max_size=80,
)
PAGES = {"a": 8, "b": 4, "c": 4}


@settings(max_examples=40, deadline=None)
@given(OPS)
def test_a_tenant_with_a_share_is_alone_with_it(steps: list[tuple[str, int, str]]) -> None:
    """Whatever the others do, what it holds is what a cache of its own of that size would hold."""
    rig = Rig(limits(*((salt, pages / 16, 1.0) for salt, pages in PAGES.items()), pages=16))
    clients = {salt: tenant(rig, salt) for salt in PAGES}
    models: dict[str, OrderedDict[int, None]] = {salt: OrderedDict() for salt in PAGES}
    offers = dict.fromkeys(PAGES, 0)
    for at, (salt, number, what) in enumerate(steps):
        client, model = clients[salt], models[salt]
        chain = client.chain([number] * 5)
        if what == "use":
            wanted = [client.wanted(chain, 0, 4)]
            (piece,) = rig.ask(client.fetching(f"u{at}", wanted), cm.Fetched).pieces
            client.release(f"u{at}")
            assert (piece is not None) == (number in model)
            if number in model:
                model.move_to_end(number)
            continue
        (grant,) = client.save(f"s{at}", client.offers(chain, 4, parts=["kv"]))
        offers[salt] += 1
        if number in model:
            assert grant.outcome == "held"
            continue
        assert (grant.outcome, grant.own) == ("granted", len(model) == PAGES[salt])
        model[number] = None
        if len(model) > PAGES[salt]:
            model.popitem(last=False)
    for salt, model in models.items():
        told = row(rig, salt)
        assert told.taken["host"] == len(model) * PAGE
        assert sum(told.outcomes.values()) == offers[salt]
