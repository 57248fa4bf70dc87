"""What tests of two nodes ask again and again."""

import msgspec

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.testing.sim.pair import Nodes
from tiercache.testing.sim.rig import TOKENS, Client, hybrid

EIGHT = [(0, 0, 4), (0, 4, 8), (1, 0, 8), (2, 0, 8)]
"""What a boundary at 8 tokens rests on: two blocks of KV and two states."""


def plan(client: Client, request: str = "r", tokens: list[int] | None = None) -> ev.PlanAsked:
    """Ask where a request can resume; it does not answer at once."""
    asked = client.planning(request, client.chain(tokens or TOKENS))
    assert client.rig.later(asked) is None
    return asked


def planned(client: Client, asked: ev.PlanAsked) -> cm.Planned:
    """Return the answer, which has come by now."""
    found = client.rig.answers[client.session, asked.call]
    assert isinstance(found, cm.Planned)
    chain = client.chain(TOKENS)
    client.planned[asked.request] = (found.boundary, chain.digest_at(found.boundary))
    return found


def loaded(client: Client, request: str = "r") -> cm.Loaded:
    """Load what was planned; it is there by now."""
    return client.rig.ask(client.loading(request), cm.Loaded)


def ask(nodes: Nodes, there: Client, **changes: object) -> ccm.Located | None:
    """Ask node b as some other node would."""
    chain = there.chain(TOKENS)
    digests = list(chain.digests[1:])
    fields: dict[str, object] = {
        "job": 1, "peer": "b", "boot": "1", "request": "r", "namespace": there.namespace.digest,
        "digests": digests, "limit": 20, "whole": 0, "ranks": 1, "codecs": ("native",),
        "reshard": False, "flush": 0,
    }  # fmt: skip
    return nodes.ask("a", msgspec.convert({**fields, **changes}, ccm.Locate))


def flush(nodes: Nodes, name: str, number: int) -> None:
    """Have a node carry out a flush of everything of the clients' namespace."""
    rig, space = nodes.rigs[name], Client(nodes.rigs[name], hybrid()).namespace.digest
    asked = ev.ClearAsked(900, rig.number(), space.hex(), number)
    assert isinstance(rig.later(asked), cm.Evicted)
