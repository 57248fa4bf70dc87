"""Sealed objects and their names, byte by byte; wrappers; calls that hang."""

import hashlib
import hmac
import random
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.errors import Fault, LayoutError, StorageFault
from tiercache.state import Record
from tiercache.testing.objects import content, faults, record_of
from tiercache.testing.store_objects import brief, flipped, get_of, put_of
from tiercache.testing.stores import History
from tiercache.tiers import remote_store
from tiercache.tiers.remote import Blob, Late
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_mooncake import below
from tiercache.tiers.remote_sealed import HEADER_BYTES, RECORD_BYTES_MAX, Realm, seal, unseal
from tiercache.tiers.remote_store import NAMESPACES_MAX, SealedStore
from tiercache.tiers.remote_waiting import Workers
from tiercache.tiers.remote_wrap import FaultyPool, MeasuredStore, ThrottledStore, Traffic
from tiercache.tiers.wrap import Delay, Fail, Flip, Lose, Trouble, scripted, seeded

REALM = Realm("cluster", b"a secret of some length")
RECORD = record_of(7, content(7, 100))


def test_a_header_holds_the_whole_record() -> None:
    for record in (RECORD, replace(RECORD, writer="", parent=b"", base=b"", sealed_at=0.0)):
        header = seal(record, REALM)
        assert len(header) == HEADER_BYTES
        assert unseal(header, REALM) == record


def test_headers_and_names_are_pinned() -> None:
    """Objects outlive the code that wrote them: what changes these is another `FORMAT`."""
    header = hashlib.sha256(seal(RECORD, REALM)).hexdigest()
    plain = hashlib.sha256(seal(RECORD, Realm("cluster"))).hexdigest()
    assert header == "b14d34dddfa47d5a17290c9678b3aa5ffb1c867193677bf4da7467d1bd929e12"
    assert plain == "091fdae6020bedef03cf842c9bb4e18ab0f378cdddf401ae10b88bb2f1ae9ca0"
    space, epoch, leaf = REALM.name(RECORD.key, 3).path.split("/")
    assert (space, epoch) == ("f0cebe96abf1cb0c5419541064011f44", "0000000000000003")
    assert leaf == "c009ae39cb467cb444fab2f6d7c76282f3e274fc5cdee59686aab9302abb0e56"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2 * HEADER_BYTES))
def test_any_bytes_are_no_record(raw: bytes) -> None:
    assert unseal(raw, REALM) is None
    assert unseal(raw.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES], REALM) is None


def test_no_bit_of_a_header_may_change() -> None:
    header = seal(RECORD, REALM)
    for bit in range(8 * HEADER_BYTES):
        assert unseal(flipped(header, bit), REALM) is None


def test_a_seal_over_nonsense_is_still_nonsense() -> None:
    """Somebody who knows the secret may be wrong, or older."""
    header = seal(RECORD, REALM)
    dice = random.Random(1)
    for body in (b"", b"\x93", b"\x90", dice.randbytes(RECORD_BYTES_MAX), header[28:] + b"\0"):
        fixed = header[:10] + min(len(body), RECORD_BYTES_MAX).to_bytes(2, "little")
        body = body[:RECORD_BYTES_MAX]  # noqa: PLW2901
        mac = hmac.digest(REALM.secret, fixed + body, "sha256")[:16]
        assert unseal((fixed + mac + body).ljust(HEADER_BYTES, b"\0"), REALM) is None


