"""The pool that the settings describe."""

from tiercache.errors import ConfigError
from tiercache.runtime.cluster.security import read_secret
from tiercache.settings import Pool
from tiercache.tiers.remote import Pool as Bytes
from tiercache.tiers.remote_sealed import SECRET_BYTES_MIN, Realm
from tiercache.tiers.remote_store import SealedStore

CALLS_MAX = 8
"""Calls of Mooncake's client that may be under way: as many as this node has threads for them."""

NAME = "tiercache"
"""Whose objects these are, where the settings do not say."""


def realm_of(settings: Pool, cluster: str) -> Realm:
    """Return whose objects these are. Raises ConfigError."""
    secret = (
        read_secret(settings.secret_file, "[pool] secret_file") if settings.secret_file else b""
    )
    if settings.secret_file and len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"[pool] secret_file {settings.secret_file}: {len(secret)} bytes, and a secret has at "
            f"least {SECRET_BYTES_MIN}"
        )
    return Realm(settings.name or cluster or NAME, secret)


def open_store(settings: Pool, realm: Realm) -> SealedStore:
    """Return the store, without a word to it yet. Raises ConfigError.

    Takes long: libraries are loaded.
    """
    return SealedStore(_mooncake(settings) if settings.kind == "mooncake" else _s3(settings), realm)


def _mooncake(settings: Pool) -> Bytes:
    from tiercache.tiers.remote_mooncake import MooncakePool
    from tiercache.tiers.remote_mooncake_client import MooncakeSettings

    return MooncakePool(
        MooncakeSettings(
            settings.mooncake_master,
            host=settings.mooncake_host,
            protocol=settings.mooncake_protocol,
            devices=settings.mooncake_devices,
            replicas=settings.mooncake_replicas,
            threads=CALLS_MAX,
        )
    )


def _s3(settings: Pool) -> Bytes:
    from tiercache.tiers.remote_s3 import S3Pool, S3Settings

    access = secret = ""
    if settings.s3_access_key_file:
        access = _text(settings.s3_access_key_file, "[pool] s3_access_key_file")
        secret = _text(settings.s3_secret_key_file, "[pool] s3_secret_key_file")
    return S3Pool(
        S3Settings(
            settings.s3_bucket,
            settings.s3_endpoint,
            settings.s3_region,
            access,
            secret,
            prefix=settings.s3_prefix,
        )
    )


def _text(path: str, what: str) -> str:
    try:
        return read_secret(path, what).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is no text") from None
