"""How nodes prove to one another who they are, as the settings say."""

import ssl
from pathlib import Path

from tiercache.errors import ConfigError
from tiercache.settings import Cluster
from tiercache.transport.security import MutualTls, Plain, Security, SharedKey


def security_of(cluster: Cluster) -> Security:
    """Return what the settings ask for: certificates before a shared key before nothing.

    Raises ConfigError. Nothing is enough on the loopback only, which the transport checks.
    """
    files = (cluster.ca_file, cluster.cert_file, cluster.cert_key_file)
    if any(files):
        if not all(files):
            raise ConfigError("[cluster] ca_file, cert_file and cert_key_file go together")
        return MutualTls(_context(cluster, ssl.PROTOCOL_TLS_SERVER), _dialling(cluster))
    if cluster.key_file:
        return SharedKey(read_secret(cluster.key_file, "[cluster] key_file"))
    return Plain()


def read_secret(path: str, what: str) -> bytes:
    """Return what a file holds, without white space at its ends. Raises ConfigError."""
    try:
        return Path(path).read_bytes().strip()
    except OSError as fault:
        raise ConfigError(f"{what} {path} cannot be read: {fault.strerror}") from fault


def _dialling(cluster: Cluster) -> ssl.SSLContext:
    return _context(cluster, ssl.PROTOCOL_TLS_CLIENT)


def _context(cluster: Cluster, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cluster.ca_file)
        context.load_cert_chain(cluster.cert_file, cluster.cert_key_file)
    except (OSError, ssl.SSLError) as fault:
        raise ConfigError(f"[cluster] certificates cannot be used: {fault}") from fault
    return context
