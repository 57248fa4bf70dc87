"""One request id, several calls: what was promised to one of them is kept, and never mixed up."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import Chain
from tiercache.testing.sim.rig import Client, Rig, hybrid, small, spans

MINE = list(range(20))
OTHER = list(range(100, 120))
ADMIN = 900


@pytest.fixture
def rig() -> Rig:
    return Rig(msgspec.structs.replace(small(64, 64), eager=True))


def on_disk(client: Client) -> None:
    for tokens in (MINE, OTHER):
        client.save(f"save-{tokens[0]}", client.offers(client.chain(tokens), 16))
    client.rig.run()
    evict(client.rig)


def evict(rig: Rig) -> cm.Evicted:
    return rig.ask(ev.EvictAsked(ADMIN, rig.number(), "", "host", 0), cm.Evicted)


def load(client: Client, boundary: int, chain: Chain) -> cm.Loaded:
    client.planned["r"] = (boundary, chain.digest_at(boundary))
    return client.rig.ask(client.loading("r"), cm.Loaded)


def test_another_prompt_under_the_same_id_is_not_taken_for_the_first(rig: Rig) -> None:
    client = Client(rig, hybrid()).attach()
    on_disk(client)
    mine, other = client.chain(MINE), client.chain(OTHER)
    assert client.plan("r", mine).boundary == client.plan("r", other).boundary == 16
    rig.run()
    assert load(client, 16, mine) == cm.Loaded(0, [], "not_planned")
    assert load(client, 16, other).boundary == 16


def test_engines_of_one_name_with_the_same_id_are_not_mixed_up(rig: Rig) -> None:
    one, two = (Client(rig, hybrid()).attach() for _ in range(2))
    on_disk(one)
    mine, other = one.chain(MINE), one.chain(OTHER)
    assert one.plan("r", mine).boundary == two.plan("r", other).boundary == 16
    rig.run()
    assert load(one, 16, mine) == cm.Loaded(0, [], "not_planned")
    assert load(two, 16, other).boundary == 16


def test_another_prompt_while_the_first_one_loads(rig: Rig) -> None:
    client = Client(rig, hybrid()).attach()
    on_disk(client)
    client.plan("r", client.chain(MINE))
    call = client.loading("r")
    assert rig.later(call) is None
    client.plan("r", client.chain(OTHER))
    rig.run()
    assert rig.answers[client.session, call.call] == cm.Loaded(0, [], "released")


def test_a_second_plan_leaves_the_bytes_of_the_first_in_place(rig: Rig) -> None:
    client = Client(rig, hybrid()).attach()
    client.save("s", client.offers(client.chain(MINE), 16))
    first = client.plan("r", client.chain(MINE))
    assert first.ready
    assert client.plan("r", client.chain(MINE), limit=3).boundary == 0
    assert evict(rig).objects == 0
    assert spans(client.plan("r", client.chain(MINE)).pieces) == spans(first.pieces)
    client.release("r")
    assert rig.gauge("leases") == 0


def test_all_ranks_get_a_boundary_inside_a_block(rig: Rig) -> None:
    ranks = [Client(rig, hybrid(2), ranks=2, rank=rank).attach() for rank in range(2)]
    chain = ranks[0].chain(MINE)
    for rank in ranks:
        rank.save("s", rank.offers(chain, 8) + rank.offers(chain, 18))
    for rank in ranks:
        asked = rank.plan("r", chain)
        assert asked.boundary == 8
        tails = [tail for tail in asked.candidates if tail.digest == chain.digest_at(18)]
        assert rank.plan("r", chain, tails=tails).boundary == 18
