"""Two tenants with shares, for the tests of shares of memory and of the disk."""

import msgspec

from tiercache.core import commands as cm
from tiercache.core import guard_events
from tiercache.core.limits import Evicting, Limits, Protecting
from tiercache.testing.sim.rig import ADMIN, Client, Rig, hybrid, small

A, B = "tenant a", "tenant b"
OTHERS = [5] * 20


def label(salt: str) -> str:
    return Client(Rig(), hybrid()).namespace.narrow(salt=salt).tenant


def limits(
    *shares: tuple[str, float, float],
    pages: int = 40,
    nvme_pages: int = 0,
    host_share: float = 1.0,
    nvme_share: float = 1.0,
) -> Limits:
    named = tuple((label(salt), host, nvme) for salt, host, nvme in shares)
    terms = Protecting(shares=named, host_share=host_share, nvme_share=nvme_share)
    return msgspec.structs.replace(
        small(pages, nvme_pages), protecting=terms, evicting=Evicting("lru"), eager=True
    )


def tenant(rig: Rig, salt: str) -> Client:
    """A client of its own that saves for one tenant."""
    client = Client(rig, hybrid())
    client.salt = salt
    return client.attach()


def flood(client: Client, count: int = 40) -> list[cm.Granted]:
    """Save prompts that nobody needs."""
    grants = []
    for number in range(count):
        chain = client.chain([1000 + number] * 5)
        grants += client.save(f"flood-{number}", client.offers(chain, 4))
    return grants


def row(rig: Rig, salt: str) -> cm.ShareRow:
    rows = rig.ask(
        guard_events.SharesAsked(ADMIN, rig.number(), label(salt), None, None), cm.ShareRows
    )
    (found,) = rows.tenants
    return found


def setting(rig: Rig, salt: str, host: float | None = None, nvme: float | None = None) -> None:
    rig.ask(guard_events.SharesAsked(ADMIN, rig.number(), label(salt), host, nvme), cm.ShareRows)