@pytest.mark.parametrize(
    "record",
    [
        replace(RECORD, start=-1), replace(RECORD, start=RECORD.end + 1), replace(RECORD, nbytes=-1),
        replace(RECORD, checksum=b"short"), replace(RECORD, parent=b"short"),
        replace(RECORD, base=b"short"), replace(RECORD, requantised=-1),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_is_no_record(record: Record) -> None:
    assert unseal(seal(record, REALM), REALM) is None


def test_names_too_long_for_a_header_are_refused() -> None:
    with pytest.raises(LayoutError, match="shorten"):
        seal(replace(RECORD, writer="w" * HEADER_BYTES), REALM)


def test_a_realm_is_checked_and_keeps_its_secret() -> None:
    for cluster, secret in (("", b""), ("c", b"short")):
        with pytest.raises(ValueError, match=r"a cluster|a secret"):
            Realm(cluster, secret)
    assert "secret" not in repr(REALM)
    with pytest.raises(ValueError, match="an epoch"):
        REALM.name(RECORD.key, -1)


def test_a_source_of_another_size_is_a_bug() -> None:
    put = put_of(1, 100)
    store = SealedStore(MemoryPool(), REALM)
    with pytest.raises(ValueError, match="99 bytes, not 100"):
        store.put([put._replace(source=put.source[:99])], 1.0)


def test_epochs_are_bounded() -> None:
    store = SealedStore(MemoryPool(), REALM)
    for number in range(NAMESPACES_MAX):
        store.enter(number.to_bytes(32, "big"), 1)
    store.enter(bytes(32), 2)
    with pytest.raises(ValueError, match="more than"):
        store.enter(b"\xff" * 32, 1)


def test_a_full_pool_takes_no_more() -> None:
    store = SealedStore(MemoryPool(10_000), REALM)
    puts = [put_of(1, 5000), put_of(2, 5000), put_of(3, 100)]
    assert brief(store.put(puts, 1.0)) == ["whole", "no_space", "whole"]


def test_a_key_that_is_taken_and_empty_again_and_again_is_a_fault() -> None:
    class Flickering(MemoryPool):
        def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
            return [False] * len(blobs)

    store = SealedStore(Flickering(), REALM)
    assert brief(store.put([put_of(1)], 1.0)) == ["io"]


@pytest.mark.parametrize("epoch", [1, 2, 15, 16, 0x1A0F, (1 << 64) - 1])
def test_the_expression_for_older_epochs(epoch: int) -> None:
    pattern = re.compile(f"({below(epoch)})")
    dice = random.Random(epoch)
    others = [0, 1, epoch - 1, epoch, (1 << 64) - 1]
    others += [max(0, epoch - dice.randrange(1 << dice.randrange(1, 64))) for _ in range(200)]
    others += [min((1 << 64) - 1, epoch + dice.randrange(1 << 60)) for _ in range(200)]
    for other in others:
        assert bool(pattern.fullmatch(f"{other:016x}")) == (other < epoch), other


def test_scripted_faults_happen_and_are_found() -> None:
    script = scripted(
        {
            ("put", 1): Fail(Fault.NO_SPACE), ("put", 2): Lose(), ("put", 3): Flip(8 * HEADER_BYTES),
            ("put", 4): Flip(3), ("put", 5): Delay(2.5), ("get", 0): Fail(Fault.IO),
            ("get", 5): Flip(9000), ("get", 6): Delay(1.5),
        }
    )  # fmt: skip
    slept: list[float] = []
    store = SealedStore(FaultyPool(MemoryPool(), script, slept.append), REALM)
    puts = [put_of(number, 200) for number in range(6)]
    words = ["whole", "no_space", "whole", "whole", "whole", "whole"]
    assert brief(store.put(puts, 9.0)) == words
    found = brief(store.get([get_of(put) for put in puts], 9.0))
    assert found == ["io", "none", "none", "damaged", "damaged", "damaged"]
    assert brief(store.get([get_of(put) for put in puts], 9.0))[-1] == "whole"
    assert slept == [2.5, 1.5]


def test_a_faulty_pool_loses_but_never_lies() -> None:
    """A random history in which a tenth of all calls go wrong: what comes is what was put."""
    troubles: list[Trouble] = [Fail(Fault.IO), Lose(), Flip(77), Flip(12_345), Fail(Fault.DAMAGED)]
    store = SealedStore(FaultyPool(MemoryPool(), seeded(3, 0.1, troubles)), REALM)
    dice = random.Random(5)
    known: dict[bytes, set[bytes]] = {}
    whole = 0
    for _ in range(3000):
        put = put_of(dice.randrange(50), 300, seed=dice.randrange(3))
        key = put.record.key.encode()
        if dice.random() < 0.5:
            (kept,) = store.put([put], 1.0)
            if isinstance(kept, Record):
                known.setdefault(key, set()).add(bytes(put.source))
            continue
        get = get_of(put)
        (had,) = store.get([get], 1.0)
        if isinstance(had, Record):
            whole += 1
            assert bytes(get.target) in known[key]
        elif isinstance(had, StorageFault) and had.fault is Fault.DAMAGED:
            store.forget([put.record.key], 1.0)
    assert whole > 1000


def test_a_measured_store_counts() -> None:
    ticks = iter(range(100))
    pool = FaultyPool(MemoryPool(), scripted({("put", 2): Fail(Fault.NO_SPACE)}))
    store = MeasuredStore(SealedStore(pool, REALM, clock=lambda: 0.0), clock=lambda: next(ticks))
    puts = [put_of(number, 100 + number) for number in range(3)]
    store.put(puts, 1.0)
    store.get([get_of(put) for put in puts], 1.0)
    store.holds([put.record.key for put in puts], 1.0)
    none = dict.fromkeys(Fault, 0)
    full = none | {Fault.NO_SPACE: 1}
    assert store.stored == Traffic(1, 3, 2, 0, 0, 201, 1.0, full)
    assert store.fetched == Traffic(1, 3, 2, 1, 0, 201, 1.0, none)
    assert store.asked == Traffic(1, 3, 2, 1, 0, 0, 1.0, none)
    with pytest.raises(StorageFault):
        store.holds([puts[0].record.key], 0.0)
    assert store.asked == Traffic(2, 4, 2, 1, 0, 0, 2.0, none | {Fault.IO: 1})


def test_a_throttled_store_pays_afterwards() -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    inner = SealedStore(MemoryPool(), REALM, clock=lambda: now[0])
    store = ThrottledStore(inner, 100, clock=lambda: now[0], sleep=sleep)
    assert brief(store.put([put_of(1, 500)], 1.0)) == ["whole"]
    assert brief(store.put([put_of(2, 100)], 5.0)) == ["io"]
    assert brief(store.put([put_of(2, 100)], 5.1)) == ["whole"]
    assert slept == [5.0]
    with pytest.raises(ValueError, match="at least 1"):
        ThrottledStore(inner, 0)


def test_wrapped_stores_pass_every_call_on() -> None:
    inner = SealedStore(FaultyPool(MemoryPool(), scripted({})), REALM)
    wrapped = MeasuredStore(ThrottledStore(inner, 1 << 60))
    wrapped.register(memoryview(bytearray(10)))
    history = History([wrapped, wrapped], random.Random(2))
    while history.operations < 1000:
        history.step()
    put = put_of(1)
    wrapped.put([put], 1.0)
    assert brief(wrapped.describe([put.record.key], 1.0)) in (["whole"], ["none"])
    assert wrapped.close(1.0) is None


def test_a_call_that_hangs_is_late_and_settles() -> None:
    workers = Workers("test", 2)
    gate = threading.Event()
    late = []
    for _ in range(2):
        with pytest.raises(Late) as raised:
            workers.call(lambda: gate.wait(20.0), 0.02)
        late.append(raised.value)
    assert [each.settled.is_set() for each in late] == [False, False]
    assert len(workers.unsettled()) == 2
    begun = []
    with pytest.raises(StorageFault, match="hang") as refused:
        workers.call(lambda: begun.append(1), 0.02)
    assert not isinstance(refused.value, Late)
    gate.set()
    assert all(each.settled.wait(20.0) for each in late)
    assert workers.unsettled() == []
    assert workers.call(lambda: 5, 20.0) == 5
    assert begun == []
    assert faults([late[0]]) == [Fault.IO]
    workers.close()


def test_what_a_call_raises_comes_to_the_caller() -> None:
    workers = Workers("test", 1)
    with pytest.raises(ZeroDivisionError):
        workers.call(lambda: 1 // 0, 20.0)
    assert workers.call(lambda: 5, 20.0) == 5
    with pytest.raises(StorageFault, match="deadline"):
        workers.call(lambda: 5, 0.0)
    workers.close()


def test_only_so_many_calls_wait() -> None:
    workers = Workers("test", 1, waiting_max=1)
    gate, running = threading.Event(), threading.Event()
    errors: list[StorageFault] = []

    def hang() -> None:
        running.set()
        gate.wait(20.0)

    first = threading.Thread(target=lambda: workers.call(hang, 20.0))
    first.start()
    assert running.wait(20.0)
    for _ in range(3):
        try:
            workers.call(lambda: 5, 0.01)
        except StorageFault as fault:
            errors.append(fault)
    gate.set()
    first.join(20.0)
    assert ["too many" in error.detail for error in errors] == [False, True, True]
    workers.close()


def test_a_batch_that_raises_waits_for_what_was_late_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who hears of an error gives the memory away: the pool must have let go of it."""
    settled, raised = threading.Event(), threading.Event()

    class Torn(MemoryPool):
        calls = 0

        def _late(self, blobs: Sequence[Blob]) -> list[bool | StorageFault]:
            self.calls += 1
            if self.calls % 2:
                return [Late("it takes its time", settled)] * len(blobs)
            raised.set()
            raise RuntimeError("something native")

        def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
            return self._late(blobs)

        def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
            return self._late(blobs)

    monkeypatch.setattr(remote_store, "RUN_OBJECTS_MAX", 1)
    store = SealedStore(Torn(), REALM)
    calls: list[Callable[[], object]] = [
        lambda: store.get([get_of(put_of(1)), get_of(put_of(2))], 1.0),
        lambda: store.put([put_of(1), put_of(2)], 1.0),
    ]
    for call in calls:
        settled.clear()
        raised.clear()
        with ThreadPoolExecutor(1) as threads:
            ended = threads.submit(call)
            assert raised.wait(20)
            with pytest.raises(TimeoutError):
                ended.result(0.05)
            settled.set()
            with pytest.raises(RuntimeError, match="native"):
                ended.result(20)
