"""How fast a tier is, learned from what it did."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.limits import MIB
from tiercache.core.pace import SAMPLE_BYTES, Pace


def test_nothing_is_known_at_first() -> None:
    pace = Pace(MIB)
    assert (pace.bytes_per_s, pace.seconds(10**9)) == (0.0, 0.0)


def test_one_read() -> None:
    pace = Pace(MIB)
    pace.started(8 * MIB, 100.0)
    pace.ended(8 * MIB, 8 * MIB, 102.0)
    assert pace.bytes_per_s == 4 * MIB
    assert pace.seconds(2 * MIB) == 0.5


def test_reads_at_one_time_share_the_tier() -> None:
    pace = Pace(MIB)
    for _ in range(4):
        pace.started(2 * MIB, 10.0)
    for end in (10.5, 11.0, 11.5, 12.0):
        pace.ended(2 * MIB, 2 * MIB, end)
    assert pace.bytes_per_s == 4 * MIB  # And not what one of them saw.


def test_the_time_between_reads_does_not_count() -> None:
    pace = Pace(MIB)
    for start in (10.0, 1000.0):
        pace.started(2 * MIB, start)
        pace.ended(2 * MIB, 2 * MIB, start + 1.0)
    assert pace.bytes_per_s == 2 * MIB
    pace.started(2 * MIB, 2000.0)
    pace.started(2 * MIB, 2001.0)
    pace.ended(2 * MIB, 2 * MIB, 2002.0)
    pace.ended(2 * MIB, 2 * MIB, 2002.0)
    assert pace.bytes_per_s == 2 * MIB


def test_who_comes_later_waits_for_what_is_on_its_way() -> None:
    pace = Pace(MIB)
    pace.started(MIB, 0.0)
    pace.ended(MIB, MIB, 1.0)
    pace.started(3 * MIB, 5.0)
    assert pace.seconds(MIB) == 4.0
    assert pace.seconds(MIB, queued=False) == 1.0


def test_small_reads_say_how_long_it_takes_to_begin() -> None:
    pace = Pace(MIB)
    for start in (0.0, 100.0):
        pace.started(MIB - 1, start)
        pace.ended(MIB - 1, MIB - 1, start + 0.5)
    assert (pace.bytes_per_s, pace.begins_s, pace.seconds(10**9)) == (0.0, 0.5, 0.5)
    pace.started(8 * MIB, 200.0)
    pace.ended(8 * MIB, 8 * MIB, 202.5)
    assert pace.bytes_per_s == 4 * MIB
    assert pace.seconds(4 * MIB) == 1.5
    pace.started(8 * MIB, 300.0)
    pace.ended(8 * MIB, 8 * MIB, 300.25)  # Sooner than a read is thought to begin.
    assert pace.bytes_per_s > 4 * MIB


def test_a_failed_read_is_no_slow_one() -> None:
    pace = Pace(MIB)
    pace.started(8 * MIB, 0.0)
    pace.ended(8 * MIB, 0, 60.0)
    assert pace.bytes_per_s == 0


def test_a_read_that_takes_no_time_says_nothing() -> None:
    pace = Pace(MIB)
    pace.started(8 * MIB, 1.0)
    pace.ended(8 * MIB, 8 * MIB, 1.0)
    assert pace.bytes_per_s == 0


def test_a_tier_that_is_never_idle_is_measured_too() -> None:
    pace = Pace(MIB)
    pace.started(SAMPLE_BYTES, 0.0)
    pace.started(SAMPLE_BYTES, 1.0)
    pace.ended(SAMPLE_BYTES, SAMPLE_BYTES, 2.0)
    assert pace.bytes_per_s == SAMPLE_BYTES / 2
    pace.started(MIB, 2.0)
    pace.ended(MIB, MIB, 3.0)
    assert pace.bytes_per_s == SAMPLE_BYTES / 2  # Not enough yet.


def test_it_follows_a_tier_that_changes() -> None:
    pace = Pace(MIB)
    found = []
    for number in range(60):
        seconds = 1.0 if number < 30 else 0.1
        pace.started(MIB, 10.0 * number)
        pace.ended(MIB, MIB, 10.0 * number + seconds)
        found.append(pace.bytes_per_s)
    assert all(after >= before for before, after in pairwise(found[29:]))
    assert found[29] == MIB
    assert found[-1] > 8 * MIB


@given(st.lists(st.tuples(st.integers(1, 2**24), st.floats(0, 10)), max_size=30))
def test_it_lies_between_the_slowest_and_the_fastest(reads: list[tuple[int, float]]) -> None:
    pace = Pace(1)
    now, rates = 0.0, []
    for nbytes, seconds in reads:
        pace.started(nbytes, now)
        if now + seconds > now:
            rates.append(nbytes / (now + seconds - now))
        pace.ended(nbytes, nbytes, now + seconds)
        now += seconds
    assert pace.is_known is bool(rates)
    if rates:
        assert min(rates) * 0.999 <= pace.bytes_per_s <= max(rates) * 1.001
