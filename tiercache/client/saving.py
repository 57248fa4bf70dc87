"""Saving, as a flow: see `flows`."""

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Final

from tiercache.client.checks import Form, Job
from tiercache.client.flows import Attach, Copying, Flow
from tiercache.client.session import Call, Session
from tiercache.client.values import Blob, Saved, Scope
from tiercache.errors import UnavailableError
from tiercache.state import Chain
from tiercache.wire import messages as wire

COMMIT_BYTES: Final = 4 << 20
"""Copied bytes after which tickets are committed, so that large blobs are sealed one by one."""


def saving(
    form: Form, request: str, chain: Chain, blobs: Sequence[Blob], scope: Scope, parent: bytes
) -> Flow[Saved]:
    """Reserve room, copy, commit; what was reserved and not committed is cancelled on every path."""
    form.check_request(request, chain)
    jobs = form.jobs(chain, blobs, parent)
    outcomes: Counter[str] = Counter()
    evicted = 0
    if scope.do_not_store:  # Not even the names of its objects leave this process.
        outcomes["do_not_store"] = len(jobs)
    elif jobs:
        try:
            session = yield Attach.ATTACH
            assert isinstance(session, Session)
            for at in range(0, len(jobs), session.offers_max):
                batch = jobs[at : at + session.offers_max]
                evicted += yield from _save_batch(session, request, scope, batch, outcomes)
        except UnavailableError as fault:
            why = str(fault).partition(":")[0]
            outcomes[why] += len(jobs) - outcomes.total()
    stored, held = outcomes.pop("stored", 0), outcomes.pop("held", 0)
    return Saved(stored, held, dict(outcomes), evicted)


def _save_batch(
    session: Session, request: str, scope: Scope, jobs: Sequence[Job], outcomes: Counter[str]
) -> Flow[int]:
    offers = [job.offer for job in jobs]
    call = Call(wire.Reserve(session.number(), request, scope.lora, scope.salt, offers, scope.care))
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
            elif arena.holds(grant.segment, grant.offset, job.offer.nbytes):
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
    return sum(grant.own for grant in reply.grants)


def _chunks(
    granted: Sequence[tuple[Job, wire.Grant]],
) -> Generator[Sequence[tuple[Job, wire.Grant]], None, None]:
    chunk: list[tuple[Job, wire.Grant]] = []
    nbytes = 0
    for job, grant in granted:
        chunk.append((job, grant))
        nbytes += job.offer.nbytes
        if nbytes >= COMMIT_BYTES:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk
