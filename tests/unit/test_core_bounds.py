"""What bounds the node: how many objects it knows, how many operators wait, what a look costs."""

import msgspec

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import Extent
from tiercache.testing.sim.rig import PAGE, Client, Rig, hybrid, small

ADMIN = 900


def chain_of(client: Client, number: int) -> list[int]:
    return [1000 * number + position for position in range(20)]


def test_the_catalog_keeps_to_its_number_of_objects() -> None:
    rig = Rig(msgspec.structs.replace(small(256), objects_max=6))
    client = Client(rig, hybrid()).attach()
    for number in range(4):
        chain = client.chain(chain_of(client, number))
        grants = client.save(f"s{number}", client.offers(chain, 4))
        assert {grant.outcome for grant in grants} == {"granted"}
        assert client.plan(f"p{number}", chain).boundary == 4
        client.release(f"p{number}")
    assert rig.gauge("objects", "host") == 6
    assert rig.count("evictions", "host") == 6


def test_with_every_object_in_use_one_more_is_declined() -> None:
    rig = Rig(msgspec.structs.replace(small(256), objects_max=3))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(chain_of(client, 0))
    client.save("s", client.offers(chain, 4))
    assert client.plan("p", chain).boundary == 4
    other = client.chain(chain_of(client, 1))
    grants = client.reserve("r", client.offers(other, 4))
    assert {grant.outcome for grant in grants} == {"full"}
    client.release("p")
    assert client.reserve("r", client.offers(other, 4))[0].outcome == "granted"


def test_no_more_is_found_on_disk_than_the_catalog_takes() -> None:
    rig = Rig(msgspec.structs.replace(small(256, 64), objects_max=2, eager=True))
    client = Client(rig, hybrid()).attach()
    chain = client.chain(chain_of(client, 0))
    client.save("s", client.offers(chain, 8)[:2])
    records = [row.record for row in rows(rig)]
    later = Rig(msgspec.structs.replace(small(256, 64), objects_max=1), opened=False)
    later.tell(ev.NvmeOpened({1: 4 * PAGE}, []))
    later.tell(
        ev.Found([(record, Extent(1, at * PAGE, PAGE)) for at, record in enumerate(records)])
    )
    assert later.gauge("objects", "nvme") == 1
    (forget,) = later.take(cm.Forget)
    assert forget.keys == [records[1].key]


def test_looking_at_objects_does_not_keep_them() -> None:
    rig = Rig(small(256))
    client = Client(rig, hybrid()).attach()
    for number in range(3):
        client.save(f"s{number}", client.offers(client.chain(chain_of(client, number)), 4))
    before = [row.key for row in rows(rig)]
    rig.later(ev.VerifyAsked(ADMIN, rig.number(), 0, 100))
    rig.run()
    order = []
    while before:
        rig.ask(ev.EvictAsked(ADMIN, rig.number(), "", "host", 1), cm.Evicted)
        left = [row.key for row in rows(rig)]
        order += [key for key in before if key not in left]
        before = left
    fresh = Rig(small(256))
    twin = Client(fresh, hybrid()).attach()
    for number in range(3):
        twin.save(f"s{number}", twin.offers(twin.chain(chain_of(twin, number)), 4))
    unseen = []
    there = [row.key for row in rows(fresh)]
    while there:
        fresh.ask(ev.EvictAsked(ADMIN, fresh.number(), "", "host", 1), cm.Evicted)
        left = [row.key for row in rows(fresh)]
        unseen += [key for key in there if key not in left]
        there = left
    assert order == unseen


def test_what_is_looked_at_is_not_taken_away_meanwhile() -> None:
    rig = Rig(small(3))
    client = Client(rig, hybrid()).attach()
    client.save("s", client.offers(client.chain(chain_of(client, 0)), 4))
    rig.later(ev.VerifyAsked(ADMIN, rig.number(), 0, 100))
    other = client.chain(chain_of(client, 1))
    assert {g.outcome for g in client.reserve("r", client.offers(other, 4))} == {"full"}
    rig.run()
    assert {g.outcome for g in client.reserve("r", client.offers(other, 4))} == {"granted"}


def test_operators_that_wait_are_bounded() -> None:
    rig = Rig(msgspec.structs.replace(small(64), operations_max=2))
    client = Client(rig, hybrid()).attach()
    client.save("s", client.offers(client.chain(chain_of(client, 0)), 4))
    calls = [ev.VerifyAsked(ADMIN, rig.number(), 0, 100) for _ in range(3)]
    answers = [rig.later(call) for call in calls]
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], cm.Refused)
    rig.run()
    assert all((ADMIN, call.call) in rig.answers for call in calls)


def test_pages_go_on_where_they_stopped_whatever_was_dropped() -> None:
    rig = Rig(small(4096))
    client = Client(rig, hybrid()).attach()
    for number in range(600):
        client.save(f"s{number}", client.offers(client.chain(chain_of(client, number)), 4))
    seen: list[int] = []
    cursor = 0
    while True:
        page = rig.ask(ev.ListAsked(ADMIN, rig.number(), cursor, 50, ""), cm.Rows)
        seen += [row.id for row in page.rows]
        cursor = page.cursor
        if not cursor:
            break
        rig.ask(ev.EvictAsked(ADMIN, rig.number(), "", "host", 200), cm.Evicted)
    assert seen == sorted(set(seen))
    assert len(seen) > 600


def rows(rig: Rig) -> list[cm.Row]:
    return rig.ask(ev.ListAsked(ADMIN, rig.number(), 0, 1000, ""), cm.Rows).rows
