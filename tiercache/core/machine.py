"""The core of one node: events in, commands out. The only door to its state."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.advising import Advising
from tiercache.core.audit import audit
from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item
from tiercache.core.cluster import events as cluster
from tiercache.core.cluster.cluster import Cluster
from tiercache.core.cluster.pulling import Pulling
from tiercache.core.cluster.reach import Reach
from tiercache.core.commands import ISOLATED, Accepted, Command, Refused
from tiercache.core.counters import NAMES
from tiercache.core.filling import Filling
from tiercache.core.finding import Finding
from tiercache.core.guarding import Guarding
from tiercache.core.limits import Limits
from tiercache.core.operation import Operation
from tiercache.core.planning import Planning
from tiercache.core.saving import Saving
from tiercache.core.soundness import Served, why_invalid, why_not_attach
from tiercache.core.surveying import Surveying
from tiercache.core.writeback import WriteBack

COUNTERS = NAMES


class Machine:
    """Decides everything that one node does. `handle` is the only way to change it.

    `now` is monotonic seconds and never goes back; `wall` is wall-clock seconds for records, read by
    people only. Hostile values are answered with `Refused`; an outcome of a job that was never given
    is a bug of the caller and raises.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._books = Books(limits)
        self._writeback = WriteBack(self._books)
        self._filling = Filling(self._books)
        self._advising = Advising(self._books)
        reach = Reach(self._books, Pulling(self._books))
        self._planning = Planning(
            self._books, self._writeback, self._filling, self._advising, reach
        )
        self._surveying = Surveying(self._books, self._writeback, self._filling, reach)
        self.cluster = Cluster(
            self._books, self._writeback, self._filling, reach, self._planning, self._surveying
        )
        self._saving = Saving(self._books, self._writeback, self._advising)
        self._operation = Operation(self._books, self._writeback, self._filling, self._planning)
        self._finding = Finding(self._books, self._writeback, self._operation)
        self._guarding = Guarding(self._books, self._writeback, self._filling)
        self._now = 0.0
        self._wall = 0.0

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Monotonic counts by name and label."""
        return self._books.counters.values

    def handle(self, event: ev.Event, now: float, wall: float = 0.0) -> list[Command]:
        """Take in one event and return what is to be done, in order."""
        self._now = max(self._now, now)
        self._wall = wall
        self._guarding.begin(now)
        self._dispatch(event, now)
        self._writeback.pump(now)
        if self._writeback.lost:
            self._saving.settled(set(), now, self._writeback.take_lost())
        out, self._books.out = self._books.out, []
        return out

    def wakeup(self) -> float | None:
        """Return when a `Tick` is due; None when nothing waits for time to pass."""
        due = self._planning.wakeup()
        for stage in (
            self._surveying, self._saving, self._writeback, self._books.protection, self.cluster,
        ):  # fmt: skip
            other = stage.wakeup()
            if other is not None and (due is None or other < due):
                due = other
        return due

    def _dispatch(self, event: ev.Event, now: float) -> None:
        match event:  # The frequent ones first.
            case ev.FetchAsked() | ev.PlanAsked() | ev.ReserveAsked() | ev.LoadAsked():
                self._serve(event, now)
            case ev.SurveyAsked() | ev.PushAsked():
                self._serve(event, now)
            case ev.Released() | ev.Committed() | ev.Cancelled() | ev.FlushAsked():
                self._take(event, now)
            case ev.Attached():
                self._attach(event)
            case ev.Closed():
                self._close(event)
            case ev.Gone(session):
                self._free(self._books.abandoned.pop(session, None))
            case ev.Tick():
                self._planning.tick(now)
                self.cluster.tick(now)
                self._surveying.tick(now)
                self._saving.settled(set(), now)
            case ev.NvmeOpened() | ev.Found() | ev.ScanEnded() | ev.NvmeFailed() | ev.TierFailed():
                self._finding.take(event)
            case _ if isinstance(event, ev.Outcome):
                self._complete(event, now)
            case _ if isinstance(event, guard_events.Event):
                self._guarding.take(event)
            case (
                cluster.LocateAsked()
                | cluster.LendAsked()
                | cluster.WhereAsked()
                | cluster.LoanOver()
                | cluster.SummaryAsked()
                | cluster.PeerLeft()
                | cluster.LocateEnded()
                | cluster.Pulled()
                | cluster.PeerTold()
                | cluster.MembersSeen()
                | cluster.FlushesKnown()
                | cluster.StandingHeld()
                | cluster.Announced()
                | cluster.AnnounceEnded()
                | cluster.AgreeAsked()
                | cluster.AgreeEnded()
                | cluster.Deposited()
            ):
                self.cluster.take(event, now)
            case _:
                self._operate(event)

    # --- sessions

    def _attach(self, event: ev.Attached) -> None:
        books = self._books
        problem = self._why_not_attach(event)
        shelf = None if problem else books.open_shelf(event.namespace, event.layout)
        if shelf is None:
            text = problem or f"the node serves {self.limits.namespaces_max} namespaces already"
            books.reply(event.session, event.call, Refused("refused", text))
            return
        session = Session(event.session, shelf, event.namespace, event.layout)
        session.ranks, session.rank = event.ranks, event.rank
        session.write, session.writer = event.write, event.writer
        said, usual = event.prefill_tokens_per_s, self.limits.retaining.prefill_tokens_per_s
        session.prefill_tokens_per_s = said if said > 0 else usual
        books.sessions[event.session] = session
        books.reply(event.session, event.call, Accepted())

    def _why_not_attach(self, event: ev.Attached) -> str:
        if event.session in self._books.sessions or event.session in self._books.abandoned:
            return "this session is attached already"
        return why_not_attach(event, self.limits)

    def _close(self, event: ev.Closed) -> None:
        session = self._books.sessions.pop(event.session, None)
        if session is None:
            return
        self._guarding.close(session)
        self._planning.close(session)
        self.cluster.close(session.number)
        self._surveying.close(session)
        self._saving.close(session)
        if event.acknowledged:
            self._free(session)
        else:
            # Its process may still read or write: extents stay until it is gone for certain.
            self._books.abandoned[event.session] = session

    def _free(self, session: Session | None) -> None:
        if session is None:
            return
        for item in reversed(self._books.leases.end_session(session.number)):
            self._books.let_go(item)
        self._saving.cancel(session, list(session.reserved))

    # --- requests

    def _serve(self, event: Served, now: float) -> None:
        books = self._books
        session = books.sessions.get(event.session)
        if session is None:
            books.reply(event.session, event.call, Refused("refused", "attach first"))
            return
        problem = self._why_invalid(session, event)
        shelf = None if problem else books.shelf_of(session, event.lora, event.salt)
        if shelf is None:
            kind = "invalid" if problem else "refused"
            text = problem or "too many namespaces"
            books.reply(event.session, event.call, Refused(kind, text))
            return
        if books.is_isolated(now) and not isinstance(event, ev.ReserveAsked):
            books.counters.add("isolated")
            books.reply(event.session, event.call, Refused("refused", ISOLATED))
            return
        if session.prefill_tokens_per_s > 0:
            shelf.prefill_tokens_per_s = session.prefill_tokens_per_s
        match event:
            case ev.PlanAsked():
                self._planning.plan(session, shelf, event, now)
            case ev.SurveyAsked():
                self._surveying.survey(session, shelf, event, now)
            case ev.PushAsked():
                self.cluster.push(session, shelf, event, now)
            case ev.LoadAsked():
                self._planning.load(session, shelf, event, now)
            case ev.ReserveAsked():
                self._saving.reserve(session, shelf, event, now)
            case ev.FetchAsked():
                self._planning.fetch(session, shelf, event, now)

    def _why_invalid(self, session: Session, event: Served) -> str:
        if self._books.leases.held(session.number) > self.limits.leases_per_session_max:
            return "the session leases too much: release something"
        return why_invalid(session, event, self.limits)

    def _take(
        self, event: ev.FlushAsked | ev.Committed | ev.Cancelled | ev.Released, now: float
    ) -> None:
        session = self._books.sessions.get(event.session)
        if session is None:
            if isinstance(event, ev.FlushAsked):
                self._books.reply(event.session, event.call, Refused("refused", "attach first"))
            return
        match event:
            case ev.FlushAsked():
                self._saving.flush(session, event, now)
            case ev.Committed(tickets=tickets, checksums=checksums):
                self._saving.commit(session, tickets, checksums, self._wall)
            case ev.Cancelled(tickets=tickets):
                self._saving.cancel(session, tickets)
            case ev.Released(requests=requests):
                for request in requests:
                    self._books.release(session.number, request)
                    self._planning.release(session, request)
                    self._surveying.release(session, request)

    def _operate(self, event: ev.Event) -> None:
        if isinstance(event, ev.ClearAsked | ev.VerifyAsked) and self._operation.is_full:
            text = f"{self.limits.operations_max} operators wait already: try again"
            self._books.reply(event.session, event.call, Refused("invalid", text))
            return
        match event:
            case ev.StatsAsked():
                self._operation.stats(event, self.gauges())
            case ev.ListAsked():
                self._operation.page(event)
            case ev.EvictAsked():
                self._operation.evict(event)
            case ev.ClearAsked():
                self._operation.clear(event)
            case ev.VerifyAsked():
                self._operation.verify(event)
            case _:
                raise AssertionError(f"no answer to {type(event).__name__}")

    # --- outcomes

    def _complete(self, event: ev.Outcome, now: float) -> None:
        match event:
            case ev.Sealed(job, checksums):
                self._saving.sealed(job, checksums, now, self._wall)
            case ev.Stored(job, faults):
                items = self._writeback.stored(job, faults, now)
                self._saving.settled(set(items), now, self._writeback.take_lost())
            case ev.Filled(job, faults):
                self.cluster.arrived(self._filling.ended(job, faults), now)
            case ev.Checked(job, faults):
                self._operation.checked(job, faults)
            case ev.Wiped(job, fault):
                self._operation.wiped(job, fault)
            case cluster.PoolFlushed(job, fault):
                self._operation.pool_flushed(job, fault)

    # --- figures

    def items(self) -> Iterator[Item]:
        """Yield every object, in whatever status; for tests and debugging."""
        return iter(self._books.catalog)

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return what is the case now, by name and label."""
        books = self._books
        shelves = books.catalog.shelves.values()
        in_use = {"host": books.space.capacity - books.space.free_bytes}
        in_use["nvme"] = sum(shelf.bytes["nvme"] for shelf in shelves)
        overdue = books.leases.overdue(self._now - self.limits.lease_s_max)
        return {
            "bytes": dict(in_use.items()),
            "capacity_bytes": {"host": books.space.capacity, "nvme": books.log.capacity},
            "objects": books.catalog.objects(),
            "free_largest_bytes": {"host": books.space.largest_free()},
            "leases": {"": books.leases.count},
            "leases_overdue": {"": overdue},
            "quarantined_bytes": {"": books.quarantined_bytes()},
            "sessions": {"": len(books.sessions)},
            "reservations": {"": sum(len(s.reserved) for s in books.sessions.values())},
            "writeback_queue": {"": len(self._writeback)},
            "nvme_paused": {"": float(self._writeback.paused_until is not None)},
            "namespaces": {"": len(shelves)},
            "waiting": {"": len(self._planning)},
            "sights": {"": len(books.sights)},
            "checkpoints_open": {"": self._advising.open},
            **books.protection.gauges(),
            **books.passage.gauges(),
            **self.cluster.gauges(self._now),
        }

    def check(self) -> None:
        """Raise AssertionError if the books do not add up."""
        parts = (
            self._writeback, self._filling, self._saving, self._operation, self._surveying,
            self.cluster,
        )  # fmt: skip
        in_jobs = Counter(item for part in parts for item in part.in_jobs())
        stages = (self._writeback, self._filling, self._operation)
        reading = chain.from_iterable(stage.in_segments() for stage in stages)
        audit(self._books, in_jobs, Counter(reading))
        self._writeback.check()
        self._planning.check()
        self._advising.check()
        self._surveying.check()
        self.cluster.check()
        self._books.sights.check()
