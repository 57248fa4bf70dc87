"""Priorities, hints and ends weigh the same, whatever the order of eviction."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Evicting, Limits, Order, Retaining
from tiercache.core.policy import pointwise, shadow
from tiercache.state import Care, Hint, Kind, Layout, Part, Tensor
from tiercache.testing.sim.rig import BLOCK, PAGE, Client, Rig, boundary, small

ORDERS = ("auto", "index", "hyper", "marconi", "point-lru", "lru")
NONE = Care()
LEARNED = 40


def limits(order: Order, pages: int) -> Limits:
    return msgspec.structs.replace(
        small(pages), evicting=Evicting(order), retaining=Retaining("marconi")
    )


def whole_pages() -> Layout:
    """A block of KV and a checkpoint take a page each."""

    def tensor(size: int) -> tuple[Tensor, ...]:
        return (Tensor("values", "int64", (size,), ("head",)),)

    kv = Part("kv", Kind.KV, None, BLOCK, 1, tensor(PAGE // 8 // BLOCK))
    return Layout((kv, Part("state", Kind.RECURRENT, 1, 0, 1, tensor(PAGE // 8))), BLOCK)


def new(order: Order, pages: int) -> Client:
    return Client(Rig(limits(order, pages)), whole_pages()).attach()


def turn(client: Client, tokens: list[int], care: Care = NONE) -> list[str]:
    """Plan, save what is missing and let go; return what became of each offer."""
    name = f"r{client.rig.number()}"
    chain = client.chain(tokens)
    asked = client.planning(name, chain, capture=ev.Capture(0, BLOCK))
    planned = client.rig.ask(msgspec.structs.replace(asked, care=care), cm.Planned)
    end = len(tokens) // BLOCK * BLOCK
    offers = client.offers(chain, end, start=planned.boundary, parts=["kv"])
    offers += [client.offer(chain, 1, each) for each in planned.checkpoints]
    client.release(name)
    number = client.rig.number()
    asking = ev.ReserveAsked(client.session, number, name, client.lora, client.salt, offers, care)
    grants = client.rig.ask(asking, cm.Reserved).grants
    client.commit(grants)
    for seal in client.rig.take(cm.Seal):
        client.rig.tell(ev.Sealed(seal.job, [b"0" * 16] * len(seal.objects)))
    client.rig.wait(1.0)
    return [grant.outcome for grant in grants]


def flood(client: Client, prompts: int, first: int) -> None:
    """Prompts of two pages each, all different."""
    for number in range(first, first + prompts):
        turn(client, [number] * 5)


@pytest.mark.parametrize("order", ORDERS)
def test_a_low_priority_goes_before_all_others(order: Order) -> None:
    client = new(order, 8)
    flood(client, 2, 100)
    turn(client, [7] * 5, Care(priority=-1))
    flood(client, 1, 200)
    assert boundary(client, [100] * 5) == 4
    turn(client, [300] * 5)
    assert boundary(client, [7] * 5) == 0
    assert boundary(client, [100] * 5) == 4


@pytest.mark.parametrize("order", ORDERS)
def test_an_ended_session_goes_before_all_others(order: Order) -> None:
    client = new(order, 8)
    flood(client, 2, 100)
    turn(client, [7] * 9, Care(hint=Hint.END_OF_SESSION))
    flood(client, 2, 200)
    assert boundary(client, [7] * 9) == 0
    assert [boundary(client, [number] * 5) for number in (100, 101, 200, 201)] == [4] * 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("care", [Care(priority=1), Care(hint=Hint.TOOL_CALL_PENDING)])
def test_who_is_worth_more_is_spared_and_no_lock(
    order: Order, care: Care, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointwise, "ASIDE_VISITS", 8)
    client = new(order, 8)
    turn(client, [7] * 5, care)
    flood(client, 4, 100)
    flood(client, 2, 200)
    assert _there(client, [7] * 5)
    flood(client, 60, 1000)  # Nobody came back for it.
    assert not _there(client, [7] * 5)


@pytest.mark.parametrize("order", ORDERS)
def test_its_objects_end_when_their_request_said(order: Order) -> None:
    client = new(order, 8)
    turn(client, [7] * 5, Care(ttl_ms=3000))
    flood(client, 1, 100)
    client.rig.wait(3.0)
    assert boundary(client, [7] * 5) == 0
    flood(client, 2, 200)
    assert boundary(client, [100] * 5) == 4  # What had ended had made room.


def _there(client: Client, tokens: list[int]) -> bool:
    """Whether a block is held; nobody uses it for that."""
    digest = client.chain(tokens).digest_at(4).hex()
    prefix = f"{client.namespace.digest.hex()[:12]}/{digest}"
    rows = client.rig.ask(ev.ListAsked(901, client.rig.number(), 0, 10, prefix), cm.Rows).rows
    return any(row.host is not None for row in rows)


def full_of_talks(client: Client) -> None:
    """Two conversations that go on and on fill memory; prompts that never come back pass by."""
    for number in range(LEARNED):
        turn(client, [7 + number % 2] * (41 + number % 7))
        turn(client, [1000 + number] * 5)


@pytest.mark.parametrize("order", ["index", "auto"])
def test_who_is_declined_is_told_so_and_not_always(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks like a one-off does not displace what is used all the time, unless it says so."""
    monkeypatch.setattr(shadow, "LEARNED_VISITS", LEARNED)
    monkeypatch.setattr(shadow, "LEARNED_USES", LEARNED // 2)
    monkeypatch.setattr(shadow, "DECLINED_MAX", 7)
    client = new(order, 22)
    full_of_talks(client)
    told = [turn(client, [5000 + number] * 41) for number in range(40)]
    outweighed = sum("outweighed" in outcomes for outcomes in told)
    assert client.rig.count("reserves", "outweighed") >= outweighed > 20
    assert sum(set(outcomes) == {"granted"} for outcomes in told) >= 3
    full_of_talks(client)
    assert set(turn(client, [9] * 41, Care(priority=1))) == {"granted"}
    assert boundary(client, [9] * 41) == 40


def test_an_lru_declines_nothing() -> None:
    client = new("lru", 22)
    full_of_talks(client)
    assert client.rig.count("reserves", "outweighed") == 0
