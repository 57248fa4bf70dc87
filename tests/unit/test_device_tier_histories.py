"""Any history of a tier with several tenants: whatever is found is the state of just those tokens.

Every state is a number that follows from whose tokens it is after, so that a foreign one, a freed one or
one of another position is seen wherever it is read. Copies are late, freed slots poisoned, pools tiny.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from tiercache.client import Blob, Saved, Scope
from tiercache.device import (
    PLACEMENTS,
    Checkpoint,
    DeviceTier,
    DirectOutlet,
    HostLane,
    Policies,
    Prompt,
    Restored,
    Run,
    Stale,
    Turn,
)
from tiercache.state import Chain, Namespace
from tiercache.testing.devices import LaterLane
from tiercache.testing.histories import LAYOUT, owner_of, read, slot_of, write

torch.set_num_threads(1)

NAMESPACE = Namespace.of(LAYOUT, model="m", weights="w", tokenizer="t")
SCOPES = (Scope(), Scope(salt="a"), Scope(lora="a"))
ENDS = (3, 4, 7, 10)
"""Where a state may be: at the edge of a block, and inside."""

TOKENS = ENDS[-1]
CHAINS = tuple(
    Chain([*range(shared), *(100 * number + n for n in range(TOKENS - shared))], 4)
    for number, shared in enumerate((TOKENS, 8, 4))
)
"""The later ones part from the first after so many tokens."""


def value_at(prompt: Prompt, tokens: int) -> int:
    """The state after those tokens of that tenant: one of 120 numbers."""
    narrowed = NAMESPACE.narrow(lora=prompt.scope.lora, salt=prompt.scope.salt)
    mixed = hashlib.sha256(narrowed.digest + prompt.chain.digest_at(tokens)).digest()
    return int.from_bytes(mixed[:8], "big") % 120 + 1


class Node:
    """Keeps what it is given under whose it is; declines now and then."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.saved: list[tuple[Prompt, int, list[Blob]]] = []

    def save(self, request: str, chain: Chain, blobs: Sequence[Blob], *, scope: Scope) -> Saved:
        if self.source.random() < 0.1:
            return Saved(0, 0, {"busy": len(blobs)})
        own = [replace(blob, data=memoryview(bytes(blob.data))) for blob in blobs]
        self.saved.append((Prompt(request, chain, scope), blobs[0].end, own))
        return Saved(len(blobs), 0, {})


@cache
def stored(codec: str) -> list[tuple[Prompt, int, list[Blob]]]:
    """What other engines have left in the node: every state, in `codec` and native."""
    node = Node(random.Random(3))
    for which in {codec, "native"}:
        outlet, policies = DirectOutlet(node), Policies.named("least_recent")
        owner = owner_of(which)
        tier = DeviceTier(
            owner, HostLane(), policies, outlet, namespace=NAMESPACE, host_bytes_max=1 << 20
        )
        run = tier.start()
        assert isinstance(run, Run)
        for prompt in (Prompt("r", chain, scope) for chain in CHAINS for scope in SCOPES):
            for end in ENDS:
                write(owner, slot_of(owner, run), value_at(prompt, end))
                tier.keep(run, prompt, end)
                tier.demote(prompt, end)
                tier.poll()
    return node.saved


@dataclass
class Going:
    """A running request: whose tokens, how many of them its state has, and whether it is in a turn."""

    prompt: Prompt
    tokens: int
    turning: bool = False


