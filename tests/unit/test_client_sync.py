"""The blocking client against a scripted node: values, leases, deadlines, ends."""

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
from msgspec.structs import replace

from tiercache.client import Blob, Client, Options, Saved, Scope, Wanted, copy_into
from tiercache.client.handshake import Handshake
from tiercache.errors import LayoutError, ProtocolError, RefusedError, UnavailableError
from tiercache.state import Chain, Kind, Layout, Namespace, Part, Piece, Shard, Tensor
from tiercache.testing.scripted import ScriptedNode
from tiercache.wire import messages as wire

BLOCK = 4
LAYOUT = Layout(
    (
        Part("kv", Kind.KV, None, BLOCK, 1, (Tensor("k", "int8", (8,), ("d",)),)),
        Part("state", Kind.RECURRENT, 1, 0, 1, (Tensor("s", "int8", (64,), ("d",)),)),
    ),
    block_tokens=BLOCK,
)
NAMESPACE = Namespace.of(LAYOUT, model="m", weights="w", tokenizer="t")
TOKENS = list(range(1, 12))
SHORT = Options(deadline_s=0.2, retry_s=0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.fixture
def node(path: Path) -> Iterator[ScriptedNode]:
    with ScriptedNode(path, LAYOUT) as scripted:
        yield scripted


@pytest.fixture
def client(node: ScriptedNode) -> Iterator[Client]:
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=SHORT) as attached:
        assert attached.status == "attached"
        yield attached


def content(nbytes: int, seed: int) -> memoryview:
    return memoryview(bytes((seed * 7 + i) % 251 for i in range(nbytes)))


def blobs_for(chain: Chain, end: int) -> list[Blob]:
    """All that is needed to resume at `end`."""
    blobs = [
        Blob(
            "kv",
            min(start + BLOCK, end),
            content((min(start + BLOCK, end) - start) * 8, start),
            start,
        )
        for start in range(0, end, BLOCK)
    ]
    return [*blobs, Blob("state", end, content(64, end))]


def chain_of(tokens: list[int] = TOKENS) -> Chain:
    return Chain(tokens, BLOCK)


def saved(client: Client, end: int, request: str = "writer") -> Chain:
    chain = chain_of()
    blobs = blobs_for(chain, end)
    assert client.save(request, chain, blobs) == Saved(len(blobs), 0, {})
    return chain


# --- the main road


def test_what_is_saved_is_planned_and_read(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 8)
    with client.plan("reader", chain) as plan:
        assert (plan.boundary, plan.ready, plan.ready_boundary, plan.reason) == (8, True, 8, "")
        assert plan.digest == chain.digest_at(8)
        assert plan.checkpoints == (11,)
        assert client.load(plan) is plan
        expected = {(b.part, b.start, b.end): bytes(b.data) for b in blobs_for(chain, 8)}
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
    plan = client.plan("reader", chain_of())
    assert (plan.boundary, plan.ready, plan.blobs, plan.reason) == (0, False, (), "nothing held")
    assert plan.checkpoints == (11,)
    assert client.load(plan) is plan
    plan.release()
    assert node.wait(wire.Release) == [wire.Release(["reader"])]


def test_the_limit_is_one_less_than_the_prompt_unless_named(
    node: ScriptedNode, client: Client
) -> None:
    chain = saved(client, 8)
    shorter = Chain(TOKENS[:8], BLOCK)
    assert client.plan("a", shorter).boundary == 0
    assert client.plan("b", shorter, limit=8).boundary == 8
    assert [p.limit for p in node.wait(wire.Plan)] == [7, 8]
    assert client.plan("c", chain, limit=7).boundary == 0
    assert client.plan("d", Chain([], BLOCK)).boundary == 0


def test_a_boundary_inside_a_block_is_verified_and_named(
    node: ScriptedNode, client: Client
) -> None:
    chain = saved(client, 10)
    # Same length, same base, other tokens: not this chain's.
    base = chain.digests[2]
    node.shelf.tails[base].add((10, b"x" * 32))
    node.shelf.tails[b"y" * 32] = {(10, chain.digest_at(10))}
    node.shelf.tails[base].add((400, chain.digest_at(10)))
    plan = client.plan("reader", chain)
    assert plan.boundary == 10
    assert [(b.part, b.start, b.end) for b in plan.blobs] == [
        ("kv", 0, 4),
        ("kv", 4, 8),
        ("kv", 8, 10),
        ("state", 0, 10),
    ]
    first, second = node.wait(wire.Plan)
    assert first.tails == []
    assert second.tails == [wire.Tail(10, chain.digest_at(10), base)]
    assert (first.chain, first.tokens) == (chain.blocks(), 11)


