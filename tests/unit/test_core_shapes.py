"""Plans for models of other shapes, in several codecs, by several ranks."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import Kind, Layout
from tiercache.testing.sim.rig import (
    BLOCK,
    TOKENS,
    Client,
    Rig,
    hybrid,
    part,
    saved,
    small,
    spans,
)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


# --- other shapes of models


def test_a_window_needs_its_last_blocks_only(rig: Rig) -> None:
    layout = Layout((part("near", Kind.KV, 2, 4), part("state", Kind.RECURRENT, 1, 0)), BLOCK)
    client = Client(rig, layout).attach()
    chain = client.chain(TOKENS)
    client.save("s", [offer for offer in client.offers(chain, 16) if offer.end > 8])
    planned = client.plan("r", chain)
    assert planned.boundary == 16
    assert spans(planned.pieces) == [(0, 8, 12), (0, 12, 16), (1, 0, 16)]


def test_a_window_one_block_short_is_a_miss(rig: Rig) -> None:
    layout = Layout((part("near", Kind.KV, 2, 4), part("state", Kind.RECURRENT, 1, 0)), BLOCK)
    client = Client(rig, layout).attach()
    chain = client.chain(TOKENS)
    client.save("s", [offer for offer in client.offers(chain, 16) if offer.end > 12])
    assert client.plan("r", chain).reason == "incomplete"


def test_a_window_inside_a_block(rig: Rig) -> None:
    layout = Layout((part("near", Kind.KV, 1, 4), part("state", Kind.RECURRENT, 1, 0)), BLOCK)
    client = Client(rig, layout).attach()
    chain = client.chain(TOKENS)
    client.save("s", [offer for offer in client.offers(chain, 14) if offer.end > 8])
    planned = client.plan("r", chain, tails=client.plan("r", chain).candidates)
    assert planned.boundary == 14
    assert spans(planned.pieces) == [(0, 8, 12), (0, 12, 14), (1, 0, 14)]


def test_parts_with_blocks_of_their_own(rig: Rig) -> None:
    layout = Layout(
        (
            part("kv", Kind.KV, None, 4),
            part("wide", Kind.KV, None, 8),
            part("state", Kind.RECURRENT, 1, 0),
        ),
        BLOCK,
    )
    client = Client(rig, layout).attach()
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 12))
    planned = client.plan("r", chain)
    assert planned.boundary == 12
    assert spans(planned.pieces) == [
        (0, 0, 4), (0, 4, 8), (0, 8, 12), (1, 0, 8), (1, 8, 12), (2, 0, 12)
    ]  # fmt: skip


def test_attention_alone_resumes_at_every_block(rig: Rig) -> None:
    client = Client(rig, Layout((part("kv", Kind.KV, None, 4),), BLOCK)).attach()
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 14))
    assert client.plan("r", chain).boundary == 12
    assert client.plan("q", client.chain(TOKENS[:11])).boundary == 8


def test_snapshots_alone_resume_where_they_stand(rig: Rig) -> None:
    client = Client(rig, Layout((part("state", Kind.RECURRENT, 1, 0),), BLOCK)).attach()
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 8))
    client.save("s", client.offers(chain, 13))
    first = client.plan("r", chain)
    assert first.boundary == 8
    assert client.plan("r", chain, tails=first.candidates).boundary == 13
    assert client.plan("q", client.chain([9, *TOKENS])).reason == "unknown_prefix"


# --- codecs


@pytest.fixture
def mixed(client: Client) -> Client:
    """Attention at 4 native and at 8 in int8, the state in both."""
    chain = client.chain(TOKENS)
    offers = [client.offer(chain, 0, 4), client.offer(chain, 0, 8, "int8")]
    for index in (1, 2):
        offers += [client.offer(chain, index, 8), client.offer(chain, index, 8, "int8")]
    client.save("s", offers)
    return client


def test_a_boundary_may_rest_on_several_codecs(mixed: Client) -> None:
    mixed.codecs = ("native", "int8")
    planned = mixed.plan("r", mixed.chain(TOKENS))
    assert planned.boundary == 8
    assert sorted((p.part, p.end, p.codec) for p in planned.pieces) == [
        (0, 4, "native"), (0, 8, "int8"), (1, 8, "native"), (2, 8, "native")
    ]  # fmt: skip


def test_the_clients_order_of_codecs_counts(mixed: Client) -> None:
    mixed.codecs = ("int8", "native")
    planned = mixed.plan("r", mixed.chain(TOKENS))
    assert sorted((p.part, p.end, p.codec) for p in planned.pieces) == [
        (0, 4, "native"), (0, 8, "int8"), (1, 8, "int8"), (2, 8, "int8")
    ]  # fmt: skip


@pytest.mark.parametrize("codecs", [("native",), ("int8",), ("int4",), ("int4", "native")])
def test_a_codec_that_was_not_asked_for_is_not_given(
    mixed: Client, codecs: tuple[str, ...]
) -> None:
    mixed.codecs = codecs
    assert mixed.plan("r", mixed.chain(TOKENS)).boundary == 0


def test_naming_a_codec_twice_changes_nothing(mixed: Client) -> None:
    """The bits of a slot named twice once added up to the bit of another slot."""
    for codecs in (("native", "native"), ("int8", "int8"), ("native", "int8", "native")):
        mixed.codecs = codecs
        once = replace_plan(mixed, tuple(dict.fromkeys(codecs)))
        mixed.codecs = codecs
        assert replace_plan(mixed, codecs) == once


def replace_plan(client: Client, codecs: tuple[str, ...]) -> tuple[int, list[tuple[int, int, int]]]:
    client.codecs = codecs
    request = f"r{client.rig.number()}"
    planned = client.plan(request, client.chain(TOKENS))
    client.release(request)
    return planned.boundary, spans(planned.pieces)


def test_asking_for_codecs_leaves_no_trace(client: Client) -> None:
    saved(client, 8)
    for number in range(50):
        client.codecs = (f"codec{number}",)
        client.plan(f"r{number}", client.chain(TOKENS))
    client.codecs = ("native",)
    assert client.plan("r", client.chain(TOKENS)).boundary == 8
    (shelf,) = client.rig.machine._books.catalog.shelves.values()
    assert len(shelf.slots) == 3


def test_a_codec_in_memory_is_ready_though_a_preferred_one_is_on_disk() -> None:
    rig = Rig(small(nvme_pages=32))
    client = Client(rig, Layout((part("kv", Kind.KV, None, 4),), BLOCK)).attach()
    chain = client.chain(TOKENS)
    client.save("a", [client.offer(chain, 0, 4)])
    client.plan("b", chain)
    rig.run()
    rig.ask(ev.EvictAsked(9, 1, "", "host", 0), cm.Evicted)
    client.release("b")
    rig.ask(ev.EvictAsked(9, 2, "", "host", 0), cm.Evicted)
    client.save("a", [client.offer(chain, 0, 4, "int8")])
    client.codecs = ("native", "int8")
    planned = client.plan("r", chain)
    assert planned.ready
    assert [piece.codec for piece in planned.pieces] == ["int8"]


# --- ranks


def pair(rig: Rig, units: int = 2) -> tuple[Client, Client]:
    layout = hybrid(units)
    one, two = (Client(rig, layout, ranks=2, rank=rank).attach() for rank in range(2))
    return one, two


def test_every_ranks_shard_is_needed(rig: Rig) -> None:
    one, two = pair(rig)
    chain = one.chain(TOKENS)
    one.save("s", one.offers(chain, 16))
    assert one.plan("r", chain).reason == "no_state"  # Rank 1's state is not there.
    one.release("r")
    two.save("s", two.offers(chain, 16))
    first, second = one.plan("q", chain), two.plan("q", chain)
    assert first.boundary == second.boundary == 16
    assert {(p.part, p.shard_start, p.shard_stop) for p in first.pieces} == {
        (0, 0, 1), (1, 0, 1), (2, 0, 1)
    }  # fmt: skip
    assert {(p.part, p.shard_start, p.shard_stop) for p in second.pieces} == {
        (0, 0, 1), (1, 1, 2), (2, 1, 2)
    }  # fmt: skip


def test_ranks_with_one_copy_store_it_once(rig: Rig) -> None:
    one, two = pair(rig, units=1)
    chain = one.chain(TOKENS)
    one.save("s", one.offers(chain, 16))
    assert {grant.outcome for grant in two.save("s", two.offers(chain, 16))} == {"held"}
    assert one.plan("r", chain).boundary == two.plan("r", chain).boundary == 16


def test_the_second_rank_gets_what_the_first_was_told(rig: Rig) -> None:
    """What is saved in between would give it a deeper boundary than the first rank's."""
    one, two = pair(rig)
    chain = one.chain(TOKENS)
    for rank in (one, two):
        rank.save("s", rank.offers(chain, 8))
    assert one.plan("r", chain).boundary == 8
    for rank in (one, two):
        rank.save("s", rank.offers(chain, 16))
    assert two.plan("r", chain).boundary == 8
    assert one.plan("r", chain).boundary == 8
    one.release("r")
    assert two.plan("r", chain).boundary == 16  # Alone again, nobody else was told less.


