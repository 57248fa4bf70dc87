"""An object store over S3, a real server: what a node sees when it is dead, slow or talks nonsense."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tiercache.errors import ConfigError, StorageFault
from tiercache.testing.s3 import BUCKET, Change, Gate, S3Server, why_not
from tiercache.testing.store_objects import SECRET, WITHIN_S, brief, get_of, put_of
from tiercache.tiers.remote import Blob, Had, Late, Name
from tiercache.tiers.remote_s3 import S3Pool, S3Settings
from tiercache.tiers.remote_sealed import Realm
from tiercache.tiers.remote_store import SealedStore

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SHORT_S = 0.5
SLACK_S = 2.0
ACCESS, HIDDEN = "AKIAACCESSACCESS", "hidden/hidden/hidden"


class Node:
    """One node's store, and the gate between it and the server."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.settings = S3Settings(BUCKET, gate.url, access_key=ACCESS, secret_key=HIDDEN)
        self.store = SealedStore(S3Pool(self.settings), Realm("test", SECRET))
        self.put = put_of(1, 200_000)

    def every(self, within_s: float) -> list[Had]:
        """Make every call once; return how each ended."""
        key = self.put.record.key
        outcomes: list[Had] = [
            *self.store.get([get_of(self.put)], within_s),
            *self.store.put([put_of(9)], within_s),
            *self.store.describe([key], within_s),
            self.store.forget([put_of(9).record.key], within_s),
            self.store.flush(bytes(32), 1, within_s),
        ]
        try:
            self.store.holds([key], within_s)
        except StorageFault as fault:
            outcomes.append(fault)
        return outcomes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    made = S3Server(tmp_path_factory.mktemp("s3"))
    made.start()
    yield made
    made.kill()


@pytest.fixture
def node(server: S3Server) -> Iterator[Node]:
    gate = Gate(server.port)
    made = Node(gate)
    made.store.forget([made.put.record.key], WITHIN_S)
    assert made.store.put([made.put], WITHIN_S) == [made.put.record]
    yield made
    made.store.close(WITHIN_S)
    gate.close()


