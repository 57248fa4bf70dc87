"""Watches what no single engine can see: one answer to each call and in time, clears that are true,
nothing written at a first sight."""

from typing import TypeAlias

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.state import Namespace
from tiercache.testing.sim.node import SimNode
from tiercache.testing.sim.swarm import Swarm

Request: TypeAlias = (
    ev.Attached
    | ev.PlanAsked
    | ev.LoadAsked
    | ev.ReserveAsked
    | ev.FetchAsked
    | ev.FlushAsked
    | ev.StatsAsked
    | ev.ListAsked
    | ev.EvictAsked
    | ev.ClearAsked
    | ev.VerifyAsked
)
REQUESTS = (
    ev.Attached, ev.PlanAsked, ev.LoadAsked, ev.ReserveAsked, ev.FetchAsked, ev.FlushAsked,
    ev.StatsAsked, ev.ListAsked, ev.EvictAsked, ev.ClearAsked, ev.VerifyAsked,
)  # fmt: skip


class Watch:
    """Raises AssertionError when the node breaks a promise."""

    def __init__(self, swarm: Swarm) -> None:
        self.asked: dict[tuple[int, int], tuple[float, Request]] = {}
        self._remembers = swarm.limits.recent_requests_max >= 1000
        self._eager = swarm.limits.eager
        self._namespaces: dict[int, Namespace] = {}
        self._writers: dict[int, str] = {}
        self._sights: dict[tuple[bytes, bytes], set[tuple[str, str]]] = {}

    def hears(self, event: ev.Event, now: float) -> None:
        """The node is about to hear this."""
        if isinstance(event, REQUESTS):
            name = (event.session, event.call)
            assert name not in self.asked
            self.asked[name] = (now, event)
        match event:
            case ev.Attached(session=session, namespace=namespace, writer=writer):
                self._namespaces[session] = namespace
                self._writers[session] = writer
            case ev.PlanAsked():
                self._see(event, [*event.digests, *(tail.digest for tail in event.tails)])
            case ev.ReserveAsked():
                self._see(event, [offer.digest for offer in event.offers])
            case _:
                pass

    def _see(self, event: ev.PlanAsked | ev.ReserveAsked, digests: list[bytes]) -> None:
        home = self._namespaces[event.session]
        namespace = home.narrow(lora=event.lora, salt=event.salt).digest
        request = (self._writers[event.session], event.request)
        for digest in digests:
            self._sights.setdefault((namespace, digest), set()).add(request)

    def answers(self, reply: cm.Reply, node: SimNode) -> None:
        """The node answers a call."""
        found = self.asked.pop((reply.session, reply.call), None)
        assert found is not None, f"an answer nobody asked for: {reply}"
        at, event = found
        if node.disk.stale or not isinstance(reply.body, cm.Evicted) or reply.body.failed:
            return
        if isinstance(event, ev.ClearAsked):
            self._cleared(event, at, node)

    def _cleared(self, event: ev.ClearAsked, at: float, node: SimNode) -> None:
        """What was sealed before the clear cannot come back."""
        for record, extent in node.disk.index.values():
            old = record.sealed_at < node.wall(at) and extent.segment in node.disk.segments
            matches = record.key.namespace.hex().startswith(event.namespace)
            assert not (old and matches), f"cleared, but on the disk: {record}"

    def commands(self, command: cm.Command) -> None:
        """The node commands this."""
        if not isinstance(command, cm.Store) or self._eager or not self._remembers:
            return
        for record, _, _ in command.objects:
            sights = self._sights[record.key.namespace, record.key.digest]
            assert len(sights) > 1, f"written at its first sight by {sights}: {record}"

    def ticked(self, now: float) -> None:
        """The node has heard that time is due."""
        for _, event in self.asked.values():
            match event:
                case ev.LoadAsked(deadline=until) | ev.FetchAsked(deadline=until):
                    assert until > now, f"not answered in time: {event}"
                case ev.FlushAsked(deadline=until):
                    assert until > now, f"not answered in time: {event}"
                case _:
                    pass

    def ends(self, session: int) -> None:
        """A session ended: it waits for no answer."""
        for name in [name for name in self.asked if name[0] == session]:
            del self.asked[name]
