"""The wall clock is for people: whatever it does, nothing is decided by it."""

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.testing.sim.rig import Client, Rig, hybrid, small

HOUR_S = 3600.0
TOKENS = list(range(20))


class Jumping(Rig):
    """A rig whose wall clock is turned an hour forth and back between any two events."""

    turn = 1

    def wall(self) -> float:
        self.turn = -self.turn
        return 1e9 + self.turn * HOUR_S


def history(rig: Rig) -> list[object]:
    """Save, plan, wait beyond every age, load and release; return what was answered and counted."""
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 16))
    seen: list[object] = [client.plan("a", chain), client.plan("b", chain)]
    rig.run()
    rig.wait(rig.limits.lease_s_max + 1)
    seen.append(rig.gauge("leases_overdue"))
    rig.ask(ev.EvictAsked(900, rig.number(), "", "host", 0), cm.Evicted)
    client.release("a", "b")
    rig.ask(ev.EvictAsked(900, rig.number(), "", "host", 0), cm.Evicted)
    seen.append(client.plan("c", chain))
    call = client.loading("c")
    rig.later(call)
    rig.run()
    seen.append(rig.answers[client.session, call.call])
    client.close()
    seen += [rig.machine.counters, rig.machine.gauges()]
    return seen


def test_a_wall_clock_that_jumps_by_an_hour_changes_nothing() -> None:
    limits = small(64, 64)
    assert history(Jumping(limits)) == history(Rig(limits))
