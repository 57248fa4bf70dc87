"""One history of several nodes: worlds, and a network between them that may do anything but lie.

What a node sends may be late, overtaken, lost or sent twice; pairs of nodes may not reach one another for
a while; nodes die and come back under another boot token; what a node believes of who is there, and of
what the others could resume, may be old. The engines of each world judge what they are given: bytes of
another prompt, namespace or boundary would be wrong outputs.
"""

import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import inf

import msgspec

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.catalog import Status
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import Clustering
from tiercache.testing.sim.errands import Errands, Member, Net
from tiercache.testing.sim.pool import SimPool, calm, draw_moods
from tiercache.testing.sim.swarm import draw
from tiercache.testing.sim.texts import Texts
from tiercache.testing.sim.world import PEERS, Given, HistoryError, World

DRAIN_STEPS_MAX = 10_000

MAD_SHARE = 0.3
FLAKY_MOST = 0.3
FLUSHES_SHARE = 0.003
"""Of all steps."""


@dataclass(frozen=True, slots=True)
class FleetHistory:
    """What a passed history of several nodes came to."""

    seed: int
    nodes: int
    resumed: int
    restarts: int
    counts: Counter[str]


class Fleet:
    """Everything of one seed. `pooled`: they have a pool in common, and perhaps nothing else."""

    def __init__(self, seed: int, steps: int, *, pooled: bool = False) -> None:
        self.seed = seed
        self.steps = steps
        self.rng = rng = random.Random(seed)
        swarm = draw(rng, steps)
        clustering = _draw_clustering(rng)
        if pooled:
            swarm = calm(rng, swarm)
            clustering = _draw_pooled(rng, clustering)
        limits = msgspec.structs.replace(swarm.limits, clustering=clustering)
        self.swarm = replace(
            swarm,
            limits=limits,
            clear=0.0,  # It clears one node only.
        )
        texts = Texts(self.swarm.layout, rng)
        self.members: dict[str, Member] = {}
        self.clearing: dict[tuple[str, str, int], tuple[bytes, int, tuple[int, int]]] = {}
        self.told: list[ccm.Summarised] = []
        self.letters: list[tuple[Member, str, cev.PeerTold]] = []  # Told, and not heard yet.
        self.counts: Counter[str] = Counter()
        self.flushes: dict[bytes, tuple[int, int]] = {}  # Number, and the step at which it began.
        self.now = 0
        self.net = Net(
            rng,
            flaky=rng.random() * FLAKY_MOST if rng.random() < 0.5 else 0.0,
            mad=0.5 if rng.random() < MAD_SHARE else 0.0,
        )
        self.pool = SimPool(rng, draw_moods(rng), self.counts) if pooled else None
        self.errands = Errands(self.members, self.net, self.counts, self._call)
        self._calls = 0
        for number in range(rng.choice((2, 2, 3, 4))):
            name = f"n{number}"
            given = Given(rng, self.swarm, texts, partial(self._abroad, name))
            world = World(seed, steps, given=given)
            world.node.clock = self._wall
            self.members[name] = Member(name, world, PEERS - number)
        for member in self.members.values():
            self.meet(member)

    # --- who is there, and what they tell

    def meet(self, member: Member) -> None:
        """A node learns who is there: all that it reaches, as they are now."""
        others = {
            other.name: other.boot
            for other in self.members.values()
            if other is not member and self.net.reach(member, other)
        }
        member.world.node.hear(cev.MembersSeen(others))
        member.world.node.hear(cev.StandingHeld(inf))

    def gossip(self, member: Member) -> None:
        """A node asks the others what they could resume."""
        for other in self.members.values():
            if other is member or not self.net.reach(member, other):
                continue
            version = member.world.node.machine.cluster.version_of(other.name)
            asked = cev.SummaryAsked(member.session, self._call(), version)
            other.world.node.hear(asked)
            told = self.told.pop()
            letter = cev.PeerTold(
                other.name, other.boot, told.version, told.whole, told.added, told.removed, version
            )
            self.letters.append((member, member.boot, letter))
            if self.rng.random() >= self.net.flaky:
                self.deliver(len(self.letters) - 1)

    def deliver(self, at: int) -> None:
        """What a node was told arrives, unless it is another start of it by now."""
        member, boot, letter = self.letters.pop(at)
        if member.boot == boot:
            member.world.node.hear(letter)

    def believe(self) -> None:
        """Once all have heard of all, they believe what is so."""
        self.net.cut.clear()
        self.net.flaky = 0.0
        while self.letters:
            self.deliver(0)
        for member in self.members.values():
            self.meet(member)
            self.gossip(member)
        limits = self.swarm.limits.clustering
        if limits.peers_max < len(self.members) - 1 or limits.peer_names_max < limits.names_max:
            return
        for member in self.members.values():
            known = member.world.node.machine.cluster.known(member.world.node.now)
            for other in self.members.values():
                if other is not member:
                    told = other.world.node.machine.gauges()["boundaries_told"][""]
                    assert known[other.name].boundaries == told, "what it believes is not so"

    # --- what nodes command and answer

    def _abroad(
        self, name: str, said: ccm.Locate | ccm.Pull | ccm.Deposit | ccm.FlushPool | cm.Reply
    ) -> None:
        member, pool = self.members[name], self.pool
        match said:
            case cm.Reply():
                self._answered(member, said)
            case ccm.FlushPool():
                assert pool is not None
                pool.flush(member, said)
            case ccm.Deposit():
                assert pool is not None
                pool.send(member, said)
            case ccm.Locate() | ccm.Pull() if said.peer == POOL:
                assert pool is not None
                pool.send(member, said)
            case _:
                self.errands.send(member, said)

    def _answered(self, member: Member, reply: cm.Reply) -> None:
        if isinstance(reply.body, ccm.Summarised):
            self.told.append(reply.body)
            return
        if isinstance(reply.body, cm.Evicted):
            self._flushed(member, reply)
            return
        self.errands.answered(member, reply)

    def _call(self) -> int:
        self._calls += 1
        return self._calls

    # --- flushes of all nodes

    def _wall(self, now: float) -> float:
        """The wall clocks of all nodes agree, so that old objects can be told from new ones."""
        return 1e9 + self.now

    def flush(self) -> None:
        """The weights of a namespace change: nothing from before may be used from now on."""
        home = self.rng.choice(self.swarm.namespaces)
        lora, salt = self.rng.choice(self.swarm.scopes)
        namespace = home.narrow(lora=lora, salt=salt).digest
        number, _ = self.flushes.get(namespace, (0, 0))
        self.flushes[namespace] = (number + 1, self.now)

    def carry_out(self, member: Member) -> None:
        """A node carries out a flush that it has not carried out yet."""
        due = [
            (namespace, number)
            for namespace, (number, _) in self.flushes.items()
            if member.flushed.get(namespace, 0) < number
        ]
        if not due:
            return
        self._carry(member, *self.rng.choice(due))

    def _carry(self, member: Member, namespace: bytes, number: int) -> None:
        call = self._call()
        self.clearing[member.name, member.boot, call] = (namespace, number, self.flushes[namespace])
        asked = ev.ClearAsked(member.session, call, namespace.hex(), number)
        member.world.node.hear(asked)

    def _flushed(self, member: Member, reply: cm.Reply) -> None:
        found = self.clearing.pop((member.name, member.boot, reply.call), None)
        if found is None or not isinstance(reply.body, cm.Evicted) or reply.body.failed:
            return
        namespace, number, _ = found
        member.flushed[namespace] = max(number, member.flushed.get(namespace, 0))
        self.counts["flushed"] += 1
        self.look_for_old(member)

    def look_for_old(self, member: Member) -> None:
        """What a node has dropped is not there, wherever it came from since."""
        if member.world.disk.stale:
            return
        for item in member.world.node.machine.items():
            number, since = self.flushes.get(item.key.namespace, (0, 0))
            carried_out = number and member.flushed.get(item.key.namespace, 0) >= number
            if carried_out and item.status is Status.SEALED:
                assert item.sealed_at >= 1e9 + since, f"from before a flush: {item.record}"

    # --- one step

    def step(self) -> None:
        """Let one thing happen somewhere."""
        rng = self.rng
        self.now += 1
        member = rng.choice(list(self.members.values()))
        chance = rng.random()
        if chance < 0.02:
            pair = frozenset(rng.choice(list(combinations(self.members, 2))))
            self.net.cut ^= {pair}
        elif chance < 0.06:
            self.meet(member)
        elif chance < 0.2:
            self.gossip(member)
        elif chance < 0.22:
            self.carry_out(member)
        elif chance < 0.25 and self.letters:
            self.deliver(rng.randrange(len(self.letters)))
        elif self.pool is None and chance < 0.25 + FLUSHES_SHARE:
            self.flush()
        elif self.pool is not None and chance < 0.35:
            self._swim(self.pool, member)
        elif chance < 0.6 and (choices := self._on_their_way()):
            rng.choice(choices)()
        else:
            restarts = member.world.restarts
            member.world.step()
            if member.world.restarts > restarts:
                self._restarted(member)

    def _swim(self, pool: SimPool, member: Member) -> None:
        """A node looks at the pool; or it goes away, or comes back; or weights change."""
        chance = self.rng.random()
        if chance < 0.02:
            pool.away = not pool.away
        elif chance < 0.03:
            self.flush()
        else:
            pool.look(member, partial(self._carry, member))

    def _on_their_way(self) -> list[Callable[[], None]]:
        return [*self.errands.steps(), *(self.pool.steps() if self.pool is not None else ())]

    def _restarted(self, member: Member) -> None:
        """Connections to a node that died are noticed by the others; its own ones end there."""
        self.counts["restarts"] += 1
        member.world.node.clock = self._wall
        member.world.node.hear(cev.FlushesKnown(dict(member.flushed)))
        self.errands.died(member)
        for other in self.members.values():
            if other is not member:
                other.world.node.hear(cev.PeerLeft(member.session))
        self.meet(member)

    # --- the end

    def drain(self) -> None:
        """All errands end, then each world comes to its own end."""
        self.believe()
        for member in self.members.values():
            member.world.node.hear(cev.MembersSeen({}))
        nodes = [member.world.node for member in self.members.values()]
        for _ in range(DRAIN_STEPS_MAX):
            outcomes = [node.deliver for node in nodes if node.outcomes]
            choices = [*self._on_their_way(), *outcomes]
            if not choices:
                break
            self.rng.choice(choices)()
        if self.pool is not None:
            self.pool.ended = True
        for member in self.members.values():
            for other in self.members.values():
                member.world.node.hear(cev.PeerLeft(other.session))
            self.look_for_old(member)
            member.world.drain()

    def run(self) -> FleetHistory:
        """Run the whole history. Raises `HistoryError`."""
        try:
            for _ in range(self.steps * len(self.members)):
                self.step()
            self.drain()
        except HistoryError:
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise HistoryError(f"seed {self.seed} of a fleet: {text}\n{self.swarm}") from error
        resumed = sum(member.world.resumed for member in self.members.values())
        for member in self.members.values():
            for name, labels in member.world.node.machine.counters.items():
                if name.startswith(("peer", "pool", "deposits")):
                    self.counts.update({f"{name} {k}".strip(): n for k, n in labels.items()})
        return FleetHistory(
            self.seed, len(self.members), resumed, self.counts["restarts"], self.counts
        )


