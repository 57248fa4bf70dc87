"""A machine with a pool, in a test's hands: nothing passes between them by itself."""

import msgspec

from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import Limits
from tiercache.state.names import short
from tiercache.testing.sim.pair import clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, boundary, hybrid


def pooled(pages: int = 64, nvme_pages: int = 0, **changes: float) -> Limits:
    """Return limits of a node that has a pool and no others. All goes to disk at once."""
    limits = clustered(pages, nvme_pages, peers_max=0, pool=True, **changes)
    return msgspec.structs.replace(limits, eager=True)


def at(limits: Limits, **how: int) -> Client:
    """Return an engine at a new node."""
    return Client(Rig(limits), hybrid(how.get("ranks", 1)), **how).attach()


def name_of(client: Client, tokens: int = 8) -> int:
    """Return the short name of a boundary."""
    return short(client.namespace.digest, client.chain(TOKENS).digest_at(tokens))


def told(client: Client, *tokens: int, since: int = -1, version: int = 0) -> None:
    """The pool is known to hold these boundaries."""
    names = [name_of(client, each) for each in tokens]
    client.rig.tell(cev.PeerTold(POOL, "", version, False, names, [], since))


def resumes(client: Client, times: int = 2) -> list[ccm.Deposit]:
    """Resume again and again; return what the pool is given."""
    for _ in range(times):
        assert boundary(client) == 8
    return client.rig.take(ccm.Deposit)


def outcomes(client: Client) -> dict[str, int]:
    """Return what became of deposits."""
    return {k: n for k, n in client.rig.machine.counters["deposits"].items() if n}
