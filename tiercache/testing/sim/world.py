"""One history: a node, its disk, engines and an operator, one small step after another.

Each step is drawn from what could happen next; the order is chance, the rules are the real ones. After
the drawn steps everything calms down and is brought to its end, and then nothing may be left.
"""

import ast
import hashlib
import random
import re
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.testing.sim.disk import Disk
from tiercache.testing.sim.engine import Engine
from tiercache.testing.sim.node import Abroad, SimNode
from tiercache.testing.sim.swarm import Swarm, draw
from tiercache.testing.sim.texts import Texts
from tiercache.testing.sim.turn import Script
from tiercache.testing.sim.watch import REQUESTS, Watch

LAST_EVENTS = 40
LINE_CHARS_MAX = 700
DRAIN_STEPS_MAX = 100_000
PEERS = -(1 << 40)
"""Sessions from here down are connections of other nodes."""


class HistoryError(AssertionError):
    """A history went wrong. The text says which seed, what, and the last events."""


@dataclass(frozen=True, slots=True)
class History:
    """What a passed history came to. `digest` covers every event and command, in order."""

    seed: int
    events: int
    requests: int
    resumed: int
    resumed_tokens: int
    restarts: int
    deaths: int
    counters: dict[str, dict[str, int]]
    digest: str


@dataclass(slots=True)
class Player:
    """An engine with its script and the answers it waits for."""

    engine: Engine
    script: Script
    answers: list[cm.ReplyBody | None]
    waiting: dict[tuple[int, int], int]
    started: bool = False

    def ready(self) -> bool:
        """Whether the script can go on."""
        return not self.waiting


@dataclass(slots=True)
class Frozen:
    """An ended session whose process lives on, stopped: it may wake and touch memory once more."""

    engine: Engine
    session: int


@dataclass(frozen=True, slots=True)
class Given:
    """What the world of a node shares with those of other nodes. `abroad` gets what the node commands
    that concerns others, and its answers to them: sessions from `PEERS` down are theirs."""

    rng: random.Random
    swarm: Swarm
    texts: Texts
    abroad: Callable[[Abroad | cm.Reply], None]


