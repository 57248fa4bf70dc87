"""Shards that lie at several nodes: an engine whose ranks need them all gathers them, for one boundary."""

from math import inf

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.gathering import RANKS_MAX, SPLIT_MAX, for_some
from tiercache.core.cluster.walking import Sought, route_of
from tiercache.state import Kind, Layout
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import clustered
from tiercache.testing.sim.rig import BLOCK, TOKENS, Client, Rig, evict, hybrid, part, saved
from tiercache.testing.sim.seated import RANKS
from tiercache.testing.sim.twin_engines import engine_of
from tiercache.testing.sim.twinned import Twinned, save, twinned


@pytest.fixture
def twins() -> Twinned:
    """Engine A has a boundary at 16: half of its shards at a1, half at a2."""
    found = twinned()
    save(found.one, 16)
    found.gossip()
    return found


def on_one_node(twins: Twinned, ranks: int, layout: Layout | None = None) -> list[Client]:
    clients = [
        Client(twins.rig("b1"), layout or hybrid(4), ranks=ranks, rank=rank)
        for rank in range(ranks)
    ]
    clients[0].all_ranks = True
    return [client.attach() for client in clients]


def resumed(twins: Twinned, head: Client, *, reshard: bool = False, request: str = "r") -> int:
    asked = head.planning(request, head.chain(TOKENS))
    asked = msgspec.structs.replace(asked, reshard=reshard)
    assert head.rig.later(asked) is None
    twins.locate("b1")
    return planned(head, asked).boundary


def test_an_engine_on_one_node_gathers_what_one_on_two_has(twins: Twinned) -> None:
    ranks = on_one_node(twins, RANKS)
    assert resumed(twins, ranks[0]) == 16
    assert {pull.peer for pull in twins.rig("b1").work if isinstance(pull, ccm.Pull)} == {
        "a1",
        "a2",
    }
    assert twins.nodes.pull("b1") == 4 + 2 * RANKS
    chain = ranks[0].chain(TOKENS)
    for rank in ranks:
        wanted = [rank.wanted(chain, part, 16) for part in (0, 1, 2)]
        assert None not in rank.rig.ask(rank.fetching("get", wanted), cm.Fetched).pieces


@pytest.mark.parametrize("begun", [0, 4, 8])
def test_models_that_have_only_blocks_are_gathered_too(begun: int) -> None:
    """Also when the beginning is here, or at one of them whole: what is given is no news."""
    twins, layout = twinned(), Layout((part("kv", Kind.KV, None, BLOCK, RANKS),), BLOCK)
    save(engine_of(twins.nodes, ("a1", "a2"), layout, (RANKS, 2)).ranks, 16)
    ranks = on_one_node(twins, RANKS, layout)
    if begun:
        save(ranks, begun)
    twins.gossip()
    assert resumed(twins, ranks[0]) == 16
    assert twins.nodes.pull("b1") == RANKS * (16 - begun) // BLOCK
    loading = ranks[0].loading("r")
    assert ranks[0].rig.ask(loading, cm.Loaded).boundary == 16


def test_a_state_for_all_does_not_hide_what_some_have_deeper(twins: Twinned) -> None:
    """The asker has all blocks up to 8, not the states there: those go with what is deeper."""
    strays = [Client(twins.rig("a1"), hybrid(4), ranks=RANKS, rank=at).attach() for at in (2, 3)]
    save([*strays, *twins.one[:2]], 8)
    (head, *_) = on_one_node(twins, RANKS)
    head.save("s", head.offers(head.chain(TOKENS), 8, parts=["kv"]))
    plan(head)
    (question,) = head.rig.take(ccm.Locate)
    answer = twins.nodes.ask("b1", msgspec.structs.replace(question, peer="a1"))
    assert answer is not None
    assert (question.whole, answer.boundary) == (8, 16)
    found = sorted((r.end, r.key.part, r.key.shard.start) for r in answer.records)
    states = [(8, part, rank) for part in ("conv", "recurrent") for rank in range(RANKS)]
    deep = [(16, part, rank) for part in ("conv", "recurrent") for rank in (0, 1)]
    assert found == sorted([*states, *deep, (12, "kv", 0), (16, "kv", 0)])


