"""With every slot taken: what was found can be resumed, and what cannot be kept is passed by."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tiercache.device import (
    CODECS,
    Checkpoint,
    DirectOutlet,
    Hold,
    LeastRecent,
    Pinned,
    Policies,
    Prompt,
    Restored,
    Run,
    Skipped,
    Standing,
)
from tiercache.errors import LayoutError
from tiercache.state import Chain
from tiercache.testing.devices import (
    PROMPT,
    LaterLane,
    SavingNode,
    kept,
    read,
    run_with,
    tier_of,
    write,
)

torch.set_num_threads(1)


# --- resuming when all is full


def test_a_donated_checkpoint_is_resumed_though_all_is_full_and_pinned() -> None:
    """The only slot is its own: the run takes it over, and the node is offered a copy."""
    node = SavingNode()
    policies = Policies(Pinned(), LeastRecent())
    tier = tier_of("int8", DirectOutlet(node), policies=policies, slots=(1, 1))
    run = run_with(tier, 1)
    kept(tier, run, 5)
    tier.owner.clear(run)
    donated = tier.donate(run_with(tier, 3), PROMPT, 7)
    assert tier.find(PROMPT, 99) == (7, donated)
    assert isinstance(donated, Checkpoint)
    again = tier.resume(donated)
    assert isinstance(again, Run)
    assert (read(tier, again), tier.owner.rounded(again)) == (3, 0)
    tier.poll()
    assert {blob.codec for blob in node.saved[7]} == {"native"}
    assert tier.find(PROMPT, 99) is not None
    assert tier.find(PROMPT, 99) != (7, donated)
    assert (tier.owner.counters["adopted"], tier.counters["demoted"]) == (1, 1)


def test_a_checkpoint_that_may_not_go_stays_and_is_skipped() -> None:
    tier = tier_of("int8", policies=Policies.named("pinned"), slots=(1, 1))
    run = run_with(tier, 1)
    kept(tier, run, 5)
    donated = tier.donate(run, PROMPT, 7)
    assert isinstance(donated, Checkpoint)
    assert tier.resume(donated) == Skipped("no_checkpoint_slot")
    assert tier.counters["skipped_no_checkpoint_slot"] == 1
    assert tier.find(PROMPT, 99) == (7, donated)


def test_a_run_takes_over_and_the_pool_has_the_checkpoint() -> None:
    tier = tier_of("int8", policies=Policies.named("pinned"), slots=(1, 1))
    donated = tier.donate(run_with(tier, 3), PROMPT, 7)
    assert isinstance(donated, Checkpoint)
    again = tier.resume(donated)
    assert isinstance(again, Run)
    assert (read(tier, again), tier.owner.rounded(again)) == (
        3,
        0,
    )  # Never quantised: no copy back.
    assert tier.find(PROMPT, 99) == (7, donated)
    standing = tier.owner.standing(donated)
    assert isinstance(standing, Standing)
    assert not standing.active


def test_a_late_copy_reads_what_was_there_before_the_run_took_over() -> None:
    lane, node = LaterLane(), SavingNode()
    policies = Policies(Pinned(), LeastRecent())
    tier = tier_of("native", DirectOutlet(node), lane, policies=policies, slots=(1, 1))
    run = run_with(tier, 1)
    kept(tier, run, 5)
    donated = tier.donate(run, PROMPT, 7)
    assert isinstance(donated, Checkpoint)
    again = tier.resume(donated)
    assert isinstance(again, Run)
    write(tier, again, 9)
    tier.owner.clear(again)
    assert isinstance(tier.start(), Skipped)  # The copy still has the slot.
    lane.go_on()
    tier.poll()
    assert set(np.frombuffer(node.saved[7][0].data, np.float32)) == {1.0}
    assert isinstance(tier.start(), Run)


def test_a_slot_that_a_copy_reads_is_not_taken_over() -> None:
    tier = tier_of("int8", policies=Policies(Pinned(), LeastRecent()), slots=(1, 1))
    donated = tier.donate(run_with(tier, 3), PROMPT, 7)
    assert isinstance(donated, Checkpoint)
    hold = tier.owner.hold(donated)
    assert isinstance(hold, Hold)
    assert tier.resume(donated) == Skipped("slot_in_use")
    assert tier.find(PROMPT, 99) == (7, donated)
    hold.release()
    assert isinstance(tier.resume(donated), Run)


def test_without_host_memory_the_copy_is_lost_and_the_run_goes_on() -> None:
    policies = Policies(Pinned(), LeastRecent())
    tier = tier_of("int8", policies=policies, slots=(1, 1), host_bytes_max=10)
    run = run_with(tier, 1)
    kept(tier, run, 5)
    donated = tier.donate(run, PROMPT, 7)
    assert isinstance(donated, Checkpoint)
    assert isinstance(tier.resume(donated), Run)
    assert tier.counters["lost_no_staging_memory"] == 1
    tier.owner.check()


# --- restoring past a full pool


@pytest.mark.parametrize("codec", CODECS)
def test_a_full_pool_keeps_no_state_from_a_free_slot(codec: str) -> None:
    node = SavingNode()
    giver = tier_of(codec, DirectOutlet(node))
    kept(giver, run_with(giver, 3), 7)
    giver.demote(PROMPT, 7)
    giver.poll()
    tier = tier_of(codec, policies=Policies.named("pinned"), slots=(3, 1))
    kept(tier, run_with(tier, 1), 8)
    found = tier.restore(PROMPT, 7, node.saved[7])
    assert isinstance(found, Restored)
    assert read(tier, found.run) == 3
    assert tier.owner.rounded(found.run) == (codec != "native")
    assert tier.find(PROMPT, 7) is None
    assert tier.counters["past_pool"] == 1
    assert (tier.landing_nbytes > 0) == (codec != "native")
    short = [replace(node.saved[7][0], data=node.saved[7][0].data[1:]), node.saved[7][1]]
    with pytest.raises(LayoutError, match="bytes for units"):
        tier.restore(PROMPT, 7, short)
    assert len(tier.owner.active.table) == 2
    again = tier.restore(PROMPT, 7, node.saved[7])  # The landing is free again.
    assert isinstance(again, Restored)
    assert read(tier, again.run) == 3


def test_a_landing_takes_one_state_at_a_time() -> None:
    lane, node = LaterLane(), SavingNode()
    giver = tier_of("int8", DirectOutlet(node))
    kept(giver, run_with(giver, 3), 7)
    giver.demote(PROMPT, 7)
    giver.poll()
    policies = Policies.named("pinned")
    tier = tier_of("int8", lane=lane, policies=policies, slots=(3, 1))
    kept(tier, run_with(tier, 1), 8)
    first = tier.restore(PROMPT, 7, node.saved[7])
    assert isinstance(first, Restored)
    assert read(tier, first.run) == 3
    assert tier.restore(PROMPT, 7, node.saved[7]) == Skipped("no_landing")
    assert len(tier.owner.active.table) == 2
    lane.go_on()
    tier.poll()
    assert isinstance(tier.restore(PROMPT, 7, node.saved[7]), Restored)


def test_what_is_here_already_is_not_restored_again() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node))
    run = run_with(tier, 3)
    kept(tier, run, 7)
    tier.demote(PROMPT, 7)
    tier.poll()
    here = kept(tier, run, 7)
    found = tier.restore(PROMPT, 7, node.saved[7])
    assert isinstance(found, Restored)
    assert found.fence.done()
    assert read(tier, found.run) == 3
    assert tier.find(PROMPT, 99) == (7, here)
    run_with(tier, 1)
    assert tier.restore(PROMPT, 7, node.saved[7]) == Skipped("no_active_slot")


def test_the_dearest_stays_when_the_policy_counts_costs() -> None:
    """At 40, 47 and 8 tokens: the second is 7 tokens from the first, and cheapest to do again."""
    for name, gone in (("least_recent", 40), ("cost_aware", 47)):
        node = SavingNode()
        tier = tier_of("int8", DirectOutlet(node), policies=Policies.named(name), slots=(3, 2))
        run = run_with(tier, 3)
        for tokens in (40, 47):
            kept(tier, run, tokens)
        other = Prompt("r", Chain([99] * 20, 16))
        assert isinstance(tier.keep(run, other, 8), Checkpoint)
        assert list(node.saved) == [gone]
