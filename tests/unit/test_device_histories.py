"""Any history of runs and checkpoints: nothing freed or foreign is read, and nothing leaks."""

import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tiercache.device import CODECS, Checkpoint, Run
from tiercache.testing.histories import Histories, play

torch.set_num_threads(1)


class Machine(RuleBasedStateMachine):
    """Histories that hypothesis can shrink."""

    runs: Bundle[Run] = Bundle("runs")
    kept: Bundle[Checkpoint] = Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.codec = "native"
        self.model = Histories("native")

    @rule(codec=st.sampled_from(sorted(CODECS)))
    def codec_is(self, codec: str) -> None:
        if not self.model.value:
            self.model = Histories(codec)

    @rule(target=runs)
    def start(self) -> Run:
        return self.model.start() or Run(-1)

    @rule(target=runs, kept=kept)
    def resume(self, kept: Checkpoint) -> Run:
        return (self.model.resume(kept) if kept in self.model.kept else None) or Run(-1)

    @rule(run=runs)
    def step(self, run: Run) -> None:
        if run in self.model.runs:
            self.model.step(run)

    @rule(run=runs)
    def turn(self, run: Run) -> None:
        if run in self.model.runs:
            self.model.turn(run)

    @rule(target=kept, run=runs)
    def snapshot(self, run: Run) -> Checkpoint:
        return (self.model.snapshot(run) if run in self.model.runs else None) or Checkpoint(-1)

    @rule(target=kept, run=consumes(runs))
    def donate(self, run: Run) -> Checkpoint:
        return self.model.donate(run) if run in self.model.runs else Checkpoint(-1)

    @rule(target=runs, kept=kept, last=st.booleans())
    def adopt(self, kept: Checkpoint, last: bool) -> Run:  # noqa: FBT001 - hypothesis draws it
        known = kept in self.model.kept
        return (self.model.adopt(kept, last=last) if known else None) or Run(-1)

    @rule(kept=kept)
    def settle(self, kept: Checkpoint) -> None:
        if kept in self.model.kept:
            self.model.settle(kept)

    @rule(kept=kept)
    def evict(self, kept: Checkpoint) -> None:
        if kept in self.model.kept:
            self.model.evict(kept)

    @rule(run=consumes(runs))
    def abort(self, run: Run) -> None:
        if run in self.model.runs:
            self.model.abort(run)

    @rule(kept=kept)
    def copy_out(self, kept: Checkpoint) -> None:
        if kept in self.model.kept:
            self.model.copy_out(kept)

    @rule()
    def finish_copy(self) -> None:
        self.model.finish_copy()

    @rule()
    def clear_all(self) -> None:
        self.model.clear_all()

    @invariant()
    def holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.finish()


def test_no_history_reads_another_state() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=400,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("codec", CODECS)
def test_ten_thousand_histories(codec: str) -> None:
    """3,200 histories per codec; with those of the state machine, 10,000."""
    for seed in range(3_200):
        play(Histories(codec), random.Random(seed), 12)
