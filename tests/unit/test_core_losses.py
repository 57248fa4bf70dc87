"""Every token of every prompt is resumed or computed, for exactly one reason."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.losses import split
from tiercache.testing.sim.rig import TOKENS, Client, Rig, evict, hybrid, on_disk, saved, small


@pytest.fixture
def client() -> Client:
    return Client(Rig(msgspec.structs.replace(small(nvme_pages=64), eager=True)), hybrid()).attach()


def lost(client: Client) -> dict[str, int]:
    """Return the reasons that were given, and how often; what was resumed is one of them."""
    counters = client.rig.machine.counters
    found = {reason: count for reason, count in counters["lost_tokens"].items() if count}
    hit = sum(counters["hit_tokens"].values())
    assert hit + sum(found.values()) == counters["lookup_tokens"][""]
    return found | ({"hit": hit} if hit else {})


def test_a_new_prompt_is_unseen(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    assert lost(client) == {"unseen": 20}


def test_one_that_was_seen_and_is_not_there(client: Client) -> None:
    client.plan("r", client.chain(TOKENS))
    client.plan("again", client.chain(TOKENS))
    assert lost(client) == {"unseen": 20, "not_held": 20}


def test_blocks_without_a_state(client: Client) -> None:
    client.save("s", client.offers(client.chain(TOKENS), 12, parts=["kv"]))
    client.plan("r", client.chain(TOKENS))
    assert lost(client) == {"no_state": 12, "unseen": 8}


def test_a_state_without_its_blocks(client: Client) -> None:
    offers = client.offers(client.chain(TOKENS), 12)
    client.save("s", [offer for offer in offers if offer.part or offer.end != 12])
    client.plan("r", client.chain(TOKENS))
    assert lost(client) == {"incomplete": 12, "unseen": 8}


def test_deeper_blocks_behind_a_hit(client: Client) -> None:
    saved(client, 8)
    client.save("s", client.offers(client.chain(TOKENS), 16, parts=["kv"]))
    client.plan("r", client.chain(TOKENS))
    assert lost(client) == {"hit": 8, "no_state": 8, "unseen": 4}


def test_what_lies_beyond_the_limit(client: Client) -> None:
    saved(client, 8, 16)
    client.plan("r", client.chain(TOKENS), limit=12)
    assert lost(client) == {"hit": 8, "beyond_limit": 8, "unseen": 4}


def test_what_comes_too_late(client: Client) -> None:
    on_disk(client, 8, 16)
    client.plan("r", client.chain(TOKENS))
    client.rig.ask(client.loading("r", wait_s=0.0), cm.Loaded)
    assert lost(client) == {"late": 16, "unseen": 4}
    assert client.rig.count("lookups", "declined") == 1


def test_what_comes_in_part(client: Client) -> None:
    on_disk(client, 8, 16)
    client.plan("half", client.chain(TOKENS[:9]))
    client.rig.later(client.loading("half"))
    client.rig.run()
    client.plan("r", client.chain(TOKENS))
    client.rig.ask(client.loading("r", wait_s=0.0), cm.Loaded)
    assert lost(client) == {"hit": 8 + 8, "late": 8, "unseen": 1 + 4}
    assert client.rig.count("lookups", "hit_nvme") == 2


def test_who_leaves_early(client: Client) -> None:
    on_disk(client, 16)
    client.plan("r", client.chain(TOKENS))
    client.release("r")
    assert lost(client) == {"aborted": 20}


def test_a_prompt_planned_anew_is_counted_as_it_was_last(client: Client) -> None:
    on_disk(client, 16)
    client.plan("r", client.chain(TOKENS))
    client.plan("r", client.chain(TOKENS[:10]))
    assert lost(client) == {"no_state": 8, "unseen": 2}


def test_a_rank_that_finds_less_asks_again_before_it_is_counted() -> None:
    """What the second rank would get without its candidates is not what the request gets."""
    rig = Rig(msgspec.structs.replace(small(nvme_pages=64), eager=True))
    ranks = [Client(rig, hybrid(units=2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    chain = ranks[0].chain(TOKENS)
    for client in ranks:
        client.save("s", client.offers(chain, 18))
    rig.run()
    evict(rig)
    (tail,) = ranks[0].plan("r", chain).candidates
    ranks[0].plan("r", chain, tails=[tail])
    assert ranks[1].plan("r", chain).boundary == 0
    assert ranks[1].plan("r", chain, tails=[tail]).boundary == 18
    call = ranks[0].loading("r")
    rig.later(call)
    rig.run()
    loaded = rig.answers[call.session, call.call]
    assert isinstance(loaded, cm.Loaded)
    assert loaded.boundary == 18
    assert lost(ranks[0]) == {"hit": 18, "unseen": 2}


def test_tokens_are_split_at_edges_that_may_lie_anywhere() -> None:
    assert split(4, ("a", 2), ("b", 9), ("c", 9), ("d", 12)) == {"b": 5, "d": 3}
    assert split(4, ("a", 4)) == {}


def test_many_requests_in_a_scripted_run(client: Client) -> None:
    """One request of each kind, one after the other: hit + miss + declined + aborted = lookups."""
    rig = client.rig
    client.plan("unseen", client.chain(TOKENS))
    on_disk(client, 8, 16)
    client.plan("aborted", client.chain(TOKENS))
    client.release("aborted")
    client.plan("late", client.chain(TOKENS))
    rig.ask(client.loading("late", wait_s=0.0), cm.Loaded)
    client.release("late")
    rig.run()
    client.plan("hit", client.chain(TOKENS))
    client.plan("beyond", client.chain(TOKENS[:8]))
    counters = rig.machine.counters
    assert sum(counters["lookups"].values()) == 5
    assert counters["lookups"]["miss"] == sum(counters["misses"].values()) == 2
    assert lost(client) == {
        "unseen": 20, "aborted": 20, "late": 16, "not_held": 4 + 4, "hit": 16, "beyond_limit": 8
    }  # fmt: skip


def test_a_survey_counts_its_tokens_too(client: Client) -> None:
    saved(client, 8)
    client.save("s", client.offers(client.chain(TOKENS), 12, parts=["kv"]))
    digests = list(client.chain(TOKENS).digests[1:])
    until = client.rig.now + 1.0
    for number in range(2):
        event = ev.SurveyAsked(
            client.session, client.rig.number(), f"r{number}", "", "", digests, ("native",), until
        )
        client.rig.tell(event)
    assert lost(client) == {"hit": 16, "incomplete": 8, "unseen": 8, "not_held": 8}