def test_what_one_has_alone_is_no_boundary(twins: Twinned) -> None:
    evict(twins.rig("a2"))
    (head, *_) = on_one_node(twins, RANKS)
    assert resumed(twins, head) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_resharding_ranks_gather_parts_of_what_they_need(twins: Twinned, ranks: int) -> None:
    (head, *_) = on_one_node(twins, ranks)
    assert resumed(twins, head, request="no") == 0
    head.release("no")
    assert resumed(twins, head, reshard=True) == 16
    assert twins.nodes.pull("b1") == 4 + 2 * RANKS
    loading = head.loading("r")
    found = head.rig.ask(loading, cm.Loaded)
    assert found.boundary == 16
    assert len(found.pieces) == 4 + 2 * RANKS // ranks


def test_with_resharding_ranks_gather_more_than_each_needs() -> None:
    """Engine A has two ranks, on two nodes; the four of B need a half each of what one of those has."""
    twins = twinned()
    save(engine_of(twins.nodes, ("a1", "a2"), hybrid(4), (2, 1)).ranks, 16)
    twins.gossip()
    (head, *_) = on_one_node(twins, RANKS)
    assert resumed(twins, head, reshard=True) == 16
    assert twins.nodes.pull("b1") == 4 + 2 * 2


def test_ranks_that_sit_otherwise_gather_what_they_need(twins: Twinned) -> None:
    """One rank at b1, three at b2: those need one shard of a1, and two of a2."""
    ranks = engine_of(twins.nodes, ("b1", "b2"), hybrid(4), (4, 1)).ranks
    asked = plan(ranks[0])
    twins.locate("b1")
    ends, questions = twins.agree()
    assert ends == [16]
    assert {question.peer for question in questions} >= {"a1", "a2"}
    assert planned(ranks[0], asked).boundary == 16
    pulled = [r for p in twins.rig("b2").take(ccm.Pull) for r, _ in p.objects]
    assert {r.key.shard.start for r in pulled if r.key.part == "recurrent"} == {1, 2, 3}


def test_half_of_what_a_node_has_is_of_use() -> None:
    """Engine A has two ranks; of the four of B three sit at b1, and the third needs half a shard of a2."""
    twins = twinned()
    save(engine_of(twins.nodes, ("a1", "a2"), hybrid(4), (2, 1)).ranks, 16)
    twins.gossip()
    ranks = engine_of(twins.nodes, ("b1", "b2"), hybrid(4), (4, 3)).ranks
    asked = ranks[0].planning("r", ranks[0].chain(TOKENS))
    asked = msgspec.structs.replace(asked, reshard=True)
    assert ranks[0].rig.later(asked) is None
    twins.locate("b1")
    assert twins.agree()[0] == [16]
    assert planned(ranks[0], asked).boundary == 16


def test_of_what_some_could_resume_the_deepest_is_told(twins: Twinned) -> None:
    """Rank 0 could go on at 16, rank 1 too, rank 2 at 8 only: 16, and what the first two need."""
    stray = Client(twins.rig("a1"), hybrid(4), ranks=RANKS, rank=2).attach()
    saved(stray, 8)
    (head, *_) = on_one_node(twins, RANKS)
    plan(head)
    (question,) = head.rig.take(ccm.Locate)
    assert question.some
    answer = twins.nodes.ask("b1", msgspec.structs.replace(question, peer="a1"))
    assert answer is not None
    assert answer.boundary == 16
    states = {r.key.shard.start for r in answer.records if r.key.part == "recurrent"}
    assert states == {0, 1}
    whole = msgspec.structs.replace(question, peer="a1", some=False)
    assert twins.nodes.ask("b1", whole) == ccm.Located(0, [])


def test_what_all_could_resume_comes_first(twins: Twinned) -> None:
    strays = [Client(twins.rig("a1"), hybrid(4), ranks=RANKS, rank=at).attach() for at in (2, 3)]
    for stray in strays:
        saved(stray, 8)
    saved(twins.one[0], 8)
    saved(twins.one[1], 8)
    (head, *_) = on_one_node(twins, RANKS)
    plan(head)
    (question,) = head.rig.take(ccm.Locate)
    answer = twins.nodes.ask("b1", msgspec.structs.replace(question, peer="a1"))
    assert answer is not None
    assert (answer.boundary, len(answer.records)) == (8, 2 + 2 * RANKS)


