"""Our own registries keep the contract that is shipped for everybody's."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from tiercache.errors import UnavailableError
from tiercache.registry import etcd
from tiercache.registry.base import Member, Registry, TenantShare, View, next_flush
from tiercache.registry.etcd import Etcd
from tiercache.registry.etcd_registry import EtcdRegistry
from tiercache.registry.shared import Board, SharedRegistry
from tiercache.testing.etcd import EtcdServer, free_port
from tiercache.testing.proxies import Gate
from tiercache.testing.registries import Ground, RegistryContract, joined, member

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)"
)


class SharedGround:
    """Registries of one process, and a clock that stands still unless it is moved."""

    ttl_s = 10.0

    def __init__(self) -> None:
        self.now = 1000.0
        self.board = Board(lambda: self.now, self.ttl_s)
        self.registries: dict[str, SharedRegistry] = {}

    def registry(self, member: Member) -> Registry:
        registry = self.registries[member.name] = SharedRegistry(self.board, member)
        return registry

    async def cut(self, name: str) -> None:
        self.registries[name].away = True

    async def heal(self, name: str) -> None:
        self.registries[name].away = False
        self.board.touch()

    async def lapse(self) -> None:
        for _ in range(4):  # The others say that they are there, as time passes.
            self.now += self.ttl_s / 3
            self.board.touch()
            for _ in range(10):
                await asyncio.sleep(0)


class TestSharedRegistry(RegistryContract):
    @pytest.fixture
    async def ground(self) -> Ground:
        return SharedGround()


class EtcdGround:
    """A real etcd, and a gate for each node."""

    ttl_s = 1.0

    def __init__(self, server: EtcdServer, cluster: str) -> None:
        self.server = server
        self.cluster = cluster
        self.gates: dict[str, Gate] = {}
        self.clients: list[Etcd] = []

    def registry(self, member: Member) -> Registry:
        if member.name not in self.gates:  # Some names are refused: they need no way.
            self.gates[member.name] = Gate(self.server.port)
        client = Etcd([self.gates[member.name].url], deadline_s=0.5)
        self.clients.append(client)
        return EtcdRegistry(client, member, cluster=self.cluster, ttl_s=1, retry_s=0.02)

    async def cut(self, name: str) -> None:
        self.gates[name].shut()

    async def heal(self, name: str) -> None:
        self.gates[name].open()

    async def lapse(self) -> None:
        """Time passes by itself: whoever waits for its effect waits long enough."""

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for gate in self.gates.values():
            gate.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def etcd_ground(
    server: EtcdServer, request: pytest.FixtureRequest
) -> AsyncIterator[EtcdGround]:
    ground = EtcdGround(server, f"cluster-{abs(hash(request.node.nodeid))}")
    yield ground
    await ground.close()


@needs_etcd
class TestEtcdRegistry(RegistryContract):
    @pytest.fixture
    async def ground(self, etcd_ground: EtcdGround) -> Ground:
        return etcd_ground


NONSENSE = {
    "shares/-": '{"host":5}',
    "shares/00000001": '{"host":NaN}',
    "shares/00000002": '{"host":1e999}',
    "shares/00000003": "{}",
    "shares/00000004": '{"host":"0.5"}',
    "shares/00000005": "[" * 100_000,
    "shares/00000006": '{"nvme":-0.5}',
    "shares/": '{"host":0.5}',
    "shares/a/b": '{"host":0.5}',
    "shares/ABCDEF01": '{"host":0.5}',
    "shares/!" + "x" * 5000: '{"host":0.5}',
    "flushes/garbage": "garbage",
    "flushes/long": "9" * 5000,
    "flushes/other-digits": "\u0663",
    "dropped/a/boot/ns": "1" * 5000,
    "members/b": "\0" * 100,
    "\ud7ff": "",
}


@needs_etcd
async def test_what_others_wrote_there_ends_no_node_and_is_not_believed(
    etcd_ground: EtcdGround, server: EtcdServer
) -> None:
    async with joined(etcd_ground, member("a")) as (a,):
        writer = Etcd([server.url])
        etcd_ground.clients.append(writer)
        for key, value in NONSENSE.items():
            await writer.put(f"/{etcd_ground.cluster}/{key}", value)
        half = TenantShare(nvme=0.5)
        for tenant in ("-", "00000001", "00000003", "00000005"):
            assert await a.registry.share(tenant, half) == half
        await a.until(lambda view: len(view.shares) == 4)
        flushes = {name: await a.registry.flush(name) for name in ("garbage", "long")}
        await a.until(lambda view: view.flushes == flushes)
        view = a.registry.view
        assert set(view.shares) == {"-", "00000001", "00000003", "00000005"}
        assert (set(view.members), view.dropped["a"]) == ({"a"}, {})


def has_flushed(number: int, view: View) -> bool:
    return view.flushes.get("ns") == number


@needs_etcd
async def test_however_much_is_written_there_at_once_no_node_ends(
    etcd_ground: EtcdGround, server: EtcdServer
) -> None:
    async with joined(etcd_ground, member("a")) as (a,):
        writer = Etcd([server.url])
        etcd_ground.clients.append(writer)
        for nbytes in (100_000, 700_000):
            await writer.put(f"/{etcd_ground.cluster}/large", "x" * nbytes)
            await a.until(partial(has_flushed, await a.registry.flush("ns")))
            assert a.task is not None
            assert not a.task.done()


@needs_etcd
async def test_an_answer_that_is_too_large_is_not_kept(
    etcd_ground: EtcdGround, server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "ANSWER_BYTES_MAX", 100_000)
    client = Etcd([server.url])
    etcd_ground.clients.append(client)
    await client.put(f"/{etcd_ground.cluster}/large", "x" * 100_000)
    with pytest.raises(UnavailableError, match="too large"):
        await client.read(f"/{etcd_ground.cluster}/")


@needs_etcd
class TestEtcdAway:
    async def test_killed_and_started_again_everybody_is_back(
        self, etcd_ground: EtcdGround, server: EtcdServer
    ) -> None:
        async with joined(etcd_ground, member("a"), member("b")) as (a, b):
            flush = await a.registry.flush("ns")
            await a.registry.dropped("ns", flush)
            server.kill()
            with pytest.raises(UnavailableError):
                await b.registry.flush("ns")
            held = a.registry.held_until
            server.start()
            assert await b.registry.flush("ns") > flush
            await a.until(lambda view: view.flushes.get("ns", 0) > flush)
            await b.until(lambda view: set(view.members) == {"a", "b"})
            await b.until(lambda view: view.dropped.get("a") == {"ns": flush})
            assert a.registry.held_until >= held

    async def test_frozen_it_holds_nobody_up_and_nothing_is_promised(
        self, etcd_ground: EtcdGround, server: EtcdServer
    ) -> None:
        async with joined(etcd_ground, member("a")) as (a,):
            server.signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(5):
                    with pytest.raises(UnavailableError):
                        await a.registry.flush("ns")
                held = a.registry.held_until
            finally:
                server.signal(signal.SIGCONT)
            assert await a.registry.flush("ns") > 0
            await a.until(lambda view: "ns" in view.flushes)
            assert a.registry.held_until >= held

    async def test_the_second_endpoint_does_when_the_first_is_dead(
        self, server: EtcdServer
    ) -> None:
        client = Etcd([f"http://127.0.0.1:{free_port()}", server.url])
        await client.put("second/key", "value")
        assert [pair.value for pair in (await client.read("second/")).pairs] == ["value"]
        await client.close()

    async def test_what_others_wrote_there_is_left_out(
        self, etcd_ground: EtcdGround, server: EtcdServer
    ) -> None:
        client = Etcd([server.url])
        for key in ("members/odd", "members/odd/deep", "flushes/odd", "elsewhere", "dropped/a/odd"):
            await client.put(f"/{etcd_ground.cluster}/{key}", "{not ours")
        async with joined(etcd_ground, member("a")) as (a,):
            assert a.registry.view == View(members={"a": member("a")}, dropped={"a": {}})
        await client.close()

    async def test_a_newer_member_may_say_more(
        self, etcd_ground: EtcdGround, server: EtcdServer
    ) -> None:
        client = Etcd([server.url])
        newer = msgspec.json.encode({**msgspec.to_builtins(member("new")), "more": [1]})
        await client.put(f"/{etcd_ground.cluster}/members/new", newer.decode())
        async with joined(etcd_ground, member("a")) as (a,):
            assert a.registry.view.members["new"] == member("new")
        await client.close()


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b"<html>", b'{"header":{"revision":"many"}}',
     b'{"header":{},"kvs":[{"key":"no base64!"}]}',
     b'{"header":{},"kvs":[{"key":"AAAA","mod_revision":"many"}]}'],
)  # fmt: skip
async def test_what_is_no_answer_is_an_etcd_that_is_away(answer: bytes) -> None:
    async def answers(_: web.BaseRequest) -> web.Response:
        return web.Response(body=answer)

    async with RawTestServer(answers) as server:
        client = Etcd([str(server.make_url("/"))])
        for call in (client.read("/"), client.grant(1), client.keep(1)):
            with pytest.raises(UnavailableError, match="etcd: http"):
                await call
        await client.close()


@pytest.mark.parametrize("wall", [0.0, 1.7e9, 1.7e9 - 3600, 1.7e9 + 3600])
def test_flushes_ascend_whatever_the_clock_says(wall: float) -> None:
    last = next_flush(0, 1.7e9)
    assert next_flush(last, wall) > last


async def test_an_etcd_that_lost_all_it_knew_still_counts_on(tmp_path: Path) -> None:
    """A flush after the loss must not look like one that was carried out before it."""
    before, after = Board(lambda: 100.0, 10), Board(lambda: 200.0, 10)
    first = await SharedRegistry(before, member("a")).flush("ns")
    assert await SharedRegistry(after, member("a")).flush("ns") > first