def parts(answer: bytes) -> tuple[bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def cut(answer: bytes) -> bytes:
    """The connection breaks in the middle of the body."""
    head, body = parts(answer)
    return head + body[: len(body) // 2]


def shorter(answer: bytes) -> bytes:
    """The body is shorter, and the head says so."""
    head, body = parts(answer)
    length = b"Content-Length: %d" % len(body)
    return head.replace(length, b"Content-Length: %d" % (len(body) - 7)) + body[:-7]


def flipped(answer: bytes) -> bytes:
    head, body = parts(answer)
    return head + body[:-1] + bytes([body[-1] ^ 1])


def of_status(code: int, body: bytes = b"") -> Change:
    head = b"HTTP/1.1 %d No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (code, len(body))
    return lambda _: head + body


GARBAGE = b"\x00\xff garbage \r\n\r\n" * 100


@pytest.mark.parametrize(
    "change",
    [
        of_status(500), of_status(503), of_status(403), of_status(400), of_status(200, b"<xml"),
        lambda _: GARBAGE, lambda _: b"", lambda answer: answer[:20],
    ],
    ids=["500", "503", "403", "400", "xml", "garbage", "nothing", "torn"],
)  # fmt: skip
def test_nonsense_is_a_fault_and_never_an_object(node: Node, change: Change) -> None:
    node.gate.change = change
    outcomes = node.every(WITHIN_S)
    assert brief(outcomes[:1]) in (["io"], ["damaged"])
    assert "whole" not in brief([outcomes[0], outcomes[2]])
    assert not any(isinstance(outcome, Late) for outcome in outcomes)
    node.gate.change = None
    assert node.store.get([get_of(node.put, checked=True)], WITHIN_S) == [node.put.record]


def careless(answer: bytes) -> bytes:
    """A server that knows no conditional writes overwrites, and says that all is well."""
    done = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
    return done if answer.startswith(b"HTTP/1.1 412") else answer


def test_where_a_name_can_be_taken_twice_nothing_is_written(server: S3Server) -> None:
    gate = Gate(server.port)
    settings = S3Settings(BUCKET, gate.url, access_key=ACCESS, secret_key=HIDDEN, prefix="twice")
    put = put_of(1)
    for change, outcome in ((careless, "io"), (None, "whole")):
        gate.change = change
        pool = S3Pool(settings)
        store = SealedStore(pool, Realm("test", SECRET))
        for _ in range(2):
            (had,) = store.put([put], WITHIN_S)
            assert brief([had]) == [outcome]
            if isinstance(had, StorageFault):
                assert "If-None-Match" in str(had)
        assert store.holds([put.record.key], WITHIN_S) == [outcome == "whole"]
        store.close(WITHIN_S)
    gate.close()


class Belated:
    """obstore, as it is with a server that removes objects long after it was asked to."""

    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.removing: list[str] = []
        self.answers = False

    async def put_async(self, _: object, path: str, whole: bytes, **__: object) -> None:
        from obstore.exceptions import AlreadyExistsError

        was_there = path in self.there
        self.there.setdefault(path, whole)
        for each in self.removing:
            self.there.pop(each, None)
        self.removing.clear()
        if was_there:
            raise AlreadyExistsError(path)

    async def delete_async(self, _: object, paths: list[str]) -> None:
        if not self.answers:
            self.removing += paths
            await asyncio.Event().wait()
        for each in paths:
            self.there.pop(each, None)


def test_a_try_that_was_given_up_says_nothing_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, library = S3Pool(S3Settings(BUCKET, "http://127.0.0.1:1")), Belated()
    monkeypatch.setattr(pool, "_obstore", library)
    blob = Blob(Name("space", 0, "leaf"), memoryview(bytearray(8)), memoryview(bytearray(8)))
    for _ in range(2):
        (fault,) = pool.put([blob], SHORT_S)
        assert "in time" in str(fault)
    library.answers = True
    assert pool.put([blob], WITHIN_S) == [True]
    assert set(library.there) == {"tiercache/" + blob.name.path}
    pool.close(WITHIN_S)


@pytest.mark.parametrize(
    ("change", "word"), [(cut, "io"), (shorter, "damaged"), (flipped, "damaged")]
)
def test_partial_bodies_are_not_delivered(node: Node, change: Change, word: str) -> None:
    node.gate.change = change
    assert brief(node.store.get([get_of(node.put)], WITHIN_S)) == [word]
    node.gate.change = None
    assert brief(node.store.get([get_of(node.put)], WITHIN_S)) == ["whole"]


def test_calls_end_when_the_server_says_nothing(node: Node) -> None:
    node.gate.change = lambda _: None
    begun = time.monotonic()
    outcomes = node.every(SHORT_S)
    assert time.monotonic() - begun < 6 * (SHORT_S + SLACK_S)
    assert brief(outcomes) == ["io"] * 6
    assert not any(isinstance(outcome, Late) for outcome in outcomes)


def test_a_late_get_never_writes_afterwards(node: Node) -> None:
    node.gate.change = lambda _: None
    get = get_of(node.put)
    assert brief(node.store.get([get], 0.1)) == ["io"]
    before = bytes(get.target)
    node.gate.change = None
    assert node.store.get([get_of(node.put)], WITHIN_S) == [node.put.record]
    assert get.target == before


def test_a_slow_answer_that_comes_in_time_is_fine(node: Node) -> None:
    def slow(answer: bytes) -> bytes:
        threading.Event().wait(0.1)
        return answer

    node.gate.change = slow
    assert node.store.get([get_of(node.put)], WITHIN_S) == [node.put.record]


def test_a_killed_server_is_a_fault_until_it_is_back(tmp_path: Path) -> None:
    server = S3Server(tmp_path)
    server.start()
    settings = S3Settings(BUCKET, server.url, access_key=ACCESS, secret_key=HIDDEN)
    store = SealedStore(S3Pool(settings), Realm("test", SECRET))
    put = put_of(1)
    assert store.put([put], WITHIN_S) == [put.record]
    server.kill()
    begun = time.monotonic()
    assert brief(store.get([get_of(put)], WITHIN_S)) == ["io"]
    assert brief(store.put([put], WITHIN_S)) == ["io"]
    with pytest.raises(StorageFault):
        store.holds([put.record.key], WITHIN_S)
    assert time.monotonic() - begun < WITHIN_S
    server.start()  # This one keeps nothing; S3 does.
    assert store.get([get_of(put)], WITHIN_S) == [None]
    assert store.put([put], WITHIN_S) == [put.record]
    store.close(WITHIN_S)
    assert brief(store.get([get_of(put)], WITHIN_S)) == ["io"]
    server.kill()


def test_no_credential_is_told_to_anybody(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Not even when the server says them back."""
    caplog.set_level(logging.DEBUG)
    echo = f"<Error><AWSAccessKeyId>{ACCESS}</AWSAccessKeyId><Key>{HIDDEN}</Key></Error>".encode()
    told = [repr(node.settings), repr(node.store), repr(Realm("test", SECRET))]
    for change in (of_status(403, echo), of_status(200, echo), lambda _: echo + GARBAGE):
        node.gate.change = change
        told += [str(outcome) for outcome in node.every(WITHIN_S)]
        told += [repr(outcome) for outcome in node.every(WITHIN_S)]
    for bad in ("nonsense://", "http://", f"http://{ACCESS}:{HIDDEN}@host", f"http://x:{HIDDEN}"):
        with pytest.raises(ConfigError) as raised:
            S3Pool(replace(node.settings, endpoint=bad))
        told.append(str(raised.value))
    text = "\n".join([*told, caplog.text])
    assert "io" in text
    assert not re.search("|".join(map(re.escape, (ACCESS, HIDDEN, SECRET.decode()))), text)


def test_names_on_the_wire_are_hashes(node: Node) -> None:
    """A store sees no part, no codec, no digest of tokens, and no name of the cluster."""
    node.gate.seen.clear()
    node.every(WITHIN_S)
    lines = [request.partition(b"\r\n")[0].decode() for request in node.gate.seen]
    assert lines
    for line in lines:
        path = line.split()[1].partition("?")[0]
        assert re.fullmatch(r"/pool(/tiercache/[0-9a-f]{32}/0{16}/[0-9a-f]{64})?", path), line


def test_a_flush_removes_nothing_that_is_not_ours(node: Node) -> None:
    """Whatever the server lists: other names, and our own of epochs that are not over."""
    space = Realm("test", SECRET).space(node.put.record.key.namespace)
    ours = f"tiercache/{space}/{0:016x}/"
    for listed in ("tiercache/", f"elsewhere/{space}/", f"tiercache/{space}/{9:016x}/", "../../"):
        node.gate.change = lambda answer, to=listed: relisted(answer, ours, to)
        node.gate.seen.clear()
        node.store.flush(node.put.record.key.namespace, 9, WITHIN_S)
        removals = [each for each in node.gate.seen if not each.startswith(b"GET")]
        assert removals == []
    node.gate.change = None
    node.gate.seen.clear()
    assert node.store.flush(node.put.record.key.namespace, 9, WITHIN_S) is None
    assert [each.split()[0] for each in node.gate.seen] == [b"GET", b"POST"]


def relisted(answer: bytes, old: str, new: str) -> bytes:
    """Return a list in which names begin otherwise, with its length put right."""
    head, body = parts(answer)
    changed = body.replace(f"<Key>{old}".encode(), f"<Key>{new}".encode())
    assert changed != body
    was, now = (b"Content-Length: %d" % len(each) for each in (body, changed))
    return head.replace(was, now) + changed


def test_a_prefix_is_checked() -> None:
    for prefix in ("/", "a//b", "../a", "a/", "a b", "a\n"):
        with pytest.raises(ConfigError, match="prefix"):
            S3Pool(S3Settings(BUCKET, "http://127.0.0.1:1", prefix=prefix))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5000])
def test_what_is_no_object_has_no_name_for_ever(server: S3Server, size: int) -> None:
    """Something else lies under the name, of any size, none too: it is seen, and makes room."""
    import obstore

    settings = S3Settings(BUCKET, server.url, access_key=ACCESS, secret_key=HIDDEN)
    pool = S3Pool(settings)
    store, put = SealedStore(pool, Realm("test", SECRET)), put_of(20 + size)
    key = put.record.key
    obstore.put(pool._bucket, pool._path(store._name(key)), bytes(size))
    assert brief(store.describe([key], WITHIN_S)) == ["damaged"]
    assert brief(store.get([get_of(put)], WITHIN_S)) == ["damaged"]
    assert store.put([put], WITHIN_S) == [put.record]
    assert store.get([get_of(put)], WITHIN_S) == [put.record]
    store.close(WITHIN_S)


def test_where_there_is_no_bucket_nothing_is_merely_missing(server: S3Server) -> None:
    settings = S3Settings("nowhere", server.url, access_key=ACCESS, secret_key=HIDDEN)
    store, put = SealedStore(S3Pool(settings), Realm("test", SECRET)), put_of(1)
    told = [*store.describe([put.record.key], WITHIN_S), *store.get([get_of(put)], WITHIN_S)]
    assert [str(each) for each in told] == ["io: there is no such bucket"] * 2
    store.close(WITHIN_S)


def test_a_call_that_raises_touches_no_memory_afterwards(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its objects makes the library raise at once, another one is still on its way."""
    pool = node.store._pool
    assert isinstance(pool, S3Pool)
    get_async, other = pool._obstore.get_async, put_of(2)
    broken = pool._path(node.store._name(other.record.key))

    def get(bucket: object, path: str) -> object:
        if path == broken:
            raise RuntimeError("something native")
        return get_async(bucket, path)

    def slow(answer: bytes) -> bytes:
        threading.Event().wait(0.3)
        return answer

    monkeypatch.setattr(pool._obstore, "get_async", get)
    node.gate.change = slow
    late = get_of(node.put)
    with pytest.raises(RuntimeError, match="native"):
        node.store.get([late, get_of(other)], WITHIN_S)
    before = bytes(late.target)
    node.gate.change = None
    assert brief(node.store.describe([node.put.record.key], WITHIN_S)) == ["whole"]
    assert bytes(late.target) == before
