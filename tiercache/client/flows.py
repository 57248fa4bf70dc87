"""What each call says to the node, without I/O: generators that a blocking or an async client drives.

A flow yields steps and is sent their answers: `ATTACH` gives the session, a `Call` its reply (of the
right type), a `Copying` nothing, once done. When a step cannot be done, the driver throws
UnavailableError, whose text becomes the reason. Closing a flow at any yield undoes what it had begun,
so a driver closes it on every path. Arguments are checked before the first step.
"""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias, TypeVar

from tiercache.client.arena import Arena
from tiercache.client.checks import Form, Job
from tiercache.client.plan import Holding, Leased, Plan
from tiercache.client.session import Call, Session
from tiercache.client.values import Blob, Flushed, Saved, Scope, Wanted
from tiercache.errors import UnavailableError
from tiercache.state import Chain
from tiercache.wire import messages as wire

COMMIT_BYTES: Final = 4 << 20
"""Copied bytes after which tickets are committed, so that large blobs are sealed one by one."""


class Attach(Enum):
    """The step that asks for a session."""

    ATTACH = "attach"


@dataclass(frozen=True, slots=True)
class Copying:
    """Bytes to be copied into granted places."""

    session: Session
    arena: Arena
    jobs: Sequence[tuple[Job, wire.Grant]]
    checksums: list[bytes] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return sum(job.data.nbytes for job, _ in self.jobs)

    def run(self) -> None:
        """Copy, and fill in the checksums. Raises UnavailableError when the attachment is over."""
        with self.session.writing():
            for job, grant in self.jobs:
                checksum = self.arena.write(grant.segment, grant.offset, job.data)
                self.checksums.append(checksum)


Step: TypeAlias = Attach | Call | Copying
Answer: TypeAlias = Session | wire.Reply | None
T = TypeVar("T")
Flow: TypeAlias = Generator[Step, Answer, T]


def planning(form: Form, request: str, chain: Chain, limit: int | None, scope: Scope) -> Flow[Plan]:
    """Ask for a plan, and once more when boundaries inside blocks turn out to be this chain's."""
    form.check_request(request, chain)
    if limit is None:
        limit = max(0, len(chain) - 1)
    if not 0 <= limit <= len(chain):
        raise ValueError(f"limit {limit} is outside the chain's {len(chain)} tokens")
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        lease = session.hold(request)
        try:
            reply = yield from _plan(session, request, chain, limit, scope)
            tails = _verified(chain, reply, limit)
            if tails:
                reply = yield from _plan(session, request, chain, limit, scope, tails)
            if not 0 <= reply.boundary <= limit:
                raise session.fail(f"the node planned {reply.boundary} of {limit} tokens")
            arena = session.arena
        except BaseException:
            lease.release()
            raise
    except UnavailableError as fault:
        return no_plan(request, chain, scope, str(fault))
    return Plan(
        request=request,
        boundary=reply.boundary,
        digest=chain.digest_at(reply.boundary),
        ready=reply.ready,
        ready_boundary=min(reply.ready_boundary, reply.boundary),
        checkpoints=tuple(reply.checkpoints),
        reason=reply.reason,
        chain=chain,
        scope=scope,
        leased=Leased(session, arena, lease, form.layout, reply.pieces),
    )


def no_plan(request: str, chain: Chain, scope: Scope, reason: str) -> Plan:
    """Return the plan to compute everything, and why."""
    return Plan(request, 0, chain.digest_at(0), False, 0, (), reason, chain, scope)


def _plan(
    session: Session,
    request: str,
    chain: Chain,
    limit: int,
    scope: Scope,
    tails: Sequence[wire.Tail] = (),
) -> Flow[wire.Planned]:
    reply = yield from _asked(
        session,
        wire.Plan(
            call=session.number(),
            request=request,
            lora=scope.lora,
            salt=scope.salt,
            chain=chain.blocks(),
            tokens=len(chain),
            limit=limit,
            tails=list(tails),
            codecs=list(scope.codecs),
            capture=scope.capture,
            all_ranks=scope.all_ranks,
            reshard=scope.reshard,
        ),
    )
    assert isinstance(reply, wire.Planned)
    return reply