def test_no_second_question_when_no_candidate_is_ours(node: ScriptedNode, client: Client) -> None:
    saved(client, 10)
    other = Chain([*TOKENS[:9], 77, 78], BLOCK)
    assert client.plan("reader", other).boundary == 0
    assert client.plan("shallow", chain_of(), limit=9).boundary == 0
    assert len(node.wait(wire.Plan)) == 2


def test_scope_goes_along(node: ScriptedNode, client: Client) -> None:
    scope = Scope("l", "s", ("native", "int8"), wire.Capture(8, 2), all_ranks=True)
    chain = chain_of()
    client.plan("r", chain, scope=scope)
    client.save("r", chain, blobs_for(chain, 4), scope=scope, parent=chain.digest_at(4))
    client.fetch("f", [Wanted("state", chain.digest_at(4))], scope=scope)
    (plan,), (reserve,), (fetch,) = (
        node.wait(wire.Plan),
        node.wait(wire.Reserve),
        node.wait(wire.Fetch),
    )
    assert (plan.lora, plan.salt, plan.codecs, plan.capture, plan.all_ranks) == (
        "l", "s", ["native", "int8"], wire.Capture(8, 2), True,
    )  # fmt: skip
    assert (reserve.lora, reserve.salt, fetch.lora, fetch.salt) == ("l", "s", "l", "s")
    assert {offer.parent for offer in reserve.offers} == {chain.digest_at(4)}


def test_loading_waits_and_may_give_less(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 8)
    pieces = list(node.shelf.objects.values())

    def slow(request: wire.Request) -> wire.Reply | None:
        match request:
            case wire.Plan(call):
                return wire.Planned(call, 8, False, 4, [], [9], [], "")
            case wire.Load(call, _, _, _, wait_ms):
                assert wait_ms == 2500
                return wire.Loaded(call, 4, pieces[:1], "one was lost")
            case _:
                return None

    node.script = slow
    plan = client.plan("reader", chain)
    assert (plan.boundary, plan.ready, plan.ready_boundary, plan.blobs) == (8, False, 4, ())
    loaded = client.load(plan, wait_s=2.5)
    assert (loaded.boundary, loaded.ready, loaded.reason) == (4, True, "one was lost")
    assert (loaded.digest, loaded.checkpoints) == (chain.digest_at(4), (9,))
    assert len(loaded.blobs) == 1
    plan.release()
    assert not loaded.held
    loaded.release()
    client.flush()
    assert node.wait(wire.Release) == [wire.Release(["reader"])]
    with pytest.raises(ValueError, match="was released"):
        client.load(plan)


