"""Mooncake Store, real processes: what a node sees when they are killed, frozen or full."""

import base64
import json
import mmap
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

import tiercache
from tiercache.errors import StorageFault
from tiercache.state import Record
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.mooncake import (
    RPC_S_MAX,
    TRANSFER_S_MAX,
    MooncakeServers,
    freeze,
    kill,
    why_not,
)
from tiercache.testing.store_objects import SECRET, WITHIN_S, brief, get_of, put_of
from tiercache.tiers import remote_staging
from tiercache.tiers.remote import Blob, Get, Had, Late, Put
from tiercache.tiers.remote_mooncake import MooncakePool
from tiercache.tiers.remote_mooncake_client import Native
from tiercache.tiers.remote_sealed import Realm, seal
from tiercache.tiers.remote_staging import Region, address_of
from tiercache.tiers.remote_store import SealedStore

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

MIB = 1 << 20
SEGMENT_BYTES = 64 * MIB
SHORT_S = 0.3
TAKEOVER_S_MAX = 30.0
SLACK_S = 2.0
"""What a call may take beyond its deadline on a busy machine."""


class Node:
    """One node's store, and the servers behind it."""

    def __init__(self, servers: MooncakeServers) -> None:
        self.servers = servers
        self.pool = MooncakePool(servers.settings)
        self.store = SealedStore(self.pool, Realm("test", SECRET))

    def put(self, put: Put, within_s: float = WITHIN_S) -> Had:
        return self.store.put([put], within_s)[0]

    def get(self, put: Put, within_s: float = WITHIN_S) -> Had:
        return self.store.get([get_of(put, checked=True)], within_s)[0]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[MooncakeServers]:
    made = MooncakeServers(tmp_path, segment_bytes=SEGMENT_BYTES)
    yield made
    made.stop()


@pytest.fixture
def node(servers: MooncakeServers) -> Iterator[Node]:
    servers.start()
    made = Node(servers)
    yield made
    made.store.close(WITHIN_S)


def until(wanted: Callable[[], bool], within_s: float = WITHIN_S) -> float:
    """Ask again and again; return the seconds it took."""
    begun = time.monotonic()
    while not wanted():
        assert time.monotonic() - begun < within_s, "it did not come to be"
        threading.Event().wait(0.02)
    return time.monotonic() - begun


def calls(node: Node, put: Put) -> list[tuple[str, Callable[[float], Had]]]:
    """Every call of a store, each of which says how it ended."""

    def holds(within_s: float) -> Had:
        try:
            node.store.holds([put.record.key], within_s)
        except StorageFault as fault:
            return fault
        return None

    key = put.record.key
    return [
        ("get", lambda s: node.get(put, s)),
        ("put", lambda s: node.put(put_of(77), s)),
        ("describe", lambda s: node.store.describe([key], s)[0]),
        ("holds", holds),
        ("forget", lambda s: node.store.forget([put_of(78).record.key], s)),
        ("flush", lambda s: node.store.flush(bytes(32), 1, s)),
    ]


def test_calls_end_when_the_master_is_frozen(node: Node) -> None:
    put = put_of(1)
    assert node.put(put) == put.record
    freeze(node.servers.master)
    late = []
    for name, call in calls(node, put):
        begun = time.monotonic()
        outcome = call(SHORT_S)
        assert time.monotonic() - begun < SHORT_S + SLACK_S, name
        assert brief([outcome]) == ["io"], name
        if isinstance(outcome, Late):
            late.append(outcome)
    assert late  # The first calls hang, the others find no thread that is free.
    assert all(each.settled.wait(20 * RPC_S_MAX) for each in late)
    node.servers.master.send_signal(signal.SIGCONT)
    until(lambda: node.get(put) == put.record)


def test_a_late_get_lets_go_of_its_memory(node: Node) -> None:
    put = put_of(1, 4 * MIB)
    arena = mmap.mmap(-1, 8 * MIB)
    memory = memoryview(arena)
    node.store.register(memory)
    assert node.put(put) == put.record
    freeze(node.servers.stores[0])
    get = Get(put.record.key, memory[: 4 * MIB])
    (late,) = node.store.get([get], SHORT_S)
    assert isinstance(late, Late)
    assert node.store.close(0.0) is not None  # It says that memory is in use.
    assert late.settled.wait(20 * (RPC_S_MAX + TRANSFER_S_MAX))
    node.servers.stores[0].send_signal(signal.SIGCONT)
    memory[:] = bytes(8 * MIB)
    assert node.store.close(WITHIN_S) is None
    assert memory == bytes(8 * MIB)


def test_closing_waits_for_calls_that_run(node: Node) -> None:
    """Not only for those that were late: memory is not touched once it returned None."""
    put = put_of(1, 4 * MIB)
    memory = memoryview(mmap.mmap(-1, 4 * MIB))
    node.store.register(memory)
    assert node.put(put) == put.record
    freeze(node.servers.stores[0])
    get = Get(put.record.key, memory)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(node.store.get, [get], WITHIN_S)
        until(lambda: bool(node.pool._workers.unsettled()))
        assert node.store.close(0.0) is not None
        assert node.store.close(WITHIN_S) is None
        memory[:] = bytes(4 * MIB)
        assert brief(running.result(WITHIN_S)) == ["io"]
    node.servers.stores[0].send_signal(signal.SIGCONT)
    assert brief([node.get(put, SHORT_S)]) == ["io"]
    assert memory == bytes(4 * MIB)