def test_other_engines_with_the_same_request_id_are_other_requests(rig: Rig) -> None:
    one = Client(rig, hybrid()).attach()
    other = Client(rig, hybrid())
    other.writer = "another engine"
    other.attach()
    chain = one.chain(TOKENS)
    one.save("s", one.offers(chain, 8))
    assert one.plan("r", chain).boundary == 8
    one.save("s", one.offers(chain, 16))
    assert other.plan("r", chain).boundary == 16


def test_one_rank_may_hold_everything_for_all(rig: Rig) -> None:
    one, two = pair(rig)
    chain = one.chain(TOKENS)
    for rank in (one, two):
        rank.save("s", rank.offers(chain, 16))
    one.all_ranks = True
    planned = one.plan("r", chain)
    assert {p.shard_start for p in planned.pieces} == {0}
    assert rig.gauge("leases") == 4 + 2 + 2
    assert rig.ask(ev.EvictAsked(9, 1, "", "", 0), cm.Evicted).objects == 0
    assert two.plan("r", chain).boundary == 16


# --- idempotence and ends


def test_a_plan_repeated_is_one_sight_and_one_set_of_leases(client: Client) -> None:
    saved(client, 16)
    chain = client.chain(TOKENS)
    first = client.plan("r", chain)
    for _ in range(5):
        assert client.plan("r", chain).pieces == first.pieces
    assert client.rig.gauge("leases") == len(first.pieces)
    sights = client.rig.machine._books.sights
    (shelf,) = client.rig.machine._books.catalog.shelves.values()
    assert [sights.count(shelf.digest, digest) for digest in chain.digests[1:]] == [2, 2, 2, 2, 1]
    assert client.rig.count("lookup_tokens") == len(TOKENS)
    client.release("r", "r")
    assert client.rig.gauge("leases") == 0


