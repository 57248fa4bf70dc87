"""Several snapshots in one block, found by whose tokens they are after."""

import random

import pytest
import torch

from tiercache.client import Scope
from tiercache.device import (
    CODECS,
    PLACEMENTS,
    CheckpointPool,
    DirectOutlet,
    HostLane,
    MarkedTier,
    Outlet,
    Prompt,
    Restored,
    Run,
    Skipped,
    Stale,
    StateBlocks,
    placement_named,
)
from tiercache.device.lanes import Lane
from tiercache.errors import LayoutError
from tiercache.state import Chain, Namespace
from tiercache.testing.devices import LaterLane, SavingNode, tier_of
from tiercache.testing.histories import LAYOUT, owner_of, poison, read, slot_of, started, write

torch.set_num_threads(1)

MARKS = (4, 8, 12, 16)
NAMESPACE = Namespace.of(LAYOUT, model="m", weights="w", tokenizer="t")
PROMPT = Prompt("r", Chain(range(64), 4))


def tier_with(
    codec: str = "int8",
    *,
    blocks: int = 2,
    placement: str = "least_recent",
    outlet: Outlet | None = None,
    lane: Lane | None = None,
    host_bytes_max: int = 1 << 20,
) -> tuple[MarkedTier, StateBlocks]:
    owner = owner_of(codec)
    pool = CheckpointPool(
        owner.active.seat, CODECS[codec], blocks, per_block=len(MARKS), freed=poison
    )
    shelf = StateBlocks(owner, pool, MARKS)
    tier = MarkedTier(
        shelf,
        lane or HostLane(),
        placement_named(placement),
        outlet or DirectOutlet(SavingNode()),
        namespace=NAMESPACE,
        host_bytes_max=host_bytes_max,
    )
    return tier, shelf


def kept(tier: MarkedTier, shelf: StateBlocks, run: Run, prompt: Prompt, *ends: int) -> None:
    for end in ends:
        write(shelf.owner, slot_of(shelf.owner, run), end)
        assert tier.keep(run, prompt, end) is None


@pytest.mark.parametrize("codec", CODECS)
def test_marks_of_one_prompt_share_a_block(codec: str) -> None:
    tier, shelf = tier_with(codec)
    run = started(shelf.owner)
    kept(tier, shelf, run, PROMPT, 4, 8, 12, 16, 20)
    assert (len(tier), len(shelf.pool.table)) == (5, 2)
    assert [tier.find(PROMPT, limit) for limit in (3, 4, 7, 12, 19, 64)] == [0, 4, 4, 12, 16, 20]
    for end in (4, 8, 12, 16, 20):
        again = tier.resume(PROMPT, end)
        assert isinstance(again, Run)
        assert read(shelf.owner, slot_of(shelf.owner, again)) == {end}
        assert shelf.owner.rounded(again) == (codec != "native")
        shelf.owner.clear(again)
    assert tier.resume(PROMPT, 5) == Skipped("not_here")
    for tokens in (0, 5, 17):
        assert tier.keep(run, PROMPT, tokens) == Skipped("no_mark")
    assert tier.counters == {"skipped_not_here": 1, "skipped_no_mark": 3}


def test_prompts_that_fork_inside_a_block_do_not_share_its_places() -> None:
    tier, shelf = tier_with(blocks=3)
    fork = Prompt("r", Chain([*range(8), *[7] * 56], 4))
    foreign = Prompt("r", PROMPT.chain, Scope(salt="x"))
    run = started(shelf.owner)
    kept(tier, shelf, run, PROMPT, 4, 8, 12)
    write(shelf.owner, slot_of(shelf.owner, run), 50)
    assert tier.keep(run, fork, 12) is None  # Its place in the block is another's.
    assert tier.keep(run, fork, 16) is None
    assert (tier.find(fork, 64), tier.find(PROMPT, 64), tier.find(foreign, 64)) == (16, 12, 0)
    assert len(shelf.pool.table) == 2
    assert tier.keep(run, foreign, 8) is None
    assert len(shelf.pool.table) == 3
    for prompt, end, value in ((PROMPT, 12, 12), (fork, 12, 50), (fork, 8, 8), (foreign, 8, 50)):
        again = tier.resume(prompt, end)
        assert isinstance(again, Run)
        assert read(shelf.owner, slot_of(shelf.owner, again)) == {value}
        shelf.owner.clear(again)


def test_a_block_goes_as_a_whole_and_comes_back_one_by_one() -> None:
    node = SavingNode()
    tier, shelf = tier_with(outlet=DirectOutlet(node), blocks=1)
    run = started(shelf.owner)
    kept(tier, shelf, run, PROMPT, 4, 12, 20)
    assert sorted(node.saved) == [4, 12]
    assert tier.find(PROMPT, 19) == 0
    assert tier.find(PROMPT, 20) == 20
    assert tier.counters["demoted"] == 2
    assert {blob.codec for blob in node.saved[12]} == {"int8", "native"}
    assert tier.make_room()
    assert not tier.make_room()
    assert len(shelf.pool.table) == 0
    assert tier._staging.host_bytes_left == 1 << 20


