"""What tests of requests with wishes begin with."""

import msgspec

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Evicting, Limits, Protecting
from tiercache.state import Care
from tiercache.testing.sim.rig import TOKENS, Client, Rig, hybrid, small

OTHERS = [5] * 20


def limits(pages: int = 20, nvme_pages: int = 0, **terms: object) -> Limits:
    protecting = msgspec.structs.replace(Protecting(), **terms)
    return msgspec.structs.replace(
        small(pages, nvme_pages), protecting=protecting, evicting=Evicting("lru"), eager=True
    )


def new(limit: Limits | None = None) -> Client:
    return Client(Rig(limit or limits()), hybrid()).attach()


def save(
    client: Client, end: int, care: Care, tokens: list[int] | None = None, request: str = "s"
) -> list[cm.Granted]:
    """Save all that a boundary rests on, with wishes."""
    chain = client.chain(tokens or TOKENS)
    grants = client.rig.ask(
        reserving(client, request, client.offers(chain, end), care), cm.Reserved
    )
    client.commit(grants.grants)
    for seal in client.rig.take(cm.Seal):
        client.rig.tell(ev.Sealed(seal.job, [b"0" * 16] * len(seal.objects)))
    return grants.grants


def reserving(client: Client, request: str, offers: list[ev.Offer], care: Care) -> ev.ReserveAsked:
    number = client.rig.number()
    return ev.ReserveAsked(client.session, number, request, client.lora, client.salt, offers, care)


def plan(client: Client, request: str, care: Care, tokens: list[int] | None = None) -> cm.Planned:
    asked = client.planning(request, client.chain(tokens or TOKENS))
    return client.rig.ask(msgspec.structs.replace(asked, care=care), cm.Planned)
