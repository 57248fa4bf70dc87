"""Attaching, ending, and values that nobody honest would send."""

from dataclasses import replace

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import Kind, Layout
from tiercache.testing.sim.rig import BLOCK, Client, Rig, hybrid, part, small

TOKENS = list(range(20))


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig, hybrid()).attach()


def refused(client: Client) -> str:
    answer = client.rig.ask(client.attaching(), cm.Refused)
    assert answer.kind == "refused"
    return answer.text


# --- attaching


def test_the_layout_must_be_the_one_that_is_named(rig: Rig) -> None:
    client = Client(rig, hybrid())
    client.layout = hybrid(2)
    assert "dtype, shape, axis or block size" in refused(client)


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (1, 1), (2, -1), (-1, -2), (10**9, 0)])
def test_a_rank_is_one_of_the_ranks(rig: Rig, ranks: int, rank: int) -> None:
    assert "rank" in refused(Client(rig, hybrid(), ranks=ranks, rank=rank))


def test_ranks_that_cannot_split_the_state_are_refused(rig: Rig) -> None:
    assert "'recurrent' has 8 units" in refused(Client(rig, hybrid(8), ranks=3))
    Client(rig, hybrid(8), ranks=16, rank=15).attach()


def test_a_session_attaches_once(rig: Rig, client: Client) -> None:
    assert "already" in refused(client)
    client.close(acknowledged=False)
    assert "already" in refused(client)
    rig.tell(ev.Gone(client.session))
    client.attach()


def test_a_layout_has_so_many_parts() -> None:
    rig = Rig(msgspec.structs.replace(small(), parts_max=2))
    assert "at most 2 parts" in refused(Client(rig, hybrid()))


@pytest.mark.parametrize("field", ["model", "weights", "tokenizer", "lora", "salt", "chain"])
def test_names_are_bounded(rig: Rig, field: str) -> None:
    client = Client(rig, hybrid())
    client.namespace = replace(client.namespace, **{field: "ü" * 513})
    assert "1024 bytes" in refused(client)
    client.namespace = replace(client.namespace, **{field: "ü" * 512})
    client.attach()


def test_a_writers_name_is_bounded(rig: Rig) -> None:
    client = Client(rig, hybrid())
    client.writer = "x" * 2000
    assert "1024 bytes" in refused(client)


def test_who_is_not_attached_is_refused(rig: Rig) -> None:
    client = Client(rig, hybrid())
    chain = client.chain(TOKENS)
    for asked in (
        client.planning("r", chain),
        client.loading("r"),
        client.fetching("r", []),
        client.flushing(),
        ev.ReserveAsked(client.session, rig.number(), "r", "", "", []),
    ):
        assert rig.ask(asked, cm.Refused) == cm.Refused("refused", "attach first")
    for told in (
        ev.Committed(client.session, [1]),
        ev.Cancelled(client.session, [1]),
        ev.Released(client.session, ["r"]),
        ev.Closed(client.session, acknowledged=True),
        ev.Closed(client.session, acknowledged=False),
        ev.Gone(client.session),
    ):
        assert rig.tell(told) == []


# --- namespaces


def test_a_request_narrows_its_namespace(rig: Rig, client: Client) -> None:
    chain = client.chain(TOKENS)
    for lora, salt in (("", ""), ("a", ""), ("", "s"), ("a", "s")):
        client.lora, client.salt = lora, salt
        assert client.plan(f"r{lora}{salt}", chain).boundary == 0
        client.save("s", client.offers(chain, 8))
        assert client.plan(f"q{lora}{salt}", chain).boundary == 8
    assert rig.gauge("namespaces") == 4


def test_what_a_session_was_attached_with_stays(rig: Rig, client: Client) -> None:
    """A request without a salt in a tenant's session is the tenant's."""
    chain = client.chain(TOKENS)
    client.salt = "tenant"
    client.save("s", client.offers(chain, 8))
    tenant = Client(rig, hybrid())
    tenant.namespace = client.namespace.narrow(salt="tenant")
    tenant.attach()
    assert tenant.plan("r", chain).boundary == 8
    tenant.lora = "adapter"
    assert tenant.plan("q", chain).boundary == 0


