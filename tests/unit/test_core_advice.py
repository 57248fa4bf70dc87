"""What became of the advice: counted, bounded, and what a tree of prompts would say."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.policy.retention import Retention
from tiercache.testing.sim.follower import (
    P,
    client_of,
    plan,
    rig_of,
    save,
    serve,
    with_suffix,
)
from tiercache.testing.sim.rig import BLOCK, Client, Rig, hybrid

# --- what became of the advice


def test_advice_that_was_not_followed_is_counted_when_the_request_is_over() -> None:
    client = client_of()
    serve(client, "0", with_suffix(0))
    plan(client, "1", with_suffix(1))
    assert client.rig.gauge("checkpoints_open") == 2
    save(client, "1", with_suffix(1), [20])
    assert client.rig.gauge("checkpoints_open") == 1
    client.release("1")
    assert client.rig.gauge("checkpoints_open") == 0
    assert client.rig.machine.counters["checkpoints"] == {
        "followed": 2, "unfollowed": 1, "unadvised": 0
    }  # fmt: skip


def test_who_lets_go_first_may_save_afterwards() -> None:
    client = client_of()
    plan(client, "0", with_suffix(0))
    client.release("0")
    assert client.rig.gauge("checkpoints_open") == 1
    assert save(client, "0", with_suffix(0), [12, 20]) == [20]
    assert client.rig.machine.counters["checkpoints"] == {
        "followed": 1, "unfollowed": 0, "unadvised": 1
    }  # fmt: skip
    assert save(client, "0", [*with_suffix(0), *range(6)], [27]) == [27]  # What it decoded.
    assert client.rig.count("checkpoints", "unadvised") == 1


def test_what_is_remembered_of_requests_is_bounded() -> None:
    rig = Rig(msgspec.structs.replace(rig_of().limits, advice_max=2))
    client = Client(rig, hybrid()).attach()
    for number in range(4):
        plan(client, str(number), with_suffix(number))
    assert rig.count("checkpoints", "unfollowed") == 3  # 20, and 16 and 20.
    assert rig.gauge("checkpoints_open") == 4
    assert plan(client, "0", with_suffix(0)).checkpoints == [20]  # That others parted is forgotten.


def test_a_namespace_that_is_cleared_takes_its_advice_along() -> None:
    client = client_of()
    plan(client, "0", with_suffix(0))
    other = Client(client.rig, client.layout)
    other.salt = "tenant"
    plan(other.attach(), "0", with_suffix(0))
    client.rig.ask(
        ev.ClearAsked(900, client.rig.number(), client.namespace.digest.hex()), cm.Evicted
    )
    assert client.rig.count("checkpoints", "unfollowed") == 1
    assert client.rig.gauge("checkpoints_open") == 1


def test_ranks_of_one_request_are_one() -> None:
    rig = rig_of()
    ranks = [Client(rig, hybrid(units=2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    for number in range(2):
        for client in ranks:
            planned = plan(client, str(number), with_suffix(number))
            assert planned.checkpoints == ([16, 20] if number else [20])
        for client in ranks:
            assert save(client, str(number), with_suffix(number), [8, *planned.checkpoints]) == (
                [16, 20] if number else [20]
            )
        for client in ranks:
            client.release(str(number))
    assert rig.machine.counters["checkpoints"] == {
        "followed": 3, "unfollowed": 0, "unadvised": 4
    }  # fmt: skip
    assert plan(ranks[0], "2", with_suffix(2)).boundary == 16


def test_ends_that_lie_nowhere_are_refused() -> None:
    client = client_of()
    chain = client.chain(P)
    event = client.planning("0", chain)
    for tail in (ev.Tail(16, chain.digest_at(16), b""), ev.Tail(3, b"short", b"")):
        refused = client.rig.ask(
            msgspec.structs.replace(event, call=client.rig.number(), ends=[tail]), cm.Refused
        )
        assert refused.kind == "invalid"


# --- against a naive model


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(("marconi", "strict", "minimal")),
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 3)),
        min_size=1,
        max_size=14,
    ),
)
def test_an_engine_that_follows_the_advice_resumes_where_a_tree_says(
    mode: Retention, prompts: list[tuple[list[int], int]]
) -> None:
    """Memory without end: a set of ways that have a state, and a list of all ways that were gone."""
    client = client_of(mode)
    gone: list[tuple[int, ...]] = []
    held: set[tuple[int, ...]] = set()
    for number, (blocks, rest) in enumerate(prompts):
        way = tuple(blocks)
        tokens = [*(block for block in blocks for _ in range(BLOCK)), *range(90, 90 + rest)]
        deepest = max(
            range(len(way) + 1),
            key=lambda d: d if d <= way_limit(tokens) and way[:d] in held else 0,
        )
        reached = max(
            (
                d
                for d in range(len(way) + 1)
                if any(one[:d] == way[:d] and len(one) >= d for one in gone)
            ),
            default=0,
        )
        gone.append(way)
        fork = max(
            (
                d
                for d in range(1, reached + 1)
                if len({one[d] for one in gone if one[:d] == way[:d] and len(one) > d}) > 1
            ),
            default=0,
        )
        ends = {way_limit(tokens), len(way)} if mode != "minimal" else {way_limit(tokens)}
        if mode == "strict":
            ends = {d for d in ends if d <= reached}
        advice = {d for d in {*ends, fork} if d > deepest and way[:d] not in held}
        held.update(way[:d] for d in advice)
        planned = serve(client, str(number), tokens)
        assert planned.boundary == deepest * BLOCK
        assert planned.checkpoints == sorted(d * BLOCK for d in advice)


def way_limit(tokens: list[int]) -> int:
    """Return the deepest block's end that serves the identical prompt."""
    return (len(tokens) - 1) // BLOCK
