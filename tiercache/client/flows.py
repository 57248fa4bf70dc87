"""What each call says to the node, without I/O: generators that a blocking or an async client drives.

A flow yields steps and is sent their answers: `ATTACH` gives the session, a `Call` its reply (of the
right type), a `Copying` nothing, once done. When a step cannot be done, the driver throws
UnavailableError, whose text becomes the reason. Closing a flow at any yield undoes what it had begun,
so a driver closes it on every path. Arguments are checked before the first step.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, TypeVar

import msgspec

from tiercache.client.arena import Arena
from tiercache.client.checks import Form, Job
from tiercache.client.plan import Holding, Leased, Plan, Survey
from tiercache.client.session import Call, Session
from tiercache.client.values import Cleared, Flushed, Scope, Wanted
from tiercache.errors import UnavailableError
from tiercache.state import Chain
from tiercache.state.canonical import DIGEST_BYTES
from tiercache.wire import messages as wire
from tiercache.wire import surveying


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
        return sum(job.offer.nbytes for job, _ in self.jobs)

    def run(self) -> None:
        """Copy, and fill in the checksums. Raises UnavailableError when the attachment is over."""
        with self.session.writing():
            for job, grant in self.jobs:
                checksum = self.arena.write(grant.segment, grant.offset, *job.pieces)
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
        digest=_digest(chain, reply.boundary),
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
    return Plan(request, 0, _digest(chain, 0), False, 0, (), reason, chain, scope)


def _digest(chain: Chain, boundary: int) -> bytes:
    """Return the digest at a boundary; b"" at the start of a chain that was given, not made of tokens."""
    return chain.digest_at(boundary) if boundary or chain.digests else b""


def _plan(
    session: Session,
    request: str,
    chain: Chain,
    limit: int,
    scope: Scope,
    tails: Sequence[wire.Tail] = (),
) -> Flow[wire.Planned]:
    reply = yield from ask(
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
            ends=_ends(chain, scope.capture),
            care=scope.care,
            source=scope.source,
            seats=list(scope.seats),
        ),
    )
    assert isinstance(reply, wire.Planned)
    return reply


def _ends(chain: Chain, capture: wire.Capture) -> list[wire.Tail]:
    """Return the prompt's ends, as far as they can be captured and lie inside blocks: none of a chain
    whose tokens are not known."""
    if not chain.digests:
        return []
    block, grain = chain.block_tokens, max(1, capture.grain)
    ends = {tokens // grain * grain for tokens in (len(chain) - 1, len(chain))}
    return [
        wire.Tail(end, chain.digest_at(end), chain.digests[end // block])
        for end in sorted(ends)
        if end > 0 and end % block
    ]


def _verified(chain: Chain, planned: wire.Planned, limit: int) -> list[wire.Tail]:
    """Return the candidates that this chain really reaches, deeper than what was planned: none of a
    chain whose tokens are not known."""
    if not chain.digests:
        return []
    block = chain.block_tokens
    return [
        tail
        for tail in planned.candidates
        if planned.boundary < tail.tokens <= limit
        and tail.base == chain.digests[tail.tokens // block]
        and tail.digest == chain.digest_at(tail.tokens)
    ]


def ask(session: Session, message: wire.Request) -> Flow[wire.Reply]:
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
        reply = yield from ask(
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
        digest=_digest(plan.chain, reply.boundary),
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
            reply = yield from ask(
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


def looking(
    form: Form, request: str, path: bytes, scope: Scope, hold_s: float, before: bytes
) -> Flow[Survey]:
    """Ask what is held along a path."""
    form.check_request(request)
    if not path or len(path) % DIGEST_BYTES or len(before) % DIGEST_BYTES:
        raise ValueError(f"a path is digests of {DIGEST_BYTES} bytes, not {len(path)} bytes")
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        lease = session.hold(request)
        try:
            reply = yield from ask(
                session,
                surveying.Survey(
                    session.number(),
                    request,
                    scope.lora,
                    scope.salt,
                    path,
                    list(scope.codecs),
                    max(0, int(hold_s * 1000)),
                    before,
                ),
            )
            assert isinstance(reply, surveying.Surveyed)
            lengths = {len(flags) for flags in reply.held}
            parts = len(form.layout.parts)
            if (
                len(reply.held) != parts
                or len(lengths) != 1
                or max(lengths) * DIGEST_BYTES > len(path)
            ):
                raise session.fail("the survey does not fit the layout")
            leased = Leased(session, None, lease, form.layout)  # It reads nothing.
        except BaseException:
            lease.release()
            raise
    except UnavailableError as fault:
        return Survey(request, (), str(fault), -1)
    return Survey(request, tuple(reply.held), "", reply.start, leased)


def clearing(form: Form) -> Flow[Cleared]:
    """Drop the whole namespace."""
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        name = form.namespace.digest.hex()
        reply = yield from ask(session, wire.Clear(session.number(), name))
        assert isinstance(reply, wire.Report)
        try:
            told = msgspec.json.decode(reply.body, type=_Evicted)
        except msgspec.DecodeError as fault:
            raise session.fail(
                f"what the node says of the clear is not understood: {fault}"
            ) from fault
    except UnavailableError as fault:
        return Cleared(0, 0, reason=str(fault))
    return Cleared(told.objects, told.busy, told.failed)


class _Evicted(msgspec.Struct, frozen=True):
    objects: int
    busy: int
    failed: str


def flushing(*, durable: bool, wait_s: float) -> Flow[Flushed]:
    """Wait until what was committed is sealed."""
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        wait_ms = max(0, int(wait_s * 1000))
        reply = yield from ask(session, wire.Flush(session.number(), durable, wait_ms))
        assert isinstance(reply, wire.Flushed)
    except UnavailableError as fault:
        return Flushed(0, 0, str(fault))
    return Flushed(reply.waiting, reply.lost)
