"""One memory for KV blocks and state slots."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tiercache.device import (
    CODECS,
    ActivePool,
    Checkpoint,
    CheckpointPool,
    End,
    Ownership,
    Run,
    Seat,
    Skipped,
    UnifiedPool,
    UnitKind,
    encoded,
    slab_for,
)
from tiercache.device.kinds import Columns, Heads, conv_qkv, recurrent
from tiercache.device.slots import Private
from tiercache.device.stacks import aligned_nbytes
from tiercache.device.unified import START_ALIGN
from tiercache.errors import LayoutError
from tiercache.state import Layout

torch.set_num_threads(1)

KV = UnitKind("kv", End.LOW, 600, 16)
INDEXER = UnitKind("indexer", End.LOW, 130, 2)
ACTIVE = UnitKind("active", End.HIGH, 3_000, 256)
IDLE = UnitKind("idle", End.HIGH, 800, 64)
KINDS = (KV, INDEXER, ACTIVE, IDLE)
SLABS = {End.LOW: slab_for([KV, INDEXER], 2), End.HIGH: slab_for([ACTIVE, IDLE], 1)}
NBYTES = 40 * START_ALIGN


def pool_of() -> UnifiedPool:
    return UnifiedPool(NBYTES, KINDS, SLABS)


def test_slabs_hold_all_kinds_of_their_end() -> None:
    pool = pool_of()
    for kind in KINDS:
        assert pool.stride(kind.name) >= kind.nbytes
        assert pool.stride(kind.name) % kind.align == 0
        assert SLABS[kind.end] % pool.stride(kind.name) == 0
    assert pool.stride("idle") < 1.3 * IDLE.nbytes


class Machine(RuleBasedStateMachine):
    """Takes and gives units of every kind, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of()
        self.taken: dict[str, set[int]] = {kind.name: set() for kind in KINDS}

    @rule(kind=st.sampled_from(KINDS), count=st.integers(1, 6))
    def take(self, kind: UnitKind, count: int) -> None:
        for _ in range(count):
            before = self.pool.usage()
            number = self.pool.take(kind.name)
            if number is None:
                assert before.gap < SLABS[kind.end]
                return
            assert 0 <= number < self.pool.count(kind.name)
            assert number not in self.taken[kind.name]
            self.taken[kind.name].add(number)

    @rule(kind=st.sampled_from(KINDS), source=st.randoms(use_true_random=False))
    def give(self, kind: UnitKind, source: random.Random) -> None:
        if self.taken[kind.name]:
            number = source.choice(sorted(self.taken[kind.name]))
            self.taken[kind.name].discard(number)
            self.pool.give(kind.name, number)

    @rule(kind=st.sampled_from(KINDS))
    def give_all(self, kind: UnitKind) -> None:
        for number in sorted(self.taken[kind.name]):
            self.pool.give(kind.name, number)
        self.taken[kind.name].clear()

    @invariant()
    def no_two_units_overlap(self) -> None:
        spans = sorted(
            (start, start + kind.nbytes, kind)
            for kind in KINDS
            for number in self.taken[kind.name]
            for start in [self.pool.offset(kind.name, number)]
        )
        for (_, stop, _), (start, _, _) in pairwise(spans):
            assert stop <= start
        low, high = self.pool.usage().frontiers
        for start, stop, kind in spans:
            assert start % kind.align == 0
            assert 0 <= start < stop <= NBYTES
            assert stop <= low if kind.end is End.LOW else start >= NBYTES - high

    @invariant()
    def every_byte_is_somewhere(self) -> None:
        usage = self.pool.usage()
        assert usage.used == {kind.name: kind.nbytes * len(self.taken[kind.name]) for kind in KINDS}
        assert sum(usage.used.values()) + usage.padding + usage.gap + usage.stranded == NBYTES
        assert min(usage.gap, usage.stranded, usage.padding) >= 0
        assert 0 <= usage.fragmentation <= 1

    def teardown(self) -> None:
        for kind in KINDS:
            self.give_all(kind)
        assert self.pool.usage().gap == NBYTES
        assert self.pool.usage().fragmentation == 0


def test_units_never_overlap_and_bytes_add_up() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def fill(pool: UnifiedPool, name: str) -> list[int]:
    found = []
    while (number := pool.take(name)) is not None:
        found.append(number)
    return found


