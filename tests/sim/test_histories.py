"""Two hundred histories with faults, and proof that they are the same each time and that they bite."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from tiercache.core.books import Books
from tiercache.core.catalog import Item
from tiercache.core.expiry import Expiry
from tiercache.core.leases import Leases
from tiercache.core.log import Log
from tiercache.core.pins import Pins
from tiercache.core.policy.admission import SecondSight
from tiercache.core.policy.retention import Retention
from tiercache.core.policy.strict import Strict
from tiercache.core.protection import Protection
from tiercache.core.space import Space
from tiercache.core.tenants import Tenant
from tiercache.errors import Fault
from tiercache.state import Extent, Part, Record, boundary
from tiercache.testing.sim import HistoryError, run_seed, world
from tiercache.testing.sim.__main__ import STEPS, main
from tiercache.testing.sim.disk import Disk
from tiercache.testing.sim.swarm import Swarm, draw

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200
CHUNK = 20
ENOUGH = 200


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_histories(first: int) -> None:
    """Outputs are right, calls are answered, books add up, and nothing is held at the end."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        history = run_seed(seed, STEPS)
        reached.update(resumed=history.resumed, restarts=history.restarts, deaths=history.deaths)
        for name, labels in history.counters.items():
            reached.update({f"{name} {label}".strip(): count for label, count in labels.items()})
    # A simulation that never gets anywhere proves nothing.
    assert min(reached["resumed"], reached["restarts"], reached["deaths"]) > 0
    assert min(reached["lookups hit_host"], reached["evictions host"], reached["commits"]) > 0


def digest(seed: int) -> str:
    return run_seed(seed, STEPS, full=True).digest


def test_a_seed_is_one_history() -> None:
    assert digest(3) == digest(3) != digest(4)


def test_a_seed_is_the_same_history_in_other_processes() -> None:
    """Nothing hangs on the order of a set, the seed of a hash or the place of an object."""
    code = (
        f"from tiercache.testing.sim import run_seed; print(run_seed(3, {STEPS}, full=True).digest)"
    )
    found = {digest(3)}
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(answer.stdout.strip())
    assert len(found) == 1


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--first", "5", "--steps", "60"]) == 0
    assert capsys.readouterr().out.startswith("2 histories passed")


def test_the_command_names_the_seed_and_the_last_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Disk, "read", lambda *_: None)
    assert main(["--seeds", "200"]) == 1
    said = capsys.readouterr().out
    seed = said.split()[1].rstrip(":")
    assert f"--seeds 1 --first {seed} " in said
    assert "last events:\n" in said
    assert "Filled(" in said


# --- each of these mistakes would cost a wrong token, a leak or a worn disk


def forget_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "take", lambda *_: [])


def believe_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Disk.read

    def careless(disk: Disk, record: Record, extent: Extent, target: memoryview) -> Fault | None:
        read(disk, record, extent, target)
        return None

    monkeypatch.setattr(Disk, "read", careless)


def windows_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = boundary._windows

    def short(window: int, block: int, positions: list[int], flags: list[bool]) -> list[bool]:
        return windows(window - 1, block, positions, flags)

    monkeypatch.setattr(boundary, "_windows", short)


def gaps_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(part: Part, positions: list[int], flags: list[bool], depth: int) -> int:
        return depth

    monkeypatch.setattr(boundary, "_first_gap", last)


def drop_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "started", lambda *_: None)


def free_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def discard(books: Books, item: Item, *, forget: bool = True) -> None:
        real(books, item, forget=forget)
        if item.users:
            books._settle(item)

    real = Books.discard
    monkeypatch.setattr(Books, "discard", discard)


def leave_space_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(space: Space, extent: Extent) -> None:
        space.free_bytes += extent.size
        space._insert(extent.segment, extent.offset, extent.size)

    monkeypatch.setattr(Space, "free", free)


def write_at_first_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecondSight, "earned", lambda *_: True)


def keep_at_first_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strict, "keeps", lambda *_: True)


def keep_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "take_due", lambda *_: [])


def write_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expiry, "is_own", lambda *_: False)


def store_against_its_will(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protection, "refuses", lambda *_: False)


def pin_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "why_not", lambda *_: "")


def keep_pins_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "of_session", lambda *_: [])


def take_more_than_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tenant, "would_pass", lambda *_: False)


def forget_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(books: Books, item: Item, extent: Extent) -> None:
        books.space.free(extent)

    monkeypatch.setattr(Books, "free", free)


@pytest.mark.parametrize(
    "mistake",
    [
        forget_leases,
        believe_the_disk,
        windows_one_short,
        gaps_do_not_matter,
        drop_what_is_read,
        free_what_is_used,
        leave_space_in_pieces,
        write_at_first_sight,
        keep_at_first_sight,
        keep_what_has_ended,
        write_what_ends,
        store_against_its_will,
        pin_beyond_the_budget,
        keep_pins_of_the_dead,
        take_more_than_the_share,
        forget_to_give_back,
    ],
)
def test_a_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mistake(monkeypatch)

    def histories() -> None:
        for seed in range(ENOUGH):
            run_seed(seed, STEPS)

    with pytest.raises(HistoryError, match="last events"):
        histories()


@pytest.mark.parametrize("mode", get_args(Retention))
def test_histories_of_each_retention(mode: Retention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode resumes, and all refuse something but those that keep whatever they are offered."""

    def drawn(rng: random.Random, steps: int) -> Swarm:
        swarm = draw(rng, steps)
        retaining = msgspec.structs.replace(swarm.limits.retaining, mode=mode)
        return replace(swarm, limits=msgspec.structs.replace(swarm.limits, retaining=retaining))

    monkeypatch.setattr(world, "draw", drawn)
    reached: Counter[str] = Counter()
    for seed in range(1000, 1012):
        history = run_seed(seed, STEPS)
        reached["resumed"] += history.resumed
        reached.update(history.counters["reserves"])
        reached.update(history.counters["checkpoints"])
    assert min(reached["resumed"], reached["granted"], reached["followed"]) > 0
    assert (reached["not_admitted"] > 0) is (mode not in {"dense", "chunk"})
