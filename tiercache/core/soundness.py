"""Whether what a client asks for can be served as it stands. Hostile values end here."""

from itertools import chain
from typing import TypeAlias

from tiercache.core import events as ev
from tiercache.core.books import Session
from tiercache.core.limits import Limits
from tiercache.state import Layout, seats
from tiercache.state.canonical import DIGEST_BYTES

Served: TypeAlias = (
    ev.PlanAsked | ev.SurveyAsked | ev.PushAsked | ev.LoadAsked | ev.ReserveAsked | ev.FetchAsked
)


def why_not_attach(event: ev.Attached, limits: Limits) -> str:
    """Return why a client cannot be served, "" when it can."""
    layout, namespace = event.layout, event.namespace
    if namespace.layout != layout.fingerprint:
        return (
            f"the namespace names layout {namespace.layout[:12]}, but the layout sent is "
            f"{layout.fingerprint[:12]}: some dtype, shape, axis or block size differs"
        )
    if not 0 <= event.rank < event.ranks <= limits.ranks_max:
        return f"rank {event.rank} is not one of {event.ranks} (at most {limits.ranks_max})"
    if len(layout.parts) > limits.parts_max:
        return f"a layout has at most {limits.parts_max} parts"
    names = (namespace.model, namespace.weights, namespace.tokenizer, namespace.chain)
    if _too_long(limits, *names, namespace.lora, namespace.salt, event.writer):
        return f"a name has at most {limits.name_bytes_max} bytes"
    for part in layout.parts:
        if part.units % event.ranks and event.ranks % part.units:
            return f"part {part.name!r} has {part.units} units: {event.ranks} ranks cannot split it"
    return ""


def why_invalid(session: Session, event: Served, limits: Limits) -> str:
    """Return why a request cannot be served as it stands, "" when it can."""
    layout = session.layout
    if not 0 < len(event.request.encode()) <= limits.request_bytes_max:
        return f"a request id has 1..{limits.request_bytes_max} bytes"
    if (event.lora or event.salt) and _too_long(limits, event.lora, event.salt):
        return f"a name has at most {limits.name_bytes_max} bytes"
    match event:
        case ev.PlanAsked():
            problem = seats.why_not(event.seats, session.ranks, session.rank)
            return problem or _why_invalid_plan(layout, event, limits)
        case ev.SurveyAsked():
            return _why_invalid_survey(event, limits)
        case ev.PushAsked():
            return _why_invalid_push(layout, event, limits)
        case ev.ReserveAsked():
            if len(event.offers) > limits.batch_max:
                return f"more than {limits.batch_max} offers"
            return event.care.why_not()
        case ev.FetchAsked():
            if len(event.wanted) > limits.batch_max:
                return f"more than {limits.batch_max} objects"
            if any(not 0 <= w.part < len(layout.parts) for w in event.wanted):
                return "there is no such part"
        case _:
            pass
    return ""


def _too_long(limits: Limits, *names: str) -> bool:
    return any(len(name.encode()) > limits.name_bytes_max for name in names)


def _why_invalid_plan(layout: Layout, event: ev.PlanAsked, limits: Limits) -> str:
    step = layout.block_tokens
    if max(len(event.digests), len(event.tails), len(event.ends)) > limits.batch_max:
        return f"more than {limits.batch_max} digests"
    if event.tokens < 1 or len(event.digests) != event.tokens // step:
        return f"{len(event.digests)} digests do not chain {event.tokens} tokens by {step}"
    tails = [*event.tails, *event.ends]
    digests = chain(event.digests, (tail.digest for tail in tails))
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        return f"a digest has {DIGEST_BYTES} bytes"
    if problem := event.care.why_not():
        return problem
    if not 0 <= event.limit <= event.tokens:
        return f"limit {event.limit} lies outside the prompt"
    if problem := _why_invalid_codecs(event.codecs, limits):
        return problem
    if any(not 0 < tail.tokens <= event.tokens or tail.tokens % step == 0 for tail in tails):
        return "a tail lies inside a block of the prompt"
    return ""


def _why_invalid_survey(event: ev.SurveyAsked, limits: Limits) -> str:
    if not 0 < len(event.digests) <= limits.batch_max:
        return f"1..{limits.batch_max} digests must be named"
    if len(event.before) > limits.batch_max:
        return f"more than {limits.batch_max} digests"
    return _why_invalid_codecs(event.codecs, limits)


def _why_invalid_push(layout: Layout, event: ev.PushAsked, limits: Limits) -> str:
    if not 0 < len(event.digests) <= limits.batch_max:
        return f"1..{limits.batch_max} digests must be named"
    if any(len(digest) != DIGEST_BYTES for digest in event.digests):
        return f"a digest has {DIGEST_BYTES} bytes"
    if not 0 <= event.limit <= len(event.digests) * layout.block_tokens:
        return f"limit {event.limit} lies outside the prompt"
    return _why_invalid_codecs(event.codecs, limits)


def _why_invalid_codecs(codecs: tuple[str, ...], limits: Limits) -> str:
    if not 0 < len(codecs) <= limits.codecs_max or not all(map(str.isidentifier, codecs)):
        return f"1..{limits.codecs_max} codecs must be named"
    return ""
