"""Where a request can resume: boundaries, windows, codecs, ranks, and what must never be a hit."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.testing.sim.rig import BLOCK, TOKENS, Client, Rig, boundary, hybrid, saved, spans


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


# --- what is a hit


def test_nothing_is_stored_nothing_is_found(client: Client) -> None:
    planned = client.plan("r", client.chain(TOKENS))
    assert planned == cm.Planned(0, True, 0, [], [19, 20], [], "unknown_prefix")


def test_the_deepest_boundary_is_offered_with_all_its_pieces(client: Client) -> None:
    saved(client, 8, 16)
    planned = client.plan("r", client.chain(TOKENS))
    assert (planned.boundary, planned.ready, planned.ready_boundary) == (16, True, 16)
    assert planned.reason == ""
    assert spans(planned.pieces) == [
        (0, 0, 4), (0, 4, 8), (0, 8, 12), (0, 12, 16), (1, 0, 16), (2, 0, 16)
    ]  # fmt: skip
    assert planned.checkpoints == [19, 20]


def test_a_prompt_that_goes_another_way_resumes_where_they_part(client: Client) -> None:
    saved(client, 8, 16)
    assert boundary(client, [*TOKENS[:12], 99, 99, 99, 99, 99]) == 8
    assert boundary(client, [99, *TOKENS[1:]]) == 0


@pytest.mark.parametrize(("length", "expected"), [(15, 8), (16, 8), (17, 16), (18, 16)])
def test_a_token_is_never_applied_twice(client: Client, length: int, expected: int) -> None:
    """The last token must be computed: at exactly 16 tokens the state at 16 is one too deep."""
    saved(client, 8, 16)
    assert boundary(client, TOKENS[:length]) == expected


def test_a_continuation_may_resume_at_the_end(client: Client) -> None:
    saved(client, 16)
    assert boundary(client, TOKENS[:16], limit=16) == 16


def test_beyond_the_limit_is_a_reason(client: Client) -> None:
    saved(client, 16)
    planned = client.plan("r", client.chain(TOKENS[:16]))
    assert (planned.boundary, planned.reason) == (0, "beyond_limit")
    assert client.plan("one", client.chain(TOKENS[:1])).reason == "unknown_prefix"


# --- what must never be one


def without_state(client: Client) -> None:
    client.save("s", client.offers(client.chain(TOKENS), 16, parts=["kv"]))


def without_conv(client: Client) -> None:
    client.save("s", client.offers(client.chain(TOKENS), 16, parts=["kv", "recurrent"]))


def without_a_block(client: Client) -> None:
    offers = client.offers(client.chain(TOKENS), 16)
    client.save("s", [offer for offer in offers if offer.end != 12])


def conv_from_one_block_before(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 16, parts=["kv", "recurrent"]))
    client.save("s", client.offers(chain, 12, parts=["conv"]))


def recurrent_from_one_block_before(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 16, parts=["kv", "conv"]))
    client.save("s", client.offers(chain, 12, parts=["recurrent"]))


def half_committed(client: Client) -> None:
    grants = client.reserve("s", client.offers(client.chain(TOKENS), 16))
    client.commit(grants[:-1])
    client.rig.run()


def not_sealed(client: Client) -> None:
    client.commit(client.reserve("s", client.offers(client.chain(TOKENS), 16)))


def cancelled(client: Client) -> None:
    grants = client.reserve("s", client.offers(client.chain(TOKENS), 16))
    client.commit(grants[:-1])
    client.rig.tell(ev.Cancelled(client.session, [grants[-1].ticket]))
    client.rig.run()


def of_another_namespace(client: Client) -> None:
    other = Client(client.rig, client.layout)
    other.namespace = replace(client.namespace, weights="other")
    saved(other.attach(), 16)


def of_another_tenant(client: Client) -> None:
    other = Client(client.rig, client.layout).attach()
    other.salt = "tenant"
    saved(other, 16)


def of_another_adapter(client: Client) -> None:
    other = Client(client.rig, client.layout).attach()
    other.lora = "adapter"
    saved(other, 16)


def in_another_codec(client: Client) -> None:
    offers = client.offers(client.chain(TOKENS), 16)
    client.save("s", [replace_codec(offer, "int8") for offer in offers])


def replace_codec(offer: ev.Offer, codec: str) -> ev.Offer:
    return ev.Offer(
        offer.part, offer.shard, codec, offer.digest, offer.base, offer.start, offer.end,
        offer.nbytes, offer.parent, offer.requantised,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_state, "no_state"),
        (without_conv, "no_state"),
        (without_a_block, "no_state"),  # What lies behind the gap does not count.
        (conv_from_one_block_before, "incomplete"),
        (recurrent_from_one_block_before, "incomplete"),
        (half_committed, "no_state"),
        (not_sealed, "unknown_prefix"),
        (cancelled, "no_state"),
        (of_another_namespace, "unknown_prefix"),
        (of_another_tenant, "unknown_prefix"),
        (of_another_adapter, "unknown_prefix"),
        (in_another_codec, "no_state"),
    ],
)
@pytest.mark.parametrize("lower", [0, 8])
def test_half_a_state_is_no_hit(
    client: Client, spoil: Callable[[Client], None], reason: str, lower: int
) -> None:
    """It gives the next lower legal boundary, or a miss with its reason."""
    if lower:
        saved(client, lower)
    spoil(client)
    planned = client.plan("r", client.chain(TOKENS))
    assert planned.boundary == lower
    assert planned.reason == ("" if lower else reason)
    assert (planned.pieces == []) == (lower == 0)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_attention_one_token_short_is_not_taken_in(client: Client, length: int) -> None:
    offers = client.offers(client.chain(TOKENS), 16)
    last = offers[3]
    nbytes = last.nbytes * length // BLOCK
    short = ev.Offer(0, last.shard, "native", last.digest, b"", last.start, 16, nbytes, b"", 0)
    outcomes = [grant.outcome for grant in client.reserve("s", [short])]
    assert outcomes == ["granted" if length == BLOCK else "invalid"]


# --- inside blocks


def test_a_turn_that_ended_inside_a_block_is_found_in_two_steps(client: Client) -> None:
    saved(client, 8, 14)
    chain = client.chain(TOKENS)
    first = client.plan("r", chain)
    assert (first.boundary, [tail.tokens for tail in first.candidates]) == (8, [14])
    (tail,) = first.candidates
    assert (tail.digest, tail.base) == (chain.digest_at(14), chain.digests[3])
    second = client.plan("r", chain, tails=first.candidates)
    assert (second.boundary, second.candidates) == (14, [])
    assert spans(second.pieces) == [
        (0, 0, 4), (0, 4, 8), (0, 8, 12), (0, 12, 14), (1, 0, 14), (2, 0, 14)
    ]  # fmt: skip


def test_a_turn_that_ended_in_the_first_block_is_found(client: Client) -> None:
    saved(client, 3)
    first = client.plan("r", client.chain(TOKENS))
    assert [tail.tokens for tail in first.candidates] == [3]
    assert client.plan("r", client.chain(TOKENS), tails=first.candidates).boundary == 3


def test_a_tail_needs_its_partial_block(client: Client) -> None:
    chain = client.chain(TOKENS)
    saved(client, 12)
    client.save("s", client.offers(chain, 14, parts=["recurrent", "conv"]))
    first = client.plan("r", chain)
    assert client.plan("r", chain, tails=first.candidates).boundary == 12


def test_tails_above_the_limit_are_neither_offered_nor_taken(client: Client) -> None:
    saved(client, 14)
    chain = client.chain(TOKENS[:15])
    assert client.plan("a", chain, limit=13).candidates == []
    tail = ev.Tail(14, chain.digest_at(14), chain.digests[3])
    assert client.plan("b", chain, limit=13, tails=[tail]).boundary == 0
    assert client.plan("c", chain, limit=14, tails=[tail]).boundary == 14


def test_a_tail_beyond_a_gap_is_not_reached(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.save("s", [offer for offer in client.offers(chain, 14) if offer.end != 8])
    tail = ev.Tail(14, chain.digest_at(14), chain.digests[3])
    assert client.plan("r", chain, tails=[tail]).boundary == 0


def test_a_tail_that_is_not_held_yet_is_not_offered(client: Client) -> None:
    chain = client.chain(TOKENS)
    saved(client, 12)
    grants = client.reserve("s", client.offers(chain, 14, start=12))
    assert client.plan("r", chain).candidates == []
    client.commit(grants)
    client.rig.run()
    assert [tail.tokens for tail in client.plan("r", chain).candidates] == [14]


def test_the_deepest_tails_are_offered(client: Client) -> None:
    ends = (1, 2, 3, 5, 6, 7, 9, 10, 11, 13)
    for end in ends:
        client.save("s", client.offers(client.chain(TOKENS), end))
    planned = client.plan("r", client.chain(TOKENS))
    assert [tail.tokens for tail in planned.candidates] == list(ends[-8:])


def test_a_popular_tail_is_found_though_many_others_end_in_its_block(client: Client) -> None:
    """Eight later turns end in the same block; the first one's engine comes back and saves again."""
    saved(client, 9)
    for other in range(8):
        saved(client, 10, tokens=[*TOKENS[:8], 100 + other, 9, 9, 9])
    assert 9 not in [tail.tokens for tail in client.plan("a", client.chain(TOKENS)).candidates]
    assert {g.outcome for g in client.reserve("b", client.offers(client.chain(TOKENS), 9))} == {
        "held"
    }
    assert 9 in [tail.tokens for tail in client.plan("c", client.chain(TOKENS)).candidates]


def test_a_client_that_names_what_it_knows_needs_one_step(client: Client) -> None:
    saved(client, 14)
    chain = client.chain(TOKENS)
    tail = ev.Tail(14, chain.digest_at(14), chain.digests[3])
    planned = client.plan("r", chain, tails=[tail, tail])
    assert (planned.boundary, planned.candidates) == (14, [])