def _verified(chain: Chain, planned: wire.Planned, limit: int) -> list[wire.Tail]:
    """Return the candidates that this chain really reaches, deeper than what was planned."""
    block = chain.block_tokens
    return [
        tail
        for tail in planned.candidates
        if planned.boundary < tail.tokens <= limit
        and tail.base == chain.digests[tail.tokens // block]
        and tail.digest == chain.digest_at(tail.tokens)
    ]


def _asked(session: Session, message: wire.Request) -> Flow[wire.Reply]:
    """Ask, and if it does not come to an answer, see that a late one is undone."""
    call = Call(message)
    try:
        reply = yield call
    except BaseException:
        session.abandon(call)
        raise
    assert not isinstance(reply, Session)
    assert reply is not None
    return reply


def loading(form: Form, plan: Plan, wait_s: float) -> Flow[Plan]:
    """Wait for what was planned."""
    leased = plan.leased
    if leased is None or plan.ready or not plan.boundary:
        return plan
    if leased.lease.released:
        raise ValueError(f"request {plan.request!r} was released")
    try:
        session = yield Attach.ATTACH
        if session is not leased.session:
            raise UnavailableError("unavailable: the node that planned it is gone")
        assert isinstance(session, Session)
        wait_ms = max(0, int(wait_s * 1000))
        scope = plan.scope
        reply = yield from _asked(
            session,
            wire.Load(
                session.number(),
                plan.request,
                scope.lora,
                scope.salt,
                plan.boundary,
                plan.digest,
                wait_ms,
            ),
        )
        assert isinstance(reply, wire.Loaded)
        if not 0 <= reply.boundary <= plan.boundary:
            raise session.fail(f"the node loaded {reply.boundary} of {plan.boundary} tokens")
    except UnavailableError as fault:
        reply = wire.Loaded(0, 0, [], str(fault))
    return Plan(
        request=plan.request,
        boundary=reply.boundary,
        digest=plan.chain.digest_at(reply.boundary),
        ready=reply.boundary > 0,
        ready_boundary=reply.boundary,
        checkpoints=plan.checkpoints,
        reason=reply.reason,
        chain=plan.chain,
        scope=plan.scope,
        leased=Leased(leased.session, leased.arena, leased.lease, form.layout, reply.pieces),
    )


def fetching(
    form: Form, request: str, wanted: Sequence[Wanted], scope: Scope, wait_s: float
) -> Flow[Holding]:
    """Ask for objects by name."""
    form.check_request(request)
    asked = form.wanted(wanted)
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        lease = session.hold(request)
        try:
            reply = yield from _asked(
                session,
                wire.Fetch(
                    session.number(),
                    request,
                    scope.lora,
                    scope.salt,
                    asked,
                    max(0, int(wait_s * 1000)),
                ),
            )
            assert isinstance(reply, wire.Fetched)
            if len(reply.pieces) != len(asked):
                raise session.fail(f"{len(reply.pieces)} pieces for {len(asked)} objects")
            leased = Leased(session, session.arena, lease, form.layout, reply.pieces)
        except BaseException:
            lease.release()
            raise
    except UnavailableError as fault:
        return Holding(request, len(asked), str(fault))
    return Holding(request, len(asked), "", leased)


def saving(
    form: Form, request: str, chain: Chain, blobs: Sequence[Blob], scope: Scope, parent: bytes
) -> Flow[Saved]:
    """Reserve room, copy, commit; what was reserved and not committed is cancelled on every path."""
    form.check_request(request, chain)
    jobs = form.jobs(chain, blobs, parent)
    outcomes: Counter[str] = Counter()
    if jobs:
        try:
            session = yield Attach.ATTACH
            assert isinstance(session, Session)
            for at in range(0, len(jobs), session.offers_max):
                batch = jobs[at : at + session.offers_max]
                yield from _save_batch(session, request, scope, batch, outcomes)
        except UnavailableError as fault:
            why = str(fault).partition(":")[0]
            outcomes[why] += len(jobs) - outcomes.total()
    stored, held = outcomes.pop("stored", 0), outcomes.pop("held", 0)
    return Saved(stored, held, dict(outcomes))


def _save_batch(
    session: Session, request: str, scope: Scope, jobs: Sequence[Job], outcomes: Counter[str]
) -> Flow[None]:
    call = Call(
        wire.Reserve(session.number(), request, scope.lora, scope.salt, [job.offer for job in jobs])
    )
    open_tickets: set[int] | None = None
    try:
        reply = yield call
        assert isinstance(reply, wire.Reserved)
        if len(reply.grants) != len(jobs):
            raise session.fail(f"{len(reply.grants)} grants for {len(jobs)} offers")
        arena = session.arena
        granted = []
        for job, grant in zip(jobs, reply.grants, strict=True):
            if grant.outcome != "granted":
                outcomes[grant.outcome] += 1
            elif arena.holds(grant.segment, grant.offset, job.data.nbytes):
                granted.append((job, grant))
            else:
                raise session.fail("the node granted a place that cannot be")
        open_tickets = {grant.ticket for _, grant in granted}
        for chunk in _chunks(granted):
            copying = Copying(session, arena, chunk)
            yield copying
            if session.ended:
                raise UnavailableError(f"unavailable: {session.ended}")
            tickets = [grant.ticket for _, grant in chunk]
            session.notify(wire.Commit(tickets, copying.checksums))
            open_tickets.difference_update(tickets)
            outcomes["stored"] += len(tickets)
    except BaseException:
        if open_tickets is None:
            session.abandon(call)
        elif open_tickets:
            session.notify(wire.Cancel(sorted(open_tickets)))
        raise


def _chunks(
    granted: Sequence[tuple[Job, wire.Grant]],
) -> Generator[Sequence[tuple[Job, wire.Grant]], None, None]:
    chunk: list[tuple[Job, wire.Grant]] = []
    nbytes = 0
    for job, grant in granted:
        chunk.append((job, grant))
        nbytes += job.data.nbytes
        if nbytes >= COMMIT_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def flushing(*, durable: bool, wait_s: float) -> Flow[Flushed]:
    """Wait until what was committed is sealed."""
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        wait_ms = max(0, int(wait_s * 1000))
        reply = yield from _asked(session, wire.Flush(session.number(), durable, wait_ms))
        assert isinstance(reply, wire.Flushed)
    except UnavailableError as fault:
        return Flushed(0, 0, str(fault))
    return Flushed(reply.waiting, reply.lost)