def test_namespaces_are_bounded_and_empty_ones_make_room() -> None:
    rig = Rig(msgspec.structs.replace(small(), namespaces_max=3))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    for number in range(20):
        client.salt = f"s{number}"
        assert client.plan(f"r{number}", chain).boundary == 0
    assert rig.gauge("namespaces") == 3
    for number in (18, 19):
        client.salt = f"s{number}"
        client.save("s", client.offers(chain, 4))
    client.salt = "one more"
    answer = rig.ask(client.planning("r", chain), cm.Refused)
    assert answer == cm.Refused("refused", "too many namespaces")
    other = Client(rig, hybrid())
    other.namespace = replace(other.namespace, weights="other")
    assert "3 namespaces already" in refused(other)
    client.salt = "s19"
    assert client.plan("again", chain).boundary == 4


def test_a_namespace_that_made_room_is_made_again(rig: Rig) -> None:
    rig = Rig(msgspec.structs.replace(small(), namespaces_max=2))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    client.salt = "a"
    client.plan("r", chain)
    client.salt = "b"
    client.plan("r", chain)
    client.salt = "a"
    client.save("r", client.offers(chain, 8))
    assert client.plan("r", chain).boundary == 8  # Not the plan of the namespace that is gone.
    client.release("r")
    assert rig.gauge("leases") == 0
    assert rig.count("lookups", "miss") == 2
    assert rig.count("lookups", "hit_host") == 1


def test_a_session_remembers_only_so_many_namespaces() -> None:
    rig = Rig(msgspec.structs.replace(small(), namespaces_max=2))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    for number in range(10):
        client.salt = f"s{number}"
        client.plan("r", chain)
    (session,) = rig.machine._books.sessions.values()
    assert len(session.narrowed) <= 3
    client.release("r")
    assert sum(rig.machine.counters["lookups"].values()) == 10  # All were ended by the release.


# --- requests that cannot be


def test_a_request_has_a_name_of_some_length(client: Client) -> None:
    chain = client.chain(TOKENS)
    for name in ("", "x" * 257, "ü" * 129):
        for asked in (
            client.planning(name, chain),
            client.loading(name),
            client.fetching(name, []),
            ev.ReserveAsked(client.session, client.rig.number(), name, "", "", []),
        ):
            answer = client.rig.ask(asked, cm.Refused)
            assert (answer.kind, "1..256 bytes" in answer.text) == ("invalid", True)
    client.plan("ü" * 128, chain)


def test_what_narrows_a_request_is_bounded(client: Client) -> None:
    client.lora = "x" * 1025
    assert client.rig.ask(client.loading("r"), cm.Refused).kind == "invalid"
    client.lora, client.salt = "", "x" * 1025
    assert client.rig.ask(client.loading("r"), cm.Refused).kind == "invalid"


def plan_with(client: Client, field: str, value: object) -> ev.PlanAsked:
    asked = client.planning("r", client.chain(TOKENS))
    return msgspec.structs.replace(asked, **{field: value})


D = b"d" * 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digests", []),
        ("digests", [D] * 6),
        ("digests", [D] * 4 + [b"short"]),
        ("digests", [D] * 70_000),
        ("tokens", 0),
        ("tokens", -1),
        ("tokens", 24),
        ("tokens", 2**62),
        ("limit", -1),
        ("limit", 21),
        ("codecs", ()),
        ("codecs", ("",)),
        ("codecs", ("a/b",)),
        ("codecs", ("native",) * 17),
        ("tails", [ev.Tail(0, D, D)]),
        ("tails", [ev.Tail(-1, D, D)]),
        ("tails", [ev.Tail(4, D, D)]),
        ("tails", [ev.Tail(21, D, D)]),
        ("tails", [ev.Tail(5, b"short", D)]),
        ("tails", [ev.Tail(5, D, D)] * 70_000),
    ],
)
def test_a_plan_that_cannot_be_is_refused(client: Client, field: str, value: object) -> None:
    assert client.rig.ask(plan_with(client, field, value), cm.Refused).kind == "invalid"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capture", ev.Capture(-1, -1)),
        ("capture", ev.Capture(2**62, 0)),
        ("capture", ev.Capture(1, 2**62)),
        ("tails", [ev.Tail(5, D, b"")]),
        ("digests", [D] * 5),
        ("limit", 0),
        ("limit", 20),
        ("codecs", ("x" * 5000,)),
    ],
)
def test_a_strange_plan_is_a_miss(client: Client, field: str, value: object) -> None:
    assert client.rig.ask(plan_with(client, field, value), cm.Planned).boundary == 0


