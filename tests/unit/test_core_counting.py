"""What is counted, exactly, over a history written out by hand; and what never changes a count."""

import random

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.errors import Fault
from tiercache.testing.sim.rig import PAGE, Client, Rig, hybrid, outcome_of, small

TOKENS = list(range(20))
ADMIN = 900


def evict(rig: Rig, tier: str) -> None:
    rig.ask(ev.EvictAsked(ADMIN, rig.number(), "", tier, 0), cm.Evicted)


def counted(rig: Rig) -> dict[str, dict[str, int]]:
    """Every count that is not 0."""
    found = {
        name: {label: count for label, count in labels.items() if count}
        for name, labels in rig.machine.counters.items()
    }
    return {name: labels for name, labels in found.items() if labels}


def test_a_history_counted_by_hand() -> None:
    rig = Rig(msgspec.structs.replace(small(pages=16, nvme_pages=32), eager=True))
    client = Client(rig, hybrid()).attach()
    chain, short = client.chain(TOKENS), client.chain(TOKENS[:16])

    client.plan("miss", chain)  # unknown_prefix, 20 tokens
    client.release("miss")
    client.save("miss", client.offers(chain, 16, parts=["kv"]))
    client.plan("no state", chain)  # no_state
    client.release("no state")
    client.save("miss", client.offers(chain, 16, parts=["recurrent"]))
    client.save("miss", client.offers(chain, 12, parts=["conv"]))
    client.plan("incomplete", chain)  # incomplete
    client.release("incomplete")
    client.save("miss", client.offers(chain, 16))  # 5 held, 1 granted
    client.plan("beyond", short)  # beyond_limit, 16 tokens
    client.release("beyond")
    rig.run()
    client.plan("host", chain)  # hit_host, 16 tokens of it
    client.release("host")
    evict(rig, "host")  # 7 objects of 4 * 32 + 3 * 8 bytes
    client.plan("nvme", chain)  # hit_nvme
    call = client.loading("nvme")
    rig.later(call)
    rig.run()
    client.release("nvme")
    evict(rig, "host")  # 6
    client.plan("declined", chain)
    rig.ask(client.loading("declined", wait_s=0.0), cm.Loaded)
    client.release("declined")
    rig.run()
    evict(rig, "host")  # 6
    client.plan("aborted", chain)
    client.release("aborted")
    rig.run()
    client.plan("open", chain)  # Decided, so it counts though it was not released.
    assert counted(rig) == {
        "lookups": {"hit_host": 2, "hit_nvme": 1, "miss": 4, "declined": 1, "aborted": 1},
        "misses": {"unknown_prefix": 1, "no_state": 1, "incomplete": 1, "beyond_limit": 1},
        "hit_tokens": {"host": 32, "nvme": 16},
        "lookup_tokens": {"": 8 * 20 + 16},
        "lost_tokens": {  # Of all but the first and the aborted, the last 4 are held nowhere.
            "unseen": 20,
            "no_state": 16,
            "incomplete": 16,
            "beyond_limit": 16,
            "late": 16,
            "aborted": 20,
            "not_held": 6 * 4,
        },
        "reserves": {"granted": 7, "held": 5},
        "checkpoints": {"unadvised": 3},  # 16, 12, and 16 again.
        "commits": {"": 7},
        "committed_bytes": {"": 4 * 32 + 3 * 8},
        "evictions": {"host": 7 + 6 + 6},
        "evicted_bytes": {"host": 152 + 144 + 144},
        "writeback_bytes": {"": 7 * PAGE},
        "nvme_read_bytes": {"": 3 * 144},
    }


def test_every_request_is_counted_once_however_it_goes() -> None:
    """The sum over all outcomes is the number of requests, whatever is repeated, lost or late."""
    chance = random.Random(11)
    rig = Rig(msgspec.structs.replace(small(pages=24, nvme_pages=16), eager=True))
    client = Client(rig, hybrid()).attach()
    requests = 0
    for number in range(150):
        tokens = [chance.randrange(3), *TOKENS[1 : chance.choice((9, 14, 19))]]
        chain = client.chain(tokens)
        name = f"r{number}"
        requests += 1
        planned = client.plan(name, chain)
        if chance.random() < 0.5:
            planned = client.plan(name, chain, tails=planned.candidates)
        if chance.random() < 0.2:
            evict(rig, chance.choice(("host", "nvme", "")))
        for _ in range(chance.randrange(3)):
            rig.later(client.loading(name, wait_s=chance.choice((0.0, 1.0))))
        if chance.random() < 0.3:
            rig.tell(ev.ClearAsked(ADMIN, rig.number(), ""))
        if chance.random() < 0.7:
            fault = Fault.DAMAGED if chance.random() < 0.2 else None
            rig.run(fault)
        client.save(name, client.offers(chain, len(tokens) - 1))
        if chance.random() < 0.8:
            client.release(name)
        rig.wait(chance.random())
    rig.run()
    client.close()
    lookups = rig.machine.counters["lookups"]
    assert sum(lookups.values()) == requests
    assert sum(rig.machine.counters["misses"].values()) == lookups["miss"]
    assert min(lookups["hit_host"], lookups["miss"], lookups["aborted"]) > 0
    assert rig.gauge("leases") == 0


def test_a_hit_that_turns_out_deeper_is_counted_where_it_was_found() -> None:
    """In memory up to 8; the client then names a boundary at 14 that is on disk."""
    rig = Rig(msgspec.structs.replace(small(nvme_pages=32), eager=True))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 8))
    client.save("s", client.offers(chain, 14))
    rig.run()
    evict(rig, "host")
    client.plan("warm", client.chain(TOKENS[:9]))
    rig.run()
    client.release("warm")
    first = client.plan("r", chain)
    assert (first.boundary, first.ready) == (8, True)
    second = client.plan("r", chain, tails=first.candidates)
    assert (second.boundary, second.ready) == (14, False)
    rig.later(client.loading("r"))
    rig.run()
    client.release("r")
    assert rig.count("hit_tokens", "nvme") == 14
    assert rig.count("lookups", "hit_host") == 0


@pytest.mark.parametrize("outcome", ["held", "busy"])
def test_puts_of_the_same_are_counted_each(outcome: str) -> None:
    rig = Rig()
    client = Client(rig, hybrid()).attach()
    offers = client.offers(client.chain(TOKENS), 16)
    grants = client.reserve("a", offers)
    client.commit(grants)
    if outcome == "held":
        for seal in rig.take(cm.Seal):
            done = outcome_of(seal)
            assert done is not None
            rig.tell(done)
    for _ in range(3):
        client.reserve("b", offers)
    assert counted(rig)["reserves"] == {"granted": 6, outcome: 18}
