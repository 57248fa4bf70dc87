"""Classes and shelter: what goes first, what is spared, what many share. Never a lock."""

import pytest

from tests.unit.wishes import OTHERS, limits, new, plan, save
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.catalog import Entry, Shelf
from tiercache.core.limits import Protecting
from tiercache.core.protection import BIAS_MAX, BIAS_MIN, bias_of
from tiercache.state import Care, Hint
from tiercache.testing.sim.rig import (
    ADMIN,
    PAGE,
    TOKENS,
    Client,
    boundary,
    evict,
    outcomes,
    saved,
)


def flood(client: Client, pages: int, first: int = 1000) -> None:
    """Save so many objects of one page that nobody needs."""
    for number in range(pages):
        chain = client.chain([first + number] * 5)
        client.save(f"flood-{first + number}", client.offers(chain, 4, parts=["kv"]))


def is_there(client: Client, tokens: list[int], end: int = 4) -> bool:
    """Whether a block is held; nobody uses it for that."""
    digest = client.chain(tokens).digest_at(end).hex()
    prefix = f"{client.namespace.digest.hex()[:12]}/{digest}"
    rows = client.rig.ask(ev.ListAsked(ADMIN, client.rig.number(), 0, 10, prefix), cm.Rows).rows
    return any(row.host is not None for row in rows)


# --- classes


def entry(hint: Hint = Hint.NONE, priority: int | None = None, at: float = 0.0) -> Entry:
    found = Entry(Shelf(b"n" * 32, None, None), b"d" * 32, b"")
    found.hint, found.priority, found.hinted_at = hint, priority, at
    return found


@pytest.mark.parametrize(
    ("of", "now", "bias"),
    [
        (entry(), 0.0, 0),
        (entry(priority=1), 0.0, 1),
        (entry(priority=-2), 0.0, -2),
        (entry(Hint.END_OF_SESSION), 0.0, -2),
        (entry(Hint.END_OF_SESSION, 1), 0.0, -1),
        (entry(Hint.END_OF_SESSION, -2), 0.0, BIAS_MIN),
        (entry(Hint.TOOL_CALL_PENDING, at=7.0), 306.9, 2),
        (entry(Hint.TOOL_CALL_PENDING, at=7.0), 307.0, 0),
        (entry(Hint.TOOL_CALL_PENDING, 2), 0.0, BIAS_MAX),
    ],
)
def test_the_class_of_an_entry(of: Entry, now: float, bias: int) -> None:
    assert bias_of(of, now, Protecting(chances_max=10)) == bias
    assert bias_of(of, now, Protecting(chances_max=1)) == min(bias, 1)


def test_a_low_priority_goes_first() -> None:
    client = new(limits(pages=6))
    flood(client, 3)
    save(client, 4, Care(priority=-1), [7] * 5)
    flood(client, 2, first=2000)
    assert [is_there(client, [1000 + n] * 5) for n in range(3)] == [True] * 3
    assert client.rig.count("evictions", "host") == 2
    assert is_there(client, [7] * 5)  # One of its three is left.
    flood(client, 1, first=3000)
    assert not is_there(client, [7] * 5)
    flood(client, 1, first=4000)
    assert not is_there(client, [1000] * 5)


def test_a_high_priority_is_spared_and_no_lock() -> None:
    client = new(limits(pages=6))
    save(client, 4, Care(priority=1), [7] * 5)
    flood(client, 3)
    flood(client, 3, first=2000)
    assert [is_there(client, [1000 + n] * 5) for n in range(3)] == [False] * 3
    assert is_there(client, [7] * 5)
    flood(client, 6, first=3000)  # Nobody came back for it.
    assert not is_there(client, [7] * 5)


def test_the_highest_priority_of_any_request_counts() -> None:
    client = new(limits(pages=6))
    save(client, 4, Care(priority=-2), [7] * 5)
    plan(client, "use", Care(priority=1), [7] * 5)
    client.release("use")
    plan(client, "look", Care(priority=-1), [7] * 5)
    client.release("look")
    flood(client, 6)
    assert is_there(client, [7] * 5)