def test_fetch_by_name(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 8)
    with client.fetch(
        "f", [Wanted("state", chain.digest_at(8)), Wanted("kv", b"?" * 32)]
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


# --- saving


def test_offers_say_what_records_say(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 10)
    (reserve,) = node.wait(wire.Reserve)
    assert [(o.part, o.start, o.end, o.nbytes, o.base) for o in reserve.offers] == [
        (0, 0, 4, 32, b""),
        (0, 4, 8, 32, b""),
        (0, 8, 10, 16, chain.digests[2]),
        (1, 0, 10, 64, chain.digests[2]),
    ]
    assert [o.digest for o in reserve.offers] == [chain.digest_at(n) for n in (4, 8, 10, 10)]


def test_what_is_held_busy_or_declined_is_counted(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 8)
    blobs = blobs_for(chain, 8)
    assert client.save("again", chain, blobs) == Saved(0, 3, {})
    outcomes = iter(["busy", "full", "too_large"])

    def decline(request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.Reserve):
            return wire.Reserved(request.call, [wire.Grant(next(outcomes)) for _ in blobs])
        return None

    node.script = decline
    assert client.save("no", chain, blobs) == Saved(0, 0, {"busy": 1, "full": 1, "too_large": 1})
    assert client.save("nothing", chain, []) == Saved(0, 0, {})
    client.flush()
    assert len(node.wait(wire.Commit)) == 1


def test_batches(path: Path) -> None:
    with (
        ScriptedNode(path, LAYOUT, batch_max=2) as node,
        Client.attach(path, NAMESPACE, LAYOUT) as client,
    ):
        saved(client, 11)
        assert [len(r.offers) for r in node.wait(wire.Reserve)] == [2, 2]
        assert [len(c.tickets) for c in node.wait(wire.Commit, 2)] == [2, 2]


def test_large_blobs_are_committed_one_by_one(path: Path) -> None:
    size = 5 << 20
    layout = Layout(
        (Part("kv", Kind.KV, None, 1, 1, (Tensor("k", "int8", (size,), ("d",)),)),), block_tokens=1
    )
    namespace = Namespace.of(layout, model="m", weights="w", tokenizer="t")
    with (
        ScriptedNode(path, layout, segments=(2 * size,)) as node,
        Client.attach(path, namespace, layout) as client,
    ):
        chain = Chain([1, 2], 1)
        blobs = [Blob("kv", end, memoryview(bytes(size)), end - 1) for end in (1, 2)]
        assert client.save("w", chain, blobs).stored == 2
        assert [c.tickets for c in node.wait(wire.Commit, 2)] == [[1], [2]]


@pytest.mark.parametrize(
    ("blob", "error", "why"),
    [
        (Blob("no", 4, content(32, 0)), LayoutError, "no part 'no'"),
        (Blob("kv", 4, content(31, 0)), LayoutError, "31 bytes for tokens"),
        (Blob("kv", 4, content(32, 0), shard=Shard(0, 2)), LayoutError, "has units 0-1"),
        (Blob("kv", 8, content(32, 0)), ValueError, "start at 4, not 0"),
        (Blob("kv", 6, content(8, 0), 5), ValueError, "start at 4, not 5"),
        (Blob("state", 6, content(64, 0), 4), ValueError, "start at 0, not 4"),
        (Blob("state", 0, content(64, 0)), ValueError, "11 tokens, not 0"),
        (Blob("state", 12, content(64, 0)), ValueError, "11 tokens, not 12"),
        (Blob("state", 4, content(128, 0)[::2]), ValueError, "contiguous"),
        (Blob("state", 4, content(0, 0), codec="int8"), LayoutError, "0 bytes"),
    ],
)
def test_a_wrong_blob_is_refused_before_anything_is_sent(
    node: ScriptedNode, client: Client, blob: Blob, error: type[Exception], why: str
) -> None:
    chain = chain_of()
    with pytest.raises(error, match=why):
        client.save("w", chain, [*blobs_for(chain, 4), blob])
    client.flush()
    assert not node.wait(wire.Reserve, 0)


def test_other_misuse(node: ScriptedNode, client: Client) -> None:
    chain = chain_of()
    with pytest.raises(ValueError, match="needs a name"):
        client.plan("", chain)
    with pytest.raises(ValueError, match="blocks of 8 tokens"):
        client.plan("r", Chain(TOKENS, 8))
    with pytest.raises(ValueError, match="limit 12"):
        client.plan("r", chain, limit=12)
    with pytest.raises(LayoutError, match="no part"):
        client.fetch("r", [Wanted("no", b"")])
    with pytest.raises(LayoutError, match="another layout"):
        Client.attach(node.path, NAMESPACE, Layout(LAYOUT.parts[:1], BLOCK))
    with pytest.raises(ValueError, match="rank 2"):
        Options(ranks=2, rank=2)
    with pytest.raises(ValueError, match="deadline_s"):
        Options(deadline_s=0)
    with pytest.raises(ValueError, match="do not fit"):
        copy_into(memoryview(bytearray(2)), memoryview(b"abc"))
    copy_into(memoryview(bytearray()), memoryview(b""))
    with (
        Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(write=False)) as reader,
        pytest.raises(ValueError, match="without `write`"),
    ):
        reader.save("r", chain, [])


