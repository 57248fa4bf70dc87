"""A thin client of etcd: its JSON gateway (version 3), over HTTP.

The gateway needs no generated code and no gRPC. Keys and values are bytes in base64; 64-bit numbers are
texts, and fields with a zero value are left out.
"""

import asyncio
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from tiercache.errors import ConfigError, UnavailableError

NOT_FOUND = 5
"""gRPC's number for a thing, here a lease, that does not exist."""

UNAUTHENTICATED = {3, 7, 16}
ANSWER_BYTES_MAX = 128 * 1024**2
"""A thousand nodes that have carried out the flushes of four hundred namespaces; a member takes as little
room as a flush that one of them has carried out, some 300 bytes."""

LINE_BYTES_MAX = 64 * 1024
"""Of what a watch says at once so much is looked at: what is longer tells of changes, since the end of a
watch is short."""

T = TypeVar("T")


class Pair(msgspec.Struct, frozen=True):
    """A key, its value, and the revision at which it was written last."""

    key: str
    value: str
    revision: int


class Reading(msgspec.Struct, frozen=True):
    """All pairs under a prefix at one revision."""

    revision: int
    pairs: tuple[Pair, ...]


class _Header(msgspec.Struct):
    revision: int = 0


class _Pair(msgspec.Struct):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0


class _Ranged(msgspec.Struct):
    header: _Header
    kvs: list[_Pair] = []


class _Done(msgspec.Struct):
    header: _Header
    succeeded: bool = False


class _Granted(msgspec.Struct):
    ID: int
    TTL: int = 0


class _Token(msgspec.Struct):
    token: str


class _Kept(msgspec.Struct):
    result: _Granted


