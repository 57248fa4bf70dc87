"""Reading everything back, and the figures of a node."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.counters import NAMES
from tiercache.errors import Fault
from tiercache.testing.sim.rig import PAGE, Client, Rig, hybrid, small

TOKENS = list(range(20))
OTHERS = [5] * 20
ADMIN = 900


@pytest.fixture
def rig() -> Rig:
    return Rig(msgspec.structs.replace(small(nvme_pages=64), eager=True))


@pytest.fixture
def client(rig: Rig) -> Client:
    """A client that saved 6 objects, now in memory and on disk."""
    client = Client(rig, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 16))
    rig.run()
    return client


def clear(rig: Rig, namespace: str = "") -> cm.Evicted:
    call = rig.number()
    rig.later(ev.ClearAsked(ADMIN, call, namespace))
    rig.run()
    answer = rig.answers[ADMIN, call]
    assert isinstance(answer, cm.Evicted)
    return answer


# --- verify


def verify(rig: Rig, cursor: int = 0, count: int = 1000) -> ev.VerifyAsked:
    return ev.VerifyAsked(ADMIN, rig.number(), cursor, count)


def test_every_copy_is_read(rig: Rig, client: Client) -> None:
    asked = verify(rig)
    rig.later(asked)
    (check,) = rig.take(cm.Check)
    assert [tier for _, tier, _ in check.objects] == ["host", "nvme"] * 6
    rig.tell(ev.Checked(check.job, [None] * 12))
    assert rig.answers[ADMIN, asked.call] == cm.Verified(12, 288, [], 0)
    assert client.plan("q", client.chain(TOKENS)).boundary == 16


def test_pages_of_a_verification(rig: Rig, client: Client) -> None:
    client.reserve("w", client.offers(client.chain(OTHERS), 4))  # Not sealed: nothing to check.
    checked, cursor = 0, 0
    for _ in range(10):
        asked = verify(rig, cursor, count=4)
        rig.later(asked)
        rig.run()
        answer = rig.answers[ADMIN, asked.call]
        assert isinstance(answer, cm.Verified)
        checked += answer.checked
        cursor = answer.cursor
        if not cursor:
            break
    assert (checked, cursor) == (12, 0)
    assert rig.ask(verify(rig, cursor=10**9), cm.Verified) == cm.Verified(0, 0, [], 0)
    rig.later(verify(rig, count=0))
    assert len(rig.take(cm.Check)[0].objects) == 2


def test_damage_in_memory_is_out_of_sight_at_once(rig: Rig, client: Client) -> None:
    planned = client.plan("q", client.chain(TOKENS))
    asked = verify(rig)
    rig.later(asked)
    (check,) = rig.take(cm.Check)
    bad = next(at for at, (r, tier, _) in enumerate(check.objects) if tier == "host" and r.end == 8)
    faults = [Fault.DAMAGED if at == bad else None for at in range(12)]
    rig.tell(ev.Checked(check.job, faults))
    answer = rig.answers[ADMIN, asked.call]
    assert isinstance(answer, cm.Verified)
    (failed,) = answer.failed
    assert failed[1:] == ("host", "damaged")
    assert rig.count("damaged", "host") == 1
    client.release("q")
    assert client.plan("p", client.chain(TOKENS)).boundary == 0
    assert planned.boundary == 16


def test_damage_on_disk_leaves_memory(rig: Rig, client: Client) -> None:
    rig.later(verify(rig))
    (check,) = rig.take(cm.Check)
    faults = [Fault.DAMAGED if tier == "nvme" else None for _, tier, _ in check.objects]
    rig.tell(ev.Checked(check.job, faults))
    assert rig.count("damaged", "nvme") == 6
    assert rig.gauge("objects", "nvme") == 0
    assert client.plan("q", client.chain(TOKENS)).ready
    assert sum(len(forget.keys) for forget in rig.take(cm.Forget)) == 6


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_went_while_it_was_checked_is_let_go(rig: Rig, client: Client, tier: str) -> None:
    rig.later(verify(rig))
    (check,) = rig.take(cm.Check)
    clear(rig)
    assert rig.gauge("bytes", "host") == 6 * PAGE
    faults = [Fault.DAMAGED if each == tier else None for _, each, _ in check.objects]
    rig.tell(ev.Checked(check.job, faults))
    assert rig.gauge("bytes", "host") == 0
    assert rig.count("damaged", tier) == 0
    assert client.rig is rig


def test_a_copy_that_moved_while_it_was_checked_is_not_blamed() -> None:
    """It was dropped from memory and came back elsewhere: the damage was in the old place."""
    rig = Rig(msgspec.structs.replace(small(nvme_pages=64), eager=True))
    client = Client(rig, hybrid()).attach()
    client.save("r", client.offers(client.chain(TOKENS), 4, parts=["kv"]))
    rig.run()
    rig.later(verify(rig))
    (check,) = rig.take(cm.Check)
    item = next(iter(rig.machine._books.catalog))
    host, nvme = item.host, item.nvme
    assert host is not None
    assert nvme is not None
    wrong = type(host)(host.segment, host.offset + PAGE, host.size)
    moved = [(item, tier, wrong) for _, tier, _ in check.objects]
    rig.machine._operation._checks[check.job].copies[:] = [moved[0]]
    rig.machine._books.log.finished(nvme)
    item.users -= 1
    rig.machine.handle(ev.Checked(check.job, [Fault.DAMAGED]), rig.now)
    rig.machine.check()
    assert rig.count("damaged", "host") == 0
    assert client.rig is rig


# --- figures


def test_figures_are_all_there_from_the_start() -> None:
    rig = Rig()
    stats = rig.ask(ev.StatsAsked(ADMIN, 1), cm.Stats)
    assert stats.counters == {name: dict.fromkeys(labels, 0) for name, labels in NAMES.items()}
    assert stats.gauges == rig.machine.gauges()
    assert stats.namespaces == []
    assert stats.gauges["capacity_bytes"] == {"host": 64 * PAGE, "nvme": 0}
    assert stats.gauges["free_largest_bytes"] == {"host": 64 * PAGE}


def test_figures_by_namespace(rig: Rig, client: Client) -> None:
    client.salt = "tenant"
    client.save("s", client.offers(client.chain(TOKENS), 4))
    stats = rig.ask(ev.StatsAsked(ADMIN, 1), cm.Stats)
    found = {label.tenant: figures for label, figures in stats.namespaces}
    tenant = client.namespace.narrow(salt="tenant").tenant
    assert found == {
        "-": {"objects": 6, "host": 144, "nvme": 144},
        tenant: {"objects": 3, "host": 48, "nvme": 0},
    }
    stats.counters["lookups"]["miss"] = 99
    assert rig.count("lookups", "miss") == 0  # What was answered does not change, nor is changed.


def test_overdue_leases_are_counted(rig: Rig, client: Client) -> None:
    client.plan("q", client.chain(TOKENS))
    rig.tell(ev.Tick())
    assert rig.gauge("leases_overdue") == 0
    rig.now += rig.limits.lease_s_max + 1
    rig.tell(ev.Tick())
    assert rig.gauge("leases_overdue") == 6