def test_batches_are_bounded(client: Client) -> None:
    rig, session = client.rig, client.session
    offer = client.offer(client.chain(TOKENS), 0, 4)
    many = rig.limits.batch_max + 1
    reserve = ev.ReserveAsked(session, rig.number(), "r", "", "", [offer] * many)
    assert rig.ask(reserve, cm.Refused).kind == "invalid"
    wanted = client.wanted(client.chain(TOKENS), 0, 4)
    assert rig.ask(client.fetching("r", [wanted] * many), cm.Refused).kind == "invalid"
    assert rig.ask(client.fetching("r", []), cm.Fetched).pieces == []


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_a_part_that_is_not_there_is_not_fetched(client: Client, index: int) -> None:
    wanted = ev.Wanted(index, client.layout.parts[0].whole, "native", D)
    assert (
        client.rig.ask(client.fetching("r", [wanted]), cm.Refused).text == "there is no such part"
    )


def test_leases_are_bounded() -> None:
    rig = Rig(msgspec.structs.replace(small(), leases_per_session_max=5))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 16))
    client.plan("r", chain)
    assert "release something" in rig.ask(client.planning("q", chain), cm.Refused).text
    assert rig.ask(client.loading("r"), cm.Refused).kind == "invalid"
    client.release("r")
    client.plan("q", chain)


def test_asking_without_getting_leaves_no_trace(client: Client) -> None:
    """A client that never releases its misses takes no memory for leases."""
    for number in range(50):
        client.plan(f"r{number}", client.chain([number, *TOKENS]))
    assert client.rig.machine._books.leases.all() == []
    client.close()
    assert client.rig.count("lookups", "miss") == 50


def test_a_route_without_hits_is_short(rig: Rig) -> None:
    layout = Layout((part("state", Kind.RECURRENT, 1, 0),), BLOCK)
    client = Client(rig, layout).attach()
    chain = client.chain(TOKENS)
    client.save("s", client.offers(chain, 8))
    client.plan("r", chain)
    client.plan("q", client.chain([9] * 20))
    routes = rig.machine._planning._routes._routes.values()
    assert [route.positions for route in routes] == [[4, 8], []]


@pytest.mark.parametrize("missing", [ev.Sealed(99, []), ev.Stored(99, []), ev.Filled(99, [])])
def test_an_outcome_of_no_job_is_a_bug(rig: Rig, missing: ev.Event) -> None:
    with pytest.raises(KeyError):
        rig.tell(missing)


def test_an_event_that_does_not_exist_is_a_bug(rig: Rig) -> None:
    with pytest.raises(AssertionError, match="no answer to str"):
        rig.machine.handle("hello", 0.0)  # type: ignore[arg-type]


def test_operators_need_no_session_and_hostile_questions_get_answers(rig: Rig) -> None:
    session = -1
    for cursor in (-5, 0, 2**62):
        for count in (-5, 0, 2**62):
            for prefix in ("", "/", "\udcff", "x" * 100_000, "a/b/c/d/e"):
                rig.ask(ev.ListAsked(session, rig.number(), cursor, count, prefix), cm.Rows)
                rig.ask(ev.EvictAsked(session, rig.number(), prefix, prefix, count), cm.Evicted)
            rig.ask(ev.VerifyAsked(session, rig.number(), cursor, count), cm.Verified)
    rig.ask(ev.ClearAsked(session, rig.number(), "\udcff"), cm.Evicted)
    rig.ask(ev.StatsAsked(session, rig.number()), cm.Stats)
