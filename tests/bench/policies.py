"""What choosing costs: eviction with many blocks held, for turns that are short and long.

The order of a node under `auto`, without the node: what requests pass, what is stored, and what goes
for it. Conversations take turns at random, and memory is full. The time is the processor's.
"""

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from time import process_time_ns

from tests.bench.figures import Figure, at_most, number
from tiercache.core.cost import Work
from tiercache.core.policy.pointwise import Place, Pointwise
from tiercache.core.policy.standing import Standing
from tiercache.core.policy.visits import Shape, Tree, Visit

TURN_BLOCKS = (8, 256)
HELD = (10_000, 1_000_000)
TURNS = 16
"""So many turns has a conversation."""

GOAL_US = 20.0
MEASURED_BLOCKS = 16_384
BLOCK_BYTES = 1 << 20
TREE = Tree("bench", Shape(256, BLOCK_BYTES, 64 * BLOCK_BYTES, Work(1.0, 1e-5)))


@dataclass(eq=False, slots=True)
class Held:
    """One object."""

    place: Place


class Traffic:
    """Conversations in turns of `turn` blocks, whose order holds `held` objects."""

    def __init__(self, turn: int, held: int) -> None:
        budget = held * (turn + 64) / (turn + 1) * BLOCK_BYTES
        self._standing = Standing("auto", budget, 65_536)
        self._order: Pointwise[Held] = Pointwise(self._standing, _place, _not_in_use)
        self._held: dict[Place, Held] = {}
        self._most = held
        self._turn = turn
        self._numbers = count()
        self._chance = random.Random(held)
        talks = max(8, 3 * held // (turn * TURNS))
        self._talks: list[list[bytes]] = [[] for _ in range(talks)]
        self._now = 0.0

    def fill(self) -> None:
        """Take turns until memory is full and has been renewed in part."""
        while len(self._held) < self._most:
            self.turn()
        for _ in range(self._most // (4 * self._turn)):
            self.turn()

    def turn(self) -> int:
        """Take one turn of some conversation; return how many blocks were stored."""
        number = self._chance.randrange(len(self._talks))
        path = self._talks[number]
        if len(path) >= TURNS * self._turn:
            path = self._talks[number] = []
        before = len(path)
        path.extend(next(self._numbers).to_bytes(16) for _ in range(self._turn))
        known = before and Place(TREE.name, path[before - 1], boundary=True) in self._held
        self._now += 0.05
        visit = Visit(TREE, tuple(path), len(path), (len(path),), self._now)
        self._order.settle()
        self._standing.visit(visit)
        self._order.visit(visit, before if known else 0)
        new = path[before:] if known else path  # With a checkpoint all KV before it is held.
        stored = sum(self._store(Place(TREE.name, block, boundary=False)) for block in new)
        self._store(Place(TREE.name, path[-1], boundary=True))
        return stored

    def _store(self, place: Place) -> bool:
        if place in self._held:
            return False
        while len(self._held) >= self._most:
            victim = next(self._order.victims())
            self._order.remove(victim)
            del self._held[victim.place]
        item = self._held[place] = Held(place)
        self._order.add(item)
        return True


def measure(reps: int) -> Iterator[Figure]:
    """Yield what a stored block costs, for each length of turns and number of objects."""
    for turn in TURN_BLOCKS:
        for held in HELD:
            traffic = Traffic(turn, held)
            traffic.fill()
            gc.collect()
            gc.freeze()  # As the sidecar does.
            values = tuple(_us_a_block(traffic) for _ in range(reps))
            del traffic
            gc.unfreeze()
            gc.collect()
            name = f"choosing, {turn} blocks a turn, {number(held)} objects held"
            yield Figure("policies", name, "us a block", values, at_most(GOAL_US))


def _us_a_block(traffic: Traffic) -> float:
    stored = 0
    before = process_time_ns()
    while stored < MEASURED_BLOCKS:
        stored += traffic.turn()
    return (process_time_ns() - before) / 1e3 / stored


def _place(item: Held) -> Place:
    return item.place


def _not_in_use(tree: object, digest: object) -> bool:
    return False