def test_a_block_is_free_when_all_of_its_copies_are_done() -> None:
    lane, node = LaterLane(), SavingNode()
    tier, shelf = tier_with(outlet=DirectOutlet(node), blocks=1, lane=lane)
    run = started(shelf.owner)
    kept(tier, shelf, run, PROMPT, 4, 8)
    assert tier.keep(run, PROMPT, 20) == Skipped("no_checkpoint_slot")
    lane.go_on()
    tier.poll()
    assert tier.keep(run, PROMPT, 20) == Skipped("no_checkpoint_slot")
    lane.go_on()
    tier.poll()
    assert tier.keep(run, PROMPT, 20) is None
    assert sorted(node.saved) == [4, 8]


def test_what_cannot_be_kept_leaves_no_block_behind() -> None:
    tier, shelf = tier_with(blocks=1, placement="pinned")
    worn = shelf.owner.enter(rounded=99)
    assert isinstance(worn, Run)
    assert tier.keep(worn, PROMPT, 4) == Skipped("requantised_max")
    assert len(shelf.pool.table) == 0
    run = started(shelf.owner)
    kept(tier, shelf, run, PROMPT, 4)
    assert tier.keep(worn, PROMPT, 8) == Skipped("requantised_max")
    assert tier.find(PROMPT, 64) == 4
    assert tier.keep(run, PROMPT, 20) == Skipped("no_checkpoint_slot")
    shelf.owner.clear(run)
    assert tier.keep(run, PROMPT, 8) == Stale("run")
    assert tier.keep(run, PROMPT, 4) is None  # It is here.
    for _ in range(3):
        started(shelf.owner)
    assert tier.resume(PROMPT, 4) == Skipped("no_active_slot")
    poor, shelf = tier_with(blocks=1, host_bytes_max=1)
    run = started(shelf.owner)
    kept(poor, shelf, run, PROMPT, 4, 20)
    assert poor.counters["lost_no_staging_memory"] == 1
    with pytest.raises(LayoutError, match="another layout"):
        MarkedTier(
            shelf, HostLane(), placement_named("pinned"), DirectOutlet(SavingNode()),
            namespace=Namespace("m", "w", "t", "other", "c"), host_bytes_max=1,
        )  # fmt: skip


def test_what_it_gave_the_node_is_restored_by_any_tier() -> None:
    """Objects say nothing of blocks."""
    node = SavingNode()
    giver, taker = tier_of("int8"), tier_of("int8")
    seat = giver.owner.active.seat
    pool = CheckpointPool(seat, CODECS["int8"], 1, per_block=len(MARKS))
    shelf = StateBlocks(giver.owner, pool, MARKS)
    namespace = Namespace.of(seat.layout, model="device", weights="w", tokenizer="t")
    outlet = DirectOutlet(node)
    tier = MarkedTier(
        shelf, HostLane(), placement_named("cost_aware"), outlet,
        namespace=namespace, host_bytes_max=1 << 20,
    )  # fmt: skip
    run = giver.start()
    assert isinstance(run, Run)
    prompt = Prompt("r", Chain(range(64), 16))
    kept(tier, shelf, run, prompt, 4, 8)
    tier.make_room()
    for end in (4, 8):
        found = taker.restore(prompt, end, node.saved[end])
        assert isinstance(found, Restored)
        assert read(taker.owner, slot_of(taker.owner, found.run)) == {end}
        taker.owner.clear(found.run)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_history_resumes_the_right_state(placement: str) -> None:
    prompts = [
        Prompt("r", Chain([*range(cut), *[cut] * (32 - cut)], 4), Scope(lora=lora))
        for cut in (32, 16, 8, 5)
        for lora in ("", "l")
    ]
    for seed in range(200):
        source, lane = random.Random(seed), LaterLane()
        tier, shelf = tier_with(
            source.choice(sorted(CODECS)), blocks=3, placement=placement, lane=lane
        )
        run = started(shelf.owner)
        for _ in range(40):
            prompt, tokens = source.choice(prompts), source.choice((4, 8, 12, 16, 20, 28))
            name = NAMESPACE.narrow(lora=prompt.scope.lora).digest + prompt.chain.digest_at(tokens)
            value = 1 + (name[0] + name[40]) % 100
            action = source.random()
            if action < 0.55:
                write(shelf.owner, slot_of(shelf.owner, run), value)
                tier.keep(run, prompt, tokens)
            elif action < 0.85:
                deepest = tier.find(prompt, tokens)
                again = tier.resume(prompt, tokens)
                assert isinstance(again, Run) == (deepest == tokens)
                if isinstance(again, Run):
                    assert read(shelf.owner, slot_of(shelf.owner, again)) == {value}
                    shelf.owner.clear(again)
            elif action < 0.9:
                tier.make_room()
            elif lane.queue:
                lane.go_on()
            tier.poll()
            shelf.owner.check()
        while lane.queue or tier.make_room() or lane.queue:
            lane.go_on() if lane.queue else None
            tier.poll()
        if placement != "pinned":
            assert (len(tier), len(shelf.pool.table)) == (0, 0)
