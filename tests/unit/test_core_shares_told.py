"""Shares that change while things are held, pinned, read and stored: random histories, audited."""

import random

import msgspec
import pytest

from tests.unit.shares import A, B, label, limits, setting, tenant
from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.limits import Evicting, Limits, Order, Protecting
from tiercache.errors import Fault
from tiercache.testing.sim.rig import ADMIN, Client, Rig, boundary, evict, outcome_of, saved, small

SALTS = ("", A, B, "tenant c")
LABELS = tuple(map(label, SALTS))
SAID = (None, 0.0, -0.0, 1e-300, 0.1, 0.3, 0.5, 0.9, 1.0, 1.5, -1.0, float("nan"), float("inf"))
STEPS = 60
ORDERS: tuple[Order, ...] = ("lru", "auto", "point-lru", "hyper", "index", "marconi")


class History:
    """Random events of tenants, operators and the cluster. The rig has the books audited after each."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rig = Rig(self.terms())
        self.clients = [tenant(self.rig, salt) for salt in SALTS]
        self.held: list[tuple[Client, str]] = []

    def terms(self) -> Limits:
        choice = self.chance.choice
        named = [(name, choice((0.0, 0.5, 1.0)), choice((0.0, 0.3, 1.0))) for name in LABELS[:2]]
        return msgspec.structs.replace(
            small(choice((12, 20, 40)), choice((0, 16, 32))),
            protecting=Protecting(
                shares=tuple(named[: choice((0, 1, 2))]),
                host_share=choice((1.0, 0.5, 0.2)),
                nvme_share=choice((1.0, 0.5)),
                shares_max=choice((2, 4096)),
                ttl_s=choice((0, 3.0)),
            ),
            evicting=Evicting(choice(ORDERS)),
            eager=choice((False, True)),
            namespaces_max=choice((5, 8)),
            objects_max=choice((12, 1000)),
        )

    def step(self, number: int) -> None:
        choice, rig, client = self.chance.choice, self.rig, self.chance.choice(self.clients)
        chain, name = client.chain([self.chance.randrange(6)] * 20), f"r{number}"
        match self.chance.randrange(10):
            case 0 | 1 | 2:
                grants = client.reserve(name, client.offers(chain, choice((4, 8, 16))))
                if choice((True, True, False)):
                    client.commit(grants)
            case 3:
                client.plan(name, chain)
                self.held.append((client, name))
            case 4 if self.held:
                client, name = self.held.pop(self.chance.randrange(len(self.held)))
                choice((client.release, lambda one: rig.later(client.loading(one))))(name)
            case 5:
                tokens, call = choice((4, 8, 16)), rig.number()
                digests = list(chain.digests[1 : 1 + tokens // 4])
                rig.later(guard_events.PinAsked(
                    client.session, call, "", client.salt, digests, tokens, b"", choice((1.0, 30.0))
                ))  # fmt: skip
                rig.later(guard_events.UnpinAsked(ADMIN, rig.number(), choice((1, 2, 3)), ""))
            case 6:
                said = [name for name in (*LABELS, "", "a/b", "x" * 3000) if choice((True, False))]
                rig.tell(guard_events.SharesTold({n: (choice(SAID), choice(SAID)) for n in said}))
            case 7:
                values = choice(SAID), choice(SAID)
                rig.later(guard_events.SharesAsked(ADMIN, rig.number(), choice(LABELS), *values))
            case 8:
                self.work()
            case _:
                self.leave(client)

    def work(self) -> None:
        """What the machine wants is done, or fails; or only some of it is done."""
        if self.chance.random() < 0.5:
            self.rig.run(self.chance.choice((None, None, Fault.IO, Fault.NO_SPACE)))
            return
        rig = self.rig
        wanted: list[cm.Command] = [*rig.take(cm.Seal), *rig.take(cm.Store), *rig.take(cm.Fill)]
        for command in wanted:
            outcome = outcome_of(command)
            assert outcome is not None
            rig.tell(outcome)

    def leave(self, client: Client) -> None:
        """Time passes, objects go, or a client does and another tenant comes."""
        match self.chance.randrange(4):
            case 0:
                self.rig.wait(self.chance.choice((0.1, 5.0, 60.0)))
            case 1:
                evict(self.rig, self.chance.choice(("host", "nvme")))
            case 2:
                self.rig.later(ev.ClearAsked(ADMIN, self.rig.number(), ""))
            case _:
                client.close()
                self.held = [each for each in self.held if each[0] is not client]
                self.clients[self.clients.index(client)] = tenant(self.rig, client.salt)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_said_of_shares_the_books_add_up(seed: int) -> None:
    history = History(seed)
    for number in range(STEPS):
        history.step(number)


@pytest.mark.parametrize("order", ORDERS)
def test_who_has_no_share_any_more_is_followed_with_the_others(order: Order) -> None:
    rig = Rig(msgspec.structs.replace(limits(), evicting=Evicting(order)))
    a = tenant(rig, A)
    saved(a, 16)
    for _ in range(2):
        setting(rig, A, host=0.5)
        assert boundary(a) == 16
        setting(rig, A, host=1.0)
        assert boundary(a) == 16
