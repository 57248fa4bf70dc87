"""Who may talk to whom, and at which addresses."""

import asyncio
import ssl
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from tiercache.errors import ConfigError, PeerFault, TransportFault
from tiercache.testing.lenders import Lender, Target
from tiercache.testing.transport_pairs import AMPLE_S, SMALL
from tiercache.transport.handshake import End
from tiercache.transport.security import (
    MutualTls,
    Place,
    Plain,
    SharedKey,
    check_place,
    is_loopback,
    place_of,
)
from tiercache.transport.tcp import TcpTransport

LOOPBACK = "127.0.0.1:0"
KEY = SharedKey(bytes(range(32)))
CERTIFICATES = Path(__file__).parents[1] / "data" / "peers"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


def tcp() -> TcpTransport:
    return TcpTransport(End("a", Plain(), SMALL))


def test_plain_is_for_this_machine() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"):
        assert is_loopback(host)
        check_place(Place(host, 1), Plain())
    check_place(Place(path="x"), Plain())
    for host in ("0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "example.org", "127.0.0.1.example"):
        with pytest.raises(ConfigError, match="a shared key or certificates"):
            check_place(Place(host, 1), Plain())
        check_place(Place(host, 1), KEY)


def test_plain_is_refused_elsewhere() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="shared key"):
            await tcp().listen("0.0.0.0:0", Lender())
        with pytest.raises(ConfigError, match="shared key"):
            await tcp().dial("192.0.2.1:7411", 1)
        transport = TcpTransport(End("a", KEY, SMALL))
        listener = await transport.listen("0.0.0.0:0", Lender({b"k": 1}))
        port = listener.address.rpartition(":")[2]
        peer = await transport.dial(f"localhost:{port}", AMPLE_S)
        assert await peer.fetch([Target(b"k", 1).want], AMPLE_S) == [None]
        await peer.close()
        with pytest.raises(TransportFault, match="asks for 'key'") as fault:
            await tcp().dial(f"127.0.0.1:{port}", AMPLE_S)
        assert fault.value.fault is PeerFault.REFUSED
        await listener.close()

    run(scenario)


@pytest.mark.parametrize("address", ["", "7411", ":7411", "a:b", "a:65536", "unix:", "a:-1", "a:²"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        place_of(address)


def test_addresses_are_read_as_they_are_written() -> None:
    for address in ("10.0.0.7:7411", "[::1]:7411", "unix:/tmp/x", "node-3.example:1"):
        assert str(place_of(address)) == address


def test_two_versions_work_side_by_side() -> None:
    """A node that speaks both serves the old and the new; one that is too new hears why not."""

    async def scenario() -> None:
        both = TcpTransport(End("both", Plain(), SMALL, versions=(1, 2)))
        listener = await both.listen(LOOPBACK, Lender({b"k": 1}))
        old = await tcp().listen(LOOPBACK, Lender({b"k": 1}))
        for versions, address in (
            ((1,), listener.address),
            ((1, 2), listener.address),
            ((1, 2), old.address),
        ):
            transport = TcpTransport(End("taker", Plain(), SMALL, versions=versions))
            peer = await transport.dial(address, AMPLE_S)
            assert await peer.fetch([Target(b"k", 1).want], AMPLE_S) == [None]
            await peer.close()
        new = TcpTransport(End("new", Plain(), SMALL, versions=(2, 3)))
        with pytest.raises(TransportFault, match=r"'new' speaks versions \[2, 3\].*\[1\]") as fault:
            await new.dial(old.address, AMPLE_S)
        assert fault.value.fault is PeerFault.REFUSED
        await listener.close()
        await old.close()

    run(scenario)


def test_two_cannot_listen_at_one_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        for address in (LOOPBACK, f"unix:{tmp_path / 'sock'}"):
            listener = await tcp().listen(address, Lender())
            with pytest.raises(ConfigError, match="cannot listen"):
                await tcp().listen(listener.address, Lender())
            await listener.close()
            await (await tcp().listen(listener.address, Lender())).close()

    run(scenario)


def test_a_unix_socket_is_for_this_user(tmp_path: Path) -> None:
    path = tmp_path / "sock"

    async def scenario() -> None:
        listener = await tcp().listen(f"unix:{path}", Lender())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await listener.close()
        assert not path.exists()

    run(scenario)


def contexts(name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.load_cert_chain(CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{name}.key")
        context.load_verify_locations(CERTIFICATES / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        made.append(context)
    return made[0], made[1]


def test_certificates_are_asked_for() -> None:
    listening, dialling = contexts("node")
    lax = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(ConfigError, match="CERT_REQUIRED"):
        MutualTls(lax, dialling)
    dialling.check_hostname = False
    with pytest.raises(ConfigError, match="check_hostname"):
        MutualTls(listening, dialling)


@pytest.mark.parametrize("who", ["stranger", "nobody", "plain", "another name"])
def test_only_certificates_that_are_known_get_in(who: str) -> None:
    async def scenario() -> None:
        node = MutualTls(*contexts("node"))
        lender = Lender({b"k": 1})
        listener = await TcpTransport(End("a", node, SMALL)).listen(LOOPBACK, lender)
        listening, dialling = contexts("stranger" if who == "stranger" else "node")
        if who == "nobody":
            dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            dialling.load_verify_locations(CERTIFICATES / "ca.pem")
        name = "node.elsewhere" if who == "another name" else ""
        security = Plain() if who == "plain" else MutualTls(listening, dialling, name)
        with pytest.raises(TransportFault):
            await TcpTransport(End("b", security, SMALL)).dial(listener.address, AMPLE_S)
        assert not lender.peers
        await listener.close()

    run(scenario)
