"""What happens when the device is full: the policy says who goes, and nothing stops the engine."""

from dataclasses import replace

import pytest
import torch

from tiercache.client import Scope
from tiercache.device import (
    Checkpoint,
    Demoted,
    DeviceTier,
    DirectOutlet,
    HostLane,
    Pinned,
    Policies,
    Prompt,
    Restored,
    Run,
    Skipped,
    Stale,
    Turn,
)
from tiercache.errors import LayoutError
from tiercache.testing.devices import (
    CHAIN,
    NAMESPACE,
    PROMPT,
    SavingNode,
    kept,
    read,
    run_with,
    tier_of,
)

torch.set_num_threads(1)


def test_the_policy_says_who_goes_when_the_pool_is_full() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node))
    run = run_with(tier, 3)
    first, second = kept(tier, run, 7), kept(tier, run, 8)
    assert kept(tier, run, 7) == first  # Used again, so the other is older.
    kept(tier, run, 9)
    assert list(node.saved) == [8]
    assert tier.owner.standing(second) == Stale("checkpoint")
    assert tier.find(PROMPT, 8) == (7, first)
    assert tier.counters["demoted"] == 1


def test_a_policy_may_let_nobody_go() -> None:
    tier = tier_of(policies=Policies(Pinned(), Pinned()), slots=(3, 1))
    run = run_with(tier, 3)
    kept(tier, run, 7)
    assert tier.keep(run, PROMPT, 8) == Skipped("no_checkpoint_slot")
    assert not tier.make_active_room()


def test_donated_states_make_room_for_runs() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node), slots=(1, 1))
    for tokens in (7, 8, 9):
        run = run_with(tier, tokens)
        assert isinstance(tier.donate(run, PROMPT, tokens), Checkpoint)
    run = run_with(tier, 1)
    assert sorted(node.saved) == [7, 8]
    found = tier.find(PROMPT, 99)
    assert found is not None
    assert found[0] == 9
    assert isinstance(tier.start(), Skipped)
    tier.owner.clear(run)
    again = tier.resume(found[1])
    assert isinstance(again, Run)
    assert read(tier, again) == 9


def test_what_the_node_declines_is_lost_and_counted() -> None:
    node = SavingNode()
    node.full = True
    outlet = DirectOutlet(node)
    tier = tier_of("int8", outlet, slots=(3, 1))
    run = run_with(tier, 3)
    kept(tier, run, 7)
    kept(tier, run, 8)
    assert outlet.outcomes == {"stored": 0, "held": 0, "full": 2}
    assert tier.find(PROMPT, 7) is None
    assert tier.drop(PROMPT, 8)
    assert not tier.drop(PROMPT, 8)
    assert tier.demote(PROMPT, 8) == Stale("checkpoint")


def test_native_objects_enter_beside_a_compressed_pool() -> None:
    node = SavingNode()
    giver = tier_of("native", DirectOutlet(node))
    kept(giver, run_with(giver, 3), 7)
    giver.demote(PROMPT, 7)
    giver.poll()
    tier = tier_of("int8")
    found = tier.restore(PROMPT, 7, node.saved[7])
    assert isinstance(found, Restored)
    assert (read(tier, found.run), tier.owner.rounded(found.run)) == (3, 0)
    assert tier.find(PROMPT, 99) is None


def test_generations_survive_the_way_down_and_up() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node))
    run = run_with(tier, 3)
    for generation in range(3):
        kept(tier, run, 7)
        tier.demote(PROMPT, 7)
        tier.poll()
        assert {blob.requantised for blob in node.saved[7]} == {generation}
        tier.owner.clear(run)
        found = tier.restore(PROMPT, 7, node.saved[7])
        assert isinstance(found, Restored)
        tier.drop(PROMPT, 7)
        run = found.run


def test_a_restore_without_room_is_a_skip() -> None:
    node = SavingNode()
    giver = tier_of("int8", DirectOutlet(node))
    kept(giver, run_with(giver, 3), 7)
    giver.demote(PROMPT, 7)
    giver.poll()
    full = tier_of("int8", slots=(1, 2))
    run_with(full, 1)
    assert isinstance(full.restore(PROMPT, 7, node.saved[7]), Skipped)
    assert full.counters["skipped_no_active_slot"] == 1
    assert len(full.owner.checkpoints.table) == 0


class Broken(DirectOutlet):
    """An outlet with a mistake in it."""

    def offer(self, demoted: Demoted) -> bool:
        raise RuntimeError("mistaken")


def test_a_mistake_in_an_outlet_keeps_no_slot() -> None:
    node = SavingNode()
    first = tier_of("int8", DirectOutlet(node))
    kept(first, run_with(first, 3), 7)
    first.demote(PROMPT, 7)
    first.poll()
    tier = tier_of("int8", Broken(node), slots=(2, 1))
    run = run_with(tier, 3)
    kept(tier, run, 8)
    with pytest.raises(RuntimeError, match="mistaken"):
        tier.restore(PROMPT, 7, node.saved[7])  # Makes room for itself.
    tier.owner.clear(run)
    tier.owner.check()
    assert (len(tier.owner.active.table), len(tier.owner.checkpoints.table)) == (0, 0)


def test_a_position_that_is_not_in_the_chain_changes_nothing() -> None:
    tier = tier_of()
    run = run_with(tier, 3)
    with pytest.raises(ValueError, match="101"):
        tier.donate(run, PROMPT, 101)
    assert read(tier, run) == 3
    assert len(tier) == 0


def test_objects_of_another_position_are_refused() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node))
    kept(tier, run_with(tier, 3), 7)
    tier.demote(PROMPT, 7)
    tier.poll()
    with pytest.raises(LayoutError, match=r"end at \[7\], not at 8"):
        tier.restore(PROMPT, 8, node.saved[7])
    assert tier.find(PROMPT, 99) is None


