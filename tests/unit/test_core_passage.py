"""The machine tells its eviction policies what requests do, and follows them."""

import random

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Evicting, Limits, Protecting, Retaining
from tiercache.core.passage import Passage
from tiercache.core.policy.pointwise import Pointwise
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.visits import Tree
from tiercache.models import ModelShape
from tiercache.replay.engine import Cell, cache_of, shape_of, visits
from tiercache.replay.traces import Request, Trace
from tiercache.state import Care, Kind, Layout, Part, Tensor
from tiercache.testing.sim.rig import BLOCK, PAGE, Client, Rig, boundary, hybrid, part, small


def limits(policy: str = "index", pages: int = 64, **others: object) -> Limits:
    evicting = msgspec.structs.replace(Evicting(), policy=policy)
    return msgspec.structs.replace(
        small(pages), evicting=evicting, retaining=Retaining("marconi"), **others
    )


def whole_pages() -> Layout:
    """A block of KV and a checkpoint take a page each: nothing is lost to rounding."""

    def tensor(size: int) -> tuple[Tensor, ...]:
        return (Tensor("values", "int64", (size,), ("head",)),)

    kv = Part("kv", Kind.KV, None, BLOCK, 1, tensor(PAGE // 8 // BLOCK))
    return Layout((kv, Part("state", Kind.RECURRENT, 1, 0, 1, tensor(PAGE // 8))), BLOCK)


def turn(client: Client, name: str, tokens: list[int], care: Care | None = None) -> int:
    """Plan, save what is missing and let go; return where it resumed."""
    chain = client.chain(tokens)
    asked = client.planning(name, chain, capture=ev.Capture(0, BLOCK))
    if care is not None:
        asked = msgspec.structs.replace(asked, care=care)
    planned = client.rig.ask(asked, cm.Planned)
    kv = client.offers(chain, len(tokens) // BLOCK * BLOCK, start=planned.boundary, parts=["kv"])
    states = [
        client.offer(chain, index, end)
        for end in planned.checkpoints
        for index, each in enumerate(client.layout.parts)
        if each.is_snapshot
    ]
    client.release(name)
    client.save(name, [*kv, *states])
    return planned.boundary


def order_of(rig: Rig) -> Pointwise[object]:
    order = rig.machine._books.passage._orders[None]
    assert isinstance(order, Pointwise)
    return order  # type: ignore[return-value]


def talks(seed: int, count: int) -> list[tuple[float, list[int]]]:
    """Conversations under a shared start that go on, fork and end, in order of time."""
    chance = random.Random(seed)
    found: list[tuple[float, list[int]]] = []
    for talk in range(count):
        at = chance.uniform(0, 600)
        tokens = [1] * 8 if chance.random() < 0.5 else []
        for _ in range(chance.choice((1, 1, 2, 5))):
            tokens = tokens + [talk + 10] * (4 * chance.randint(1, 4))
            found.append((at, [*tokens, 0]))
            at += chance.expovariate(1 / 20)
    return sorted(found, key=lambda pair: pair[0])


@pytest.mark.parametrize("policy", ["point-lru", "index", "hyper", "auto"])
def test_a_node_decides_as_the_replay_does(policy: str) -> None:
    pages, layout = 60, whole_pages()
    rig = Rig(limits(policy, pages))
    client = Client(rig, layout).attach()
    shelf = next(iter(rig.machine._books.catalog.shelves.values()))
    model = ModelShape("m", PAGE // BLOCK, PAGE, shelf.work, "test")
    requests, resumed = [], []
    start = rig.now
    for number, (at, tokens) in enumerate(talks(5, 120)):
        rig.wait(max(0.0, start + at - rig.now))
        digests = list(client.chain(tokens).digests[1 : len(tokens) // BLOCK + 1])
        requests.append(Request(rig.now, len(tokens), digests))  # type: ignore[arg-type]
        resumed.append(turn(client, f"r{number}", tokens) // BLOCK)
    reuse = Reuse(65_536)
    cache = cache_of(policy, pages * PAGE, reuse)
    trace = Trace("t", BLOCK, requests)
    tree = Tree("t", shape_of(model, BLOCK))
    replayed = []
    for visit, _ in visits(trace, Cell(model, pages * PAGE, policy), tree, None):
        reuse.visit(visit)
        replayed.append(cache.visit(visit))
    assert sum(resumed) > 100
    assert rig.count("evictions", "host") > 100
    # What is being written cannot go, and in a replay it can: now and then another point goes instead.
    same = sum(a == b for a, b in zip(resumed, replayed, strict=True))
    assert same >= 0.97 * len(replayed)
    assert resumed[:64] == replayed[:64]


def test_what_is_worth_more_stays() -> None:
    """A flood of prompts that never come back does not wipe out a conversation that goes on."""
    rig = Rig(limits("auto", pages=40))
    client = Client(rig, whole_pages()).attach()
    for number in range(300):
        turn(client, f"once{number}", [1000 + number] * 17)
        rig.wait(1.0)
        if number % 4 == 0:
            turn(client, f"talk{number}", [7] * (17 + number // 4 * 4 % 60))
            rig.wait(1.0)
    assert rig.gauge("eviction_policy", rig.machine._books.passage.standing.current) == 1.0  # type: ignore[union-attr]
    assert rig.gauge("ghosts") > 100
    assert set(rig.machine.gauges()["whatif_saved"]) == {"0.5", "1", "2", "4"}
    assert boundary(client, [7] * 80) > 0


def test_a_plain_lru_is_told_nothing() -> None:
    rig = Rig(limits("lru"))
    client = Client(rig, whole_pages()).attach()
    turn(client, "a", [1] * 17)
    passage = rig.machine._books.passage
    assert (passage.standing, passage._orders, passage._ways) == (None, {}, {})
    assert rig.gauge("eviction_policy", "lru") == 1.0
    assert set(rig.machine.gauges()["whatif_saved"].values()) == {0.0}
    client.rig.ask(ev.ClearAsked(0, rig.number(), ""), cm.Evicted)


def test_what_a_request_writes_makes_its_way_longer() -> None:
    rig = Rig(limits())
    client = Client(rig, whole_pages()).attach()
    chain = client.chain([1] * 25)
    client.rig.ask(client.planning("a", client.chain([1] * 9)), cm.Planned)
    client.save("a", client.offers(chain, 8))
    client.save("a", client.offers(chain, 20, start=8, parts=["kv"]))
    passage = rig.machine._books.passage
    assert next(iter(passage._ways.values())) == (2, list(chain.digests[1:6]))
    forest = order_of(rig)._canopy.forest
    assert {point.node.end for point in forest.points_of(client.namespace.digest)} == {2}
    client.save("a", client.offers(chain, 24, start=20, parts=["kv"]))
    client.save("a", client.offers(chain, 24, parts=["state"]))
    ends = {point.node.end for point in forest.points_of(client.namespace.digest)}
    assert ends == {2, 6}
    client.release("a")  # It may save all the same.
    assert turn(client, "b", [1] * 27) == 24


def test_a_prompt_that_was_not_planned_is_told_from_its_start() -> None:
    rig = Rig(limits())
    client = Client(rig, whole_pages()).attach()
    chain = client.chain([1] * 20)
    client.save(
        "a", client.offers(chain, 16, start=8)
    )  # From somewhere inside: nobody knows where.
    assert not order_of(rig)._canopy.forest.points
    (nonsense, *_) = client.offers(chain, 16)
    client.save("n", [msgspec.structs.replace(nonsense, part=9)])
    assert not order_of(rig)._canopy.forest.points
    client.save("b", client.offers(chain, 16))
    assert order_of(rig)._canopy.forest.points == 1
    assert order_of(rig)._canopy.forest.blocks == 4


def test_tails_hang_at_the_block_before_them() -> None:
    rig = Rig(limits(pages=16))
    client = Client(rig, hybrid()).attach()
    chain = client.chain([1] * 11)
    client.plan("a", chain)
    client.save("a", client.offers(chain, 10))
    client.release("a")
    (point,) = order_of(rig)._canopy.forest.points_of(client.namespace.digest)
    assert point.node.end == 2
    tail = ev.Tail(10, chain.digest_at(10), chain.digests[2])
    assert client.plan("b", chain, tails=[tail]).boundary == 10
    assert order_of(rig)._in_use(client.namespace.digest, chain.digests[2])
    assert not order_of(rig)._in_use(b"nobody", chain.digests[2])
    assert not order_of(rig)._in_use(client.namespace.digest, b"nothing")
    client.release("b")
    assert not order_of(rig)._in_use(client.namespace.digest, chain.digests[2])
    for number in range(20):
        turn(client, f"x{number}", [number + 5] * 9)
        rig.wait(1.0)
    assert rig.count("evictions", "host") > 0


def test_without_checkpoints_every_block_serves() -> None:
    layout = Layout((part("kv", Kind.KV, None, BLOCK),), BLOCK)
    rig = Rig(limits(pages=12))
    client = Client(rig, layout).attach()
    assert turn(client, "a", [1] * 17) == 0
    assert turn(client, "b", [1] * 13 + [2] * 8) == 12
    for number in range(10):
        turn(client, f"x{number}", [number + 5] * 9)
        rig.wait(1.0)
    assert rig.count("evictions", "host") > 0


def test_nothing_is_told_of_what_shall_not_be_stored() -> None:
    rig = Rig(limits())
    client = Client(rig, whole_pages()).attach()
    turn(client, "a", [1] * 17, Care(store=False))
    assert order_of(rig)._canopy.forest.points == 0
    turn(client, "b", [1] * 17)
    turn(client, "c", [1] * 25, Care(store=False))
    assert {
        p.node.end for p in order_of(rig)._canopy.forest.points_of(client.namespace.digest)
    } == {4}


def test_a_namespace_that_is_gone_is_forgotten() -> None:
    rig = Rig(limits("auto", namespaces_max=2))
    client = Client(rig, whole_pages()).attach()
    turn(client, "a", [1] * 17)
    passage = rig.machine._books.passage
    assert passage.standing is not None
    assert len(passage.standing.reuse) == 1
    rig.ask(ev.ClearAsked(0, rig.number(), client.namespace.digest.hex()), cm.Evicted)
    assert len(passage.standing.reuse) == 0
    assert order_of(rig)._canopy.forest.blocks == 0
    client.close()
    for salt in ("x", "y", "z"):
        other = Client(rig, whole_pages())
        other.salt = salt
        other.attach()
        turn(other, "a", [2] * 17)
        rig.ask(ev.ClearAsked(0, rig.number(), ""), cm.Evicted)
        other.close()
    assert len(passage._trees) <= 2


def test_ways_are_bounded() -> None:
    rig = Rig(limits(way_blocks_max=5))
    client = Client(rig, whole_pages()).attach()
    for number in range(4):
        client.plan(f"r{number}", client.chain([number] * 9))
    passage = rig.machine._books.passage
    assert [request[2] for request in passage._ways] == ["r2", "r3"]
    client.plan("long", client.chain([9] * 29))
    assert not passage._ways


def test_the_number_of_ways_is_bounded() -> None:
    rig = Rig(limits(recent_requests_max=3))
    client = Client(rig, whole_pages()).attach()
    passage = rig.machine._books.passage
    for number in range(6):
        client.plan(f"short{number}", client.chain([number] * 2))
    assert not passage._ways  # Of less than a block there is nothing to be told.
    for number in range(6):
        client.plan(f"r{number}", client.chain([number] * 9))
    assert [request[2] for request in passage._ways] == ["r3", "r4", "r5"]


def test_another_prompt_under_the_same_name_has_a_way_of_its_own() -> None:
    """What it saves hangs below nothing of the other, and is found when the prompt comes again."""
    rig = Rig(limits())
    client = Client(rig, whole_pages()).attach()
    first, second = client.chain([1] * 20), client.chain([2] * 40)
    client.save("same", client.offers(first, 16))
    client.save("same", client.offers(second, 32))
    points = order_of(rig)._canopy.forest.points_of(client.namespace.digest)
    assert {point.node.tokens for point in points} == {16, 32}
    assert all(point.node.start == 0 for point in points)
    turn(client, "next", [2] * 40)
    (deep,) = (
        point
        for point in order_of(rig)._canopy.forest.points_of(client.namespace.digest)
        if point.node.end == 8 and point.hits
    )
    assert deep.node.rests_on(1, second.digests[1])


@pytest.mark.parametrize("write", [False, True])
def test_requests_that_never_save_are_forgotten(*, write: bool) -> None:
    """No room is ever wanted: nothing would make them go."""
    rig = Rig(limits(recent_requests_max=10))
    client = Client(rig, whole_pages())
    client.write = write
    client.attach()
    turn(client, "kept", [7] * 17)
    for number in range(900):
        client.plan(f"r{number}", client.chain([100 + number] * 9))
        client.release(f"r{number}")
    order = order_of(rig)
    assert order._canopy.forest.points < 500
    assert len(order._rounds) < 1000
    assert sum(map(len, order._spots.values())) < 1000
    assert (turn(client, "again", [7] * 17) == 16) == write


def test_a_tenant_with_a_share_has_an_order_of_its_own() -> None:
    probe = Client(Rig(), whole_pages())
    label = probe.namespace.narrow(salt="s").tenant
    rig = Rig(limits(protecting=Protecting(shares=((label, 0.5, 1.0),))))
    client = Client(rig, whole_pages())
    client.salt = "s"
    client.attach()
    turn(client, "a", [1] * 17)
    passage = rig.machine._books.passage
    assert isinstance(passage, Passage)
    assert len(passage._orders) == 2
    (own,) = (order for tenant, order in passage._orders.items() if tenant is not None)
    assert own._canopy.forest.points == 1
    assert order_of(rig)._canopy.forest.points == 0
    (tenant,) = (tenant for tenant in passage._orders if tenant is not None)
    passage.left(tenant)
    assert list(passage._orders) == [None]
