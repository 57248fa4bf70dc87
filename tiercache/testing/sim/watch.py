"""Watches what no single engine can see: one answer to each call and in time, clears that are true,
nothing written at a first sight."""

from typing import TypeAlias

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.cluster.events import LocateAsked, WhereAsked
from tiercache.state import Namespace
from tiercache.testing.sim.guard import Guard
from tiercache.testing.sim.node import SimNode
from tiercache.testing.sim.swarm import Swarm

Request: TypeAlias = (
    ev.Attached
    | ev.PlanAsked
    | ev.SurveyAsked
    | ev.LoadAsked
    | ev.ReserveAsked
    | ev.FetchAsked
    | ev.FlushAsked
    | ev.StatsAsked
    | ev.ListAsked
    | ev.EvictAsked
    | ev.ClearAsked
    | ev.VerifyAsked
    | ev.PushAsked
    | guard_events.Asked
    | WhereAsked
)
REQUESTS = (
    ev.Attached, ev.PlanAsked, ev.SurveyAsked, ev.LoadAsked, ev.ReserveAsked, ev.FetchAsked,
    ev.FlushAsked,
    ev.StatsAsked, ev.ListAsked, ev.EvictAsked, ev.ClearAsked, ev.VerifyAsked, ev.PushAsked,
    guard_events.PinAsked, guard_events.KeysPinAsked, guard_events.UnpinAsked,
    guard_events.PinsAsked, guard_events.SharesAsked, WhereAsked,
)  # fmt: skip


class Watch:
    """Raises AssertionError when the node breaks a promise."""

    def __init__(self, swarm: Swarm) -> None:
        self.asked: dict[tuple[int, int], tuple[float, Request]] = {}
        self._since: dict[tuple[int, int], float] = {}
        others = swarm.limits.clustering
        self._waits_s = max(others.peer_answer_s_max, others.pool * others.pool_answer_s_max)
        self._remembers = swarm.limits.recent_requests_max >= 1000
        self.guard = Guard(self._remembers, swarm.layout)
        self._eager = swarm.limits.eager
        self._strict = swarm.limits.retaining.mode == "strict" and self._remembers
        self._layout = swarm.layout
        self._namespaces: dict[int, Namespace] = {}
        self._writers: dict[int, str] = {}
        self._sights: dict[tuple[bytes, bytes], set[tuple[str, str]]] = {}

    def hears(self, event: ev.Event, now: float, wall: float) -> None:
        """The node is about to hear this; its clocks show that."""
        if isinstance(event, REQUESTS):
            name = (event.session, event.call)
            assert name not in self.asked
            self.asked[name] = (wall, event)
            self._since[name] = now
        match event:
            case ev.Attached(session=session, namespace=namespace, writer=writer):
                self._namespaces[session] = namespace
                self._writers[session] = writer
            case ev.PlanAsked():
                tails = (*event.tails, *event.ends)
                self._see(event, [*event.digests, *(tail.digest for tail in tails)])
                self.guard.planned(event, self._namespace(event), self._writers[event.session])
            case ev.SurveyAsked():
                self._see(event, event.digests)
            case ev.ReserveAsked():
                self._see(event, [offer.digest for offer in event.offers])
            case _:
                pass

    def located(self, asked: LocateAsked) -> None:
        """Another node asks on behalf of a request: that is a sight too."""
        for digest in asked.digests:
            sights = self._sights.setdefault((asked.namespace, digest), set())
            sights.add((asked.peer, asked.request))

    def _see(
        self, event: ev.PlanAsked | ev.SurveyAsked | ev.ReserveAsked, digests: list[bytes]
    ) -> None:
        namespace = self._namespace(event).digest
        request = (self._writers[event.session], event.request)
        for digest in digests:
            self._sights.setdefault((namespace, digest), set()).add(request)

    def _namespace(self, event: ev.PlanAsked | ev.SurveyAsked | ev.ReserveAsked) -> Namespace:
        return self._namespaces[event.session].narrow(lora=event.lora, salt=event.salt)

    def answers(self, reply: cm.Reply, node: SimNode) -> None:
        """The node answers a call."""
        found = self.asked.pop((reply.session, reply.call), None)
        self._since.pop((reply.session, reply.call), None)
        assert found is not None, f"an answer nobody asked for: {reply}"
        at, event = found
        match event:
            case ev.ReserveAsked():
                writer = self._writers[event.session]
                self.guard.reserved(event, reply.body, self._namespace(event), writer)
                if self._strict and isinstance(reply.body, cm.Reserved):
                    self._second_sight(event, reply.body)
            case guard_events.SharesAsked() | guard_events.PinsAsked():
                self.guard.answered(event, reply.body)
            case _:
                pass
        if node.disk.stale or not isinstance(reply.body, cm.Evicted) or reply.body.failed:
            return
        if isinstance(event, ev.ClearAsked):
            self._cleared(event, at, node)

    def _second_sight(self, asked: ev.ReserveAsked, answer: cm.Reserved) -> None:
        """No state at a block's end is stored before a second request reached it. Inside a block lies what
        is nearest to a fork: others passed it, and did not say so."""
        namespace = self._namespace(asked).digest
        for offer, grant in zip(asked.offers, answer.grants, strict=True):
            state = self._layout.parts[offer.part].is_snapshot and not offer.base
            if grant.extent is not None and state:
                sights = self._sights[namespace, offer.digest]
                assert len(sights) > 1, f"stored at its first sight by {sights}: {offer}"

    def _cleared(self, event: ev.ClearAsked, at: float, node: SimNode) -> None:
        """What was sealed before the clear cannot come back."""
        for record, extent in node.disk.index.values():
            old = record.sealed_at < at and extent.segment in node.disk.segments
            matches = record.key.namespace.hex().startswith(event.namespace)
            assert not (old and matches), f"cleared, but on the disk: {record}"

    def commands(self, command: cm.Command) -> None:
        """The node commands this."""
        if isinstance(command, cm.Store):
            self.guard.stored(command)
        if not isinstance(command, cm.Store) or self._eager or not self._remembers:
            return
        for record, _, _ in command.objects:
            sights = self._sights[record.key.namespace, record.key.digest]
            assert len(sights) > 1, f"written at its first sight by {sights}: {record}"

    def ticked(self, now: float) -> None:
        """The node has heard that time is due."""
        for name, (_, event) in self.asked.items():
            match event:
                case ev.PlanAsked() | ev.SurveyAsked():
                    since = self._since[name]
                    assert now < since + self._waits_s, f"waits too long: {event}"
                case ev.LoadAsked(deadline=until) | ev.FetchAsked(deadline=until):
                    assert until > now, f"not answered in time: {event}"
                case ev.FlushAsked(deadline=until):
                    assert until > now, f"not answered in time: {event}"
                case _:
                    pass

    def ends(self, session: int) -> None:
        """A session ended: it waits for no answer."""
        for name in [name for name in self.asked if name[0] == session]:
            del self.asked[name], self._since[name]
