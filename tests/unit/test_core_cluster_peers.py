"""What nodes tell each other of what they could resume, and who is asked."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.cluster.breaker import Breaker
from tiercache.core.cluster.peers import Peers, Whom
from tiercache.core.cluster.summary import Own
from tiercache.core.limits import Clustering
from tiercache.state.names import packed, short, unpacked

SPACE = bytes(range(32))
LIMITS = Clustering(peers_max=4, peer_names_max=3, peer_failures_max=2, peer_sick_s=1.0)


def chain(seed: int, blocks: int) -> list[bytes]:
    return [random.Random(f"{seed}/{at}").randbytes(32) for at in range(blocks)]


# --- names


def test_names_are_64_bits_of_namespace_and_digest() -> None:
    digest = bytes(8) + b"x" * 24
    assert short(SPACE, digest) == int.from_bytes(SPACE[:8])
    assert short(SPACE, digest) != short(SPACE[::-1], digest)
    names = [0, 1, 2**64 - 1]
    assert unpacked(packed(names)) == names
    assert unpacked(b"") == []


def test_half_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes each, not 9"):
        unpacked(bytes(9))


# --- what this node tells


def test_what_changed_is_told_once_for_each_boundary() -> None:
    own = Own(names_max=10, changes_max=10)
    own.add(1)
    told = own.since(0)
    assert (told.whole, told.added, told.removed) == (False, [1], [])
    own.add(2)
    own.remove(1)
    own.add(3)
    own.remove(3)
    later = own.since(told.version)
    assert (later.whole, later.added, sorted(later.removed)) == (False, [2], [1, 3])
    assert own.since(later.version) == (later.version, False, [], [])
    assert len(own) == 1


def test_a_name_that_two_boundaries_share_stays_until_both_are_gone() -> None:
    own = Own(names_max=10, changes_max=10)
    own.add(1)
    own.add(1)
    before = own.version
    own.remove(1)
    assert own.version == before
    own.remove(1)
    assert own.since(before).removed == [1]
    own.remove(1)
    assert own.version == before + 1


def test_who_missed_too_much_or_knows_the_future_is_told_everything() -> None:
    own = Own(names_max=10, changes_max=2)
    for name in (1, 2, 3):
        own.add(name)
    assert own.since(0) == (3, True, [1, 2, 3], [])
    assert own.since(4) == (3, True, [1, 2, 3], [])
    assert own.since(1).whole is False


def test_the_oldest_boundaries_are_not_told_when_there_are_too_many() -> None:
    own = Own(names_max=2, changes_max=10)
    for name in (1, 2, 3):
        own.add(name)
    assert own.since(0) == (4, False, [2, 3], [1])
    assert own.since(-1).added == [2, 3]
    own.remove(1)
    assert len(own) == 2


def test_what_moves_between_tiers_is_told_anew() -> None:
    own = Own(names_max=2, changes_max=10)
    own.add(1, slower=True)
    own.add(2)
    assert own.slower([1, 2]) == {1}
    version = own.version
    own.move(1, slower=True)
    own.move(2, slower=False)
    own.move(3, slower=True)  # Not told: too many, or gone.
    assert own.version == version
    own.move(1, slower=False)
    own.move(2, slower=True)
    assert sorted(own.since(version).added) == [1, 2]
    assert own.slower([1, 2, 3]) == {2}
    own.remove(2)
    own.add(4, slower=True)
    own.add(5, slower=True)
    own.add(6)
    assert own.slower([2, 4, 5, 6]) == {5}


# --- what others told


@pytest.mark.parametrize("last", ["a", "b"])
def test_who_is_unlikely_to_have_it_comes_after_who_lacked_it_once(last: str) -> None:
    peers, digests = Peers(LIMITS), chain(1, 3)
    peers.members({"a": "1", "b": "1"})
    for name in "ab":
        told(peers, name, [digests[2]])
    ranks = (SPACE, 4, 0, 2)
    whom = Whom(ranks, lambda name: inf, frozenset({last}))
    other = "b" if last == "a" else "a"
    peer = peers.get(other)
    assert peer is not None
    peer.lacks(ranks, nothing=True)
    _, found = peers.deepest(SPACE, digests, 0, 0, whom)
    assert [each.name for each in found] == [other, last]


def test_what_is_told_by_those_only_whom_nobody_may_ask_costs_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt has many boundaries, and all of them may be told by whoever was asked already."""
    peers, digests = Peers(LIMITS), chain(1, 3)
    peers.members({"a": "1", "b": "1", "c": "1"})
    told(peers, "a", digests)
    monkeypatch.delattr("tiercache.core.cluster.peers.short")
    asked: list[str] = []

    def nobody(name: str) -> float:
        asked.append(name)
        return 0

    assert peers.deepest(SPACE, digests, 0, 0, Whom((SPACE, 1, 0, 0), nobody)) == (0, [])
    assert asked == ["a"], "once, and of none who told nothing"


