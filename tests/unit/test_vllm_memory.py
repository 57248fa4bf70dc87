"""What a scheduler remembers is bounded."""

from tiercache_vllm.memory import Failures, Seen


def test_seen_forgets_what_was_used_longest_ago() -> None:
    seen = Seen(2)
    for key in (b"a", b"b"):
        seen.add(key)
    assert b"a" in seen
    seen.add(b"c")
    assert [key in seen for key in (b"a", b"b", b"c")] == [True, False, True]
    seen.discard([b"a", b"z"])
    assert (b"a" in seen, len(seen)) == (False, 1)
    seen.clear()
    assert len(seen) == 0


def test_failures_last_a_while() -> None:
    failures = Failures(5.0, 2)
    failures.add(b"a", 10.0)
    assert failures.holds(b"a", 14.9)
    assert not failures.holds(b"b", 14.9)
    assert not failures.holds(b"a", 15.0)
    assert not failures.holds(b"a", 11.0), "it is forgotten, not asleep"


def test_failures_are_bounded() -> None:
    failures = Failures(5.0, 2)
    for key in (b"a", b"b", b"c"):
        failures.add(key, 0.0)
    assert [failures.holds(key, 1.0) for key in (b"a", b"b", b"c")] == [False, True, True]
