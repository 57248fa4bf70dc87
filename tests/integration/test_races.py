"""Clients that race, share, fill and count, against a real node."""

import threading
from collections.abc import Callable

import pytest

from tiercache.cli.admin import Admin
from tiercache.testing import toy
from tiercache.testing.children import children
from tiercache.testing.nodes import START_S, NewClient, NewNode, NodeProcess, eventually

SECRET = "the salt of one tenant"
Run = Callable[[int], None]
RACES = """
client = Client.attach(path, toy.NAMESPACE, toy.LAYOUT, options=options)
print("ready", flush=True)
sys.stdin.readline()
chain = toy.chain(5, 40)
saved = client.save(f"race-{number}", chain, toy.state(chain, 40))
assert set(saved.declined) <= {"busy"}, saved
while not client.plan(f"race-{number}-p", chain, limit=40).boundary:
    client.flush()
with client.load(client.plan(f"race-{number}-q", chain, limit=40)) as plan:
    wrong = list(toy.wrong(plan, chain))
    assert plan.boundary == 40 and not wrong, (plan, wrong)
print("done", flush=True)
"""
FETCHES = """
client = Client.attach(path, toy.NAMESPACE, toy.LAYOUT, options=options)
print("ready", flush=True)
sys.stdin.readline()
assert toy.resumed(client, 2) == toy.TOKENS
print("done", flush=True)
"""


@pytest.mark.slow
def test_sixteen_clients_store_the_same_at_once(node: NodeProcess) -> None:
    with children(node.socket, RACES, 16) as racing:
        for child in racing:
            child.tell("go")
        for child in racing:
            child.reads("done")
    with Admin(str(node.socket), START_S) as admin:
        stats = admin.stats()
        copies = len(toy.state(toy.chain(5, 40), 40))
        assert stats.gauges["objects"]["host"] == copies
        assert stats.counters["commits"][""] == copies
        outcomes = stats.counters["reserves"]
        assert outcomes["granted"] == copies
        assert sum(outcomes.values()) == outcomes["granted"] + outcomes["held"] + outcomes["busy"]


@pytest.mark.slow
def test_sixteen_clients_fetch_the_same_from_disk_at_once(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node(nvme={"write_back": "eager"})
    node.start()
    client = new_client(node)
    assert all([toy.is_put(client, number) for number in (1, 2)])  # noqa: C419
    assert node.stop() == 0
    node.start()
    node.wait_scanned()
    assert toy.resumed(client, 1) == toy.TOKENS
    alone = node.counter("nvme_read_bytes")
    assert alone > 0
    with children(node.socket, FETCHES, 16) as fetching:
        for child in fetching:
            child.tell("go")
        for child in fetching:
            child.reads("done")
    assert node.counter("nvme_read_bytes") == 2 * alone, "it is read once, whoever asks"


@pytest.mark.slow
def test_readers_writers_and_evictors_see_whole_objects_or_none(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node(host={"bytes": "1MiB", "segment_bytes": "512KiB"}, nvme={"write_back": "eager"})
    node.start()
    pinning = new_client(node)
    toy.put(pinning, 0)
    pinned = pinning.plan("pinned", toy.chain(0, 40), limit=40)
    assert pinned.boundary == 40
    errors: list[BaseException] = []
    found: list[int] = []

    def reads(seed: int) -> None:
        client = new_client(node)
        numbers = [1 + (seed * 31 + step * 17) % 40 for step in range(120)]
        found.extend(toy.resumed(client, number) for number in numbers)
        client.close()

    def writes(seed: int) -> None:
        client = new_client(node)
        for step in range(120):
            chain = toy.chain(1 + (seed * 13 + step * 7) % 40, 40)
            client.save(f"w-{seed}-{step}", chain, toy.state(chain, 40))
        client.close()

    def evicts(seed: int) -> None:
        with Admin(str(node.socket), START_S) as admin:
            for step in range(40):
                admin.evict("", ["host", "nvme", ""][(seed + step) % 3], 64 * 1024)

    def guarded(run: Run, seed: int) -> None:
        try:
            run(seed)
        except BaseException as error:
            errors.append(error)
            raise

    crowd = [(reads, n) for n in range(8)] + [(writes, n) for n in range(4)]
    crowd += [(evicts, n) for n in range(2)]
    threads = [threading.Thread(target=guarded, args=who) for who in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert {0, 40} == set(found), "there were hits and misses, and nothing else"
    assert not [*toy.wrong(pinned, toy.chain(0, 40))]
    assert toy.resumed(pinning, 0) == 40, "what is leased is never evicted"
    pinned.release()
    assert eventually(lambda: node.gauge("leases") == 0)
    assert node.gauge("reservations") == 0


def test_tenants_share_with_themselves_only(new_client: NewClient, new_node: NewNode) -> None:
    node = new_node(nvme={"write_back": "eager"})
    node.start()
    client = new_client(node)
    for salt in (SECRET, ""):
        toy.put(client, 1, salt=salt)
    assert client.flush(durable=True).waiting == 0

    def all_as_they_should() -> None:
        assert toy.resumed(client, 1, salt=SECRET) == 40
        assert toy.resumed(client, 1, salt="") == 40
        assert toy.resumed(client, 1, salt="t2") == 0

    all_as_they_should()
    assert node.stop() == 0
    node.start()
    assert eventually(lambda: toy.resumed(client, 1) == 40)
    all_as_they_should()
    assert SECRET not in node.said(), "a salt is a secret"


def test_a_full_node_declines_and_recovers_by_itself(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node(host={"bytes": "256KiB", "segment_bytes": "256KiB"}, nvme={"path": ""})
    node.start()
    client = new_client(node)
    plans = []
    for number in range(40):
        chain = toy.chain(number, 40)
        saved = client.save(f"put-{number}", chain, toy.state(chain, 40))
        client.flush()
        if saved.declined:
            break
        plans.append(client.plan(f"pin-{number}", chain, limit=40))
    assert set(saved.declined) == {"full"}
    assert all(plan.boundary == 40 for plan in plans)
    assert node.counter("reserves", "full") > 0
    assert node.gauge("free_largest_bytes", "host") < 16 * 1024
    for plan in plans:
        plan.release()
    toy.put(client, 1000)
    assert toy.resumed(client, 1000) == 40


def test_counters_say_exactly_what_happened(new_client: NewClient, new_node: NewNode) -> None:
    node = new_node(nvme={"path": ""})
    node.start()
    client = new_client(node)
    for number in range(3):
        toy.put(client, number)
    with Admin(str(node.socket), START_S) as admin:
        before = admin.stats().counters
        for number, plans in ((0, 2), (1, 1), (100, 4)):
            for _ in range(plans):
                toy.resumed(client, number)
        again = toy.chain(2, 40)
        for _ in range(5):
            client.plan("the same request", again, limit=40)
        client.release(client.plan("the same request", again, limit=40))
        after = admin.stats().counters
        idle = admin.stats().counters
    changed = {name for name, labels in idle.items() if labels != after[name]}
    assert changed == {"requests"}, "asking is a request, and changes nothing else"
    assert after["lookups"]["hit_host"] - before["lookups"]["hit_host"] == 4
    assert after["lookups"]["miss"] - before["lookups"]["miss"] == 4
    assert sum(after["misses"].values()) - sum(before["misses"].values()) == 4
    assert after["hit_tokens"]["host"] - before["hit_tokens"]["host"] == 4 * 40
    assert after["lookup_tokens"][""] - before["lookup_tokens"][""] == 8 * 40
    assert after["commits"] == before["commits"]
