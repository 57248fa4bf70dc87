"""Who may talk to whom: plain on this machine, a shared key or mutual TLS beyond it.

A shared key proves at the start of a connection that both ends have it; what follows is neither
encrypted nor signed. It keeps strangers out of a network in which nobody changes packets. Where
somebody might, or might listen, use TLS.
"""

import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tiercache.errors import ConfigError

KEY_BYTES_MIN: Final = 32
"""A shorter key could be guessed offline by whoever may connect once."""

UNIX: Final = "unix:"


@dataclass(frozen=True, slots=True)
class Plain:
    """Nothing is proved. For Unix sockets and loopback only; anything else is refused."""

    method = "plain"


@dataclass(frozen=True, slots=True)
class SharedKey:
    """Both ends prove that they have the same `key`, at least 32 random bytes."""

    key: bytes = field(repr=False)
    method = "key"

    def __post_init__(self) -> None:
        if len(self.key) < KEY_BYTES_MIN:
            raise ConfigError(f"a shared key has at least {KEY_BYTES_MIN} random bytes")


@dataclass(frozen=True, slots=True)
class MutualTls:
    """Both ends show a certificate that the other one's context accepts.

    `peer_name` is the name that a listener's certificate must have, "" for that of the address. The
    contexts are checked: one that takes a peer without a certificate is refused.
    """

    listening: ssl.SSLContext
    dialling: ssl.SSLContext
    peer_name: str = ""
    method = "tls"

    def __post_init__(self) -> None:
        for context in (self.listening, self.dialling):
            if context.verify_mode is not ssl.CERT_REQUIRED:
                raise ConfigError("TLS between nodes must ask for certificates: CERT_REQUIRED")
        if not self.dialling.check_hostname:
            raise ConfigError("TLS between nodes must check the listener's name: check_hostname")


Security: TypeAlias = Plain | SharedKey | MutualTls


@dataclass(frozen=True, slots=True)
class Place:
    """An address taken apart: `path` of a Unix socket, or `host` and `port`."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def local(self) -> bool:
        """Whether only this machine can be at the other end."""
        return bool(self.path) or is_loopback(self.host)

    def __str__(self) -> str:
        if self.path:
            return UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def place_of(address: str) -> Place:
    """Take "unix:PATH", "HOST:PORT" or "[HOST]:PORT" apart; raises ConfigError."""
    if address.startswith(UNIX) and len(address) > len(UNIX):
        return Place(path=address.removeprefix(UNIX))
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(f"{address!r} is no address: unix:PATH, HOST:PORT or [HOST]:PORT")
    return Place(host, int(port))


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address. Of names, only "localhost" is known."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def check_place(place: Place, security: Security) -> None:
    """Raise ConfigError when `security` is too little for `place`."""
    if isinstance(security, Plain) and not place.local:
        raise ConfigError(
            f"{place} can be reached from elsewhere: peers there need a shared key or certificates"
        )