def test_a_survey_asks_for_all_ranks(twins: Twinned) -> None:
    """Each rank is told its own: one would be told of what another has not."""
    (head, *_) = on_one_node(twins, RANKS)
    assert head.rig.later(head.surveying("s", head.chain(TOKENS).digests[1:])) is None
    (question,) = head.rig.take(ccm.Locate)
    assert not question.some


def test_no_more_ranks_are_looked_at_one_by_one_than_may_be() -> None:
    layout = hybrid(4 * RANKS_MAX)
    rig = Rig(clustered(pages=300))
    rig.tell(cev.StandingHeld(inf))
    ranks = [
        Client(rig, layout, ranks=4 * RANKS_MAX, rank=at).attach() for at in range(2 * RANKS_MAX)
    ]
    for rank in ranks:
        chain = rank.chain(TOKENS)
        rank.save("s", rank.offers(chain, 4))
    shelf = rig.machine._books.catalog.shelves[ranks[0].namespace.digest]
    sought = Sought("r", list(chain.digests[1:]), 20, 4 * RANKS_MAX, ("native",), reshard=False)
    found = for_some(route_of(shelf, layout, sought), 4 * RANKS_MAX, in_host=True)
    assert found.position == 0
    assert len({item.slot.shard for item in found.items}) == RANKS_MAX
    assert len(found.items) == 2 * RANKS_MAX + 1, "one of KV, for all"


@pytest.mark.parametrize(("looks", "looked_at"), [(100, 4), (8, 2), (4, 1), (1, 1)])
def test_of_a_long_prompt_fewer_ranks_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, looks: int, looked_at: int
) -> None:
    """Whoever asks names as many blocks as a message holds."""
    monkeypatch.setattr("tiercache.core.cluster.gathering.LOOKS_MAX", looks)
    rig = Rig(clustered())
    rig.tell(cev.StandingHeld(inf))
    ranks = [Client(rig, hybrid(4), ranks=RANKS, rank=at).attach() for at in range(RANKS)]
    save(ranks, 16)
    chain = ranks[0].chain(TOKENS)
    shelf = rig.machine._books.catalog.shelves[ranks[0].namespace.digest]
    sought = Sought("r", list(chain.digests[1:]), 20, RANKS, ("native",), reshard=False)
    found = for_some(route_of(shelf, hybrid(4), sought), RANKS, in_host=True)
    assert found.position == 3
    states = {item.slot.shard for item in found.items if item.slot.part == "recurrent"}
    assert len(states) == looked_at
    other = sought._replace(digests=[bytes(32)], limit=4)
    assert for_some(route_of(shelf, hybrid(4), other), RANKS, in_host=True).position == -1


def test_finer_ways_end_somewhere() -> None:
    """Whoever asks names any number of ranks; few engines have that many."""
    layout = hybrid(4 * SPLIT_MAX)
    rig = Rig(clustered())
    rig.tell(cev.StandingHeld(inf))
    splits = (SPLIT_MAX, 2 * SPLIT_MAX)
    fine, finer = (Client(rig, layout, ranks=split).attach() for split in splits)
    for client, end in ((fine, 4), (finer, 8)):
        saved(client, end)
    shelf = rig.machine._books.catalog.shelves[fine.namespace.digest]
    digests = list(fine.chain(TOKENS).digests[1:])
    for ranks, position in ((SPLIT_MAX // 2, 0), (SPLIT_MAX, 0), (2 * SPLIT_MAX, 1)):
        sought = Sought("r", digests, 20, ranks, ("native",), reshard=True)
        found = for_some(route_of(shelf, layout, sought), ranks, in_host=True)
        assert found.position == position


def test_a_way_to_split_that_there_is_not_is_not_looked_for() -> None:
    """Of three units no power of two is a part."""
    twins = twinned()
    layout = hybrid(3)
    saved(Client(twins.rig("a1"), layout, ranks=3, rank=0).attach(), 16)
    twins.gossip()
    (head, *_) = on_one_node(twins, 3, layout)
    assert resumed(twins, head, reshard=True) == 0
    assert twins.nodes.pull("b1") == 4 + 2
    twins.rig("b1").tell(cev.PeerLeft(-1))
    head.release("r")