def test_a_killed_master_takes_the_objects_with_it(node: Node) -> None:
    put = put_of(1)
    assert node.put(put) == put.record
    kill(node.servers.master)
    for name, call in calls(node, put):
        begun = time.monotonic()
        assert brief([call(SHORT_S)]) == ["io"], name
        assert time.monotonic() - begun < SHORT_S + SLACK_S, name
    node.servers.start_master()
    # The store process finds the new master by itself; the objects in its memory are nobody's.
    until(lambda: node.put(put_of(2)) == put_of(2).record)
    assert node.get(put) is None
    assert node.put(put) == put.record
    assert node.get(put) == put.record


def test_a_killed_store_process_loses_its_objects_only(node: Node) -> None:
    puts = [put_of(number, MIB) for number in range(12)]
    first = node.servers.stores[0]
    second = node.servers.start_store()
    until(lambda: node.store.put(puts, WITHIN_S) == [put.record for put in puts])
    kill(first)
    # Until the master has noticed, reading fails; then it is a miss. It is never something else.
    until(lambda: all(node.get(put) is None or node.get(put) == put.record for put in puts))
    left = [put for put in puts if node.get(put) == put.record]
    assert second.poll() is None
    assert len(left) < len(puts)
    again = node.store.put(puts, WITHIN_S)
    assert again == [put.record for put in puts]
    assert node.store.get([get_of(put) for put in puts], WITHIN_S) == again


def test_copies_outlive_a_store_process(servers: MooncakeServers, tmp_path: Path) -> None:
    servers.start(stores=2)
    pool = MooncakePool(replace(servers.settings, replicas=2))
    store = SealedStore(pool, Realm("test", SECRET))
    puts = [put_of(number, MIB) for number in range(6)]
    assert store.put(puts, WITHIN_S) == [put.record for put in puts]
    kill(servers.stores[0])
    for put in puts:
        until(lambda put=put: store.get([get_of(put)], WITHIN_S) == [put.record])  # type: ignore[misc]
    store.close(WITHIN_S)


def test_large_objects_come_in_pieces(node: Node) -> None:
    """In one batch with small ones; longer ones, shorter ones and damaged ones are told apart."""
    puts = [put_of(1, 9 * MIB + 77), put_of(2, 100), put_of(3, 8 * MIB), put_of(4, 12 * MIB)]
    assert node.store.put(puts, WITHIN_S) == [put.record for put in puts]
    gets = [get_of(put, checked=True) for put in [*puts, put_of(5, 8 * MIB)]]
    assert node.store.get(gets, WITHIN_S) == [*(put.record for put in puts), None]
    assert all(get.target == put.source for get, put in zip(gets, puts, strict=False))
    pool, realm = MooncakePool(node.servers.settings), Realm("test", SECRET)
    name = realm.name(puts[2].record.key, 0)
    whole = seal(puts[2].record, realm) + bytes(puts[2].source)
    for raw in (whole + b"x", whole[:-1], whole[:-1] + b"x", b"short"):
        assert pool.remove([name], WITHIN_S) is None
        blob = Blob(name, memoryview(raw), memoryview(b""))
        assert pool.put([blob], WITHIN_S) == [True]
        assert brief(node.store.get(gets[1:3], WITHIN_S)) == ["whole", "damaged"]
    pool.close(WITHIN_S)


