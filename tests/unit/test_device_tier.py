"""What happens when the device is full: the policy says who goes, and nothing stops the engine."""

import pytest
import torch

from tiercache.device import (
    Checkpoint,
    Demoted,
    DirectOutlet,
    Pinned,
    Policies,
    Restored,
    Run,
    Skipped,
    Stale,
)
from tiercache.errors import LayoutError
from tiercache.testing.devices import CHAIN, SavingNode, kept, read, run_with, tier_of

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
    assert tier.find(CHAIN, 8) == (7, first)
    assert tier.counters["demoted"] == 1


def test_a_policy_may_let_nobody_go() -> None:
    tier = tier_of(policies=Policies(Pinned(), Pinned()), slots=(3, 1))
    run = run_with(tier, 3)
    kept(tier, run, 7)
    assert tier.keep(run, "r", CHAIN, 8) == Skipped("no_checkpoint_slot")
    assert not tier.make_active_room()


def test_donated_states_make_room_for_runs() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node), slots=(1, 1))
    for tokens in (7, 8, 9):
        run = run_with(tier, tokens)
        assert isinstance(tier.donate(run, "r", CHAIN, tokens), Checkpoint)
    run = run_with(tier, 1)
    assert sorted(node.saved) == [7, 8]
    found = tier.find(CHAIN, 99)
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
    assert tier.find(CHAIN, 7) is None
    assert tier.drop(CHAIN.digest_at(8))
    assert not tier.drop(CHAIN.digest_at(8))
    assert tier.demote(CHAIN.digest_at(8)) == Stale("checkpoint")


def test_native_objects_enter_beside_a_compressed_pool() -> None:
    node = SavingNode()
    giver = tier_of("native", DirectOutlet(node))
    kept(giver, run_with(giver, 3), 7)
    giver.demote(CHAIN.digest_at(7))
    giver.poll()
    tier = tier_of("int8")
    found = tier.restore("r", CHAIN, 7, node.saved[7])
    assert isinstance(found, Restored)
    assert (read(tier, found.run), tier.owner.rounded(found.run)) == (3, 0)
    assert tier.find(CHAIN, 99) is None


def test_generations_survive_the_way_down_and_up() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node))
    run = run_with(tier, 3)
    for generation in range(3):
        kept(tier, run, 7)
        tier.demote(CHAIN.digest_at(7))
        tier.poll()
        assert {blob.requantised for blob in node.saved[7]} == {generation}
        tier.owner.clear(run)
        found = tier.restore("r", CHAIN, 7, node.saved[7])
        assert isinstance(found, Restored)
        tier.drop(CHAIN.digest_at(7))
        run = found.run


def test_a_restore_without_room_is_a_skip() -> None:
    node = SavingNode()
    giver = tier_of("int8", DirectOutlet(node))
    kept(giver, run_with(giver, 3), 7)
    giver.demote(CHAIN.digest_at(7))
    giver.poll()
    full = tier_of("int8", slots=(1, 2))
    run_with(full, 1)
    assert isinstance(full.restore("r", CHAIN, 7, node.saved[7]), Skipped)
    pinned = tier_of("int8", policies=Policies(Pinned(), Pinned()), slots=(3, 1))
    run = run_with(pinned, 1)
    kept(pinned, run, 8)
    assert pinned.restore("r", CHAIN, 7, node.saved[7]) == Skipped("no_checkpoint_slot")
    assert len(pinned.owner.active.table) == 1


class Broken(DirectOutlet):
    """An outlet with a mistake in it."""

    def offer(self, demoted: Demoted) -> bool:
        raise RuntimeError("mistaken")


def test_a_mistake_in_an_outlet_keeps_no_slot() -> None:
    node = SavingNode()
    first = tier_of("int8", DirectOutlet(node))
    kept(first, run_with(first, 3), 7)
    first.demote(CHAIN.digest_at(7))
    first.poll()
    tier = tier_of("int8", Broken(node), slots=(2, 1))
    run = run_with(tier, 3)
    kept(tier, run, 8)
    with pytest.raises(RuntimeError, match="mistaken"):
        tier.restore("r", CHAIN, 7, node.saved[7])  # Makes room for itself.
    tier.owner.clear(run)
    tier.owner.check()
    assert (len(tier.owner.active.table), len(tier.owner.checkpoints.table)) == (0, 0)


def test_a_position_that_is_not_in_the_chain_changes_nothing() -> None:
    tier = tier_of()
    run = run_with(tier, 3)
    with pytest.raises(ValueError, match="101"):
        tier.donate(run, "r", CHAIN, 101)
    assert read(tier, run) == 3
    assert len(tier) == 0


def test_objects_of_another_position_are_refused() -> None:
    node = SavingNode()
    tier = tier_of("int8", DirectOutlet(node))
    kept(tier, run_with(tier, 3), 7)
    tier.demote(CHAIN.digest_at(7))
    tier.poll()
    with pytest.raises(LayoutError, match=r"end at \[7\], not at 8"):
        tier.restore("r", CHAIN, 8, node.saved[7])
    assert tier.find(CHAIN, 99) is None


def test_a_checkpoint_that_its_owner_cleared_is_not_found() -> None:
    tier = tier_of()
    run = run_with(tier, 3)
    for tokens in (7, 8):
        tier.owner.clear(kept(tier, run, tokens))
    assert tier.demote(CHAIN.digest_at(7)) == Stale("checkpoint")
    assert tier.find(CHAIN, 99) is None
    assert len(tier) == 0
    kept(tier, run, 8)
    assert tier.find(CHAIN, 99) is not None