def test_an_interrupted_save_is_cancelled(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of()
    session = client._attached(monotonic() + 1).session

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.arena, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.save("w", chain, blobs_for(chain, 8))
    assert node.wait(wire.Cancel) == [wire.Cancel([1, 2, 3])]
    assert node.shelf.pending == {}
    assert session.writers == 0


def test_reserved_too_late_is_cancelled(node: ScriptedNode, client: Client) -> None:
    chain = chain_of()
    node.mute = True
    assert client.save("w", chain, blobs_for(chain, 8)) == Saved(0, 0, {"deadline": 3})
    node.speak()
    client.flush(wait_s=5)
    assert node.wait(wire.Cancel) == [wire.Cancel([1, 2, 3])]
    assert node.shelf.pending == {}


# --- leases


def test_leaving_by_an_exception_releases(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 8)
    with pytest.raises(RuntimeError, match="engine"), client.plan("reader", chain):
        raise RuntimeError("engine")
    node.wait(wire.Release)
    assert node.shelf.leases == set()


def test_the_last_of_several_holds_releases(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 8)
    first, second = client.plan("same", chain), client.plan("same", chain)
    client.release(first)
    client.release(first)
    client.flush()
    assert not node.wait(wire.Release, 0)
    assert second.held
    client.release(second)
    assert node.wait(wire.Release) == [wire.Release(["same"])]


def test_a_released_plan_gives_no_views(client: Client) -> None:
    chain = saved(client, 8)
    plan = client.plan("reader", chain)
    plan.release()
    with pytest.raises(ValueError, match="may be others"):
        _ = plan.blobs


def test_a_plan_that_was_lost_releases_with_the_next_call(
    node: ScriptedNode, client: Client
) -> None:
    chain = saved(client, 8)
    client.plan("lost", chain)
    kept = client.plan("viewed", chain).blobs
    gc.collect()
    client.flush()
    assert node.wait(wire.Release) == [wire.Release(["lost"])]
    assert node.shelf.leases == {"viewed"}
    assert kept


def test_views_stay_readable_after_everything_is_gone(path: Path) -> None:
    node = ScriptedNode(path, LAYOUT)
    client = Client.attach(path, NAMESPACE, LAYOUT)
    chain = saved(client, 8)
    views = [blob.data for blob in client.plan("reader", chain).blobs]
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


# --- a node that is slow, late, away


def timed(limit_s: float, began: float) -> None:
    assert monotonic() - began < limit_s


def test_each_call_ends_at_its_deadline(node: ScriptedNode) -> None:
    options = Options(deadline_s=0.1)
    chain = chain_of()
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        node.mute = True
        began = monotonic()
        plan = client.plan("r", chain)
        assert (plan.boundary, plan.reason) == (0, "deadline")
        timed(0.1 + 0.5, began)
        assert client.status == "detached: the node does not answer"
        began = monotonic()
        silent = "unavailable: the node does not answer"
        assert client.plan("r", chain).reason == silent
        assert client.save("w", chain, blobs_for(chain, 4)).declined == {"unavailable": 2}
        assert client.fetch("f", [Wanted("kv", b"d")]).reason == silent
        assert client.fetch("f", [Wanted("kv", b"d")]).blobs == (None,)
        assert client.flush(wait_s=0.1).reason == silent
        timed(0.05, began)


@pytest.mark.parametrize("call", ["plan", "load", "save", "fetch", "flush"])
def test_deadlines_of_each_call(node: ScriptedNode, call: str) -> None:
    options = Options(deadline_s=0.1)
    chain = chain_of()
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        node.script = lambda r: (
            wire.Planned(r.call, 8, False, 0, [], [], [], "") if isinstance(r, wire.Plan) else None
        )
        plan = client.plan("r", chain)
        node.mute = True
        began = monotonic()
        match call:
            case "plan":
                assert client.plan("q", chain).reason == "deadline"
            case "load":
                loaded = client.load(plan, wait_s=0.1)
                assert (loaded.boundary, loaded.reason, loaded.blobs) == (0, "deadline", ())
            case "save":
                assert client.save("w", chain, blobs_for(chain, 4)).declined == {"deadline": 2}
            case "fetch":
                assert client.fetch("f", [Wanted("kv", b"d")]).reason == "deadline"
            case _:
                assert client.flush(wait_s=0.1).reason == "deadline"
        assert 0.09 < monotonic() - began < 0.7


def test_attaching_ends_at_its_deadline_and_is_not_repeated_at_once(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.mute = True
        began = monotonic()
        options = Options(deadline_s=0.1, retry_s=60)
        client = Client.attach(path, NAMESPACE, LAYOUT, options=options)
        timed(0.1 + 0.5, began)
        assert client.status == "detached: the node does not answer"
        began = monotonic()
        reason = client.plan("r", chain_of()).reason
        assert reason == "unavailable: detached: the node does not answer"
        timed(0.05, began)
        assert node.connections == 1
        client.close()


def test_a_late_reply_is_dropped_and_its_lease_released(node: ScriptedNode, client: Client) -> None:
    chain = saved(client, 8)
    node.mute = True
    assert client.plan("late", chain).reason == "deadline"
    node.speak()
    with client.plan("next", chain) as plan:
        assert plan.boundary == 8
        # Once on giving up, and once more for the reply that came after.
        assert node.wait(wire.Release, 2) == [wire.Release(["late"])] * 2
        assert node.shelf.leases == {"next"}


def test_a_late_reply_does_not_release_what_a_retry_holds(
    node: ScriptedNode, client: Client
) -> None:
    chain = saved(client, 8)
    node.mute = True
    assert client.plan("again", chain).reason == "deadline"
    node.speak()
    plan = client.plan("again", chain)
    client.flush()
    assert plan.boundary == 8
    assert node.shelf.leases == {"again"}
    assert len(node.wait(wire.Release)) == 1


def test_a_node_that_does_not_read_never_blocks_a_release(node: ScriptedNode) -> None:
    options = Options(deadline_s=0.2, retry_s=60)
    chain = chain_of()
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        plans = [client.plan("x" * 200 + str(n), chain) for n in range(3000)]
        node.freeze()
        began = monotonic()
        for plan in plans:
            plan.release()
        timed(2.0, began)
        assert client.plan("r", chain).reason in {
            "deadline",
            "unavailable: the node does not answer",
        }
        node.thaw()
        node.wait(wire.Release)
        assert client.flush(wait_s=5).reason == ""
        node.wait(wire.Release, 3000)


def test_too_many_unread_notices_end_the_attachment(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.client.session.NOTICES_MAX", 100)
    chain = chain_of()
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(retry_s=60))
    plans = [client.plan("x" * 200 + str(n), chain) for n in range(3000)]
    node.freeze()
    for plan in plans:
        plan.release()
    assert client.status == "detached: the node does not read what it is sent"
    node.thaw()
    node.wait_until(lambda: not node.shelf.leases)
    client.close()


def test_a_restarted_node_is_attached_to_again(path: Path) -> None:
    client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
    assert client.status.startswith(f"detached: {path}: No such file")
    with ScriptedNode(path, LAYOUT, boot="first"):
        chain = saved(client, 8)
        assert (client.status, client.boot) == ("attached", "first")
        old = client.plan("old", chain)
        kept = old.blobs[0].data
        expected = bytes(kept)
    assert not old.held
    assert client.status == "detached: the node closed the connection"
    assert client.boot == ""
    assert client.plan("r", chain).reason.startswith("unavailable: detached: ")
    with ScriptedNode(path, LAYOUT, boot="second") as node:
        assert client.plan("r", chain).reason == "nothing held"
        assert client.boot == "second"
        old.release()
        loaded = client.load(old)
        assert loaded is old
        client.flush()
        assert wire.Release(["old"]) not in node.wait(wire.Release, 0)
        assert bytes(kept) == expected
        client.close()


def test_a_plan_of_a_lost_attachment_cannot_be_loaded(node: ScriptedNode, client: Client) -> None:
    node.script = lambda r: (
        wire.Planned(r.call, 8, False, 0, [], [], [], "") if isinstance(r, wire.Plan) else None
    )
    plan = client.plan("r", chain_of())
    node.drop_clients()
    assert client.plan("q", chain_of()).boundary == 8
    loaded = client.load(plan)
    assert (loaded.boundary, loaded.reason) == (0, "unavailable: the node that planned it is gone")


def test_a_connection_that_ends_during_a_call(node: ScriptedNode, client: Client) -> None:
    def hang_up(request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.Flush):
            node.drop_clients()
        return None

    node.script = hang_up
    assert client.flush().reason in {
        "unavailable: the node closed the connection",
        "unavailable: the connection broke: Connection reset by peer",
    }
    assert client.plan("r", chain_of()).reason == "nothing held"


def test_at_most_one_attempt_per_retry_s(path: Path) -> None:
    client = Client.attach(path, NAMESPACE, LAYOUT, options=Options(retry_s=60))
    with ScriptedNode(path, LAYOUT) as node:
        for _ in range(5):
            assert client.plan("r", chain_of()).reason.startswith("unavailable: detached: ")
        assert node.connections == 0
    client.close()


def test_required_raises(path: Path) -> None:
    options = Options(required=True, deadline_s=0.1)
    with pytest.raises(UnavailableError, match="No such file"):
        Client.attach(path, NAMESPACE, LAYOUT, options=options)
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: wire.Failed(r.call, "refused", "not you")
        with pytest.raises(RefusedError, match="not you"):
            Client.attach(path, NAMESPACE, LAYOUT, options=options)
        node.mute = True
        with pytest.raises(UnavailableError, match="deadline"):
            Client.attach(path, NAMESPACE, LAYOUT, options=options)


def test_a_refusal_stands_for_a_while_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedNode(path, LAYOUT) as node, caplog.at_level(logging.INFO, "tiercache.client"):
        node.script = lambda r: (
            wire.Failed(r.call, "refused", "no room") if isinstance(r, wire.Attach) else None
        )
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        for _ in range(3):
            assert client.plan("r", chain_of()).reason == "unavailable: refused: no room"
        assert client.status == "refused: no room"
        assert node.connections == 1
        assert [r.message for r in caplog.records] == [
            "running uncached: the node refused: no room"
        ]
        client.close()


def test_another_protocol_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        monkeypatch.setattr(
            Handshake, "hello", lambda self: self._side.send(wire.Hello(1, 99, "newer"))
        )
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status == "refused: the client speaks protocol 99, this node 1"
        assert node.received == []
        client.close()


def test_a_node_of_another_protocol_is_refused(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: wire.Welcome(r.call, 99, "b", "9.9", 1 << 20, 8)
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status == "refused: the node speaks protocol 99, this client 1"
        client.close()


def plans_as(node: ScriptedNode, planned: wire.Planned) -> None:
    """Make the node answer every plan with this."""
    node.script = lambda request: (
        replace(planned, call=request.call) if isinstance(request, wire.Plan) else None
    )


@pytest.mark.parametrize("boundary", [12, -1])
def test_a_boundary_that_cannot_be_ends_the_attachment(
    node: ScriptedNode, client: Client, boundary: int
) -> None:
    plans_as(node, wire.Planned(0, boundary, True, 0, [], [], [], ""))
    assert client.plan("r", chain_of()).reason == (
        f"unavailable: the node planned {boundary} of 10 tokens"
    )
    assert client.status == f"detached: the node planned {boundary} of 10 tokens"
    node.script = lambda _: None
    assert client.plan("r", chain_of()).reason == "nothing held"


@pytest.mark.parametrize(
    "piece",
    [
        Piece(2, 0, 1, "native", 0, 4, 0, 0, 32),
        Piece(-1, 0, 1, "native", 0, 4, 0, 0, 32),
        Piece(0, 0, 1, "native", 0, 4, 1, 0, 32),
        Piece(0, 0, 1, "native", 0, 4, -1, 0, 32),
        Piece(0, 0, 1, "native", 0, 4, 0, (1 << 20) - 31, 32),
        Piece(0, 0, 1, "native", 0, 4, 0, -32, 32),
        Piece(0, 0, 1, "native", 0, 4, 0, 0, -1),
    ],
)
def test_a_place_that_cannot_be_is_never_a_view(
    node: ScriptedNode, client: Client, piece: Piece
) -> None:
    plans_as(node, wire.Planned(0, 4, True, 4, [piece], [], [], ""))
    plan = client.plan("r", chain_of())
    with pytest.raises(ProtocolError, match="no "):
        _ = plan.blobs


@pytest.mark.parametrize(
    "grants",
    [
        [],
        [wire.Grant("granted", 1, 1, 0)],
        [wire.Grant("granted", 1, 0, (1 << 20) - 63)],
        [wire.Grant("granted", 1, 0, -1)],
    ],
)
def test_a_grant_that_cannot_be_is_never_written(
    node: ScriptedNode, client: Client, grants: list[wire.Grant]
) -> None:
    node.script = lambda request: (
        wire.Reserved(request.call, grants) if isinstance(request, wire.Reserve) else None
    )
    blob = Blob("state", 4, content(64, 1))
    assert client.save("w", chain_of(), [blob]) == Saved(0, 0, {"unavailable": 1})
    assert client.status.startswith("detached: ")
    assert bytes(node.memory[0][: 1 << 10]) == bytes(1 << 10)


def test_fetched_and_loaded_must_fit_what_was_asked(node: ScriptedNode, client: Client) -> None:
    def script(request: wire.Request) -> wire.Reply | None:
        match request:
            case wire.Fetch(call):
                return wire.Fetched(call, [])
            case wire.Plan(call):
                return wire.Planned(call, 8, False, 0, [], [], [], "")
            case wire.Load(call):
                return wire.Loaded(call, 9, [], "")
            case _:
                return None

    node.script = script
    holding = client.fetch("f", [Wanted("kv", b"d")])
    assert (holding.reason, holding.blobs) == ("unavailable: 0 pieces for 1 objects", (None,))
    loaded = client.load(client.plan("r", chain_of()))
    assert (loaded.boundary, loaded.reason) == (0, "unavailable: the node loaded 9 of 8 tokens")


def test_a_failed_call_says_why_and_keeps_the_connection(
    node: ScriptedNode, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    node.script = lambda r: wire.Failed(r.call, "invalid", "too many") if isinstance(
        r, wire.Plan
    ) else None  # fmt: skip
    for _ in range(3):
        assert client.plan("r", chain_of()).reason == "unavailable: too many"
    assert client.status == "attached"
    assert len(caplog.records) == 1


def test_what_does_not_fit_a_frame(node: ScriptedNode, client: Client) -> None:
    request = "r" * (1 << 20)
    chain = chain_of()
    assert client.plan(request, chain).reason.startswith("too_large: Plan takes ")
    assert client.save(request, chain, blobs_for(chain, 4)).declined == {"too_large": 2}
    client.flush()
    assert not node.wait(wire.Release, 0)


def test_wrong_descriptors_are_refused_and_closed(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: (
            wire.Attached(r.call, [1 << 20, 1 << 20]) if isinstance(r, wire.Attach) else None
        )
        before = len(os.listdir("/proc/self/fd"))
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status == "refused: 2 descriptors came, 4 should"
        node.wait_until(lambda: not node._sides)
        assert len(os.listdir("/proc/self/fd")) == before
        client.close()


def test_a_segment_larger_than_its_memory_is_refused(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        node.script = lambda r: (
            wire.Attached(r.call, [2 << 20]) if isinstance(r, wire.Attach) else None
        )
        client = Client.attach(path, NAMESPACE, LAYOUT, options=SHORT)
        assert client.status.startswith("refused: a segment's size is wrong")
        client.close()


def test_descriptors_are_flat_over_reconnects(path: Path) -> None:
    with ScriptedNode(path, LAYOUT) as node:
        counts = []
        for _ in range(5):
            with Client.attach(path, NAMESPACE, LAYOUT, options=SHORT) as client:
                assert client.flush().reason == ""
            node.wait_until(lambda: not node._sides)
            del client
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert len(set(counts)) == 1


def test_closing(node: ScriptedNode) -> None:
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=SHORT)
    chain = saved(client, 8)
    plan = client.plan("r", chain)
    client.close()
    client.close()
    node.wait(wire.Detach)
    assert not plan.held
    plan.release()
    assert client.status == "detached: closed"
    assert client.plan("r", chain).reason == "unavailable: closed"
    assert client.load(plan) is plan


# --- threads, forks, signals


def test_eight_threads_share_a_client(node: ScriptedNode) -> None:
    options = Options(deadline_s=10)
    faults: list[BaseException] = []
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:

        def work(number: int) -> None:
            try:
                tokens = [number * 1000 + at for at in range(12)]
                chain = chain_of(tokens)
                blobs = blobs_for(chain, 8)
                assert client.save(f"w{number}", chain, blobs).stored == 3
                for turn in range(40):
                    with client.plan(f"r{number}-{turn}", chain) as plan:
                        assert plan.boundary == 8
                        assert bytes(plan.blobs[0].data) == bytes(blobs[0].data)
                    assert client.flush().reason == ""
            except BaseException as fault:
                faults.append(fault)
                raise

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert faults == []
        client.flush()
        assert node.shelf.leases == set()
        assert len(node.wait(wire.Release)) == 8 * 40


def test_a_long_wait_of_one_thread_does_not_hold_up_another(node: ScriptedNode) -> None:
    options = Options(deadline_s=5)
    held: list[wire.Flush] = []
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        chain = saved(client, 8)
        node.mute = True
        results = []
        waiting = threading.Thread(target=lambda: results.append(client.flush(wait_s=30)))
        waiting.start()
        held += node.wait(wire.Flush)
        node.mute = False  # The flush stays kept; others are answered.
        with client.plan("r", chain) as plan:
            assert plan.boundary == 8
        node.speak()
        waiting.join(30)
        assert results[0].reason == ""


def test_threads_that_wait_together_each_keep_their_own_deadline(node: ScriptedNode) -> None:
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=0.2)) as client:
        node.mute = True
        reasons: list[str] = []
        waits = [0.3, 0.0, 0.1]
        threads = [
            threading.Thread(target=lambda w=w: reasons.append(client.flush(wait_s=w).reason))
            for w in waits
        ]
        began = monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert monotonic() - began < 1.5
        assert reasons == ["deadline"] * 3


def test_closing_while_another_thread_waits(node: ScriptedNode) -> None:
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=20))
    node.mute = True
    reasons: list[str] = []
    waiting = threading.Thread(target=lambda: reasons.append(client.plan("r", chain_of()).reason))
    waiting.start()
    node.wait(wire.Plan)
    client.close()
    waiting.join(10)
    assert reasons == ["unavailable: closed"]


def test_the_node_hears_of_the_end_only_after_the_last_byte_was_written(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client.attach(node.path, NAMESPACE, LAYOUT, options=Options(deadline_s=20))
    session = client._attached(monotonic() + 1).session
    writing, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        writing.set()
        assert go_on.wait(20)

    monkeypatch.setattr(session.arena, "write", slow)
    chain = chain_of()
    results: list[Saved] = []
    saving = threading.Thread(
        target=lambda: results.append(client.save("w", chain, blobs_for(chain, 4)))
    )
    saving.start()
    assert writing.wait(20)
    client.close()
    assert len(node._sides) == 1
    assert not node.wait(wire.Detach, 0)
    go_on.set()
    saving.join(20)
    assert results == [Saved(0, 0, {"unavailable": 2})]
    node.wait(wire.Detach)
    node.wait_until(lambda: not node._sides)
    assert not node.wait(wire.Commit, 0)


def test_a_forked_child_attaches_by_itself(node: ScriptedNode) -> None:
    options = Options(deadline_s=10)
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        chain = saved(client, 8)
        plan = client.plan("parent", chain)
        expected = bytes(plan.blobs[0].data)
        child = os.fork()
        if child == 0:  # No test machinery here: only an exit code.
            code = 1
            with contextlib.suppress(BaseException):
                plan.release()
                theirs = client.plan("child", chain)
                good = theirs.boundary == 8 and bytes(plan.blobs[0].data) == expected
                code = 0 if good and not plan.held else 2
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        node.wait_until(lambda: len(node._sides) == 1)
        assert node.connections == 2
        assert plan.held
        assert client.plan("again", chain).boundary == 8
        assert "parent" in node.shelf.leases
        assert client.flush().reason == ""


def test_a_fork_while_another_thread_is_in_a_call(node: ScriptedNode) -> None:
    options = Options(deadline_s=10)
    with Client.attach(node.path, NAMESPACE, LAYOUT, options=options) as client:
        chain = saved(client, 8)
        node.mute = True
        reasons: list[str] = []
        waiting = threading.Thread(target=lambda: reasons.append(client.flush().reason))
        waiting.start()
        node.wait(wire.Flush)
        node.mute = False
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = 0 if client.plan("child", chain).boundary == 8 else 2
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        node.speak()
        waiting.join(10)
        assert reasons == [""]


def test_an_interrupt_while_waiting_gives_the_call_up(
    node: ScriptedNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = saved(client, 8)
    link = client._attached(monotonic() + 1)

    def interrupted(_: int) -> list[tuple[int, int]]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(link, "_readable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.plan("r", chain)
    with client.plan("next", chain) as plan:
        assert plan.boundary == 8
        node.wait(wire.Release, 1)
        assert node.shelf.leases == {"next"}
