"""The blocking client against a scripted node: plans, loads, fetches, leases."""

import gc
from pathlib import Path

import pytest

from tiercache.client import Client, Options, Scope, Wanted, copy_into
from tiercache.state import Chain, GivenChain, Shard
from tiercache.testing.scripted import ScriptedNode
from tiercache.testing.tiny import (
    BLOCK,
    CHAIN,
    LAYOUT,
    NAMESPACE,
    SHORT,
    TOKENS,
    blobs_for,
    content,
    store,
)
from tiercache.wire import messages as wire


def test_what_is_saved_is_planned_and_read(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    with client.plan("reader", CHAIN) as plan:
        assert (plan.boundary, plan.ready, plan.ready_boundary, plan.reason) == (8, True, 8, "")
        assert plan.digest == CHAIN.digest_at(8)
        assert plan.checkpoints == (11,)
        assert client.load(plan) is plan
        expected = {(b.part, b.start, b.end): bytes(b.data) for b in blobs_for(8)}
        assert {(b.part, b.start, b.end): bytes(b.data) for b in plan.blobs} == expected
        assert all(blob.data.readonly and blob.shard == Shard(0, 1) for blob in plan.blobs)
        target = memoryview(bytearray(32))
        copy_into(target, plan.blobs[0].data)
        assert bytes(target) == bytes(plan.blobs[0].data)
        assert plan.held
        assert node.shelf.leases == {"reader"}
    assert not plan.held
    assert node.wait(wire.Release) == [wire.Release(["reader"])]
    assert node.shelf.leases == set()


def test_a_miss_is_a_value_with_advice(node: ScriptedNode, client: Client) -> None:
    plan = client.plan("reader", CHAIN)
    assert (plan.boundary, plan.ready, plan.blobs, plan.reason) == (0, False, (), "nothing held")
    assert plan.checkpoints == (11,)
    assert client.load(plan) is plan
    plan.release()
    assert node.wait(wire.Release) == [wire.Release(["reader"])]


def test_the_limit_is_one_less_than_the_prompt_unless_named(
    node: ScriptedNode, client: Client
) -> None:
    store(client, 8)
    shorter = Chain(TOKENS[:8], BLOCK)
    assert client.plan("a", shorter).boundary == 0
    assert client.plan("b", shorter, limit=8).boundary == 8
    assert [p.limit for p in node.wait(wire.Plan)] == [7, 8]
    assert client.plan("c", CHAIN, limit=7).boundary == 0
    assert client.plan("d", Chain([], BLOCK)).boundary == 0


def test_a_boundary_inside_a_block_is_verified_and_named(
    node: ScriptedNode, client: Client
) -> None:
    store(client, 10)
    # Same length, same base, other tokens: not this chain's.
    base = CHAIN.digests[2]
    node.shelf.tails[base].add((10, b"x" * 32))
    node.shelf.tails[b"y" * 32] = {(10, CHAIN.digest_at(10))}
    node.shelf.tails[base].add((400, CHAIN.digest_at(10)))
    plan = client.plan("reader", CHAIN)
    assert plan.boundary == 10
    assert [(b.part, b.start, b.end) for b in plan.blobs] == [
        ("kv", 0, 4),
        ("kv", 4, 8),
        ("kv", 8, 10),
        ("state", 0, 10),
    ]
    first, second = node.wait(wire.Plan)
    assert first.tails == []
    assert second.tails == [wire.Tail(10, CHAIN.digest_at(10), base)]
    assert (first.chain, first.tokens) == (CHAIN.blocks(), 11)


@pytest.mark.parametrize(
    ("tokens", "grain", "ends"),
    [
        (11, 1, [10, 11]),
        (11, 0, [10, 11]),
        (11, 2, [10]),
        (9, 1, [9]),  # At 8 a block ends, and its digest is in the chain.
        (8, 1, [7]),
        (11, 4, []),
        (1, 1, [1]),
        (0, 1, []),
    ],
)
def test_the_ends_of_the_prompt_are_named(
    node: ScriptedNode, client: Client, tokens: int, grain: int, ends: list[int]
) -> None:
    chain = Chain(TOKENS[:tokens], BLOCK)
    client.plan("r", chain, scope=Scope(capture=wire.Capture(8, grain)))
    (plan,) = node.wait(wire.Plan)
    assert plan.ends == [
        wire.Tail(end, chain.digest_at(end), chain.digests[end // BLOCK]) for end in ends
    ]


def test_a_chain_without_tokens_has_no_boundaries_inside_blocks(
    node: ScriptedNode, client: Client
) -> None:
    """Its digests before the first one and inside blocks are not known."""
    store(client, 10)
    given = GivenChain(CHAIN.blocks(), BLOCK)
    node.shelf.tails[CHAIN.digests[1]] = {(6, CHAIN.digest_at(6))}
    with client.plan("miss", given) as plan:
        assert (plan.boundary, plan.digest) == (0, b"")
        assert client.load(plan) is plan
    client.save("writer", CHAIN, blobs_for(4))
    client.flush(wait_s=20)
    with client.plan("hit", given) as plan:
        assert (plan.boundary, plan.digest) == (4, CHAIN.digest_at(4))
    miss, hit = node.wait(wire.Plan)
    assert (miss.chain, miss.tails, miss.ends) == (CHAIN.blocks(), [], [])
    assert (hit.chain, hit.tails, hit.ends) == (CHAIN.blocks(), [], [])


def test_what_a_chain_without_tokens_loads_may_be_nothing(
    node: ScriptedNode, client: Client
) -> None:
    def lost(request: wire.Request) -> wire.Reply | None:
        match request:
            case wire.Plan(call):
                return wire.Planned(call, 4, False, 0, [], [], [], "")
            case wire.Load(call):
                return wire.Loaded(call, 0, [], "lost")
            case _:
                return None

    node.script = lost
    with client.plan("r", GivenChain(CHAIN.blocks(), BLOCK)) as plan:
        loaded = client.load(plan)
        assert (loaded.boundary, loaded.digest, loaded.reason) == (0, b"", "lost")


def test_how_fast_the_engine_is_goes_along(node: ScriptedNode) -> None:
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(prefill_tokens_per_s=9000.0)):
        (attach,) = node.wait(wire.Attach)
        assert attach.prefill_tokens_per_s == 9000.0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="prefill_tokens_per_s"):
            Options(prefill_tokens_per_s=wrong)


def test_no_second_question_when_no_candidate_is_ours(node: ScriptedNode, client: Client) -> None:
    store(client, 10)
    other = Chain([*TOKENS[:9], 77, 78], BLOCK)
    assert client.plan("reader", other).boundary == 0
    assert client.plan("shallow", CHAIN, limit=9).boundary == 0
    assert len(node.wait(wire.Plan)) == 2


def test_scope_goes_along(node: ScriptedNode, client: Client) -> None:
    scope = Scope("l", "s", ("native", "int8"), wire.Capture(8, 2), all_ranks=True)
    client.plan("r", CHAIN, scope=scope)
    client.save("r", CHAIN, blobs_for(4), scope=scope, parent=CHAIN.digest_at(4))
    client.fetch("f", [Wanted("state", CHAIN.digest_at(4))], scope=scope)
    (plan,), (reserve,), (fetch,) = (
        node.wait(wire.Plan),
        node.wait(wire.Reserve),
        node.wait(wire.Fetch),
    )
    assert (plan.lora, plan.salt, plan.codecs, plan.capture, plan.all_ranks) == (
        "l", "s", ["native", "int8"], wire.Capture(8, 2), True,
    )  # fmt: skip
    assert (reserve.lora, reserve.salt, fetch.lora, fetch.salt) == ("l", "s", "l", "s")
    assert {offer.parent for offer in reserve.offers} == {CHAIN.digest_at(4)}


def test_loading_waits_and_may_give_less(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    pieces = list(node.shelf.objects.values())

    def slow(request: wire.Request) -> wire.Reply | None:
        match request:
            case wire.Plan(call):
                return wire.Planned(call, 8, False, 4, [], [9], [], "")
            case wire.Load(call, wait_ms=wait_ms):
                assert wait_ms == 2500
                return wire.Loaded(call, 4, pieces[:1], "one was lost")
            case _:
                return None

    node.script = slow
    plan = client.plan("reader", CHAIN)
    assert (plan.boundary, plan.ready, plan.ready_boundary, plan.blobs) == (8, False, 4, ())
    loaded = client.load(plan, wait_s=2.5)
    assert (loaded.boundary, loaded.ready, loaded.reason) == (4, True, "one was lost")
    assert (loaded.digest, loaded.checkpoints) == (CHAIN.digest_at(4), (9,))
    assert len(loaded.blobs) == 1
    plan.release()
    assert not loaded.held
    loaded.release()
    client.flush()
    assert node.wait(wire.Release) == [wire.Release(["reader"])]
    with pytest.raises(ValueError, match="was released"):
        client.load(plan)


def test_fetch_by_name(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    with client.fetch(
        "f", [Wanted("state", CHAIN.digest_at(8)), Wanted("kv", b"?" * 32)]
    ) as holding:
        there, gone = holding.blobs
        assert gone is None
        assert there is not None
        assert bytes(there.data) == bytes(content(64, 8))
        assert (holding.reason, holding.held) == ("", True)
    assert node.wait(wire.Release) == [wire.Release(["f"])]
    assert client.fetch("g", []).blobs == ()


def test_flush_reports(node: ScriptedNode, client: Client) -> None:
    node.script = lambda r: wire.Flushed(r.call, 3, 1) if isinstance(r, wire.Flush) else None
    flushed = client.flush(durable=True, wait_s=0.25)
    assert (flushed.waiting, flushed.lost, flushed.reason) == (3, 1, "")
    assert node.wait(wire.Flush)[0] == wire.Flush(3, True, 250)


def test_leaving_by_an_exception_releases(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    with pytest.raises(RuntimeError, match="engine"), client.plan("reader", CHAIN):
        raise RuntimeError("engine")
    node.wait(wire.Release)
    assert node.shelf.leases == set()


def test_the_last_of_several_holds_releases(node: ScriptedNode, client: Client) -> None:
    store(client, 8)
    first, second = client.plan("same", CHAIN), client.plan("same", CHAIN)
    client.release(first)
    client.release(first)
    client.flush()
    assert not node.wait(wire.Release, 0)
    assert second.held
    client.release(second)
    assert node.wait(wire.Release) == [wire.Release(["same"])]


def test_a_released_plan_gives_no_views(client: Client) -> None:
    store(client, 8)
    plan = client.plan("reader", CHAIN)
    assert plan.blobs is plan.blobs
    plan.release()
    with pytest.raises(ValueError, match="may be others"):
        _ = plan.blobs


def test_a_plan_that_was_lost_releases_with_the_next_call(
    node: ScriptedNode, client: Client
) -> None:
    store(client, 8)
    client.plan("lost", CHAIN)
    kept = client.plan("viewed", CHAIN).blobs
    gc.collect()
    client.flush()
    assert node.wait(wire.Release) == [wire.Release(["lost"])]
    assert node.shelf.leases == {"viewed"}
    assert kept


def test_views_stay_readable_after_everything_is_gone(path: Path) -> None:
    node = ScriptedNode(path, LAYOUT)
    client = Client.attach(path, NAMESPACE, LAYOUT)
    store(client, 8)
    views = [blob.data for blob in client.plan("reader", CHAIN).blobs]
    expected = [bytes(view) for view in views]
    client.close()
    del client
    node.stop()
    del node
    gc.collect()
    assert [bytes(view) for view in views] == expected
    assert Path("/proc/self/maps").read_text().count("memfd:scripted") >= 1
    del views
    gc.collect()
    assert "memfd:scripted" not in Path("/proc/self/maps").read_text()


def mapped() -> bool:
    return "memfd:scripted" in Path("/proc/self/maps").read_text()


def test_the_memory_of_a_dead_node_goes_with_its_last_view(path: Path) -> None:
    """At once, not with some later collection: it counts against the budget of the host."""
    client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
    gc.collect()
    gc.disable()
    try:
        with ScriptedNode(path, LAYOUT) as node:
            store(client, 8)
            plan = client.plan("reader", CHAIN)
            view = plan.blobs[0].data
            kept = client.plan("released", CHAIN)
            kept.release()
        del node
        assert client.plan("r", CHAIN).reason.startswith("unavailable: ")
        assert bytes(view)
        assert mapped()
        assert len(plan.blobs) == 3
        del plan, view
        gc_needed = mapped()
        assert not kept.held
    finally:
        gc.enable()
    client.close()
    assert not gc_needed
