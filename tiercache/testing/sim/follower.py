"""Engines on a rig that follow the advice they get, or do not."""

from collections.abc import Sequence

import msgspec

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Retaining
from tiercache.core.policy.retention import Retention
from tiercache.testing.sim.rig import BLOCK, Client, Rig, hybrid, small

P = list(range(16))
"""What prompts have in common: four blocks."""

BLOCKS = ev.Capture(0, BLOCK)
ANY = ev.Capture(0, 1)


def rig_of(mode: Retention = "marconi", most: int = 64) -> Rig:
    """Return a rig with that retention; `most`: checkpoints on one way."""
    retaining = Retaining(mode, interval_tokens=8, checkpoints_per_path_max=most)
    return Rig(msgspec.structs.replace(small(pages=400), retaining=retaining))


def client_of(mode: Retention = "marconi", most: int = 64) -> Client:
    """Return a client of such a rig."""
    return Client(rig_of(mode, most), hybrid()).attach()


def with_suffix(number: int, tokens: int = 6) -> list[int]:
    """Return the common prefix, and tokens that no other number has."""
    return [*P, *(1000 * (number + 1) + at for at in range(tokens))]


def plan(
    client: Client,
    request: str,
    tokens: list[int],
    capture: ev.Capture = BLOCKS,
    ends: Sequence[int] = (),
) -> cm.Planned:
    """Plan; `ends`: which of the prompt's ends inside blocks are named."""
    chain = client.chain(tokens)
    named = [ev.Tail(end, chain.digest_at(end), chain.digests[end // BLOCK]) for end in ends]
    event = client.planning(request, chain, capture=capture)
    return client.rig.ask(msgspec.structs.replace(event, ends=named), cm.Planned)


def offers(client: Client, tokens: list[int], ends: Sequence[int]) -> list[ev.Offer]:
    """Return offers of all blocks and of the state at each of `ends`."""
    chain = client.chain(tokens)
    found = {(offer.part, offer.end): offer for end in ends for offer in client.offers(chain, end)}
    return list(found.values())


def states(client: Client, grants: Sequence[cm.Granted], asked: Sequence[ev.Offer]) -> list[int]:
    """Return the boundaries whose recurrent state was granted."""
    return [
        offer.end
        for offer, grant in zip(asked, grants, strict=True)
        if offer.part == 1 and grant.outcome == "granted"
    ]


def save(client: Client, request: str, tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Save blocks and states; return the boundaries whose state was taken."""
    asked = offers(client, tokens, ends)
    return states(client, client.save(request, asked), asked)


def serve(client: Client, request: str, tokens: list[int]) -> cm.Planned:
    """Serve one request by an engine that follows the advice."""
    planned = plan(client, request, tokens)
    save(client, request, tokens, planned.checkpoints)
    client.release(request)
    return planned