def test_the_boundary_moves_with_the_load() -> None:
    pool = pool_of()
    all_kv = fill(pool, "kv")
    assert pool.take("active") is None
    for number in all_kv:
        pool.give("kv", number)
    all_states = fill(pool, "active")
    assert pool.take("kv") is None
    for number in all_states:
        pool.give("active", number)
    assert len(fill(pool, "kv")) == len(all_kv)


def test_what_is_stranded_is_measured() -> None:
    pool = pool_of()
    taken = [pool.take("active") for _ in range(3)]
    first, second, third = (number for number in taken if number is not None)
    pool.give("active", first)
    assert pool.usage().stranded == SLABS[End.HIGH]
    assert pool.usage().frontiers[1] == 3 * SLABS[End.HIGH]
    assert 0 < pool.usage().fragmentation < 1
    assert pool.take("active") == first
    pool.give("active", third)
    assert pool.usage().stranded == 0
    assert pool.usage().frontiers[1] == 2 * SLABS[End.HIGH]
    pool.give("active", first)
    pool.give("active", second)


def test_kinds_of_one_end_share_it_slab_by_slab() -> None:
    pool = pool_of()
    active = pool.take("active")
    idle = pool.take("idle")
    assert active is not None
    assert idle is not None
    pool.give("active", active)
    again = [pool.take("idle") for _ in range(pool.count("idle"))]
    assert pool.offset("active", active) in {
        pool.offset("idle", number) for number in again if number is not None
    }


def test_the_books_do_not_grow_with_use() -> None:
    pool = pool_of()
    fill(pool, "kv")
    for _ in range(1_000):
        pool.give("kv", 1)
        assert pool.take("kv") == 1
    side = pool._sides[End.LOW]
    assert len(side.kinds["kv"].open) + len(side.holes) <= side.capacity


@given(source=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_after_any_churn_everything_fits_again(source: random.Random) -> None:
    pool = pool_of()
    fresh = {kind.name: len(fill(pool_of(), kind.name)) for kind in KINDS}
    taken: list[tuple[str, int]] = []
    for _ in range(400):
        if taken and source.random() < 0.5:
            pool.give(*taken.pop(source.randrange(len(taken))))
        else:
            name = source.choice(KINDS).name
            number = pool.take(name)
            if number is not None:
                taken.append((name, number))
    for name, number in taken:
        pool.give(name, number)
    for kind in KINDS:
        held = fill(pool, kind.name)
        assert len(held) == fresh[kind.name]
        for number in held:
            pool.give(kind.name, number)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: UnifiedPool(NBYTES, (KV, KV), SLABS), "different names"),
        (lambda: UnifiedPool(NBYTES, (), SLABS), "different names"),
        (lambda: UnifiedPool(NBYTES + 1, KINDS, SLABS), "steps of 512"),
        (
            lambda: UnifiedPool(NBYTES, KINDS, {End.LOW: SLABS[End.LOW], End.HIGH: 512}),
            "larger slabs",
        ),
        (lambda: UnifiedPool(START_ALIGN, KINDS, SLABS), "hold no slab"),
        (lambda: UnitKind("x", End.LOW, 8, 3), "power of two"),
    ],
)
def test_what_cannot_work_is_refused(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=why):
        make()


def test_a_unit_is_given_back_once() -> None:
    pool = pool_of()
    first, second = pool.take("kv"), pool.take("kv")
    assert first is not None
    assert second is not None
    pool.give("kv", first)
    before = pool.usage()
    with pytest.raises(ValueError, match="'kv' that is taken"):
        pool.give("kv", first)
    assert pool.usage() == before
    pool.give("kv", second)
    for name, number in (("kv", second), ("kv", -1), ("kv", pool.count("kv")), ("active", 0)):
        with pytest.raises(ValueError, match="that is taken"):
            pool.give(name, number)
    assert pool.usage().gap == NBYTES
    idle = pool.take("idle")
    assert idle is not None
    slab = idle // (SLABS[End.HIGH] // pool.stride("idle"))
    with pytest.raises(ValueError, match="'active' that is taken"):
        pool.give("active", slab)  # A unit of another kind lies there.
    pool.give("idle", idle)


# --- pools in it

LAYOUT = Layout(
    (recurrent(Heads(range(2), 2, 8, 4)), conv_qkv(Columns(range(2), 3), (2, 4), (2, 8))), 16
)


