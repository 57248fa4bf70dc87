"""From advice to what is stored: forks, and what engines offer unasked."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core.policy.retention import Retention
from tiercache.state import Kind, Layout
from tiercache.testing.sim.follower import (
    ANY,
    BLOCKS,
    P,
    client_of,
    offers,
    plan,
    rig_of,
    save,
    serve,
    states,
    with_suffix,
)
from tiercache.testing.sim.rig import BLOCK, Client, evict, hybrid, outcomes, part

# --- forks


def test_a_fork_is_captured_at_its_second_sight_and_hit_from_the_third() -> None:
    client = client_of()
    first = serve(client, "0", with_suffix(0))
    assert (first.boundary, first.checkpoints) == (0, [20])
    second = serve(client, "1", with_suffix(1))
    assert (second.boundary, second.checkpoints, second.reason) == (0, [16, 20], "no_state")
    for number in range(2, 66):
        later = serve(client, str(number), with_suffix(number))
        assert (later.boundary, later.checkpoints) == (16, [20])
    counters = client.rig.machine.counters
    assert counters["lookups"] == {
        **dict.fromkeys(counters["lookups"], 0), "hit_host": 64, "miss": 2
    }  # fmt: skip
    assert counters["misses"]["unknown_prefix"] == counters["misses"]["no_state"] == 1
    assert counters["checkpoints"] == {"followed": 67, "unfollowed": 0, "unadvised": 0}


def test_an_evicted_fork_is_still_known() -> None:
    client = client_of()
    for number in range(3):
        serve(client, str(number), with_suffix(number))
    evict(client.rig)
    again = serve(client, "3", with_suffix(3))
    assert (again.boundary, again.checkpoints) == (0, [16, 20])
    assert serve(client, "4", with_suffix(4)).boundary == 16


def test_a_conversation_goes_on_and_is_no_fork() -> None:
    client = client_of()
    turn = with_suffix(0, tokens=4)
    serve(client, "0", turn)
    evict(client.rig)
    longer = [*turn, *range(500, 508)]
    assert plan(client, "1", longer).checkpoints == [24, 28]
    other = [*turn, *range(600, 608)]  # Another answer to the same turn.
    assert plan(client, "2", other).checkpoints == [20, 24, 28]


def test_the_deepest_fork_counts() -> None:
    client = client_of()
    serve(client, "0", with_suffix(0))
    serve(client, "1", with_suffix(1))
    deeper = [*with_suffix(1), *range(50)]
    serve(client, "2", [*deeper, 1, 1, 1, 1, 1])
    planned = plan(client, "3", [*deeper, 2, 2, 2, 2, 2])
    assert planned.checkpoints[0] == len(deeper) // BLOCK * BLOCK


def test_a_plan_asked_again_has_the_same_advice() -> None:
    client = client_of()
    serve(client, "0", with_suffix(0))
    first = plan(client, "1", with_suffix(1))
    assert plan(client, "1", with_suffix(1)).checkpoints == first.checkpoints == [16, 20]
    save(client, "1", with_suffix(1), [16])
    client.release("1")
    assert plan(client, "1", with_suffix(1)).checkpoints == [20]


def test_a_suffix_within_the_block_is_a_way_of_its_own() -> None:
    client = client_of()
    for number, expected in enumerate(([17, 18], [16, 17, 18])):
        found = plan(client, str(number), with_suffix(number, tokens=2), ANY)
        assert found.checkpoints == expected


# --- never what is there already


def test_what_is_restorable_is_not_advised_again() -> None:
    client = client_of()
    serve(client, "0", P)
    assert plan(client, "1", P).checkpoints == []  # At 12 it resumes, and at 16 it could.
    assert client.rig.count("hit_tokens", "host") == 12


def test_an_end_inside_a_block_is_known_by_its_name() -> None:
    client = client_of()
    tokens = with_suffix(0, tokens=3)
    assert plan(client, "0", tokens, ANY, ends=[18, 19]).checkpoints == [18, 19]
    save(client, "0", tokens, [18, 19])
    again = plan(client, "1", tokens, ANY, ends=[18, 19])
    assert (again.boundary, again.checkpoints) == (18, [])
    assert plan(client, "2", tokens, ANY, ends=[19]).checkpoints == [18]


def test_a_limit_below_what_is_there() -> None:
    client = client_of("dense")
    save(client, "0", [*P, 1], [4, 8, 12, 16])
    event = client.planning("1", client.chain([*P, 1]), limit=6, capture=BLOCKS)
    planned = client.rig.ask(event, cm.Planned)
    assert (planned.boundary, planned.checkpoints) == (4, [])


def test_checkpoints_on_the_way_count_against_the_budget() -> None:
    client = client_of("dense", most=3)
    tokens = [*P, *range(100, 116), 1]
    assert plan(client, "0", tokens).checkpoints == [24, 28, 32]
    save(client, "0", tokens, [4, 8])
    assert plan(client, "1", tokens).checkpoints == [32]


# --- what engines offer unasked


@pytest.mark.parametrize(
    ("mode", "taken"),
    [
        ("marconi", [20, 30]),
        ("strict", []),
        ("minimal", [20]),
        ("interval", [8, 16, 20, 30]),
        ("chunk", [4, 8, 12, 16, 20, 30]),
        ("dense", [4, 8, 12, 16, 20, 26, 30]),
    ],
)
def test_what_is_offered_is_judged_by_the_mode(mode: Retention, taken: list[int]) -> None:
    client = client_of(mode, most=0)
    tokens = with_suffix(0)
    plan(client, "0", tokens)
    longer = [*tokens, *range(8)]  # Decoded.
    asked = offers(client, longer, [4, 8, 12, 16, 20, 26, 30])
    grants = client.save("0", asked)
    assert states(client, grants, asked) == taken
    whole = [g.outcome for o, g in zip(asked, grants, strict=True) if o.part == 0 and not o.base]
    assert whole == ["granted"] * 7  # Blocks are taken whatever becomes of the states.
    inside = {o.end: g.outcome for o, g in zip(asked, grants, strict=True) if o.base}
    for end in (26, 30):  # A partial block serves its own boundary only.
        assert inside[end] == ("granted" if end in taken else "not_admitted")
    refused = sum(grant.outcome == "not_admitted" for grant in grants)
    assert client.rig.count("reserves", "not_admitted") == refused


def test_strict_takes_what_a_second_request_reaches() -> None:
    client = client_of("strict")
    tokens = with_suffix(0, tokens=3)
    longer = [*tokens, *range(7)]
    for number, taken in enumerate(([], [16, 18, 26])):
        request = str(number)
        plan(client, request, tokens, ANY, ends=[18, 19])
        assert save(client, request, longer, [16, 18, 26]) == taken
        assert save(client, request, longer, [16, 18, 26]) == []  # Refused, or held.
        client.release(request)
    assert plan(client, "2", tokens, ANY, ends=[18, 19]).boundary == 18


def test_strict_advises_at_the_second_sight() -> None:
    client = client_of("strict")
    tokens = with_suffix(0, tokens=3)
    assert plan(client, "0", tokens, ANY, ends=[18, 19]).checkpoints == []
    assert plan(client, "1", tokens, ANY, ends=[18, 19]).checkpoints == [18, 19]
    assert plan(client, "1", tokens, ANY, ends=[18, 19]).checkpoints == [18, 19]
    forked = with_suffix(1, tokens=3)
    assert plan(client, "2", forked, ANY, ends=[18, 19]).checkpoints == [16]


def test_who_never_planned_is_at_a_first_sight() -> None:
    client = client_of()
    tokens = [*P, 1]
    assert save(client, "0", tokens, [8, 16]) == [16]  # The deepest stands for its end.
    assert save(client, "1", [*P[:12], 7, 7, 7, 7], [4, 8, 12, 16]) == [12, 16]
    strict = client_of("strict")
    assert save(strict, "0", tokens, [8, 16]) == []
    assert save(strict, "1", tokens, [8, 16]) == [8, 16]


def test_one_call_after_the_other_is_one_request() -> None:
    client = client_of("strict")
    for parts in (["kv"], ["recurrent"], ["conv"]):
        client.save("0", client.offers(client.chain(P), 16, parts=parts))
    assert client.rig.count("reserves", "not_admitted") == 2
    for parts in (["kv"], ["recurrent"], ["conv"]):
        client.save("1", client.offers(client.chain(P), 16, parts=parts))
    assert client.rig.count("reserves", "not_admitted") == 2
    assert plan(client, "2", [*P, 1]).boundary == 16


def test_an_engine_comes_as_near_to_a_fork_as_its_own_boundaries_let_it() -> None:
    client = client_of()
    plan(client, "0", with_suffix(0, tokens=12))
    plan(client, "1", with_suffix(1, tokens=12))
    assert save(client, "1", with_suffix(1, tokens=12), [4, 8, 12, 20, 28]) == [12, 28]
    assert save(client, "1", with_suffix(1, tokens=12), [4, 8]) == []  # Once.
    client.release("1")
    plan(client, "2", with_suffix(2, tokens=12))
    assert save(client, "2", with_suffix(2, tokens=12), [4, 8, 16, 28]) == [16, 28]


def test_a_layout_without_states_takes_everything() -> None:
    client = Client(rig_of("strict"), Layout((part("kv", Kind.KV, None, BLOCK),), BLOCK)).attach()
    grants = client.save("0", client.offers(client.chain(P[:14]), 14))
    assert outcomes(grants) == {"granted": 4}


def test_who_may_not_write_leaves_no_sight() -> None:
    client = client_of("strict")
    reader = Client(client.rig, hybrid())
    reader.write = False
    asked = reader.attach().offers(reader.chain(P), 16)
    assert outcomes(reader.reserve("0", asked)) == {"read_only": 6}
    assert save(client, "1", P, [16]) == []


def test_nonsense_is_invalid_and_leaves_no_sight() -> None:
    client = client_of("strict")
    (recurrent,) = client.offers(client.chain(P), 16, parts=["recurrent"])
    wrong = [
        msgspec.structs.replace(recurrent, part=7),
        msgspec.structs.replace(recurrent, part=-1),
        msgspec.structs.replace(recurrent, nbytes=9),
    ]
    assert outcomes(client.reserve("0", wrong)) == {"invalid": 3}
    save(client, "1", P, [16])
    other = msgspec.structs.replace(recurrent, end=12)
    assert outcomes(client.reserve("2", [other])) == {"invalid": 1}  # Another boundary's digest.
    assert save(client, "3", P, [16]) == [16]
