"""All of one node's dealings with other nodes, behind one door."""

from collections.abc import Iterator
from itertools import chain

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf
from tiercache.core.cluster import events as ev
from tiercache.core.cluster.agreeing import Agreement
from tiercache.core.cluster.assenting import Assenting
from tiercache.core.cluster.handing import Handing
from tiercache.core.cluster.lending import Lending
from tiercache.core.cluster.peers import Known
from tiercache.core.cluster.reach import Reach, Waited
from tiercache.core.cluster.summary import Own
from tiercache.core.cluster.whereabouts import Whereabouts
from tiercache.core.commands import ISOLATED, Refused
from tiercache.core.events import PlanAsked, PushAsked, SurveyAsked
from tiercache.core.filling import Filling
from tiercache.core.planning import Planning
from tiercache.core.surveying import Surveying
from tiercache.core.writeback import WriteBack
from tiercache.state import Layout


class Cluster:
    """Takes every event that other nodes bring about. Without others there is none."""

    def __init__(
        self,
        books: Books,
        writeback: WriteBack,
        filling: Filling,
        reach: Reach,
        planning: Planning,
        surveying: Surveying,
    ) -> None:
        self._books = books
        self._pulling = reach.pulling
        self._reach = reach
        self._planning = planning
        self._surveying = surveying
        self._lending = Lending(books, writeback, filling)
        self._assenting = Assenting(
            books, writeback, self._lending, planning.advising, planning.worth, reach
        )
        self._handing = Handing(books, reach.peers, reach.pulling)
        self._whereabouts = Whereabouts(books, reach.peers)

    def take(self, event: ev.ClusterEvent, now: float) -> None:
        """Take in one event."""
        match event:
            case ev.MembersSeen():
                self._reach.members(event)
            case ev.PeerTold():
                self._reach.told(event)
            case ev.StandingHeld(until):
                self._books.standing_until = until
            case ev.FlushesKnown(flushes):
                for namespace, number in flushes.items():
                    self._books.flushed(namespace, number)
            case (
                ev.LocateEnded()
                | ev.Pulled()
                | ev.AnnounceEnded()
                | ev.AgreeEnded()
                | ev.Deposited()
            ):
                self._ended(event, now)
            case _:
                self._asked(event, now)

    def _ended(
        self,
        event: ev.LocateEnded | ev.Pulled | ev.AnnounceEnded | ev.AgreeEnded | ev.Deposited,
        now: float,
    ) -> None:
        """Something that this node wanted of another one, or of the pool, has come to its end."""
        match event:
            case ev.LocateEnded():
                if not self._handing.located(event, now):
                    self._reached(self._reach.located(event, now), now)
            case ev.Pulled(job, faults):
                self.arrived(self._pulling.ended(job, faults, now), now)
            case ev.AgreeEnded():
                self._agreed(self._reach.agreeing.ended(event, now), now)
            case ev.AnnounceEnded():
                self._handing.announced(event, now)
            case ev.Deposited():
                self._reach.deposits.ended(event, now)

    def _asked(
        self,
        event: ev.LocateAsked
        | ev.LendAsked
        | ev.LoanOver
        | ev.SummaryAsked
        | ev.WhereAsked
        | ev.PeerLeft
        | ev.Announced
        | ev.AgreeAsked,
        now: float,
    ) -> None:
        """Another node wants something of this one, or somebody wants to know what the nodes have."""
        match event:
            case ev.LocateAsked():
                self._lending.locate(event, now)
            case ev.LendAsked():
                self._lending.lend(event)
            case ev.LoanOver(session, call):
                self._lending.loan_over(session, call)
            case ev.SummaryAsked():
                self._lending.summarise(event)
            case ev.WhereAsked():
                self._whereabouts.answer(event, now)
            case ev.PeerLeft(session):
                self._lending.close(session)
                self._reach.close(session)
            case ev.Announced():
                self._handing.take(event, now)
            case ev.AgreeAsked():
                self._assenting.take(event, now)

    def _reached(self, calls: list[Waited], now: float) -> None:
        """Another node has said what it has, or is late: answer the calls that waited for it, or ask the
        next one."""
        for asked, search in calls:
            if isinstance(asked, ev.AgreeAsked):
                self._assenting.go_on(asked, search, now)
            elif self._refused(asked, now):
                continue
            elif isinstance(asked, PlanAsked):
                self._planning.reached(asked, now, search)
            else:
                self._surveying.reached(asked, now)

    def _agreed(self, agreements: list[Agreement], now: float) -> None:
        """The nodes of an engine's ranks have said what they have, or are late: answer the plans."""
        for asked, ends in agreements:
            if not self._refused(asked, now):
                self._planning.reached(asked, now, ends)

    def _refused(self, asked: PlanAsked | SurveyAsked, now: float) -> bool:
        """Refuse a call that waited, if this node may have missed a flush meanwhile."""
        if not self._books.is_isolated(now):
            return False
        self._books.counters.add("isolated")
        self._books.reply(asked.session, asked.call, Refused("refused", ISOLATED))
        return True

    def push(self, session: Session, shelf: Shelf, asked: PushAsked, now: float) -> None:
        """See `Handing.push`."""
        self._handing.push(session, shelf, asked, now)

    def arrived(self, items: list[Item], now: float) -> None:
        """These objects came to memory, or failed to."""
        self._planning.arrived(items, now)
        self._lending.arrived(items)
        self._handing.arrived(items)

    def tick(self, now: float) -> None:
        """Answer whatever waited long enough."""
        self._reached(self._reach.tick(now), now)
        self._agreed(self._reach.agreeing.tick(now), now)
        self._lending.tick(now)
        self._handing.tick(now)

    def wakeup(self) -> float | None:
        """Return when something is due next, or a time before."""
        stages = (self._reach, self._reach.agreeing, self._lending, self._handing)
        due = [at for at in (stage.wakeup() for stage in stages) if at is not None]
        return min(due, default=None)

    def close(self, session: int) -> None:
        """A client's session ended: none of its calls is answered any more."""
        self._reach.close(session)
        self._reach.agreeing.close(session)

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for everything here that uses it."""
        deposits = self._reach.deposits.in_jobs()
        asked = chain(self._reach.in_jobs(), self._reach.agreeing.in_jobs())
        return chain(self._pulling.in_jobs(), self._lending.in_jobs(), asked, deposits)

    def version_of(self, peer: str) -> int:
        """See `Reach.version`."""
        return self._reach.version(peer)

    @property
    def own(self) -> Own | None:
        """Which boundaries could be resumed here, for reading; None when nobody is told."""
        return self._books.catalog.own

    @property
    def standing_until(self) -> float:
        """Until when this node gives out what is shared; infinite for one without a cluster."""
        return self._books.standing_until

    def known(self, now: float) -> dict[str, Known]:
        """Return what is known of each other node, by name."""
        return self._reach.peers.known(now)

    def served(self) -> dict[bytes, Layout]:
        """Return the namespaces that engines of this start have attached with, and their layouts."""
        shelves = self._books.catalog.shelves.values()
        return {s.digest: s.layout for s in shelves if s.layout is not None and s.start}

    def flush_of(self, namespace: bytes) -> int:
        """See `Books.flush_of`."""
        return self._books.flush_of(namespace)

    def known_pool(self, now: float) -> Known | None:
        """Return what is known of the pool; None when there is none."""
        pool = self._reach.peers.pool
        return Known(len(pool.names), pool.breaker.health(now)) if pool is not None else None

    def gauges(self, now: float) -> dict[str, dict[str, float]]:
        """Return what is the case now, by name and label."""
        known, own = self.known(now).values(), self._books.catalog.own
        pool, deposits = self._reach.peers.pool, self._reach.deposits
        return {
            "peers": {"": float(len(self._reach))},
            "peers_sick": {"": float(sum(each.health == "sick" for each in known))},
            "boundaries_told": {"": float(len(own) if own is not None else 0)},
            "isolated_now": {"": float(self._books.is_isolated(now))},
            "peer_pulls": {"": float(len(self._pulling))},
            "handing_over": {"": float(len(self._handing))},
            "pool_boundaries": {"": float(len(pool.names) if pool is not None else 0)},
            "pool_sick": {"": float(pool is not None and pool.breaker.is_sick(now))},
            "deposits_open": {"": float(len(deposits))},
            "deposits_paused": {"": float(deposits.is_sick(now))},
        }

    def check(self) -> None:
        """Raise AssertionError if the books of this do not add up."""
        self._reach.check()
        self._reach.agreeing.check()
        self._lending.check()