@pytest.mark.parametrize(
    ("below", "counts", "found"),
    [
        (inf, None, 3),
        (3, None, 2),
        (inf, {1, 2, 7}, 2),
        (2, {1, 2}, 1),
        (inf, {0, 7}, 0),
        (1, None, 0),
    ],
)
def test_one_is_asked_for_less_than_it_told_and_for_what_is_of_use(
    below: float, counts: set[int] | None, found: int
) -> None:
    peers, digests = Peers(LIMITS), chain(1, 3)
    peers.members({"a": "1"})
    told(peers, "a", digests)
    of_use = frozenset(counts) if counts is not None else None
    whom = Whom((SPACE, 1, 0, 0), lambda name: below, counts=of_use)
    assert peers.deepest(SPACE, digests, 0, 0, whom)[0] == found


def test_of_two_each_is_asked_for_less_than_it_lacked() -> None:
    peers, digests = Peers(LIMITS), chain(1, 3)
    peers.members({"a": "1", "b": "1"})
    for name in "ab":
        told(peers, name, digests[:2] if name == "b" else digests)
    whom = Whom((SPACE, 1, 0, 0), {"a": 2.0, "b": 3.0}.__getitem__)
    count, found = peers.deepest(SPACE, digests, 0, 0, whom)
    assert (count, [peer.name for peer in found]) == (2, ["b"])
    count, found = peers.deepest(SPACE, digests[:1], 0, 0, whom)
    assert (count, len(found)) == (1, 2)
    told(peers, "b", digests[:1])
    told(peers, "a", digests[1:])
    count, found = peers.deepest(SPACE, digests, 0, 0, whom)
    assert (count, [peer.name for peer in found]) == (1, ["b"])


def told(peers: Peers, name: str, digests: list[bytes]) -> None:
    peers.told(name, 1, [short(SPACE, digest) for digest in digests], [], whole=True)


def test_the_deepest_boundary_of_any_peer_is_found_without_a_message() -> None:
    peers, digests = Peers(LIMITS), chain(1, 8)
    assert peers.deepest(SPACE, digests, 0, now=0) == (0, [])
    peers.members({"a": "1", "b": "1"})
    told(peers, "a", [digests[2], digests[5]])
    told(peers, "b", [digests[5]])
    count, found = peers.deepest(SPACE, digests, 0, now=0)
    assert (count, sorted(peer.name for peer in found)) == (6, ["a", "b"])
    assert peers.deepest(SPACE, digests[:5], 0, now=0)[0] == 3
    assert peers.deepest(SPACE, digests, 6, now=0) == (0, [])
    assert peers.deepest(bytes(32), digests, 0, now=0) == (0, [])
    peers.check()


def test_one_that_is_sick_is_not_asked() -> None:
    peers, digests = Peers(LIMITS), chain(1, 4)
    peers.members({"a": "1", "b": "1"})
    told(peers, "a", [digests[3]])
    told(peers, "b", [digests[1]])
    sick = peers.get("a")
    assert sick is not None
    for _ in range(2):
        sick.breaker.asked()
        sick.breaker.failed(10.0)
    count, found = peers.deepest(SPACE, digests, 0, now=10.0)
    assert (count, [peer.name for peer in found]) == (2, ["b"])
    assert peers.deepest(SPACE, digests, 0, now=11.5)[0] == 4


def test_prefixes_are_spread_over_the_peers_that_hold_them_and_stay_with_one() -> None:
    peers = Peers(LIMITS)
    peers.members({"a": "1", "b": "1"})
    firsts = set()
    for seed in range(32):
        digests = chain(seed, 1)
        told(peers, "a", digests)
        told(peers, "b", digests)
        first = [peers.deepest(SPACE, digests, 0, now=0)[1][0].name for _ in range(2)]
        assert first[0] == first[1]
        firsts.add(first[0])
    assert firsts == {"a", "b"}


def test_what_is_told_anew_takes_no_more_room() -> None:
    peers, names = Peers(Clustering(peers_max=2, peer_names_max=2)), [1, 2, 3]
    peers.members({"a": "1"})
    peers.told("a", 1, names[:2], [], whole=True)
    peers.told("a", 2, [2, 3], [1], whole=False)
    assert peers.known(0)["a"].boundaries == 2
    peers.told("a", 3, [2, 3, 4], [], whole=False)
    peers.check()
    assert peers.known(0)["a"].boundaries == 2


