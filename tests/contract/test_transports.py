"""Our own transports keep the contract that is shipped for everybody's."""

import asyncio
import ssl
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiercache.testing.lending import KEY
from tiercache.testing.transport_processes import ProcessContract
from tiercache.testing.transports import TransportContract
from tiercache.transport.base import Limits, Transport
from tiercache.transport.handshake import End
from tiercache.transport.inproc import InprocTransport, Space
from tiercache.transport.security import MutualTls, Plain, Security
from tiercache.transport.tcp import TcpTransport
from tiercache.transport.ucx import UcxTransport

LOOPBACK = "127.0.0.1:0"
# Made for these tests, for a hundred years; the key of their authority is gone.
CERTIFICATES = Path(__file__).parents[1] / "data" / "peers"


def tls(name: str, protocol: int) -> ssl.SSLContext:
    """Return a context that shows the certificate `name`, and asks for one."""
    context = ssl.SSLContext(protocol)
    context.load_cert_chain(CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{name}.key")
    context.load_verify_locations(CERTIFICATES / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class TestInproc(TransportContract):
    @pytest.fixture(autouse=True)
    def space(self) -> None:
        self.found = Space()

    def transport(self, node: str, limits: Limits) -> Transport:
        return InprocTransport(node, self.found, limits)

    def address(self) -> str:
        return "lender"


class TestTcp(TransportContract):
    security: Security = Plain()

    def transport(self, node: str, limits: Limits) -> Transport:
        return TcpTransport(End(node, self.security, limits))

    def address(self) -> str:
        return LOOPBACK


class TestTcpWithKey(TestTcp, ProcessContract):
    CANCELS = 500
    RECONNECTS = 500
    security = KEY


class TestTcpOnAsyncio(TestTcp):
    RECONNECTS = 500

    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()


class TestTls(TestTcp):
    CANCELS = 1000
    RECONNECTS = 200
    security = MutualTls(tls("node", ssl.PROTOCOL_TLS_SERVER), tls("node", ssl.PROTOCOL_TLS_CLIENT))


class TestUnix(TestTcp):
    RECONNECTS = 500

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "peer.sock"

    def address(self) -> str:
        return f"unix:{self.path}"


@pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed: the extra `ucx`")
class TestUcx(TransportContract, ProcessContract):
    RECONNECTS = 1000
    KIND = "ucx"

    @pytest.fixture(autouse=True)
    def made(self) -> None:
        self.transports: list[UcxTransport] = []

    def transport(self, node: str, limits: Limits) -> Transport:
        transport = UcxTransport(End(node, KEY, limits))
        self.transports.append(transport)
        return transport

    def finish(self) -> None:
        for transport in self.transports:
            transport.close()

    def address(self) -> str:
        return LOOPBACK