class _Refusal(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Event(msgspec.Struct):
    kv: _Pair


class _Watched(msgspec.Struct):
    canceled: bool = False
    events: list[_Event] = []


class _Line(msgspec.Struct):
    result: _Watched


# Not strict: numbers are texts.
_RANGED = msgspec.json.Decoder(_Ranged, strict=False)
_DONE = msgspec.json.Decoder(_Done, strict=False)
_ENDED: msgspec.json.Decoder[_Done | None] = msgspec.json.Decoder(_Done | None, strict=False)
_GRANTED = msgspec.json.Decoder(_Granted, strict=False)
_KEPT: msgspec.json.Decoder[_Kept | None] = msgspec.json.Decoder(_Kept | None, strict=False)


class Etcd:
    """One client. `endpoints` are base URLs, tried in turn; the one that answered last comes first.

    `deadline_s` bounds every call but `watch`, over all endpoints. Faults are UnavailableError, except
    wrong credentials: ConfigError.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        deadline_s: float = 2.0,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        if not endpoints:
            raise ConfigError("etcd needs at least one endpoint")
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._deadline_s = deadline_s
        self._tls = tls
        self._user = user
        self._password = password
        self._token = ""
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    # --- keys

    async def read(self, prefix: str) -> Reading:
        """Return all pairs whose key starts with `prefix`, at one revision."""
        body = {"key": _coded(prefix), "range_end": _coded(_after(prefix))}
        ranged = await self._ask("v3/kv/range", body, _RANGED)
        pairs = (
            Pair(_plain(pair.key), _plain(pair.value), pair.mod_revision) for pair in ranged.kvs
        )
        return Reading(ranged.header.revision, tuple(pairs))

    async def put(self, key: str, value: str, *, lease: int = 0) -> None:
        """Write a pair; it goes when its lease ends, if it has one."""
        body = {"key": _coded(key), "value": _coded(value), "lease": str(lease)}
        await self._ask("v3/kv/put", body, _DONE)

    async def swap(self, key: str, value: str | None, *, revision: int) -> bool:
        """Write a pair, or remove it (None), if it was written last at `revision` (0: if it is not there);
        False if not."""
        name = _coded(key)
        change: dict[str, dict[str, str]] = {"request_delete_range": {"key": name}}
        if value is not None:
            change = {"request_put": {"key": name, "value": _coded(value)}}
        body = {
            "compare": [{"key": name, "target": "MOD", "mod_revision": str(revision)}],
            "success": [change],
        }
        return (await self._ask("v3/kv/txn", body, _DONE)).succeeded

    @asynccontextmanager
    async def watching(self, prefix: str, revision: int) -> AsyncIterator[AsyncIterator[None]]:
        """Yield once for each batch of changes under `prefix` from `revision` on.

        It says that something changed, not what: read again. Ends with UnavailableError.
        """
        request = {
            "key": _coded(prefix),
            "range_end": _coded(_after(prefix)),
            "start_revision": str(revision),
        }
        body = msgspec.json.encode({"create_request": request})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._deadline_s)
        try:
            async with self._session().post(
                f"{self._endpoints[0]}/v3/watch",
                data=body,
                headers=self._headers(),
                timeout=timeout,
                ssl=self._tls or True,
            ) as answer:
                yield self._changes(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as fault:
            raise UnavailableError(f"unavailable: etcd: {fault}") from fault

    async def _changes(self, answer: aiohttp.ClientResponse) -> AsyncIterator[None]:
        async for line in _lines(answer.content):
            if line is None:
                yield
                continue
            try:
                watched = msgspec.json.decode(line, type=_Line, strict=False).result
            except msgspec.DecodeError as fault:
                raise UnavailableError(f"unavailable: etcd ended a watch: {line!r}") from fault
            if watched.canceled:  # The history it would start from is compacted away.
                raise UnavailableError("unavailable: etcd ended a watch")
            if watched.events:
                yield
        raise UnavailableError("unavailable: etcd ended a watch")

    # --- leases

    async def grant(self, ttl_s: int) -> int:
        """Return a new lease that ends `ttl_s` seconds after it was kept last."""
        return (await self._ask("v3/lease/grant", {"TTL": str(ttl_s)}, _GRANTED)).ID

    async def keep(self, lease: int) -> bool:
        """Keep a lease alive; False when it has ended."""
        kept = await self._ask("v3/lease/keepalive", {"ID": str(lease)}, _KEPT)
        return kept is not None and kept.result.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End a lease and all that was written under it. One that has ended is no error."""
        await self._ask("v3/lease/revoke", {"ID": str(lease)}, _ENDED)

    # --- asking

    async def _ask(self, path: str, body: object, decoder: msgspec.json.Decoder[T]) -> T:
        attempt_s = self._deadline_s / len(self._endpoints)
        reason = ""
        for endpoint in list(self._endpoints):
            try:
                async with asyncio.timeout(attempt_s):
                    answer = await self._post(endpoint, path, msgspec.json.encode(body))
                    found = decoder.decode(answer)
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as fault:
                reason = f"{endpoint}: {str(fault) or type(fault).__name__}"
                self._endpoints.remove(endpoint)
                self._endpoints.append(endpoint)
                continue
            return found
        raise UnavailableError(f"unavailable: etcd: {reason}")

    async def _post(self, endpoint: str, path: str, body: bytes) -> bytes:
        """Return the answer's body; b"null" for a thing that does not exist."""
        for fresh in (False, True):
            if self._user and (fresh or not self._token):
                await self._log_in(endpoint)
            status, answer = await self._send(endpoint, path, body)
            if status == 200:
                return answer
            refusal = msgspec.json.decode(answer, type=_Refusal)
            if refusal.code == NOT_FOUND:
                return b"null"
            if refusal.code not in UNAUTHENTICATED:
                raise aiohttp.ClientError(refusal.message)
        raise ConfigError(f"etcd refuses the user {self._user!r}: {refusal.message}")

    async def _log_in(self, endpoint: str) -> None:
        body = msgspec.json.encode({"name": self._user, "password": self._password})
        status, answer = await self._send(endpoint, "v3/auth/authenticate", body)
        if status != 200:
            refusal = msgspec.json.decode(answer, type=_Refusal)
            raise ConfigError(f"etcd refuses the user {self._user!r}: {refusal.message}")
        self._token = msgspec.json.decode(answer, type=_Token).token

    async def _send(self, endpoint: str, path: str, body: bytes) -> tuple[int, bytes]:
        async with self._session().post(
            f"{endpoint}/{path}", data=body, headers=self._headers(), ssl=self._tls or True
        ) as answer:
            found = bytearray()
            async for piece in answer.content.iter_any():
                found += piece
                if len(found) > ANSWER_BYTES_MAX:
                    raise aiohttp.ClientError("the answer is too large")
            return answer.status, bytes(found)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes | None]:
    """Yield each line as it ends; None for one that is too long."""
    begun, is_long = b"", False
    async for piece in content.iter_any():
        ended, newline, rest = (begun + piece).rpartition(b"\n")
        for line in ended.split(b"\n") if newline else []:
            yield None if is_long else line
            is_long = False
        begun, is_long = (b"", True) if len(rest) > LINE_BYTES_MAX else (rest, is_long)


def _coded(text: str) -> str:
    return b64encode(text.encode()).decode()


def _plain(text: bytes) -> str:
    return text.decode(errors="replace")


def _after(prefix: str) -> str:
    """Return the first key after all that start with `prefix`, which ends in an ASCII character."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
