"""One history of two engines of one model, each with ranks at two nodes of its own, and of what these four
nodes ask one another.

What a node asks or answers may be lost, late, overtaken or come twice; what it has told may be out of
date; some nodes are of an older version, which knows nothing of seats. What nodes agree on is judged when
they say it, and once more by the ranks when the plan is answered.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.search import SOURCES_MAX
from tiercache.errors import Fault
from tiercache.state import Layout
from tiercache.testing.sim.pair import HOLD_S, Nodes, clustered
from tiercache.testing.sim.rig import BLOCK, Rig, evict, hybrid
from tiercache.testing.sim.seated import RANKS, sliding
from tiercache.testing.sim.twin_engines import (
    Engine,
    Promise,
    engine_of,
    must_have,
    must_need,
    split_blocks,
    strays,
)
from tiercache.testing.sim.world import HistoryError

WAIT_S = 0.05
LATE_S = 1e-6
PROMPTS = [[*range(shared), *range(100 * at, 100 * at + 21 - shared)]
           for at, shared in enumerate((21, 12, 8, 4, 12, 0, 0, 0), 1)]  # fmt: skip
ENDS = (4, 8, 12, 16, 20)
NAMES = ("a1", "a2", "b1", "b2")
ABROAD = (ccm.Locate, ccm.Agree, ccm.Pull)

Sent: TypeAlias = ccm.Locate | ccm.Agree | ccm.Pull
Outcome: TypeAlias = cev.LocateEnded | cev.AgreeEnded | cev.Pulled


@dataclass(slots=True)
class Asked:
    """A plan that waits for its answer, or a question of another node that does. `since`: by the clock of
    who must answer."""

    engine: str
    event: ev.PlanAsked
    since: float


@dataclass(slots=True)
class There:
    """A question that has come to a node, not answered yet."""

    source: str
    command: ccm.Locate | ccm.Agree
    until: float


class Twins:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        limits = clustered(
            256, 256, pulls_max=rng.choice((2, 1000, 1000)), peer_failures_max=rng.choice((3, 1000))
        )
        self.nodes = Nodes(**{name: Rig(limits) for name in NAMES})
        self.layout: Layout = rng.choice((hybrid(RANKS), sliding(), split_blocks()))
        self.older = {name for name in NAMES if rng.random() < 0.1}
        other = rng.choice(((RANKS, 2), (RANKS, 2), (RANKS, 1), (2, 1)))
        self.engines = {
            "a": engine_of(self.nodes, ("a1", "a2"), self.layout, (RANKS, 2)),
            "b": engine_of(self.nodes, ("b1", "b2"), self.layout, other),
        }
        for engine in self.engines.values():
            engine.reshard = other[0] != RANKS or rng.random() < 0.3
        self.strays = {name: strays(self.nodes, name, self.layout) for name in NAMES}
        self.plans: dict[int, Asked] = {}
        self.requests = ["r"]
        self.sent: list[tuple[str, Sent]] = []
        self.there: dict[tuple[str, int, int], There] = {}
        self.back: list[tuple[str, Outcome]] = []
        self.found: Counter[tuple[str, str]] = Counter()
        self.clears: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def rig(self, name: str) -> Rig:
        """Return a node."""
        return self.nodes.rigs[name]

    def engine_at(self, name: str) -> Engine:
        """Return the engine that has ranks at a node."""
        return self.engines[name[0]]

    # --- what happens

    def run(self, steps: int) -> Counter[str]:
        """Run the whole history; return what it came to. Raises AssertionError."""
        often = [self.save] * 6 + [self.plan] * 6 + [self.gossip] * 8
        often += [self.arrive] * 20 + [self.hear] * 20
        seldom = (self.drop, *[self.wait] * 5, *[self.release] * 4)
        for _ in range(steps):
            if self.rng.random() < (0.1 if len(set(map(self._cleared, NAMES))) > 1 else 0.002):
                self.clear()
            else:
                self.rng.choice((*often, *seldom))()
            self.look()
        if self.rng.random() < 0.7:
            self._drain()
            assert not self.plans, "a plan without its answer"
        self._end()
        return self.counts

    def _drain(self) -> None:
        while self.sent or self.there or self.back:
            for happens in (self.wait, self.arrive, self.hear):
                happens()
                self.look()

    def _cleared(self, name: str) -> int:
        return self.clears[name]

    def save(self) -> None:
        """Ranks of an engine save a boundary: all of them mostly, or those at one node; or its end only."""
        engine = self.engines[self.rng.choice("ab")]
        mine = PROMPTS[engine is self.engines["b"] :: 2]  # Mostly, each engine computes others.
        end, request = self.rng.choice(ENDS), f"s{self.rng.random()}"
        chain = engine.ranks[0].chain(self.rng.choice((*mine, *mine, *PROMPTS)))
        begins = self.rng.choice((0, 0, 0, 4, 8))
        stray = self.strays[self.rng.choice(NAMES)]
        some = (*[engine.ranks] * 6, engine.of(engine.nodes[0]), stray)
        for rank in self.rng.choice(some):
            rank.save(request, [o for o in rank.offers(chain, end) if o.end > begins])
            rank.release(request)
        for name in NAMES:
            self._work(name)

    def _work(self, name: str) -> None:
        self.look()
        done = self.rig(name).run()
        assert not any(isinstance(command, ABROAD) for command in done)

    def plan(self) -> None:
        """The head of an engine plans; its requests plan again, for other prompts too."""
        letter = self.rng.choice("ab")
        engine = self.engines[letter]
        theirs = PROMPTS[letter == "a" :: 2]
        head, prompt = engine.ranks[0], self.rng.choice((*theirs, *theirs, *PROMPTS))
        if self.rng.random() < 0.8:
            self.requests.append(f"r{len(self.requests)}")
        request, limit = self.rng.choice(self.requests[-3:]), self.rng.choice((20, 20, 13))
        event = head.planning(request, head.chain(prompt), limit=limit)
        event = msgspec.structs.replace(event, reshard=engine.reshard)
        self.plans[event.call] = Asked(letter, event, head.rig.now)
        head.rig.later(event)

    def gossip(self) -> None:
        """A node tells the others what it could resume."""
        self.nodes.gossip(self.rng.choice(NAMES))

    def arrive(self) -> None:
        """What a node wants of another one comes there, once or twice; or it is lost."""
        if not self.sent:
            return
        source, command = self.sent.pop(self.rng.randrange(len(self.sent)))
        if self.rng.random() < 0.08:
            self.back.append((source, _failed(command)))
            return
        if isinstance(command, ccm.Pull):
            self.back.append((source, self._pulled(command)))
            return
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            self._ask(source, command)

    def _ask(self, source: str, command: ccm.Locate | ccm.Agree) -> None:
        rig, session = self.rig(command.peer), -1 - NAMES.index(source)
        call = rig.number()
        fields = msgspec.structs.asdict(command)
        wait_s = 0.6 * fields.pop("wait_s")
        for own in ("job", "peer", "boot"):
            del fields[own]
        if command.peer in self.older:
            wait_s = wait_s if isinstance(command, ccm.Locate) else 0.0
            if isinstance(command, ccm.Locate):
                fields |= {"first": 0, "stop": 0, "some": False}
        kind = cev.LocateAsked if isinstance(command, ccm.Locate) else cev.AgreeAsked
        until = rig.now + wait_s
        self.there[command.peer, session, call] = There(source, command, until)
        who = {"session": session, "call": call, "peer": source}
        rig.tell(kind(**who, **fields, deadline=until, until=rig.now + HOLD_S))  # type: ignore[arg-type]

    def _pulled(self, command: ccm.Pull) -> cev.Pulled:
        if self.rng.random() < 0.1:
            return cev.Pulled(command.job, [Fault.IO] * len(command.objects))
        return cev.Pulled(command.job, self.nodes.lent(command))

    def hear(self) -> None:
        """An outcome comes back, in any order."""
        if not self.back:
            return
        name, outcome = self.back.pop(self.rng.randrange(len(self.back)))
        if isinstance(outcome, cev.Pulled) and any(outcome.faults):
            for promise in self.engine_at(name).promises.values():
                promise.broken = True
        self.rig(name).tell(outcome)

    def drop(self) -> None:
        """A node makes room."""
        name = self.rng.choice(NAMES)
        evict(self.rig(name), self.rng.choice(("host", "host", "nvme")))
        self._work(name)

    def wait(self) -> None:
        """Time passes at one node, and whatever is due happens when it is."""
        name = self.rng.choice(NAMES)
        rig = self.rig(name)
        until = rig.now + self.rng.choice((0.001, 0.01, 0.02, 0.06))
        while (due := rig.machine.wakeup()) is not None and due <= until:
            rig.wait(max(0.0, due - rig.now) + LATE_S)
            self.look()
        rig.now = max(rig.now, until)
        for asked in self.plans.values():
            if self.engines[asked.engine].ranks[0].rig is rig:
                assert rig.now <= asked.since + WAIT_S + 10 * LATE_S, "a plan beyond its time"
        for (there, _, _), question in self.there.items():
            if there == name and isinstance(question.command, ccm.Agree):
                assert rig.now <= question.until + 10 * LATE_S, "an answer beyond its time"

    def release(self) -> None:
        """A request is over."""
        letter, name = self.rng.choice("ab"), self.rng.choice(self.requests)
        waits = any((p.engine, p.event.request) == (letter, name) for p in self.plans.values())
        if not waits:
            self.engines[letter].ranks[0].release(name)

    def clear(self) -> None:
        """A node carries out a flush; the others do, sooner or later."""
        last = max(self.clears.values(), default=0)
        behind = [name for name in NAMES if self.clears[name] < last]
        name = self.rng.choice(behind or NAMES)
        rig, space = self.rig(name), self.engines["a"].ranks[0].namespace.digest.hex()
        self.clears[name] += 1
        rig.later(ev.ClearAsked(900, rig.number(), space, self.clears[name]))
        self._work(name)
        for promise in self.engine_at(name).promises.values():
            promise.broken = True
        self.counts["cleared"] += 1

    # --- what is judged

    def look(self) -> None:
        """Take out what nodes want of one another, and judge all that was answered."""
        for name, rig in self.nodes.rigs.items():
            mine: list[Sent] = [*rig.take(ccm.Locate), *rig.take(ccm.Agree), *rig.take(ccm.Pull)]
            for command in mine:
                if isinstance(command, ccm.Pull):
                    must_need(self.engine_at(name).of(name), command)
                self.sent.append((name, command))
        for (name, session, call), question in list(self.there.items()):
            body = self.rig(name).answers.pop((session, call), None)
            if body is not None:
                del self.there[name, session, call]
                self._answered(name, question, body)
        for call, asked in list(self.plans.items()):
            head = self.engines[asked.engine].ranks[0]
            found = head.rig.answers.pop((head.session, call), None)
            if found is not None:
                del self.plans[call]
                self._planned(asked, found)

    def _answered(self, name: str, question: There, body: cm.ReplyBody) -> None:
        """What nodes say of their ranks is so: it is there, or on its way."""
        command = question.command
        if isinstance(command, ccm.Locate):
            assert isinstance(body, ccm.Located)
            self.found[question.source, command.request] += bool(body.records)
            event: Outcome = cev.LocateEnded(command.job, body.boundary, body.records, None)
        else:
            assert isinstance(body, ccm.Agreed)
            assert isinstance(command, ccm.Agree)
            engine = self.engine_at(name)
            for end in body.ends:
                for rank in engine.of(name):
                    must_have(rank, command.digests, end, reshard=command.reshard)
            prompt = (command.digests[-1], command.limit)
            engine.promises[command.request] = Promise(body.ends, prompt, self.rig(name).now)
            engine.said.setdefault((command.request, *prompt), set()).update(body.ends)
            event = cev.AgreeEnded(command.job, body.ends, None)
        if self.rng.random() < 0.05:
            event = _failed(command)
        self.back.append((question.source, event))

    def _planned(self, asked: Asked, found: cm.ReplyBody) -> None:
        """All ranks have what was planned, and are told the same."""
        event, engine = asked.event, self.engines[asked.engine]
        assert isinstance(found, cm.Planned), found
        sources = self.found.pop((engine.nodes[0], event.request), 0)
        assert sources <= 2 * SOURCES_MAX  # What was sent twice was answered twice.
        self.counts["resumed" if found.boundary else found.reason] += 1
        if not found.boundary:
            return
        self.counts["joined"] += sources > 1
        self.counts["fetched"] += sources > 0
        limit = min(event.limit, BLOCK * len(event.digests))
        assert found.boundary <= limit
        for rank in engine.of(engine.nodes[0]):
            must_have(rank, event.digests, found.boundary, reshard=event.reshard)
        there, promise = engine.nodes[1], engine.promises[event.request]
        prompt = (event.digests[-1], limit)
        said = engine.said.get((event.request, *prompt), set())
        assert found.boundary in said, "the other node did not say so"
        if promise.name != prompt or promise.broken or found.boundary not in promise.ends:
            return  # It has said something else since, or what it said is not so any more.
        if self.clears[there] != self.clears[engine.nodes[0]]:
            return
        if self.rng.random() < 0.3:
            evict(self.rig(there))  # It needs room: not that of what it promised.
        if self.rig(there).now < promise.at + HOLD_S:
            for rank in engine.of(there):
                must_have(rank, event.digests, found.boundary, reshard=event.reshard)
            self.counts["there"] += 1
        for rank in engine.ranks:
            own = rank.planning("own", rank.chain([]), limit=found.boundary)
            own = msgspec.structs.replace(
                own, request=event.request, digests=event.digests, tokens=event.tokens,
                reshard=event.reshard, all_ranks=False,
            )  # fmt: skip
            if rank is not engine.ranks[0]:
                answer = rank.rig.later(own)
                assert isinstance(answer, cm.Planned), answer
                assert answer.boundary == found.boundary, f"rank {rank.rank} is told otherwise"
                rank.release(event.request)

    def _end(self) -> None:
        """Nothing is held for anybody once all are gone."""
        for name, rig in self.nodes.rigs.items():
            self._work(name)
            for session in range(len(NAMES)):
                rig.tell(cev.PeerLeft(-1 - session))
        engines = [*[engine.ranks for engine in self.engines.values()], *self.strays.values()]
        for rank in itertools.chain(*engines):
            rank.close()
        self.plans.clear()
        self.there.clear()
        self._drain()
        for name, rig in self.nodes.rigs.items():
            for session in range(len(NAMES)):
                rig.tell(cev.PeerLeft(-1 - session))
            self._work(name)
            assert not rig.gauge("leases"), "a lease that nobody released"
            evict(rig)
            self._work(name)
            assert not rig.gauge("objects", "host"), f"something is still held at {name}"


def _failed(command: Sent) -> Outcome:
    match command:
        case ccm.Locate(job=job):
            return cev.LocateEnded(job, 0, [], Fault.IO)
        case ccm.Agree(job=job):
            return cev.AgreeEnded(job, [], Fault.IO)
        case ccm.Pull(job=job, objects=objects):
            return cev.Pulled(job, [Fault.IO] * len(objects))


def run_twins(seed: int, steps: int) -> Counter[str]:
    """Run the history of one seed. Raises `HistoryError`."""
    try:
        return Twins(seed).run(steps)
    except Exception as error:
        raise HistoryError(f"seed {seed} of twins: {type(error).__name__}: {error}") from error
