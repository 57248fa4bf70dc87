"""How objects come in: grants, merged puts, commits, quarantine, flushes."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import Kind, Layout, Shard
from tiercache.testing.sim.rig import (
    BLOCK,
    PAGE,
    TOKENS,
    Client,
    Rig,
    boundary,
    hybrid,
    outcome_of,
    outcomes,
    part,
    small,
)

OTHERS = [5] * 20


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


# --- grants


def test_room_is_given_and_sealed(client: Client) -> None:
    offers = client.offers(client.chain(TOKENS), 16)
    grants = client.reserve("r", offers)
    assert outcomes(grants) == {"granted": 6}
    assert len({grant.ticket for grant in grants}) == 6
    places = [grant.extent for grant in grants]
    assert len(set(places)) == 6
    assert client.rig.gauge("reservations") == 6
    client.commit(grants)
    assert client.rig.gauge("reservations") == 0
    (seal,) = client.rig.take(cm.Seal)
    assert seal.objects == [(g.extent, o.nbytes) for g, o in zip(grants, offers, strict=True)]
    assert boundary(client) == 0  # Not before its checksums are known.
    done = outcome_of(seal)
    assert done is not None
    client.rig.tell(done)
    assert boundary(client) == 16
    assert client.rig.count("commits") == 6


def test_the_second_put_of_the_same_is_merged(client: Client) -> None:
    offers = client.offers(client.chain(TOKENS), 16)
    grants = client.reserve("a", offers)
    assert outcomes(client.reserve("b", offers)) == {"busy": 6}
    client.commit(grants)
    assert outcomes(client.reserve("c", offers)) == {"busy": 6}
    client.rig.run()
    assert outcomes(client.reserve("d", offers)) == {"held": 6}
    assert outcomes(client.reserve("e", [*offers[:1], *offers[:1]])) == {"held": 2}
    assert client.rig.gauge("objects", "host") == 6


def test_a_put_that_was_cancelled_is_free_for_others(client: Client) -> None:
    offers = client.offers(client.chain(TOKENS), 16)
    grants = client.reserve("a", offers)
    tickets = [grant.ticket for grant in grants]
    client.rig.tell(ev.Cancelled(client.session, [*tickets, *tickets, 12345]))
    assert client.rig.gauge("bytes", "host") == 0
    assert outcomes(client.reserve("b", offers)) == {"granted": 6}


def test_a_reader_saves_nothing(rig: Rig) -> None:
    reader = Client(rig, hybrid())
    reader.write = False
    reader.attach()
    assert outcomes(reader.reserve("r", reader.offers(reader.chain(TOKENS), 16))) == {
        "read_only": 6
    }


def test_the_least_recently_used_makes_room(client: Client) -> None:
    client.rig = rig = Rig(small(pages=8))
    client.attach()
    for number in range(8):
        chain = client.chain([number] * 5)
        client.save(f"r{number}", client.offers(chain, 4, parts=["kv"]))
    client.plan("use", client.chain([0] * 5))  # A look, but nothing to resume: no lease.
    first = client.fetching("keep", [client.wanted(client.chain([0] * 5), 0, 4)])
    rig.tell(first)
    client.release("keep")
    client.save("more", client.offers(client.chain([9] * 5), 4, parts=["kv"]))
    wanted = [client.wanted(client.chain([number] * 5), 0, 4) for number in range(8)]
    pieces = rig.ask(client.fetching("see", wanted), cm.Fetched).pieces
    assert [number for number in range(8) if pieces[number] is None] == [1]
    assert rig.count("evictions", "host") == 1
    assert rig.count("evicted_bytes", "host") == 32


def test_the_start_of_a_prefix_is_dropped_last(client: Client) -> None:
    """Deep blocks are worth nothing without the shallow ones."""
    client.rig = rig = Rig(small(pages=8))
    client.attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    client.save("x", client.offers(client.chain(OTHERS), 12, parts=["kv"]))
    wanted = [client.wanted(client.chain(TOKENS), 0, end) for end in (4, 8, 12, 16)]
    pieces = rig.ask(client.fetching("see", wanted), cm.Fetched).pieces
    assert [piece is not None for piece in pieces] == [True] * 4
    assert boundary(client) == 0  # The snapshot went first.


def test_a_released_prefix_goes_from_its_end_too(client: Client) -> None:
    client.rig = rig = Rig(small(pages=8))
    client.attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    client.plan("use", client.chain(TOKENS))
    client.release("use")
    client.save("x", client.offers(client.chain(OTHERS), 20, parts=["kv"]))
    wanted = [client.wanted(client.chain(TOKENS), 0, end) for end in (4, 8, 12, 16)]
    pieces = rig.ask(client.fetching("see", wanted), cm.Fetched).pieces
    assert [piece is not None for piece in pieces] == [True, True, True, False]


def test_a_lease_protects_from_eviction(client: Client) -> None:
    client.rig = rig = Rig(small(pages=8))
    client.attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    planned = client.plan("use", client.chain(TOKENS))
    assert outcomes(client.save("x", client.offers(client.chain(OTHERS), 16))) == {
        "granted": 2,
        "full": 4,
    }
    assert client.plan("use", client.chain(TOKENS)).pieces == planned.pieces
    client.release("use")
    assert outcomes(client.save("y", client.offers(client.chain(OTHERS), 16))) == {
        "held": 2,
        "granted": 4,
    }
    assert rig.count("reserves", "full") == 4


def test_a_pool_that_is_leased_whole_declines_and_recovers(client: Client) -> None:
    client.rig = rig = Rig(small(pages=6))
    client.attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    client.plan("storm", client.chain(TOKENS))
    assert rig.gauge("leases") == 6
    for _ in range(3):
        assert outcomes(client.reserve("x", client.offers(client.chain(OTHERS), 16))) == {"full": 6}
    assert rig.gauge("free_largest_bytes", "host") == 0
    client.release("storm")
    assert outcomes(client.save("x", client.offers(client.chain(OTHERS), 16))) == {"granted": 6}


def test_making_room_is_bounded(client: Client) -> None:
    """A large object among many small ones that are leased in every other page."""
    limits = msgspec.structs.replace(small(pages=16), evictions_per_reserve_max=2)
    rig = Rig(limits)
    layout = Layout(
        (part("kv", Kind.KV, None, BLOCK, 1), part("big", Kind.CONV, 1, 0, 4096)), BLOCK
    )
    big = Client(rig, layout).attach()
    for number in range(16):
        big.save(f"r{number}", big.offers(big.chain([number] * 5), 4, parts=["kv"]))
    offer = big.offer(big.chain(TOKENS), 1, 16)
    assert offer.nbytes == 8 * PAGE
    assert outcomes(big.reserve("x", [offer])) == {"full": 1}
    assert rig.count("evictions", "host") == 2


def full_catalog(evictions: int = 4096) -> Client:
    """A client on a node that knows as many objects as it may, each in memory and on disk."""
    limits = msgspec.structs.replace(
        small(256, 256), eager=True, objects_max=24, evictions_per_reserve_max=evictions
    )
    client = Client(Rig(limits), hybrid()).attach()
    for number in range(4):
        client.save(f"s{number}", client.offers(client.chain([number] * 20), 16))
        client.rig.run()
    assert client.rig.gauge("objects", "host") == client.rig.gauge("objects", "nvme") == 24
    return client


def test_a_full_catalog_drops_from_disk_what_was_used_longest_ago() -> None:
    """Leaving memory makes no room in it for what is on disk too: a segment goes, and no more."""
    client = full_catalog()
    rig = client.rig
    assert outcomes(client.save("x", client.offers(client.chain([9] * 20), 16))) == {"granted": 6}
    assert rig.gauge("objects", "host") == 24
    assert rig.gauge("objects", "nvme") == 16
    assert (rig.count("evictions", "host"), rig.count("evictions", "nvme")) == (6, 8)
    assert client.plan("last", client.chain([3] * 20)).boundary == 16


def test_making_room_in_a_catalog_is_bounded() -> None:
    client = full_catalog(evictions=1)
    assert outcomes(client.reserve("x", client.offers(client.chain([9] * 20), 4))) == {
        "full": 2,
        "granted": 1,
    }


def test_a_full_catalog_whose_disk_is_in_use_declines() -> None:
    client = full_catalog()
    rig = client.rig
    rig.ask(ev.EvictAsked(900, rig.number(), "", "host", 0), cm.Evicted)
    wanted = [
        client.wanted(client.chain([n] * 20), 0, 4 * k) for n in range(4) for k in range(1, 5)
    ]
    rig.later(client.fetching("f", wanted))
    states = [client.wanted(client.chain([n] * 20), k, 16) for n in range(4) for k in (1, 2)]
    rig.later(client.fetching("g", states))
    assert len(rig.take(cm.Fill)) > 0
    assert outcomes(client.reserve("x", client.offers(client.chain([9] * 20), 4))) == {"full": 3}


def test_an_object_larger_than_any_segment_is_told_so(rig: Rig) -> None:
    layout = Layout((part("big", Kind.CONV, 1, 0, 64 * 512 + 1),), BLOCK)
    big = Client(rig, layout).attach()
    assert outcomes(big.reserve("x", big.offers(big.chain(TOKENS), 16))) == {"too_large": 1}
    assert rig.count("evictions", "host") == 0


def test_reservations_are_bounded() -> None:
    rig = Rig(msgspec.structs.replace(small(), reservations_per_session_max=4))
    client = Client(rig, hybrid()).attach()
    grants = client.reserve("r", client.offers(client.chain(TOKENS), 16))
    assert outcomes(grants) == {"granted": 4, "too_many": 2}
    client.commit(grants)
    assert outcomes(client.reserve("q", client.offers(client.chain(OTHERS), 4))) == {"granted": 3}


def test_the_kinds_of_objects_of_a_namespace_are_bounded() -> None:
    rig = Rig(msgspec.structs.replace(small(), slots_max=2))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    offers = [client.offer(chain, 0, 4, codec) for codec in ("native", "a", "b")]
    assert outcomes(client.reserve("r", offers)) == {"granted": 2, "too_many": 1}
    assert outcomes(client.reserve("r", [client.offer(chain, 0, 8, "a")])) == {"granted": 1}


# --- offers that cannot be


def altered(offer: ev.Offer, field: str, value: object) -> ev.Offer:
    fields = {name: getattr(offer, name) for name in offer.__struct_fields__}
    return ev.Offer(*{**fields, field: value}.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("part", -1),
        ("part", 3),
        ("shard", Shard(0, 2)),
        ("shard", Shard(-1, 1)),
        ("shard", Shard(1, 1)),
        ("codec", ""),
        ("codec", "a/b"),
        ("codec", "x" * 2000),
        ("digest", b""),
        ("digest", b"x" * 31),
        ("base", b"x" * 32),  # It ends at a block's edge: there is no block below.
        ("start", 7),
        ("start", 0),
        ("end", 0),
        ("end", -8),
        ("end", 7),
        ("end", 9),
        ("end", 12),  # Whole blocks are one block long.
        ("nbytes", 0),
        ("nbytes", -1),
        ("nbytes", 24),  # One token short.
        ("nbytes", 40),
        ("parent", b"x"),
        ("requantised", -1),
    ],
)
def test_an_offer_that_cannot_be_is_not_taken(client: Client, field: str, value: object) -> None:
    offer = client.offer(client.chain(TOKENS), 0, 8)
    assert outcomes(client.reserve("r", [altered(offer, field, value)])) == {"invalid": 1}
    assert client.rig.gauge("bytes", "host") == 0
    assert outcomes(client.reserve("r", [offer])) == {"granted": 1}


@pytest.mark.parametrize(
    ("field", "value"), [("base", b""), ("base", b"x" * 31), ("start", 4), ("nbytes", 32)]
)
def test_an_offer_inside_a_block_names_the_block_below(
    client: Client, field: str, value: object
) -> None:
    offer = client.offer(client.chain(TOKENS), 0, 10)
    assert (offer.start, offer.nbytes) == (8, 16)
    assert outcomes(client.reserve("r", [altered(offer, field, value)])) == {"invalid": 1}
    assert outcomes(client.reserve("r", [offer])) == {"granted": 1}


@pytest.mark.parametrize(("field", "value"), [("start", 8), ("nbytes", 16)])
def test_a_snapshot_covers_all_of_its_prefix(client: Client, field: str, value: object) -> None:
    offer = client.offer(client.chain(TOKENS), 1, 8)
    assert outcomes(client.reserve("r", [altered(offer, field, value)])) == {"invalid": 1}
    assert outcomes(client.reserve("r", [offer])) == {"granted": 1}


def test_a_digest_stands_at_one_token_count(client: Client) -> None:
    """Somebody names the same digest at another place: only one of the two can be right."""
    chain = client.chain(TOKENS)
    first, second = client.offer(chain, 1, 8), client.offer(chain, 2, 8)
    assert outcomes(client.reserve("r", [first])) == {"granted": 1}
    assert outcomes(client.reserve("r", [altered(second, "end", 12)])) == {"invalid": 1}
    inside = altered(altered(second, "end", 9), "base", chain.digests[2])
    assert outcomes(client.reserve("r", [inside])) == {"invalid": 1}
    assert outcomes(client.reserve("r", [second])) == {"granted": 1}


def test_other_codecs_have_other_sizes(client: Client) -> None:
    offer = altered(client.offer(client.chain(TOKENS), 0, 8, "int8"), "nbytes", 9)
    assert outcomes(client.reserve("r", [offer])) == {"granted": 1}
