"""The remote tier against the client it is made of: one Mooncake, one arena, the same bytes.

Each object goes to and from a store process over loopback, by Mooncake's own client and by ours, which
seals, names and checks besides; one after the other, so that both see the same neighbours. Redis, where
there is one, stands beside them. What another program does not have is left out, and said.
"""

import importlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import redis
import xxhash

from tests.bench.figures import Figure, at_least, size_label
from tests.bench.peers.peer import Servers
from tiercache.state import Extent, Record
from tiercache.testing.mooncake import MooncakeServers, why_not
from tiercache.testing.objects import record_of
from tiercache.tiers.host import HostArena
from tiercache.tiers.remote import Get, Put
from tiercache.tiers.remote_mooncake import MooncakePool
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_store import SealedStore

PART = "remote"
SHAPES = ((1 << 20, 1), (1 << 20, 16), (16 << 20, 1), (64 << 20, 1))
"""The size of an object, and how many go in one call."""

SEGMENT_BYTES = 1 << 30
ARENA_BYTES = 64 << 20
SAMPLE_BYTES = 256 << 20
CALLS_MIN, CALLS_MAX = 6, 64
GET_GOAL = at_least(0.9)
WITHIN_S = 60.0
LEASE = "--default_kv_lease_ttl=10000"
"""As Mooncake has it."""

Call = Callable[[int], None]


class Side:
    """One way to store: a name, how to put, get and remove the object of a number."""

    def __init__(self, name: str, put: Call, get: Call, remove: Call) -> None:
        self.name, self.put, self.get, self.remove = name, put, get, remove


def measure(reps: int) -> Iterator[Figure]:
    """Yield figures per size; none when Mooncake cannot be started here."""
    if why_not():
        print(f"! left out: {why_not()}")
        return
    folder = Path(tempfile.mkdtemp(prefix="tiercache-bench-"))
    arena = HostArena([ARENA_BYTES, ARENA_BYTES])
    mooncake = MooncakeServers(folder, segment_bytes=SEGMENT_BYTES, master=[LEASE])
    others = Servers("redis")
    try:
        arena.prefault(lambda: False)
        noise = np.random.default_rng(0).integers(0, 255, ARENA_BYTES, dtype=np.uint8)
        arena.view(Extent(0, 0, ARENA_BYTES))[:] = noise.data
        mooncake.start()
        store = our_store(mooncake, arena)  # The first one: it sets Mooncake's limits.
        own = OwnClient(mooncake, arena)
        client = redis_client(others)
        for size, count in SHAPES:
            sides = [own.side(size, count), our_side(store, arena, size, count)]
            if client is not None and count == 1:
                sides.append(redis_side(client, arena, size))
            yield from compared(size, count, sides, reps)
        store.close(WITHIN_S)
    finally:
        mooncake.stop()
        others.stop()
        shutil.rmtree(folder, ignore_errors=True)


