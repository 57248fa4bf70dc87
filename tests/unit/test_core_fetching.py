"""Objects asked for by name: leased where they are, brought back where they are not."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Limits
from tiercache.errors import Fault
from tiercache.testing.sim.rig import (
    ADMIN,
    PAGE,
    TOKENS,
    Client,
    Rig,
    hybrid,
    on_disk,
    outcome_of,
    small,
)


def limits(pages: int = 64, nvme_pages: int = 64) -> Limits:
    return msgspec.structs.replace(small(pages, nvme_pages), eager=True)


@pytest.fixture
def rig() -> Rig:
    return Rig(limits())


@pytest.fixture
def client(rig: Rig) -> Client:
    client = Client(rig, hybrid()).attach()
    on_disk(client, 8, 16)
    return client


def fills(rig: Rig) -> list[cm.Fill]:
    return [command for command in rig.work if isinstance(command, cm.Fill)]


# --- fetch


def test_objects_are_fetched_by_name(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.save("s", client.offers(client.chain([7] * 5), 4, parts=["kv"]))
    wanted = [
        client.wanted(client.chain([7] * 5), 0, 4),
        client.wanted(chain, 1, 16),
        client.wanted(chain, 1, 12),
    ]
    call = client.fetching("f", wanted)
    assert client.rig.later(call) is None
    client.rig.run()
    fetched = client.rig.answers[client.session, call.call]
    assert isinstance(fetched, cm.Fetched)
    assert [None if p is None else (p.part, p.end) for p in fetched.pieces] == [
        (0, 4), (1, 16), None
    ]  # fmt: skip
    counted = {label: client.rig.count("fetches", label) for label in ("host", "nvme", "miss")}
    assert counted == {"host": 1, "nvme": 1, "miss": 1}
    assert client.rig.gauge("leases") == 2
    client.release("f")
    assert client.rig.gauge("leases") == 0


def test_a_fetch_that_may_not_wait_takes_what_is_there(client: Client) -> None:
    wanted = [client.wanted(client.chain(TOKENS), 1, 16)]
    call = client.fetching("f", wanted, wait_s=0.0)
    assert client.rig.ask(call, cm.Fetched).pieces == [None]
    assert fills(client.rig) == []


def test_a_fetch_ends_at_its_deadline_with_what_came(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.plan("warm", client.chain(TOKENS[:9]))
    client.rig.run()
    wanted = [client.wanted(chain, 1, 8), client.wanted(chain, 1, 16)]
    call = client.fetching("f", wanted)
    client.rig.later(call)
    client.rig.wait(2.0)
    fetched = client.rig.answers[client.session, call.call]
    assert isinstance(fetched, cm.Fetched)
    assert [piece is not None for piece in fetched.pieces] == [True, False]


def test_what_came_stays_until_the_whole_fetch_is_answered() -> None:
    """Two jobs; between them the pool is full of things that nobody holds."""
    rig = Rig(msgspec.structs.replace(limits(pages=6), fill_batch_bytes_max=1))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    chain = client.chain(TOKENS)
    call = client.fetching("f", [client.wanted(chain, 1, 16), client.wanted(chain, 2, 16)])
    rig.later(call)
    first, second = rig.take(cm.Fill)
    for fill in (first, second):
        done = outcome_of(fill)
        assert done is not None
        rig.tell(done)
        client.save("other", client.offers(client.chain([5] * 21), 20))
    fetched = rig.answers[client.session, call.call]
    assert isinstance(fetched, cm.Fetched)
    assert None not in fetched.pieces


def test_what_is_cleared_while_a_fetch_waits_is_not_given(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.plan("warm", client.chain(TOKENS[:9]))
    client.rig.run()
    call = client.fetching("f", [client.wanted(chain, 1, 8), client.wanted(chain, 1, 16)])
    client.rig.later(call)
    client.rig.tell(ev.ClearAsked(ADMIN, 1, ""))
    client.rig.run()
    fetched = client.rig.answers[client.session, call.call]
    assert isinstance(fetched, cm.Fetched)
    assert fetched.pieces == [None, None]


def test_what_is_found_damaged_while_a_fetch_waits_is_not_given(client: Client) -> None:
    chain = client.chain(TOKENS)
    client.plan("warm", client.chain(TOKENS[:9]))
    client.rig.run()
    call = client.fetching("f", [client.wanted(chain, 1, 8), client.wanted(chain, 1, 16)])
    client.rig.later(call)
    client.rig.tell(ev.VerifyAsked(ADMIN, 1, 0, 100))
    (check,) = client.rig.take(cm.Check)
    faults = [Fault.DAMAGED if tier == "host" else None for _, tier, _ in check.objects]
    client.rig.tell(ev.Checked(check.job, faults))
    client.rig.run()
    fetched = client.rig.answers[client.session, call.call]
    assert isinstance(fetched, cm.Fetched)
    assert [piece is not None for piece in fetched.pieces] == [False, True]
    assert client.rig.gauge("bytes", "host") > 0


def test_fetching_what_never_was_leaves_no_trace(client: Client) -> None:
    strange = ev.Wanted(0, client.layout.parts[0].whole, "codec", bytes(32))
    other = ev.Wanted(0, type(strange.shard)(3, 900), "native", b"short")
    pieces = client.rig.ask(client.fetching("f", [strange, other]), cm.Fetched).pieces
    assert pieces == [None, None]
    assert client.rig.gauge("leases") == 0


def test_a_large_load_is_read_in_several_jobs() -> None:
    rig = Rig(msgspec.structs.replace(limits(), fill_batch_bytes_max=3 * PAGE // 4))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    client.plan("r", client.chain(TOKENS))
    assert len(fills(rig)) == 1
    rig = Rig(msgspec.structs.replace(limits(), fill_batch_bytes_max=50))
    client = Client(rig, hybrid()).attach()
    on_disk(client, 16)
    client.plan("r", client.chain(TOKENS))
    assert [len(fill.objects) for fill in fills(rig)] == [2, 2, 2]