class World:
    """Everything of one seed. `full`: keep a digest of all that happens, for replays."""

    def __init__(
        self, seed: int, steps: int, *, full: bool = False, given: Given | None = None
    ) -> None:
        self.rng = given.rng if given is not None else random.Random(seed)
        self.seed = seed
        self.swarm: Swarm = given.swarm if given is not None else draw(self.rng, steps)
        limits = self.swarm.limits
        self.disk = Disk(self.rng, self.swarm.faults, limits.nvme_segment_bytes)
        self.texts = given.texts if given is not None else Texts(self.swarm.layout, self.rng)
        self._given = given
        self.players: list[Player] = []
        self.frozen: list[Frozen] = []
        self.watch = Watch(self.swarm)
        self.last: deque[tuple[float, ev.Event | cm.Command]] = deque(maxlen=LAST_EVENTS)
        self.events = self.requests = self.resumed = self.resumed_tokens = 0
        self.restarts = self.deaths = 0
        self._full = hashlib.sha256() if full else None
        self._sessions = 0
        self._engines = 0
        self._operators = 0
        self.node = self._start()

    # --- starting things

    def _start(self) -> SimNode:
        limits, rng = self.swarm.limits, self.rng
        if limits.nvme_bytes and self.restarts and rng.random() < self.swarm.shrinks:
            least = 2 * limits.nvme_segment_bytes
            limits = msgspec.structs.replace(limits, nvme_bytes=max(least, limits.nvme_bytes // 2))
            self.disk.over_cap = True  # Until the core has seen to it.
        node = SimNode(limits, self.disk, rng, reply=self._reply, trace=self._trace)
        node.ticked = self.watch.ticked
        if self._given is not None:
            node.abroad = self._given.abroad
        node.check_every = 8
        node.opening_pace = self.swarm.opening_pace
        if limits.nvme_bytes:
            node.open_disk(rng.choice((1, 4, 512)), fails=rng.random() < self.swarm.disk_fails)
        return node

    def _trace(self, now: float, what: ev.Event | cm.Command) -> None:
        self.last.append((now, what))
        self.events += 1
        if isinstance(what, cm.Command):
            self.watch.commands(what)
        elif isinstance(what, ev.Found):
            self.watch.guard.found(what)
        if self._full is not None:
            self._full.update(f"{now:.6f} {what!r}\n".encode())

    def _new_engine(self) -> None:
        self._engines += 1
        engine = Engine(self._engines, self.node, self.swarm, self.texts)
        sessions = [self._new_session() for _ in range(self.rng.choice(self.swarm.ranks))]
        self.players.append(Player(engine, engine.live(sessions), [], {}))

    def _new_session(self) -> int:
        self._sessions += 1
        return self._sessions

    # --- talking

    def _say(self, events: list[ev.Event], player: Player | None) -> None:
        if player is not None:
            player.answers = []
            for event in events:
                if isinstance(event, REQUESTS):
                    player.waiting[event.session, event.call] = len(player.answers)
                    player.answers.append(None)
        for event in events:
            self.watch.hears(event, self.node.now, self.node.wall(self.node.now))
            self.node.hear(event)

    def _reply(self, reply: cm.Reply) -> None:
        name = (reply.session, reply.call)
        if reply.session <= PEERS and self._given is not None:
            self._given.abroad(reply)
            return
        self.watch.answers(reply, self.node)
        for player in self.players:
            at = player.waiting.pop(name, None)
            if at is not None:
                player.answers[at] = reply.body

    def _advance(self, player: Player) -> None:
        answers = [answer for answer in player.answers if answer is not None]
        assert len(answers) == len(player.answers)
        try:
            said = player.script.send(answers) if player.started else next(player.script)
        except StopIteration:
            self._end(player, acknowledged=True)
            return
        player.started = True
        self._say(said, player)

    # --- ending things

    def _end(self, player: Player, *, acknowledged: bool) -> None:
        """An engine ends: it said so, it died, or it only lost its connections and is frozen."""
        self.players.remove(player)
        player.script.close()
        engine = player.engine
        self.requests += engine.requests
        self.resumed += engine.resumed_requests
        self.resumed_tokens += engine.resumed_tokens
        if engine.node is not self.node:
            return
        for session in engine.sessions:
            self.watch.ends(session)
            if not acknowledged:
                self.frozen.append(Frozen(engine, session))
            self.node.hear(ev.Closed(session, acknowledged))

    def _thaw(self) -> None:
        """A frozen process wakes, reads what it leased and writes what it reserved, then is gone."""
        frozen = self.frozen.pop(self.rng.randrange(len(self.frozen)))
        engine, session = frozen.engine, frozen.session
        holding = engine.holdings[session]
        for request in holding.leased:
            engine.look(session, request)
        for extent in holding.reserved.values():
            engine.node.view(extent)[:] = b"\xdd" * extent.size
        self.node.hear(ev.Gone(session))

    def _crash(self) -> None:
        """The node dies and is started anew; engines notice, and attach again."""
        self.restarts += 1
        self.node.die()
        for player in list(self.players):
            player.engine.node = self.node
            player.script.close()
            self.requests += player.engine.requests
            self.resumed += player.engine.resumed_requests
            self.resumed_tokens += player.engine.resumed_tokens
        self.players.clear()
        self.frozen.clear()
        self.watch.asked.clear()
        self.watch.guard.restarted()
        now = self.node.now
        self.node = self._start()
        self.node.now = now

    # --- the operator

    def _operate(self) -> None:
        self._operators += 1
        session, call = -self._operators, 1
        rng = self.rng
        prefix = rng.choice(("", rng.choice(self.swarm.namespaces).digest.hex()[:12], "nothing"))
        events: list[ev.Event] = [
            ev.StatsAsked(session, call),
            ev.ListAsked(session, call, rng.randrange(50), rng.randint(0, 20), prefix),
            ev.EvictAsked(
                session, call, prefix, rng.choice(("", "host", "nvme")), rng.choice((0, 9999))
            ),
            ev.VerifyAsked(session, call, rng.randrange(50), rng.randint(1, 20)),
            *self._guarding(session, call, prefix),
        ]
        if rng.random() < self.swarm.clear:
            events = [ev.ClearAsked(session, call, prefix)]
        self._say([rng.choice(events)], None)

    def _guarding(self, session: int, call: int, prefix: str) -> list[ev.Event]:
        rng, namespace = self.rng, self.swarm.namespaces[0]
        tenant = namespace.narrow(salt=rng.choice(self.swarm.scopes)[1]).tenant
        owner = rng.choice(("a", "b"))
        return [
            guard_events.KeysPinAsked(session, call, prefix, owner, rng.choice((0.5, 20.0))),
            guard_events.UnpinAsked(session, call, rng.randrange(9), owner),
            guard_events.PinsAsked(session, call),
            guard_events.SharesAsked(session, call, "", None, None),
            guard_events.SharesAsked(
                session, call, tenant, rng.choice((None, rng.random(), 1.0)), rng.random()
            ),
        ]

    # --- one step

    def step(self) -> None:
        """Let one thing happen."""
        rng, swarm, node = self.rng, self.swarm, self.node
        node.now += rng.random() * 0.05
        if rng.random() < swarm.node_dies:
            self._crash()
            return
        if self.players and rng.random() < swarm.engine_dies:
            self.deaths += 1
            self._end(rng.choice(self.players), acknowledged=rng.random() < 0.5)
            return
        if rng.random() < swarm.operator:
            self._operate()
            return
        if len(self.players) < swarm.engines:
            self._new_engine()
        choices = [*node.steps() * swarm.haste, *self._ready()]
        if self.frozen and rng.random() < 0.05:
            choices.append(self._thaw)
        if choices:
            rng.choice(choices)()
        else:
            due = node.machine.wakeup()
            assert due is not None, "everybody waits, and nothing will happen"
            node.now = max(node.now, due)

    def _ready(self) -> list[Callable[[], None]]:
        return [partial(self._advance, player) for player in self.players if player.ready()]

    # --- the end

    def drain(self) -> None:
        """Bring everything to its end: what was asked is answered, and nothing stays held."""
        self.disk.calm = True
        self.node.opening_pace = 1.0
        for player in [player for player in self.players if player.ready()]:
            self._end(player, acknowledged=True)
        for _ in range(DRAIN_STEPS_MAX):
            for player in [player for player in self.players if player.ready()]:
                self._end(player, acknowledged=True)
            while self.frozen:
                self._thaw()
            choices = self.node.steps()
            if choices:
                self.rng.choice(choices)()
                continue
            due = self.node.machine.wakeup()
            if due is None and not self.players:
                break
            assert due is not None, f"never answered: {list(self.watch.asked.values())}"
            self.node.now = max(self.node.now, due)
        assert not self.watch.asked, f"never answered: {list(self.watch.asked.values())}"
        self._quiet()
        self._say([ev.ClearAsked(0, 1, "")], None)
        while choices := self.node.steps():
            self.rng.choice(choices)()
        assert not self.watch.asked
        self.node.machine.check()
        gauges = self.node.machine.gauges()
        assert gauges["bytes"] == {"host": 0, "nvme": 0}, "something was not cleared"
        largest = max(self.swarm.limits.host_segments)
        assert gauges["free_largest_bytes"]["host"] == largest, "free space is in pieces"

    def _quiet(self) -> None:
        """Nobody is there any more: nothing is leased, reserved, waited for or in flight."""
        machine = self.node.machine
        machine.check()
        gauges = machine.gauges()
        names = (
            "leases", "quarantined_bytes", "sessions", "reservations", "waiting", "writeback_queue"
        )  # fmt: skip
        left = {name: gauges[name] for name in names if any(gauges[name].values())}
        assert not left, f"held by nobody: {left}"
        self.watch.guard.ended(machine)
        lookups = machine.counters["lookups"]
        assert sum(machine.counters["misses"].values()) == lookups["miss"]

    def run(self) -> History:
        """Run the whole history. Raises `HistoryError`."""
        try:
            for _ in range(self.swarm.steps):
                self.step()
            self.drain()
        except Exception as error:
            raise HistoryError(self._story(error)) from error
        return History(
            self.seed,
            self.events,
            self.requests,
            self.resumed,
            self.resumed_tokens,
            self.restarts,
            self.deaths,
            self.node.machine.counters,
            self._full.hexdigest() if self._full is not None else "",
        )

    def _story(self, error: Exception) -> str:
        lines = [f"{now:9.3f} {_brief(what)}" for now, what in self.last]
        what = "".join(traceback.format_exception(error))
        return "\n".join([f"seed {self.seed}: {what}", f"{self.swarm}", "last events:", *lines])


def _brief(what: ev.Event | cm.Command) -> str:
    """Return an event or command as text in which digests are short."""

    def head(match: re.Match[str]) -> str:
        return str(ast.literal_eval(match[0])[:3].hex()) or "-"

    text = re.sub(r"b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"", head, repr(what))
    return text if len(text) <= LINE_CHARS_MAX else f"{text[:LINE_CHARS_MAX]}..."


def run_seed(seed: int, steps: int, *, full: bool = False) -> History:
    """Run the history of one seed. Raises `HistoryError`."""
    return World(seed, steps, full=full).run()
