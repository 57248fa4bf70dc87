"""Memory that is registered with a client, whatever that refuses, however long it takes, whoever leaves."""

import mmap
import threading
from typing import cast

import pytest

from tiercache.errors import StorageFault
from tiercache.tiers.remote import Blob, Name
from tiercache.tiers.remote_mooncake_client import Native
from tiercache.tiers.remote_staging import LANE_BYTES, Staging, address_of

LANES = 2
WAIT_S = 10.0


class Card:
    """A client with a network card of limited memory. `pause`: what to wait for before it answers."""

    def __init__(self, nbytes_max: int = 1 << 40) -> None:
        self.nbytes_max = nbytes_max
        self.there: dict[int, int] = {}
        self.pause: threading.Event | None = None
        self.asked = threading.Semaphore(0)

    def register_buffer(self, address: int, nbytes: int) -> int:
        self.asked.release()
        if self.pause is not None:
            assert self.pause.wait(WAIT_S)
        if sum(self.there.values()) + nbytes > self.nbytes_max:
            return -1
        assert address not in self.there, "registered twice"
        self.there[address] = nbytes
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.there[address]
        return 0


def native(card: Card) -> Native:
    return cast("Native", card)


def memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def blob(body: memoryview) -> Blob:
    return Blob(Name("space", 0, "leaf"), memory(4096), body)


def place(staging: Staging, card: Card, body: memoryview) -> int:
    """Return where a body is moved from or to, which is registered while it is."""
    with staging.staged(native(card), [blob(body)], with_bodies=True) as staged:
        at = staged.addresses[0][1]
        assert any(start <= at < start + nbytes for start, nbytes in card.there.items())
        return at


def test_memory_is_its_own_place_unless_it_was_refused() -> None:
    staging, before, after = Staging(LANES), memory(4096), memory(4096)
    staging.add(before)
    card = Card(LANES * LANE_BYTES + 2 * 4096)
    staging.use(native(card))
    staging.add(after)
    refused = memory(4096)
    staging.add(refused)
    assert place(staging, card, before) == address_of(before)
    assert place(staging, card, after) == address_of(after)
    assert place(staging, card, refused) != address_of(refused)
    staging.leave()
    assert not card.there


def test_what_has_no_room_in_a_lane_and_is_refused_is_a_fault() -> None:
    staging, card = Staging(LANES), Card(LANES * LANE_BYTES)
    staging.use(native(card))
    with pytest.raises(StorageFault, match="registered"):
        place(staging, card, memory(2 * LANE_BYTES))
    card.nbytes_max *= 4
    place(staging, card, memory(2 * LANE_BYTES))
    assert len(card.there) == LANES


def test_without_lanes_a_client_is_of_no_use_until_it_takes_them() -> None:
    staging, card, ours = Staging(LANES), Card(LANE_BYTES), memory(4096)
    staging.add(ours)
    with pytest.raises(StorageFault, match="registered"):
        staging.use(native(card))
    assert not card.there
    other = Card()
    staging.use(native(other))
    assert len(other.there) == LANES + 1
    assert place(staging, other, ours) == address_of(ours)


def test_memory_that_comes_while_all_is_registered_is_registered_once() -> None:
    staging, card, late = Staging(LANES), Card(), memory(4096)
    card.pause = threading.Event()
    using = threading.Thread(target=staging.use, args=(native(card),))
    using.start()
    assert card.asked.acquire(timeout=WAIT_S)
    staging.add(late)
    card.pause.set()
    using.join(WAIT_S)
    assert place(staging, card, late) == address_of(late)
    assert len(card.there) == LANES + 1


def test_memory_that_comes_while_all_is_left_stays_nowhere() -> None:
    staging, card = Staging(LANES), Card()
    staging.use(native(card))
    for _ in range(LANES):
        assert card.asked.acquire(timeout=WAIT_S)
    card.pause = threading.Event()
    adding = threading.Thread(target=staging.add, args=(memory(4096),))
    adding.start()
    assert card.asked.acquire(timeout=WAIT_S)
    staging.leave()
    card.pause.set()
    adding.join(WAIT_S)
    assert not card.there


def test_who_never_connected_keeps_no_memory() -> None:
    ours = mmap.mmap(-1, 4096)
    staging = Staging(LANES)
    with memoryview(ours) as view:
        staging.add(view)
        staging.leave()
    ours.close()  # BufferError while somebody has a view of it.