def run_fleet(seed: int, steps: int, *, pooled: bool = False) -> FleetHistory:
    """Run the history of one seed. Raises `HistoryError`."""
    return Fleet(seed, steps, pooled=pooled).run()


def _draw_pooled(rng: random.Random, clustering: Clustering) -> Clustering:
    return msgspec.structs.replace(
        clustering,
        peers_max=rng.choice((0, clustering.peers_max)),
        pool=True,
        pool_answer_s_max=rng.choice((0.1, 5.0, 5.0)),
        resumes_max=rng.choice((2, 1000)),
        deposit_resumes_min=rng.choice((1, 1, 2)),
        deposits_max=rng.choice((1, 4)),
        deposit_share_max=rng.choice((0.2, 0.9)),
    )


def _draw_clustering(rng: random.Random) -> Clustering:
    return Clustering(
        peers_max=rng.choice((1, 8, 8)),
        peer_names_max=rng.choice((2, 1000)),
        names_max=rng.choice((2, 1000)),
        name_changes_max=rng.choice((2, 1000)),
        peer_failures_max=rng.choice((1, 3, 1000)),
        peer_sick_s=rng.choice((0.05, 0.5)),
        peer_sick_s_max=1.0,
        peer_answer_s_max=rng.choice((0.1, 5.0, 5.0)),
        peer_objects_max=rng.choice((3, 1000)),
        pull_batch_bytes_max=rng.choice((64, 100_000)),
        pulls_max=rng.choice((1, 1000)),
        lends_max=rng.choice((1, 1000)),
        lent_objects_max=rng.choice((5, 1000)),
    )