def test_a_restart_or_a_leave_takes_what_was_told_with_it() -> None:
    peers, digests = Peers(LIMITS), chain(1, 2)
    peers.members({"a": "1", "b": "1"})
    told(peers, "a", digests)
    told(peers, "b", digests[:1])
    peers.members({"a": "2", "b": "1"})
    assert [p.name for p in peers.deepest(SPACE, digests, 0, now=0)[1]] == ["b"]
    peers.members({"a": "2"})
    assert peers.deepest(SPACE, digests, 0, now=0) == (0, [])
    assert "b" not in peers
    assert len(peers) == 1
    told(peers, "b", digests)  # It says something as it goes.
    assert peers.get("b") is None
    peers.members({"c": "1", "a": "2"})
    told(peers, "c", digests)
    peers.check()


def test_there_are_limits_to_peers_and_to_what_one_tells() -> None:
    peers = Peers(LIMITS)
    peers.members(dict.fromkeys("abcdef", "1"))
    assert len(peers) == 4
    digests = chain(1, 5)
    told(peers, "a", digests)
    assert peers.deepest(SPACE, digests, 0, now=0)[0] == 3
    peers.told("a", 2, [short(SPACE, digests[4])], [], whole=False)
    assert peers.deepest(SPACE, digests, 0, now=0)[0] == 3
    peers.told("a", 3, [short(SPACE, digests[4])], [short(SPACE, digests[0])], whole=False)
    assert peers.deepest(SPACE, digests, 0, now=0)[0] == 5
    peers.check()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["members", "whole", "changes"]),
            st.sampled_from("abc"),
            st.sets(st.integers(0, 7)),
            st.sets(st.integers(0, 7)),
        ),
        max_size=30,
    )
)
def test_the_table_is_what_the_peers_told(
    steps: list[tuple[str, str, set[int], set[int]]],
) -> None:
    digests = chain(3, 8)
    names = [short(SPACE, digest) for digest in digests]
    peers = Peers(Clustering(peers_max=3, peer_names_max=100))
    held: dict[str, set[int]] = {}
    for what, peer, one, other in steps:
        if what == "members":
            there = {name: str(len(other)) for name in "abc" if ord(name) % 8 in one}
            held = {
                name: held.get(name, set())
                if (known := peers.get(name)) and known.boot == boot
                else set()
                for name, boot in there.items()
            }
            peers.members(there)
        elif peer in held:
            added, removed = sorted(one - other), sorted(other)
            whole = what == "whole"
            peers.told(
                peer, 1, [names[at] for at in added], [names[at] for at in removed], whole=whole
            )
            held[peer] = ((set() if whole else held[peer]) - other) | (one - other)
        peers.check()
        deepest = max(
            (at for at in range(8) if any(at in own for own in held.values())), default=-1
        )
        count, found = peers.deepest(SPACE, digests, 0, now=0)
        assert count == deepest + 1
        assert {p.name for p in found} == {name for name in held if deepest in held[name]}


# --- health


def test_it_is_left_alone_after_some_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=2, sick_s=1.0, sick_s_max=4.0)
    for _ in range(3):
        breaker.asked()
        breaker.failed(0.0)
        assert breaker.may_ask(0.0)
        breaker.asked()
        breaker.succeeded()
    breaker.asked()
    breaker.withdrawn()
    assert breaker.under_way == 0
    for _ in range(2):
        breaker.asked()
        breaker.failed(0.0)
    assert breaker.is_sick(0.9)
    assert not breaker.may_ask(0.9)
    assert breaker.may_ask(1.0)


def test_it_comes_back_gradually_and_rests_longer_each_time() -> None:
    breaker = Breaker(failures_max=2, sick_s=1.0, sick_s_max=3.0)
    rests = []
    now = 0.0
    for _ in range(2):
        breaker.asked()
        breaker.failed(now)
    for _ in range(3):
        start = now
        while not breaker.may_ask(now):
            now += 0.5
        rests.append(now - start)
        breaker.asked()
        assert not breaker.may_ask(now), "one at a time"
        breaker.failed(now)
    assert rests == [1.0, 2.0, 3.0]
    now += 3.0
    together = []
    while (count := _ask_all(breaker, now)) < 100:
        together.append(count)
    assert together == [1, 2, 4, 8, 16], "and is trusted with all in the end"
    for _ in range(2):
        breaker.asked()
        breaker.failed(now)
    assert breaker.may_ask(now + 1.0), "the first rest is short again"


def _ask_all(breaker: Breaker, now: float) -> int:
    count = 0
    while breaker.may_ask(now) and count < 100:
        breaker.asked()
        count += 1
    for _ in range(count):
        breaker.succeeded()
    return count