def test_a_checkpoint_that_its_owner_cleared_is_not_found() -> None:
    tier = tier_of()
    run = run_with(tier, 3)
    for tokens in (7, 8):
        tier.owner.clear(kept(tier, run, tokens))
    assert tier.demote(PROMPT, 7) == Stale("checkpoint")
    assert tier.find(PROMPT, 99) is None
    assert len(tier) == 0
    kept(tier, run, 8)
    assert tier.find(PROMPT, 99) is not None


def test_what_is_cleared_without_a_word_is_forgotten_in_the_end() -> None:
    tier = tier_of("int8", slots=(2, 3))
    run = run_with(tier, 3)
    for tokens in range(1, 90):
        tier.owner.clear(kept(tier, run, tokens))
        assert len(tier) <= 5
    last = kept(tier, run, 90)
    assert tier.find(PROMPT, 99) == (90, last)


# --- whose tokens


OTHERS = (
    Prompt("r", CHAIN, Scope(salt="theirs")),
    Prompt("r", CHAIN, Scope(lora="adapter")),
    Prompt("r", CHAIN, Scope(lora="theirs")),
    Prompt("r", CHAIN, Scope(lora="adapter", salt="theirs")),
)


def test_equal_tokens_of_others_never_meet() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node), slots=(8, 8))
    mine = kept(tier, run_with(tier, 3), 7)
    for prompt in OTHERS:
        assert tier.find(prompt, 99) is None
        assert tier.demote(prompt, 7) == Stale("checkpoint")
        assert not tier.drop(prompt, 7)
    theirs = []
    for number, prompt in enumerate(OTHERS):
        found = tier.keep(run_with(tier, 10 + number), prompt, 7)
        assert isinstance(found, Checkpoint)
        theirs.append(found)
    assert len({mine, *theirs}) == len(tier) == 5
    for prompt, checkpoint in zip((PROMPT, *OTHERS), (mine, *theirs), strict=True):
        assert tier.find(prompt, 99) == (7, checkpoint)
    assert tier.drop(OTHERS[0], 7)
    assert tier.find(PROMPT, 99) == (7, mine)
    assert tier.find(OTHERS[0], 99) is None


@pytest.mark.parametrize("prompt", [PROMPT, *OTHERS])
def test_what_leaves_is_saved_as_whose_it_is(prompt: Prompt) -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node))
    tier.keep(run_with(tier, 3), prompt, 7)
    tier.demote(prompt, 7)
    tier.poll()
    assert node.scopes == {7: prompt.scope}
    found = tier.restore(prompt, 7, node.saved[7])
    assert isinstance(found, Restored)
    for other in (PROMPT, *OTHERS):
        assert (tier.find(other, 99) is not None) == (other is prompt)


def test_the_namespace_must_be_of_the_pools() -> None:
    tier = tier_of()
    other = replace(NAMESPACE, layout="another")
    with pytest.raises(LayoutError, match="another layout"):
        DeviceTier(
            tier.owner, HostLane(), Policies.named("pinned"), DirectOutlet(SavingNode()),
            namespace=other, host_bytes_max=1,
        )  # fmt: skip


# --- turns


def test_a_turn_leaves_a_checkpoint_that_is_found() -> None:
    tier = tier_of("int8", slots=(2, 1))
    run = run_with(tier, 3)
    turn = tier.turn(run)
    assert isinstance(turn, Turn)
    assert tier.find(PROMPT, 99) is None
    for tensor in tier.owner.active.store.tensors:
        tensor[:, turn.write] = 4
    checkpoint = tier.turned(run, PROMPT, 7)
    assert tier.find(PROMPT, 99) == (7, checkpoint)
    assert read(tier, run) == 4
    assert isinstance(checkpoint, Checkpoint)
    again = tier.resume(checkpoint)  # The checkpoint makes room for a copy of itself.
    assert isinstance(again, Run)
    assert (read(tier, again), read(tier, run)) == (3, 4)
    assert tier.find(PROMPT, 99) == (7, checkpoint)


def test_a_turn_makes_room_or_is_skipped() -> None:
    tier = tier_of("int8", slots=(2, 1))
    tier.donate(run_with(tier, 3), PROMPT, 7)
    run = run_with(tier, 4)
    assert isinstance(tier.turn(run), Turn)  # The donated one moved to the pool.
    full = tier_of("int8", policies=Policies.named("pinned"), slots=(1, 1))
    alone = run_with(full, 5)
    assert full.turn(alone) == Skipped("no_active_slot")
    assert full.counters["skipped_no_active_slot"] == 1
    assert read(full, alone) == 5
    with pytest.raises(ValueError, match="not in a turn"):
        full.turned(alone, PROMPT, 7)
    with pytest.raises(ValueError, match="101"):
        tier.turned(run, PROMPT, 101)
    assert isinstance(tier.turned(run, PROMPT, 8), Checkpoint)
    tier.owner.clear(run)
    assert tier.turn(run) == tier.turned(run, PROMPT, 8) == Stale("run")


def test_of_two_of_one_name_the_first_stays() -> None:
    tier = tier_of("int8", slots=(3, 2))
    first = kept(tier, run_with(tier, 3), 7)
    run = run_with(tier, 3)
    assert tier.donate(run, PROMPT, 7) == first
    assert len(tier.owner.active.table) == 1
    other = run_with(tier, 3)
    tier.turn(other)
    assert tier.turned(other, PROMPT, 7) == first
    assert len(tier.owner.active.table) == 2
    assert len(tier) == 1