def test_memory_that_cannot_be_registered_yet_or_at_all_holds_up_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning a large arena takes long, and a device may refuse: calls do not wait for it, and go on."""
    slow, refused = (memoryview(mmap.mmap(-1, 4 * MIB)) for _ in range(2))
    begun, go = threading.Event(), threading.Event()

    def registered(client: Native, region: Region) -> bool:
        if region.address == address_of(slow):
            begun.set()
            assert go.wait(WITHIN_S)
        if region.address == address_of(refused):
            return False
        return client.register_buffer(region.address, region.nbytes) == 0

    monkeypatch.setattr(remote_staging, "registered", registered)
    node.pool.register(refused)
    first, *puts = [put_of(number, 4 * MIB) for number in (1, 2, 3)]
    assert node.put(first) == first.record
    registering = threading.Thread(target=node.pool.register, args=(slow,))
    registering.start()
    assert begun.wait(WITHIN_S)
    for put, memory in zip(puts, (slow, refused), strict=True):
        memory[:] = put.source
        assert node.put(put._replace(source=memory)) == put.record
        assert node.get(put) == put.record
    go.set()
    registering.join()
    assert node.get(puts[1]) == puts[1].record


def test_who_was_never_connected_keeps_no_memory(servers: MooncakeServers) -> None:
    ours = mmap.mmap(-1, MIB)
    pool = MooncakePool(servers.settings)
    with memoryview(ours) as view:
        pool.register(view)
        assert pool.close(WITHIN_S) is None
    ours.close()  # BufferError while somebody has a view of it.


def test_a_full_pool_says_so_and_makes_room(node: Node) -> None:
    puts = [put_of(number, 8 * MIB) for number in range(12)]
    outcomes = [node.put(put) for put in puts]
    words = brief(outcomes)
    assert "no_space" in words
    assert set(words) == {"whole", "no_space"}
    # What is evicted is a miss; what was told to be kept, and is there, is whole.
    assert {word for put in puts for word in brief([node.get(put)])} <= {"whole", "none"}
    new = put_of(99, 8 * MIB)
    until(lambda: node.put(new) == new.record)
    assert node.get(new) == new.record


def test_an_object_larger_than_a_segment_is_refused(node: Node) -> None:
    put = put_of(1, 4096)
    memory = mmap.mmap(-1, SEGMENT_BYTES + MIB)
    large = Put(put_of(2, 0).record, memoryview(memory))
    record = _record_of(large)
    assert brief([node.put(Put(record, large.source))]) == ["no_space"]
    assert node.store.holds([record.key], WITHIN_S) == [False]
    assert node.put(put) == put.record


def _record_of(put: Put) -> Record:
    checksum = xxhash.xxh3_128_digest(put.source)
    return replace(put.record, nbytes=put.source.nbytes, checksum=checksum)


def test_the_master_may_come_later(servers: MooncakeServers) -> None:
    node = Node(servers)
    put = put_of(1)
    begun = time.monotonic()
    assert brief([node.get(put, SHORT_S)]) == ["io"]
    assert time.monotonic() - begun < SHORT_S + SLACK_S
    servers.start()
    until(lambda: node.put(put) == put.record, 60.0)
    assert node.get(put) == put.record
    node.store.close(WITHIN_S)


CHILD = """
import json, os, sys, time
from tiercache.testing.store_objects import SECRET, brief, get_of, put_of
from tiercache.tiers.remote_mooncake import MooncakePool
from tiercache.tiers.remote_mooncake_client import MooncakeSettings
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_store import SealedStore
settings = MooncakeSettings(sys.argv[1], rpc_s_max=1.0, transfer_s_max=1.0)
store = SealedStore(MooncakePool(settings), Realm("test", SECRET))
puts = [put_of(number, 10_000) for number in range(20)]
def wait_for(call, wanted):
    until = time.monotonic() + 40
    while call() != wanted and time.monotonic() < until:
        pass
    sys.stdout.write(f"{brief(call())}\\n")
    sys.stdout.flush()
wait_for(lambda: store.put(puts, 2.0), [put.record for put in puts])
sys.stdin.readline()
new = put_of(99, 10_000)
wait_for(lambda: store.put([new], 2.0), [new.record])
wait_for(lambda: store.get([get_of(put, checked=True) for put in puts], 2.0),
         [put.record for put in puts])
sys.stdin.readline()
os._exit(0)
"""


def logged(etcd: EtcdServer, names: Sequence[str]) -> bool:
    """Whether the log in etcd has these objects, and counts as written that far."""
    everything = base64.b64encode(b"\0").decode()
    asked = json.dumps({"key": everything, "range_end": everything}).encode()
    with urllib.request.urlopen(f"{etcd.url}/v3/kv/range", data=asked, timeout=5) as answer:
        found = json.load(answer)["kvs"]
    log = {
        base64.b64decode(each["key"]).decode(): base64.b64decode(each["value"]) for each in found
    }
    batches = sorted(key for key in log if "/batches/" in key)
    (durable,) = (json.loads(value) for key, value in log.items() if key.endswith("durable_prefix"))
    text = b"".join(log.values()).decode()
    return int(batches[-1][-20:]) == durable["batch_id"] and all(name in text for name in names)


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_a_log_of_operations_outlives_the_master(tmp_path: Path) -> None:
    """Two masters; the first is killed. A process of its own is the node: see `MooncakePool`."""
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    endpoint = etcd.url.removeprefix("http://")
    options = [
        "--enable_ha=true", "--ha_backend_type=etcd", f"--ha_backend_connstring={endpoint}",
        f"--etcd_endpoints={endpoint}", "--enable_oplog=true", "--oplog_poll_interval_ms=100",
    ]  # fmt: skip
    servers = MooncakeServers(tmp_path, segment_bytes=SEGMENT_BYTES, master=options)
    servers.elected = f"etcd://{endpoint}"
    child = None
    try:
        servers.start()
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, servers.elected],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(tiercache.__file__).parents[1],
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == f"{['whole'] * 20}\n"
        # An answer to a put is no promise that the log has it: a moment later it does.
        realm = Realm("test", SECRET)
        names = [realm.name(put_of(number).record.key, 0).path for number in range(20)]
        until(lambda: logged(etcd, names))
        servers.start_standby()
        kill(servers.master)
        begun = time.monotonic()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == f"{['whole']}\n"
        assert time.monotonic() - begun < TAKEOVER_S_MAX
        assert child.stdout.readline() == f"{['whole'] * 20}\n"
    finally:
        if child is not None:
            child.kill()
            child.communicate()
        servers.stop()
        etcd.kill()
