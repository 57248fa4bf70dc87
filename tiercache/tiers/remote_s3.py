"""A `Pool` in an object store that speaks S3: for what is cold, and should outlive every machine.

The extra `s3` brings obstore. All calls run on one event loop in a thread of their own, which is where
deadlines end them: bytes are copied to a target there and nowhere else, so nothing is ever `Late`.
"""

import asyncio
import re
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

from tiercache.errors import ConfigError, Fault, StorageFault
from tiercache.tiers.remote import Blob, Name, epoch_text, no_time, other_size

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

REQUESTS_MAX = 32
"""Requests under way at once, of all calls together."""

CHUNK_BYTES = 1 << 20
"""A body is copied in pieces of about this size: what the interpreter is held for."""

REMOVED_TOGETHER_MAX = 1000
"""S3 removes no more in one request."""

PREFIX = re.compile(r"([A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*)?")
STATUS = re.compile(r"status code: (\d{3})")
NO_BUCKET = "<Code>NoSuchBucket</Code>"
NO_SUCH_RANGE = "416"

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the objects are.

    `endpoint` is a URL; "" for Amazon's own, then `region` says which. Without an `access_key` the
    credentials are looked for as Amazon's tools do. `prefix` comes before every name. Secrets are in no
    text of this value, and in no fault. A connection must be made within `connect_s_max`; deadlines of
    calls bound the rest.
    """

    bucket: str
    endpoint: str = ""
    region: str = "us-east-1"
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    prefix: str = "tiercache"
    connect_s_max: float = 2.0
    request_s_max: float = 60.0


class S3Pool:
    """See `Pool`. A name is taken with a conditional write, which the server must know (`If-None-Match`).
    Before the first write two of one name are tried: where the second succeeds too, every `put` fails.

    NO_SPACE is never told: such stores have no end, or answer with an error like any other. Retries are
    the caller's. ConfigError when obstore is not installed or refuses the settings.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.name = "s3"
        if not PREFIX.fullmatch(settings.prefix):
            raise ConfigError(f"s3_prefix {settings.prefix!r} must be words with slashes between")
        self._prefix = settings.prefix
        self._obstore, self._bucket = _open(settings)
        self._secrets = [each for each in _secrets(settings) if each]
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(REQUESTS_MAX)
        self._probing = asyncio.Lock()
        self._conditional: bool | None = None  # Not known yet.
        self._tried: deque[str] = deque(maxlen=REMOVED_TOGETHER_MAX)  # Perhaps still there.
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="s3", daemon=True)
        self._thread.start()

    def register(self, memory: memoryview) -> None:
        """See `Pool.register`. Bytes come through buffers of the library in any case."""

    def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.put`."""
        return self._each(self._put, blobs, within_s)

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.get`."""
        return self._each(self._get, blobs, within_s)

    def heads(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.heads`."""
        return self._each(self._head, blobs, within_s)

    def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
        """See `Pool.holds`. One request per name."""
        found = []
        for outcome in self._each(self._exists, names, within_s):
            if isinstance(outcome, StorageFault):
                raise outcome
            found.append(outcome)
        return found

    def remove(self, names: Sequence[Name], within_s: float) -> StorageFault | None:
        """See `Pool.remove`."""
        return self._one(self._remove([self._path(name) for name in names]), within_s)

    def remove_before(self, space: str, epoch: int, within_s: float) -> StorageFault | None:
        """See `Pool.remove_before`. One request per thousand objects, and one to list them."""
        return self._one(self._remove_before(space, epoch), within_s)

    def close(self, within_s: float) -> StorageFault | None:
        """See `Pool.close`."""
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            idle = self._calls == 0
        if idle:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(max(0.0, within_s))
        if self._thread.is_alive():
            return StorageFault(Fault.IO, "calls of the pool go on")
        return None

    def _each(
        self,
        work: "Callable[[_Thing], Awaitable[bool | StorageFault]]",
        things: "Sequence[_Thing]",
        within_s: float,
    ) -> list[bool | StorageFault]:
        """Do the work on all at once; those that are not done in time fail alone."""

        async def one(thing: "_Thing") -> bool | StorageFault:
            try:
                async with self._in_time(within_s):
                    return await work(thing)
            except StorageFault as fault:
                return fault

        async def every() -> list[bool | StorageFault]:
            # All of them, whatever one raises: who is told that the call ended gives the memory away.
            ended = await asyncio.gather(*map(one, things), return_exceptions=True)
            return [_or_raised(each) for each in ended]

        if within_s <= 0:
            return [no_time()] * len(things)
        try:
            return self._wait(every())
        except StorageFault as fault:
            return [fault] * len(things)

    def _one(self, work: Coroutine[None, None, None], within_s: float) -> StorageFault | None:
        async def one() -> None:
            async with self._in_time(within_s):
                await work

        if within_s <= 0:
            work.close()
            return no_time()
        try:
            self._wait(one())
        except StorageFault as fault:
            return fault
        return None

    def _wait(self, work: Coroutine[None, None, _Answer]) -> _Answer:
        """Run it on the loop. It ends by itself: its deadlines are in it."""
        with self._lock:
            if self._closed:
                work.close()
                raise StorageFault(Fault.IO, "the pool is closed")
            self._calls += 1
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        finally:
            with self._lock:
                self._calls -= 1
                last = self._closed and self._calls == 0
            if last:
                self._loop.call_soon_threadsafe(self._loop.stop)

    @asynccontextmanager
    async def _in_time(self, within_s: float) -> AsyncIterator[None]:
        """Make every failure of the library a StorageFault that gives no secret away."""
        from obstore.exceptions import BaseError

        try:
            async with asyncio.timeout(within_s), self._slots:
                yield
        except TimeoutError:
            raise StorageFault(Fault.IO, "the store did not answer in time") from None
        except (BaseError, OSError, ValueError) as error:
            raise StorageFault(Fault.IO, self._told(error)) from None

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _put(self, blob: Blob) -> bool:
        await self._probe()
        # A copy: the library reads it in its own threads, for a moment after a cancel too.
        return await self._create(self._path(blob.name), b"".join((blob.header, blob.body)))

    async def _create(self, path: str, whole: bytes) -> bool:
        """Write an object that is not there yet; False when it is."""
        from obstore.exceptions import AlreadyExistsError

        try:
            await self._obstore.put_async(
                self._bucket, path, whole, mode="create", use_multipart=False
            )
        except AlreadyExistsError:
            return False
        return True

    async def _probe(self) -> None:
        """Raise StorageFault where a name can be taken twice. Asks the server once."""
        if self._conditional is None:
            async with self._probing:
                if self._conditional is None:
                    self._conditional = await self._refuses_a_second()
        if not self._conditional:
            raise StorageFault(Fault.IO, "the store ignores If-None-Match, and takes a name twice")

    async def _refuses_a_second(self) -> bool:
        # Each attempt has a name of its own: what is left of one that was given up may be done at any
        # time, and its removal between two writes would look like a server that overwrites.
        path = self._under(f"probe/{secrets.token_hex(16)}")
        self._tried.append(path)
        twice = await self._create(path, b"1") and await self._create(path, b"2")
        await self._remove(list(self._tried))
        self._tried.clear()
        return not twice

    async def _get(self, blob: Blob) -> bool | StorageFault:
        try:
            answer = await self._obstore.get_async(self._bucket, self._path(blob.name))
        except FileNotFoundError as error:
            return _missed(error)
        size = len(blob.header) + len(blob.body)
        if answer.meta["size"] != size:
            return other_size(blob.name)
        at = 0
        async for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
            piece = memoryview(chunk)
            if at + len(piece) > size:
                return other_size(blob.name)
            blob.take_in(at, piece)
            at += len(piece)
        return True if at == size else other_size(blob.name)

    async def _head(self, blob: Blob) -> bool | StorageFault:
        from obstore.exceptions import BaseError

        nbytes = len(blob.header)
        try:
            chunk = await self._obstore.get_range_async(
                self._bucket, self._path(blob.name), start=0, end=nbytes
            )
        except FileNotFoundError as error:
            return _missed(error)
        except BaseError as error:
            status = STATUS.search(str(error))
            if status and status[1] == NO_SUCH_RANGE:
                return other_size(blob.name)  # It is empty: no byte of it can be asked for.
            raise
        if len(chunk) != nbytes:
            return other_size(blob.name)
        blob.header[:] = memoryview(chunk)
        return True

    async def _exists(self, name: Name) -> bool:
        try:
            await self._obstore.head_async(self._bucket, self._path(name))
        except FileNotFoundError:
            return False
        return True

    async def _remove(self, paths: Sequence[str]) -> None:
        for at in range(0, len(paths), REMOVED_TOGETHER_MAX):
            await self._obstore.delete_async(self._bucket, paths[at : at + REMOVED_TOGETHER_MAX])

    async def _remove_before(self, space: str, epoch: int) -> None:
        root = self._under(space)
        end = f"{root}/{epoch_text(epoch)}/"
        pages = self._obstore.list(self._bucket, root, chunk_size=REMOVED_TOGETHER_MAX)
        async for page in pages:
            # Ours only: what a server lists is its claim.
            paths = [each["path"] for each in page]
            await self._remove([path for path in paths if f"{root}/" < path < end])

    def _path(self, name: Name) -> str:
        return self._under(name.path)

    def _under(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _told(self, error: Exception) -> str:
        """Return what may be said of an error: a server's answer may hold what was sent to it."""
        status = STATUS.search(str(error))
        if status:
            return f"the store answered with status {status[1]}"
        said = str(error).partition("\n")[0][:200]
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return f"{type(error).__name__}: {said}"


_Thing = TypeVar("_Thing", Blob, Name)
_Ended: TypeAlias = bool | StorageFault | BaseException


def _or_raised(ended: _Ended) -> bool | StorageFault:
    if isinstance(ended, bool | StorageFault):
        return ended
    raise ended


def _missed(error: FileNotFoundError) -> bool:
    """Return False, for an object that is not there; raises StorageFault where there is no bucket either.

    Else a mistake in the settings would look like a pool that is empty. The answer to a HEAD does not say.
    """
    if NO_BUCKET in str(error):
        raise StorageFault(Fault.IO, "there is no such bucket")
    return False


def _endpoint(url: str) -> str:
    """Return the URL; ConfigError, which does not show it, when it is more or less than a server's."""
    try:
        found = urlsplit(url)
        usable = (
            found.scheme in {"http", "https"}
            and bool(found.hostname)
            and found.port != 0
            and "@" not in found.netloc
            and not found.query
            and not found.fragment
        )
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError("s3_endpoint must be http:// or https://, a host, a port, and no more")
    return url


def _secrets(settings: S3Settings) -> tuple[str, ...]:
    return settings.access_key, settings.secret_key, settings.session_token


def _open(settings: S3Settings) -> "tuple[ModuleType, S3Store]":
    try:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError(f"obstore cannot be loaded: {error}; install the extra `s3`") from error
    names = ("access_key_id", "secret_access_key", "session_token")
    config = {"region": settings.region}
    config |= {
        name: secret for name, secret in zip(names, _secrets(settings), strict=True) if secret
    }
    if settings.endpoint:
        config["endpoint"] = _endpoint(settings.endpoint)
    try:
        bucket = S3Store(
            settings.bucket,
            config=cast("S3Config", config),
            client_options={
                "allow_http": settings.endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=settings.connect_s_max),
                "timeout": timedelta(seconds=settings.request_s_max),
            },
            retry_config={"max_retries": 0},
        )
    except (BaseError, ValueError):
        raise ConfigError(
            f"the settings of the bucket {settings.bucket!r} are not usable"
        ) from None
    return obstore, bucket
