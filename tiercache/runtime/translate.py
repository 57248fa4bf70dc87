"""From what a client says to what the core hears, and back. No decision is made here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import msgspec

from tiercache.core import commands, events, guard_events
from tiercache.core.cluster import events as cluster_events
from tiercache.core.cluster.commands import Place, Places
from tiercache.state import Label, Shard
from tiercache.state.canonical import DIGEST_BYTES
from tiercache.wire import guarding, sharing, surveying
from tiercache.wire import messages as wire

_DIGEST = Struct(f"{DIGEST_BYTES}s")
INSPECT_ROWS_MAX = 64
WAIT_MS_MAX = 600_000
"""No request waits longer than this, whatever it asks for."""

Spoken = (
    wire.Attach
    | wire.Plan
    | surveying.Survey
    | wire.Load
    | wire.Reserve
    | wire.Fetch
    | wire.Flush
    | wire.Stats
    | wire.List
    | wire.Inspect
    | wire.Evict
    | wire.Clear
    | wire.Verify
    | guarding.Request
    | sharing.Request
    | wire.Commit
    | wire.Cancel
    | wire.Release
)
"""What becomes an event: everything but `Hello` and `Detach`, which are about the connection."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who speaks: the session's number and what its client calls itself."""

    session: int
    writer: str


def to_event(message: Spoken, caller: Caller, now: float) -> events.Event:
    """Return the event that `message` means. Raises ValueError for what cannot be expressed."""
    session = caller.session
    match message:
        case wire.Plan():
            return _plan_asked(message, session)
        case wire.Fetch(call, request, lora, salt, wanted, wait_ms):
            names = [
                events.Wanted(w.part, shard(w.shard_start, w.shard_stop), w.codec, w.digest)
                for w in wanted
            ]
            until = _deadline(now, wait_ms)
            return events.FetchAsked(session, call, request, lora, salt, names, until)
        case surveying.Survey(call, request, lora, salt, chain, codecs, hold_ms, before):
            until = _deadline(now, hold_ms)
            return events.SurveyAsked(
                session,
                call,
                request,
                lora,
                salt,
                _digests(chain),
                tuple(codecs),
                until,
                _digests(before),
            )
        case wire.Load(call, request, lora, salt, boundary, digest, wait_ms):
            until = _deadline(now, wait_ms)
            return events.LoadAsked(session, call, request, lora, salt, boundary, digest, until)
        case wire.Reserve(call, request, lora, salt, offers, care):
            wanted_room = [_offer(offer) for offer in offers]
            return events.ReserveAsked(session, call, request, lora, salt, wanted_room, care)
        case wire.Commit(tickets, checksums):
            if checksums and len(checksums) != len(tickets):
                raise ValueError(f"{len(checksums)} checksums for {len(tickets)} tickets")
            return events.Committed(session, tickets, checksums)
        case wire.Cancel(tickets):
            return events.Cancelled(session, tickets)
        case wire.Release(requests):
            return events.Released(session, requests)
        case wire.Flush(call, durable, wait_ms):
            return events.FlushAsked(session, call, durable, _deadline(now, wait_ms))
        case wire.Attach(call, namespace, layout, ranks, rank, write, prefill):
            return events.Attached(
                session, call, namespace, layout, ranks, rank, write, caller.writer, prefill
            )
        case _:
            return _question(message, session, now)


def _question(
    message: wire.Stats
    | wire.List
    | wire.Inspect
    | wire.Evict
    | wire.Clear
    | wire.Verify
    | guarding.Request
    | sharing.Request,
    session: int,
    now: float,
) -> events.Event:
    """The operator's questions, pins, and what goes to other nodes."""
    match message:
        case wire.Stats(call):
            return events.StatsAsked(session, call)
        case wire.List(call, cursor, count, prefix):
            return events.ListAsked(session, call, cursor, count, prefix)
        case wire.Inspect(call, key):
            return events.ListAsked(session, call, 0, INSPECT_ROWS_MAX, key)
        case wire.Evict(call, prefix, tier, nbytes):
            return events.EvictAsked(session, call, prefix, tier, nbytes)
        case wire.Clear(call, namespace):
            return events.ClearAsked(session, call, namespace)
        case wire.Verify(call, cursor, count):
            return events.VerifyAsked(session, call, cursor, count)
        case sharing.Push():
            return _push_asked(message, session, now)
        case sharing.Where():
            return _where_asked(message, session)
        case _:
            return _guarding(message, session)


def _push_asked(message: sharing.Push, session: int, now: float) -> events.PushAsked:
    return events.PushAsked(
        session,
        message.call,
        message.request,
        message.lora,
        message.salt,
        _digests(message.chain),
        message.limit,
        tuple(message.codecs),
        message.reshard,
        message.to,
        _deadline(now, message.wait_ms),
    )


def _where_asked(message: sharing.Where, session: int) -> cluster_events.WhereAsked:
    return cluster_events.WhereAsked(
        session,
        message.call,
        message.namespace,
        message.lora,
        message.salt,
        _digests(message.chain),
        message.block_tokens,
        message.limit,
        tuple(message.codecs),
        message.reshard,
    )