def test_states_and_kv_live_in_one_buffer() -> None:
    """Real pools as views of one memory, under load from both ends; nobody's bytes change."""
    seat, codec = Seat(LAYOUT), CODECS["int8"]
    idle_parts = [encoded(codec, part) for part in seat.parts]
    kinds = (
        UnitKind("kv", End.LOW, 512),
        UnitKind("active", End.HIGH, aligned_nbytes(seat.parts, seat.shards)),
        UnitKind("idle", End.HIGH, aligned_nbytes(idle_parts, seat.shards)),
    )
    unified = UnifiedPool(64 * 1024, kinds, {End.LOW: 512, End.HIGH: slab_for(kinds[1:])})
    memory = torch.zeros(unified.nbytes, dtype=torch.uint8)
    active = ActivePool(seat, unified.space("active", memory))
    idle = CheckpointPool(seat, codec, unified.space("idle", memory))
    owner = Ownership(active, idle)
    kv = unified.space("kv", memory)
    blocks: dict[int, int] = {}
    runs: dict[Run, float] = {}
    kept: dict[Checkpoint, float] = {}
    source = random.Random(5)
    for step in range(600):
        value = float(step % 100 + 1)
        match source.randrange(6):
            case 0 if (block := unified.take("kv")) is not None:
                memory[block * kv.stride : (block + 1) * kv.stride] = step % 256
                blocks[block] = step % 256
            case 1 if blocks:
                block = source.choice(list(blocks))
                unified.give("kv", block)
                del blocks[block]
            case 2 if isinstance(run := owner.start(), Run):
                runs[run] = value
                set_state(owner, run, value)
            case 3 if runs:
                run = source.choice(list(runs))
                found = owner.snapshot(run, 1)
                if isinstance(found, Checkpoint):
                    kept[found] = runs[run]
            case 4 if kept:
                found = source.choice(list(kept))
                resumed = owner.resume(found)
                if isinstance(resumed, Run):
                    runs[resumed] = kept[found]
            case _ if runs and kept:
                owner.clear(ended := source.choice(list(runs)))
                owner.clear(left := source.choice(list(kept)))
                del runs[ended], kept[left]
        everything_is_as_it_was(owner, runs, {b: (kv.stride, v) for b, v in blocks.items()}, memory)
    owner.check()
    assert isinstance(unified.usage().used["active"], int)


def everything_is_as_it_was(
    owner: Ownership,
    runs: dict[Run, float],
    blocks: dict[int, tuple[int, int]],
    memory: torch.Tensor,
) -> None:
    for block, (stride, byte) in blocks.items():
        assert set(memory[block * stride :][:stride].tolist()) == {byte}
    for run, expected in runs.items():
        assert get_state(owner, run) == {expected}


def set_state(owner: Ownership, run: Run, value: float) -> None:
    slot = owner.slot(run)
    assert isinstance(slot, Private)
    for tensor in owner.active.store.tensors:
        tensor[:, slot.number] = value


def get_state(owner: Ownership, run: Run) -> set[float]:
    slot = owner.slot(run)
    assert isinstance(slot, Private)
    return {
        float(round(value))
        for tensor in owner.active.store.tensors
        for value in tensor[:, slot.number].double().flatten().tolist()
    }


def test_memory_that_does_not_fit_is_refused() -> None:
    unified = UnifiedPool(64 * 1024, (UnitKind("a", End.HIGH, 500, 2),), {End.HIGH: 512})
    memory = torch.zeros(unified.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="flat bytes"):
        unified.space("a", memory[1:])
    with pytest.raises(LayoutError, match="do not fit"):
        ActivePool(Seat(LAYOUT), unified.space("a", memory))


def test_a_full_memory_skips_checkpoints() -> None:
    seat = Seat(LAYOUT)
    kinds = (
        UnitKind("kv", End.LOW, 512),
        UnitKind("active", End.HIGH, aligned_nbytes(seat.parts, seat.shards)),
    )
    unified = UnifiedPool(16 * 1024, kinds, {End.LOW: 512, End.HIGH: slab_for(kinds[1:])})
    memory = torch.zeros(unified.nbytes, dtype=torch.uint8)
    pool = ActivePool(seat, unified.space("active", memory))
    owner = Ownership(pool, CheckpointPool(seat, CODECS["native"], 1))
    run = owner.start()
    assert isinstance(run, Run)
    fill(unified, "kv")
    assert isinstance(owner.start(), Skipped)
    assert isinstance(owner.turn(run), Skipped)
    assert isinstance(owner.donate(run, 4), Checkpoint)