def test_repeating_with_tails_is_one_sight_of_them(client: Client) -> None:
    chain = client.chain(TOKENS)
    tail = ev.Tail(14, chain.digest_at(14), chain.digests[3])
    for _ in range(3):
        client.plan("r", chain, tails=[tail])
    (shelf,) = client.rig.machine._books.catalog.shelves.values()
    sights = client.rig.machine._books.sights
    assert sights.count(shelf.digest, tail.digest) == 1
    client.save("r", client.offers(chain, 14))
    assert sights.count(shelf.digest, tail.digest) == 1
    client.plan("q", chain, tails=[tail])
    assert sights.count(shelf.digest, tail.digest) == 2


def test_only_so_many_plans_are_remembered() -> None:
    rig = Rig(msgspec.structs.replace(small(), plans_max=2))
    client = Client(rig, hybrid()).attach()
    for number in range(4):
        client.plan(f"r{number}", client.chain(TOKENS))
    assert rig.ask(client.loading("r0"), cm.Loaded).reason == "not_planned"
    assert rig.ask(client.loading("r3"), cm.Loaded).reason == ""


def test_a_session_that_ends_ends_its_plans(rig: Rig, client: Client) -> None:
    saved(client, 16)
    other = Client(rig, hybrid()).attach()
    other.plan("r", other.chain(TOKENS))
    assert rig.gauge("leases") == 6
    other.close()
    assert rig.gauge("leases") == 0
    assert rig.count("lookups", "hit_host") == 1