def _guarding(message: guarding.Request, session: int) -> events.Event:
    """Pins and shares."""
    match message:
        case guarding.Pin(call, lora, salt, chain, tokens, tail, age_ms):
            digests = _digests(chain)
            age_s = age_ms / 1000
            return guard_events.PinAsked(session, call, lora, salt, digests, tokens, tail, age_s)
        case guarding.Unpin(call, number, owner):
            return guard_events.UnpinAsked(session, call, number, owner)
        case guarding.PinKeys(call, prefix, owner, age_ms):
            return guard_events.KeysPinAsked(session, call, prefix, owner, age_ms / 1000)
        case guarding.Pins(call):
            return guard_events.PinsAsked(session, call)
        case guarding.Shares(call, tenant, host, nvme):
            return guard_events.SharesAsked(session, call, tenant, host, nvme)


def _plan_asked(message: wire.Plan, session: int) -> events.PlanAsked:
    capture = message.capture
    return events.PlanAsked(
        session,
        message.call,
        message.request,
        message.lora,
        message.salt,
        _digests(message.chain),
        message.tokens,
        message.limit,
        [events.Tail(tail.tokens, tail.digest, tail.base) for tail in message.tails],
        tuple(message.codecs),
        events.Capture(capture.chunk_tokens, capture.grain),
        message.all_ranks,
        message.reshard,
        [events.Tail(tail.tokens, tail.digest, tail.base) for tail in message.ends],
        message.care,
        message.source,
        message.seats,
    )


def _digests(chain: bytes) -> list[bytes]:
    if len(chain) % DIGEST_BYTES:
        raise ValueError(f"a chain is digests of {DIGEST_BYTES} bytes, not {len(chain)} bytes")
    return [digest for (digest,) in _DIGEST.iter_unpack(chain)]


def _offer(offer: wire.Offer) -> events.Offer:
    return events.Offer(
        offer.part,
        shard(offer.shard_start, offer.shard_stop),
        offer.codec,
        offer.digest,
        offer.base,
        offer.start,
        offer.end,
        offer.nbytes,
        offer.parent,
        offer.requantised,
    )


@lru_cache(maxsize=1024)
def shard(start: int, stop: int) -> Shard:
    """Return the shard; few are in use, and a look-up is cheaper than making one."""
    return Shard(start, stop)


def _deadline(now: float, wait_ms: int) -> float:
    return now + min(max(wait_ms, 0), WAIT_MS_MAX) / 1000


class NodeFacts(msgspec.Struct, frozen=True):
    """What a node says of itself. `nvme` is "off", "opening", "scanning", "ready" or "failed: why"."""

    version: str
    protocol: int
    boot: str
    pid: int
    socket: str
    uptime_s: float
    connections: int
    arena_bytes: int
    arena_prefaulted_bytes: int
    nvme: str


class Telling(NamedTuple):
    """What the runtime adds to the answer to `Stats`: its own counters and gauges beside the core's."""

    node: NodeFacts
    counters: dict[str, dict[str, int]]
    gauges: dict[str, dict[str, float]]


class _StatsDocument(msgspec.Struct, frozen=True):
    node: NodeFacts
    counters: dict[str, dict[str, int]]
    gauges: dict[str, dict[str, float]]
    namespaces: list[tuple[Label, dict[str, int]]]


def to_reply(call: int, body: commands.ReplyBody, telling: Callable[[], Telling]) -> wire.Reply:
    """Return the message that answers `call`. `telling()` is part of the answer to `Stats`.

    `Accepted` has no message here: its reply carries descriptors, which the session owns.
    """
    match body:
        case commands.Planned():
            return _planned(call, body)
        case commands.Fetched(pieces):
            return wire.Fetched(call, pieces)
        case commands.Surveyed(held, start):
            return surveying.Surveyed(call, held, start)
        case commands.Pushed() | Places():
            return _shared(call, body)
        case commands.Loaded(boundary, pieces, reason):
            return wire.Loaded(call, boundary, pieces, reason)
        case commands.Reserved(grants):
            return wire.Reserved(call, [_grant(grant) for grant in grants])
        case commands.Pinned(outcome, number, objects, nbytes, age_s):
            return guarding.Pinned(call, outcome, number, objects, nbytes, int(age_s * 1000))
        case commands.Flushed(waiting, lost):
            return wire.Flushed(call, waiting, lost)
        case commands.Refused(kind, text):
            return wire.Failed(call, kind, text)
        case commands.Accepted():
            raise AssertionError("the session answers an accepted attach")
        case commands.Stats(counters, gauges, namespaces):
            own = telling()
            stats = _StatsDocument(
                own.node, {**counters, **own.counters}, {**gauges, **own.gauges}, namespaces
            )
            return wire.Report(call, msgspec.json.encode(stats))
        case _:
            return wire.Report(call, msgspec.json.encode(body))


def _planned(call: int, body: commands.Planned) -> wire.Planned:
    return wire.Planned(
        call,
        body.boundary,
        body.ready,
        body.ready_boundary,
        body.pieces,
        body.checkpoints,
        [wire.Tail(tail.tokens, tail.digest, tail.base) for tail in body.candidates],
        body.reason,
    )


def _shared(call: int, body: commands.Pushed | Places) -> sharing.Reply:
    if isinstance(body, commands.Pushed):
        return sharing.Pushed(call, body.boundary, body.reason)
    return sharing.Places(call, [_place(p) for p in body.places], body.reason, body.block_tokens)


def _place(place: Place) -> sharing.Place:
    return sharing.Place(
        place.node,
        place.boundary,
        place.tier,
        place.nbytes,
        place.absent_bytes,
        place.seconds,
        place.compute_s,
        place.health,
    )


def _grant(grant: commands.Granted) -> wire.Grant:
    extent = grant.extent
    if extent is None:
        return wire.Grant(grant.outcome)
    return wire.Grant(grant.outcome, grant.ticket, extent.segment, extent.offset, grant.own)