def compared(size: int, count: int, sides: list[Side], reps: int) -> Iterator[Figure]:
    """Yield the speed of each side, and ours over Mooncake's."""
    rates: dict[str, dict[str, list[float]]] = {"put": defaultdict(list), "get": defaultdict(list)}
    calls = max(CALLS_MIN, min(CALLS_MAX, SAMPLE_BYTES // (size * count)))
    for rep in range(-1, reps):  # The first round is not counted: it touches memory anew.
        seconds = one_round(sides, calls)
        for (op, name), times in seconds.items():
            if rep >= 0:
                rates[op][name].append(size * count / float(np.median(times)) / 1e9)
    label = size_label(size) if count == 1 else f"{count} x {size_label(size)}"
    for op in ("put", "get"):
        for each in sides:
            yield Figure(PART, f"{op} {label}, {each.name}", "GB/s", tuple(rates[op][each.name]))
        ratios = zip(rates[op]["tiercache"], rates[op]["mooncake"], strict=True)
        goal = GET_GOAL if op == "get" else None
        what = f"{op} {label}, over Mooncake's own client"
        yield Figure(PART, what, "x", tuple(ours / theirs for ours, theirs in ratios), goal)


def one_round(sides: list[Side], calls: int) -> dict[tuple[str, str], list[float]]:
    """Put, get and remove so many objects, the sides in turn; return the seconds of each call."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(calls):
        turn = sides if number % 2 else sides[::-1]
        for op in ("put", "get", "remove"):
            for side in turn:
                call: Call = getattr(side, op)
                begun = perf_counter()
                call(number)
                if op != "remove":
                    seconds[op, side.name].append(perf_counter() - begun)
    return seconds


def our_store(servers: MooncakeServers, arena: HostArena) -> SealedStore:
    settings = replace(servers.settings, rpc_s_max=30.0, transfer_s_max=30.0)
    store = SealedStore(MooncakePool(settings), Realm("bench", b"a secret of the bench"))
    for segment in range(2):
        store.register(arena.view(Extent(segment, 0, ARENA_BYTES)))
    return store


def our_side(store: SealedStore, arena: HostArena, size: int, count: int) -> Side:
    """Sums are part of a get; those of a put were made when the object was sealed."""
    sources, targets = views(arena, 0, size, count), views(arena, 1, size, count)
    sums = [xxhash.xxh3_128_digest(source) for source in sources]

    def records(number: int) -> list[Record]:
        made = [record_of(number * count + at, b"") for at in range(count)]
        return [replace(m, nbytes=size, checksum=s) for m, s in zip(made, sums, strict=True)]

    def put(number: int) -> None:
        batch = [Put(*each) for each in zip(records(number), sources, strict=True)]
        assert store.put(batch, WITHIN_S) == records(number)

    def get(number: int) -> None:
        keys = [record.key for record in records(number)]
        batch = [Get(*each) for each in zip(keys, targets, sums, strict=True)]
        assert store.get(batch, WITHIN_S) == records(number)

    def remove(number: int) -> None:
        assert store.forget([record.key for record in records(number)], WITHIN_S) is None

    return Side("tiercache", put, get, remove)


class OwnClient:
    """Mooncake's client, as it is; it has no types."""

    def __init__(self, servers: MooncakeServers, arena: HostArena) -> None:
        self._client: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        host = servers.settings.host
        setup = self._client.setup(host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", servers.address)
        assert setup == 0
        self._arena = arena
        for segment in range(2):
            whole = arena.view(Extent(segment, 0, ARENA_BYTES))
            assert self._client.register_buffer(address(whole), ARENA_BYTES) == 0

    def side(self, size: int, count: int) -> Side:
        client, sizes = self._client, [size] * count
        sources, targets = (
            [address(view) for view in views(self._arena, segment, size, count)]
            for segment in range(2)
        )

        def keys(number: int) -> list[str]:
            return [f"{size}-{number * count + at}" for at in range(count)]

        def put(number: int) -> None:
            assert client.batch_put_from(keys(number), sources, sizes) == [0] * count

        def get(number: int) -> None:
            assert client.batch_get_into(keys(number), targets, sizes) == sizes

        def remove(number: int) -> None:
            client.batch_remove(keys(number), True)

        return Side("mooncake", put, get, remove)


def redis_client(servers: Servers) -> "redis.Redis | None":
    if shutil.which("redis-server") is None:
        print("! Redis is left out: redis-server is not installed")
        return None
    path = str(servers.folder / "redis.sock")
    servers.run(
        "redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"
    )
    servers.wait_for(path)
    return redis.Redis(unix_socket_path=path)


def redis_side(client: "redis.Redis", arena: HostArena, size: int) -> Side:
    """Its `get` returns bytes, which are copied to where the others put them."""
    source, target = (arena.view(Extent(segment, 0, size)) for segment in range(2))

    def put(number: int) -> None:
        client.set(f"{size}-{number}", source)

    def get(number: int) -> None:
        found = client.get(f"{size}-{number}")
        assert isinstance(found, bytes)
        target[:] = found

    def remove(number: int) -> None:
        client.delete(f"{size}-{number}")

    return Side("redis", put, get, remove)


def views(arena: HostArena, segment: int, size: int, count: int) -> list[memoryview]:
    return [arena.view(Extent(segment, at * size, size)) for at in range(count)]


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
