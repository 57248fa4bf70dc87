"""What stands beside an eviction policy keeps the policies' contract, and does what it says."""

from collections.abc import Callable
from typing import Literal, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core import commands as cm
from tiercache.core import guard_events
from tiercache.core.limits import Evicting, Protecting
from tiercache.core.policy.base import Eviction
from tiercache.core.policy.bias import SPARES_PER_VICTIM_MAX, Biased
from tiercache.core.policy.lru import Lru
from tiercache.core.policy.noop import KeepAll
from tiercache.core.policy.shelter import Sheltered
from tiercache.core.policy.tenants import ByTenant
from tiercache.core.tenants import Share, Tenant
from tiercache.testing.policies import EvictionContract, Thing
from tiercache.testing.sim.rig import (
    ADMIN,
    PAGE,
    TOKENS,
    Client,
    Rig,
    boundary,
    hybrid,
    saved,
    small,
)

Policy = Literal["auto", "index", "hyper", "marconi", "point-lru", "lru"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def order(policy: Eviction[Thing], things: list[Thing]) -> list[int]:
    """Drop everything, asking anew each time; return the numbers of the things as they went."""
    found = []
    while (victim := next_of(policy)) is not None:
        policy.remove(victim)
        found.append(things.index(victim))
    return found


def next_of(policy: Eviction[Thing]) -> Thing | None:
    return next(policy.victims(), None)


def tenant(name: str, host: float, taken: int = 0) -> Tenant:
    found = Tenant(name, Share(host), {"host": 100, "nvme": 0})
    found.taken["host"] = taken
    return found


class TestBiasedWithoutClasses(EvictionContract):
    def make(self) -> Eviction[Thing]:
        return Biased(Lru(), lambda _: 0)


class TestBiasedWithClasses(EvictionContract):
    def make(self) -> Eviction[Thing]:
        known: dict[Thing, int] = {}
        return Biased(Lru(), lambda thing: known.setdefault(thing, len(known) % 5 - 2))


class TestShelteredWithRoom(EvictionContract):
    def make(self) -> Eviction[Thing]:
        known: dict[Thing, int] = {}

        def is_shared(thing: Thing) -> bool:
            return known.setdefault(thing, len(known)) % 2 == 0

        return Sheltered(Lru(), is_shared, lambda _: 1, lambda: 0.0, lambda: 3, 10.0)


class TestShelteredWithoutRoom(EvictionContract):
    def make(self) -> Eviction[Thing]:
        return Sheltered(Lru(), lambda _: True, lambda _: 2, lambda: 0.0, lambda: 1, 10.0)


class TestByTenant(EvictionContract):
    def make(self) -> Eviction[Thing]:
        owners = [None, tenant("a", 0.5), tenant("b", 0.5), tenant("c", 1.0)]
        known: dict[Thing, int] = {}

        def owner(thing: Thing) -> Tenant | None:
            return owners[known.setdefault(thing, len(known)) % 4]

        policy: ByTenant[Thing] = ByTenant(lambda _: Lru(), owner, lambda: True)
        for each in owners[1:]:
            assert each is not None
            policy.join(each)
        return policy


# --- classes


def test_classes_below_zero_go_first_and_above_zero_later() -> None:
    things = [Thing() for _ in range(6)]
    classes = dict(zip(things, (0, 1, -1, 0, -2, 2), strict=True))
    policy: Biased[Thing] = Biased(Lru(), classes.__getitem__)
    for thing in things:
        policy.add(thing)
    assert [things.index(thing) for thing in policy] == [4, 2, 0, 1, 3, 5]
    assert order(policy, things) == [4, 2, 0, 3, 1, 5]


def test_one_that_is_thought_better_of_goes_in_its_turn() -> None:
    things = [Thing() for _ in range(2)]
    classes = dict(zip(things, (0, -1), strict=True))
    policy: Biased[Thing] = Biased(Lru(), classes.__getitem__)
    for thing in things:
        policy.add(thing)
    classes[things[1]] = 0
    assert order(policy, things) == [0, 1]


def test_the_spared_ones_are_bounded() -> None:
    things = [Thing() for _ in range(2 * SPARES_PER_VICTIM_MAX)]
    policy: Biased[Thing] = Biased(Lru(), lambda _: 1)
    for thing in things:
        policy.add(thing)
    assert next_of(policy) is things[SPARES_PER_VICTIM_MAX]


def test_use_gives_chances_anew() -> None:
    things = [Thing() for _ in range(2)]
    classes = dict(zip(things, (1, 0), strict=True))
    policy: Biased[Thing] = Biased(Lru(), classes.__getitem__)
    for thing in things:
        policy.add(thing)
    assert next_of(policy) is things[1]
    policy.remove(things[0])
    policy.add(things[0])
    policy.remove(things[1])
    policy.add(things[1])
    assert next_of(policy) is things[1]


def test_a_policy_that_offers_nothing_stays_like_that() -> None:
    thing = Thing()
    spared: Eviction[Thing] = Biased(KeepAll(), lambda _: 2)
    sheltered: Eviction[Thing] = Sheltered(
        KeepAll(), lambda _: True, lambda _: 1, lambda: 0.0, lambda: 9, 1.0
    )
    for policy in (spared, sheltered):
        policy.add(thing)
        assert next_of(policy) is None


# --- shelter


class Shelter:
    """A shelter of 3 for things of size 1, of which the even ones are shared."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.things = [Thing() for _ in range(count)]
        self.policy: Sheltered[Thing] = Sheltered(
            Lru(),
            lambda thing: self.things.index(thing) % 2 == 0,
            lambda _: 1,
            lambda: self.now,
            lambda: 3,
            10.0,
        )
        for thing in self.things:
            self.policy.add(thing)


def test_shared_things_go_when_there_is_no_room_or_nothing_else() -> None:
    shelter = Shelter(10)
    # 0, 2 and 4 are set aside; then each further one takes the place of the one that was first.
    assert order(shelter.policy, shelter.things) == [1, 3, 5, 0, 7, 2, 9, 4, 6, 8]
    assert shelter.policy.aside_bytes == 0


def test_shared_things_go_when_nobody_came_for_long() -> None:
    shelter = Shelter(4)
    assert next_of(shelter.policy) is shelter.things[1]
    shelter.now = 9.9
    assert next_of(shelter.policy) is shelter.things[1]
    shelter.now = 10.0
    assert next_of(shelter.policy) is shelter.things[0]


def test_a_smaller_shelter_lets_go_of_what_is_too_much() -> None:
    room = [3]
    things = [Thing() for _ in range(4)]
    policy: Sheltered[Thing] = Sheltered(
        Lru(), lambda thing: thing is not things[3], lambda _: 1, lambda: 0.0, lambda: room[0], 9.0
    )
    for thing in things:
        policy.add(thing)
    assert next_of(policy) is things[3]
    room[0] = 1
    assert order(policy, things) == [0, 1, 3, 2]


def test_many_shared_things_are_not_all_looked_at() -> None:
    things = [Thing() for _ in range(3 * SPARES_PER_VICTIM_MAX)]
    policy: Sheltered[Thing] = Sheltered(
        Lru(), lambda _: True, lambda _: 1, lambda: 0.0, lambda: 1000, 1.0
    )
    for thing in things:
        policy.add(thing)
    assert next_of(policy) is things[SPARES_PER_VICTIM_MAX]
    assert len(policy) == len(things)
    assert policy.aside_bytes == SPARES_PER_VICTIM_MAX


# --- tenants


class Pool:
    """Three tenants, two of them with a share of 100 bytes, and things of each."""

    def __init__(self) -> None:
        self.tenants = [tenant("a", 0.5), tenant("b", 0.25), tenant("c", 1.0)]
        self.things: list[Thing] = []
        self.owner: dict[Thing, Tenant] = {}
        self.overcommitted = False
        self.policy: ByTenant[Thing] = ByTenant(
            lambda _: Lru(), self.owner.get, lambda: self.overcommitted
        )
        for each in self.tenants:
            self.policy.join(each)

    def add(self, number: int) -> None:
        thing = Thing()
        self.things.append(thing)
        self.owner[thing] = self.tenants[number]
        self.policy.add(thing)


@pytest.fixture
def pool() -> Pool:
    made = Pool()
    for number in (0, 1, 2, 0, 1, 2):
        made.add(number)
    return made


def test_who_has_a_share_does_not_give_to_others(pool: Pool) -> None:
    assert order(pool.policy, pool.things) == [2, 5]


def test_the_fullest_gives_when_more_was_promised_than_there_is(pool: Pool) -> None:
    pool.overcommitted = True
    pool.tenants[0].taken["host"], pool.tenants[1].taken["host"] = 30, 20
    assert order(pool.policy, pool.things) == [2, 5, 1, 4, 0, 3]


def test_who_has_more_than_a_lowered_share_gives_first(pool: Pool) -> None:
    a = pool.tenants[0]
    a.taken["host"] = 30

    def lower() -> None:
        a.share = Share(0.2)

    pool.policy.move(a, lower)
    assert next_of(pool.policy) is pool.things[0]
    a.taken["host"] = 20
    assert next_of(pool.policy) is pool.things[2]
    a.taken["host"] = 30  # It is looked after when it saves, not here.
    assert next_of(pool.policy) is pool.things[2]


def test_things_follow_their_tenant(pool: Pool) -> None:
    a = pool.tenants[0]

    def lift() -> None:
        a.share = Share()

    pool.policy.move(a, lift)
    assert order(pool.policy, pool.things) == [2, 5, 0, 3]
    assert len(list(pool.policy.policies())) == 2
    assert len(pool.policy) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_policy_pins_and_shares_hold(policy: Policy) -> None:
    """A tenant floods ten times the pool; what is pinned and what another tenant holds stays."""
    salts = ("tenant a", "tenant b")
    names = [hybrid_client(Rig(), salt).namespace.narrow(salt=salt).tenant for salt in salts]
    terms = Protecting(shares=((names[0], 0.75, 1.0), (names[1], 0.25, 1.0)), pinned_share_max=0.5)
    rig = Rig(msgspec.structs.replace(small(40), protecting=terms, evicting=Evicting(policy)))
    a, b = (hybrid_client(rig, salt).attach() for salt in salts)
    saved(a, 16)
    saved(b, 16)
    chain = a.chain(TOKENS)
    asked = guard_events.PinAsked(
        a.session, rig.number(), "", a.salt, list(chain.digests[1:5]), 16, b"", 1000.0
    )
    assert rig.ask(asked, cm.Pinned).outcome == "pinned"
    offered = 6
    for number in range(134):
        offers = a.offers(a.chain([1000 + number] * 5), 4)
        offered += len(a.save(f"flood-{number}", offers))
    assert boundary(a) == boundary(b) == 16
    rows = rig.ask(guard_events.SharesAsked(ADMIN, rig.number(), "", None, None), cm.ShareRows)
    told = {row.tenant: row for row in rows.tenants}[names[0]]
    assert told.taken["host"] <= told.allowed["host"] == 30 * PAGE
    assert sum(told.outcomes.values()) == offered
    assert told.outcomes["rejected"] == 0


def hybrid_client(rig: Rig, salt: str) -> Client:
    """A client that saves for one tenant."""
    client = Client(rig, hybrid())
    client.salt = salt
    return client


# --- against the plainest models

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "remove", "victim")), st.integers(0, 9)), max_size=60
)


def run(steps: list[Step], policy: Eviction[Thing], model: Callable[[list[int]], int]) -> None:
    """Compare a policy with a model, which picks of the numbers in the order of their last use."""
    things = [Thing() for _ in range(10)]
    held: list[int] = []
    numbers.clear()
    numbers.update({thing: number for number, thing in enumerate(things)})
    for what, number in steps:
        if what == "add" and number not in held:
            held.append(number)
            policy.add(things[number])
        elif what == "remove" and number in held:
            held.remove(number)
            policy.remove(things[number])
        elif what == "victim" and held:
            victim = next_of(policy)
            assert victim is not None
            assert numbers[victim] == model(held)
            held.remove(numbers[victim])
            policy.remove(victim)
        assert len(policy) == len(held)
        assert {numbers[thing] for thing in policy} == set(held)


numbers: dict[Thing, int] = {}


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_low_classes_against_a_model(steps: list[Step]) -> None:
    """The lowest class of those below 0, then what was used longest ago."""
    policy: Biased[Thing] = Biased(Lru(), lambda thing: -(numbers[thing] % 3))
    run(steps, policy, lambda held: min(held, key=lambda n: (-(n % 3), held.index(n))))


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_tenants_against_a_model(steps: list[Step]) -> None:
    """Who has no share first; of the others the fullest, here always the same."""
    owners = [None, tenant("a", 0.5, 40), tenant("b", 0.5, 20)]
    policy: ByTenant[Thing] = ByTenant(
        lambda _: Lru(), lambda thing: owners[numbers[thing] % 3], lambda: True
    )
    for owner in owners[1:]:
        assert owner is not None
        policy.join(owner)
    run(steps, policy, lambda held: min(held, key=lambda n: (n % 3, held.index(n))))
