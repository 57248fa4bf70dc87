"""When the pool is slower than computing: what is not fetched from it, and what does not go there."""

import pytest

from tiercache.core import commands as cm
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import MIB, Clustering, Limits, Retaining
from tiercache.core.worth import PROBE_EVERY
from tiercache.state import Kind, Layout, Part, Record, Tensor
from tiercache.state.names import short
from tiercache.testing.sim.rig import Client, Rig, evict

MEGA = 131_072
"""Numbers of eight bytes in 1 MiB."""

TOKENS = list(range(41))


def heavy() -> Layout:
    """Return a layout of which 40 tokens take 44 MiB."""
    kv = Part("kv", Kind.KV, None, 4, 1, (Tensor("v", "int64", (MEGA,), ("c",)),))
    state = Part("s", Kind.RECURRENT, 1, 0, 1, (Tensor("v", "int64", (4 * MEGA,), ("c",)),))
    return Layout((kv, state), 4)


def at_pool(prefill: float) -> Client:
    clustering = Clustering(pool=True)
    retaining = Retaining("dense", checkpoints_per_path_max=0, prefill_tokens_per_s=prefill)
    rig = Rig(Limits((512 * MIB,), clustering=clustering, retaining=retaining))
    return Client(rig, heavy()).attach()


def records_at(client: Client, end: int) -> list[Record]:
    """Return the records of a set that another node would have put there."""
    giver = Client(Rig(client.rig.limits), heavy()).attach()
    chain = giver.chain(TOKENS)
    giver.save("s", giver.offers(chain, end))
    return [item.record for item in giver.rig.machine.items()]


def ask_pool(client: Client, request: str, seconds_per_mib: float) -> int:
    """Plan what the pool has, fetch what the plan is given, and drop it; return the boundary."""
    asked = client.planning(request, client.chain(TOKENS))
    assert client.rig.later(asked) is None
    (locate,) = client.rig.take(ccm.Locate)
    client.rig.tell(cev.LocateEnded(locate.job, 40, records_at(client, 40), None))
    for pull in client.rig.take(ccm.Pull):
        nbytes = sum(record.nbytes for record, _ in pull.objects)
        client.rig.now += seconds_per_mib * nbytes / MIB
        client.rig.tell(cev.Pulled(pull.job, [None] * len(pull.objects)))
    found = client.rig.answers[client.session, asked.call]
    assert isinstance(found, cm.Planned)
    client.release(request)
    evict(client.rig)
    return found.boundary


@pytest.mark.parametrize(
    ("prefill", "seconds_per_mib", "boundary"),
    [(0.0, 1.0, 40), (10.0, 0.0, 40), (0.8, 1.0, 40), (1.0, 1.0, 0)],
)
def test_what_the_pool_gives_more_slowly_than_it_is_computed_is_not_fetched(
    prefill: float, seconds_per_mib: float, boundary: int
) -> None:
    client = at_pool(prefill)
    name = short(client.namespace.digest, client.chain(TOKENS).digest_at(40))
    client.rig.tell(cev.PeerTold(POOL, "", 0, False, [name], [], -1))
    ask_pool(client, "first", seconds_per_mib)
    assert ask_pool(client, "second", seconds_per_mib) == boundary
    assert client.rig.count("pool_asked", "slower") == (boundary == 0)


def test_now_and_then_it_is_fetched_all_the_same() -> None:
    client = at_pool(1.0)
    name = short(client.namespace.digest, client.chain(TOKENS).digest_at(40))
    client.rig.tell(cev.PeerTold(POOL, "", 0, False, [name], [], -1))
    ask_pool(client, "first", 1.0)
    found = [ask_pool(client, f"r{number}", 1.0) for number in range(PROBE_EVERY)]
    assert found == [0] * (PROBE_EVERY - 1) + [40]


def test_what_would_come_back_too_slowly_does_not_go_there() -> None:
    client = at_pool(1.0)
    name = short(client.namespace.digest, client.chain(TOKENS).digest_at(40))
    client.rig.tell(cev.PeerTold(POOL, "", 0, False, [name], [], -1))
    ask_pool(client, "first", 1.0)
    client.rig.tell(cev.PeerTold(POOL, "", 1, False, [], [name], 0))
    client.save("s", client.offers(client.chain(TOKENS), 40))
    for request in "ab":  # The first request resumed there too.
        assert client.plan(request, client.chain(TOKENS)).boundary == 40
        client.release(request)
    assert client.rig.take(ccm.Deposit) == []
    assert client.rig.count("deposits", "slower") == 2