def test_an_ended_session_goes_first_and_its_prefix_does_not() -> None:
    client = new(limits(pages=12))
    saved(client, 8)
    save(client, 16, Care(hint=Hint.END_OF_SESSION), request="last")  # Two blocks, two states.
    flood(client, 4)
    flood(client, 4, first=2000)
    assert boundary(client) == 8
    assert [is_there(client, [1000 + n] * 5) for n in range(4)] == [True] * 4


def test_an_end_said_before_the_run_concerns_where_it_resumes() -> None:
    client = new(limits(pages=12))
    saved(client, 8, 16)
    plan(client, "last", Care(hint=Hint.END_OF_SESSION))
    client.release("last")
    flood(client, 4)
    flood(client, 3, first=2000)
    assert boundary(client) == 8
    assert plan(client, "none", Care(hint=Hint.END_OF_SESSION), OTHERS).boundary == 0


def test_a_session_that_waits_for_a_tool_is_spared_for_a_while() -> None:
    client = new(limits(pages=9))
    care = Care(hint=Hint.TOOL_CALL_PENDING)
    save(client, 16, care)
    flood(client, 3)
    flood(client, 6, first=2000)
    assert boundary(client) == 16
    save(client, 16, care, request="again")
    client.rig.wait(301.0)
    flood(client, 9, first=3000)
    assert boundary(client) == 0


def test_whoever_goes_on_ends_the_hint() -> None:
    client = new(limits(pages=8))
    save(client, 16, Care(hint=Hint.END_OF_SESSION))
    assert boundary(client) == 16  # Somebody goes on from there after all.
    flood(client, 2)
    flood(client, 2, first=2000)
    assert [is_there(client, [1000 + n] * 5) for n in range(2)] == [True] * 2


def test_hints_can_be_switched_off() -> None:
    client = new(limits(pages=6, chances_max=0))
    save(client, 4, Care(priority=2), [7] * 5)
    flood(client, 6)
    assert not is_there(client, [7] * 5)


# --- what many share


def test_what_many_requests_share_survives_a_flood() -> None:
    client = new(limits(pages=20, shared_share_max=0.3, shared_sights_min=3))
    saved(client, 16)
    for _ in range(3):
        boundary(client)
    flood(client, 60)
    assert client.rig.gauge("sheltered_bytes") == 6 * PAGE
    assert boundary(client) == 16
    assert client.rig.gauge("sheltered_bytes") == 0  # In use, then the last to go.


def test_what_is_not_used_for_long_loses_its_shelter() -> None:
    client = new(limits(pages=20, shared_share_max=0.3, shared_sights_min=3, shared_s_max=100.0))
    saved(client, 16)
    for _ in range(3):
        boundary(client)
    flood(client, 30)
    client.rig.wait(101.0)
    flood(client, 30, first=2000)
    assert client.rig.gauge("sheltered_bytes") == 0
    assert boundary(client) == 0


def test_the_shelter_is_bounded() -> None:
    client = new(limits(pages=20, shared_share_max=0.2, shared_sights_min=3))
    for tokens in (TOKENS, OTHERS):
        saved(client, 16, tokens=tokens)
        for _ in range(3):
            boundary(client, tokens)
    flood(client, 60)
    assert client.rig.gauge("sheltered_bytes") == 4 * PAGE
    assert evict(client.rig).objects == 20
    assert client.rig.gauge("bytes", "host") == 0


def test_a_shelter_is_no_lock() -> None:
    client = new(limits(pages=6, shared_share_max=0.9, shared_sights_min=2))
    save(client, 8, Care())
    for _ in range(2):
        boundary(client)
    chain = client.chain([9] * 20)
    assert outcomes(client.reserve("all", client.offers(chain, 16))) == {"granted": 6}