class Model:
    """A tier, and what each of its runs must read."""

    def __init__(self, codec: str, policy: str, source: random.Random) -> None:
        self.source = source
        self.lane = LaterLane()
        self.node = Node(source)
        self.node.saved += source.sample(stored(codec), 8)
        self.owner = owner_of(codec)
        self.host_bytes_max = source.choice((100, 200, 1 << 20))
        self.tier = DeviceTier(
            self.owner,
            self.lane,
            Policies.named(policy),
            DirectOutlet(self.node),
            namespace=NAMESPACE,
            host_bytes_max=self.host_bytes_max,
        )
        self.going: dict[Run, Going] = {}
        self.seen: Counter[str] = Counter()

    def asks(self) -> Prompt:
        return Prompt("r", self.source.choice(CHAINS), self.source.choice(SCOPES))

    def come(self) -> None:
        """A request: the deepest state there is for it, else from the start."""
        prompt = self.asks()
        found = self.tier.find(prompt, self.source.choice(ENDS))
        if found is None:
            run = self.tier.start()
            if isinstance(run, Run):
                self.going[run] = Going(prompt, 0)
                assert read(self.owner, slot_of(self.owner, run)) == {0}
            return
        tokens, checkpoint = found
        again = self.tier.resume(checkpoint)
        assert not isinstance(again, Stale), "what was just found is gone"
        if isinstance(again, Run):
            self.going[again] = Going(prompt, tokens)
            self.seen["hits"] += 1
            self.sees(again)
        else:
            assert self.tier.find(prompt, tokens) == found, "skipped, and gone all the same"
            self.seen["skipped"] += 1

    def restore(self) -> None:
        """A request whose state the node has."""
        prompt, tokens, blobs = self.source.choice(self.node.saved)
        found = self.tier.restore(prompt, tokens, blobs)
        assert not isinstance(found, Stale)
        if isinstance(found, Restored):
            self.going[found.run] = Going(prompt, tokens)
            self.seen["restored"] += 1
            self.sees(found.run)

    def step(self, run: Run) -> None:
        """The engine computes some tokens; in a turn, from the one slot into the other."""
        going = self.going[run]
        if going.tokens == TOKENS:
            return
        tokens = next(end for end in ENDS if end > going.tokens)
        value = value_at(going.prompt, tokens)
        if going.turning:
            turn = self.tier.turn(run)
            assert isinstance(turn, Turn)
            write(self.owner, turn.write, value)
            kept = self.tier.turned(run, going.prompt, going.tokens)
            assert isinstance(kept, Checkpoint)
            going.turning = False
        else:
            write(self.owner, slot_of(self.owner, run), value)
        going.tokens = tokens
        self.sees(run)

    def turn(self, run: Run) -> None:
        going = self.going[run]
        if going.tokens:
            found = self.tier.turn(run)
            assert not isinstance(found, Stale)
            going.turning = isinstance(found, Turn)
            self.seen["turns"] += going.turning

    def keep(self, run: Run) -> None:
        going = self.going[run]
        if going.tokens:
            kept = self.tier.keep(run, going.prompt, going.tokens)
            assert not isinstance(kept, Stale)

    def donate(self, run: Run) -> None:
        going = self.going[run]
        if going.tokens:
            del self.going[run]
            assert isinstance(self.tier.donate(run, going.prompt, going.tokens), Checkpoint)

    def abort(self, run: Run) -> None:
        del self.going[run]
        self.owner.clear(run)

    def drop(self) -> None:
        self.tier.drop(self.asks(), self.source.choice(ENDS))

    def demote(self) -> None:
        self.tier.demote(self.asks(), self.source.choice(ENDS))

    def clear_behind(self) -> None:
        """The owner ends a checkpoint without telling the tier."""
        found = self.tier.find(self.asks(), TOKENS)
        if found is not None:
            self.owner.clear(found[1])

    def go_on(self) -> None:
        if self.lane.queue:
            self.lane.go_on()

    def sees(self, run: Run) -> None:
        going = self.going[run]
        expected = value_at(going.prompt, going.tokens) if going.tokens else 0
        found = read(self.owner, slot_of(self.owner, run))
        assert found == {expected}, f"{going}: a run reads {found}, not {expected}"

    def check(self) -> None:
        self.owner.check()
        for run, going in self.going.items():
            if going.tokens:
                self.sees(run)

    def finish(self) -> None:
        while self.lane.queue:
            self.lane.go_on()
        self.tier.poll()
        assert self.tier.host_bytes_left == self.host_bytes_max
        for run in list(self.going):
            self.abort(run)
        self.owner.clear_all()
        self.tier.poll()
        self.owner.check()
        assert len(self.owner.active.table) == len(self.owner.checkpoints.table) == 0
        for chain in CHAINS:
            for scope in SCOPES:
                assert self.tier.find(Prompt("r", chain, scope), TOKENS) is None
        assert len(self.tier) == 0
        assert self.tier._arriving._landing is None or not len(self.tier._arriving._landing.table)


def play(model: Model, steps: int) -> None:
    on_run: list[Callable[[Run], None]] = [
        model.step, model.step, model.step, model.keep, model.keep, model.turn, model.turn,
        model.donate, model.donate, model.donate, model.abort,
    ]  # fmt: skip
    others = [
        model.come, model.come, model.come, model.come, model.restore, model.restore,
        model.go_on, model.go_on, model.tier.poll, model.tier.poll, model.drop, model.demote,
        model.clear_behind,
    ]  # fmt: skip
    for _ in range(steps):
        if model.going and model.source.random() < 0.6:
            model.source.choice(on_run)(model.source.choice(list(model.going)))
        else:
            model.source.choice(others)()
        model.check()
    model.finish()


@pytest.mark.parametrize("policy", PLACEMENTS)
@pytest.mark.parametrize("codec", ["native", "bf16", "int8"])
def test_no_history_meets_a_foreign_state(codec: str, policy: str) -> None:
    """Together with `test_device_histories`, twice ten thousand."""
    seen: Counter[str] = Counter()
    told: Counter[str] = Counter()
    for seed in range(1_120):
        model = Model(codec, policy, random.Random(seed))
        play(model, 40)
        seen += model.seen
        told += model.tier.counters
        told += model.owner.counters
    assert min(seen["hits"], seen["restored"], seen["turns"], seen["skipped"]) > 10
    assert min(told[what] for what in ("demoted", "lost_no_staging_memory", "turned")) > 10
    assert min(told["past_pool"], told["adopted"]) > 10
