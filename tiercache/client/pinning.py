"""Pinning, as a flow: see `flows`."""

from tiercache.client.checks import Form
from tiercache.client.flows import Attach, Flow, ask
from tiercache.client.session import Session
from tiercache.client.values import Pinned, Scope
from tiercache.errors import UnavailableError
from tiercache.state import Chain
from tiercache.state.canonical import DIGEST_BYTES
from tiercache.wire import guarding


def pinning(
    form: Form, chain: Chain, boundary: int | None, scope: Scope, age_s: float
) -> Flow[Pinned]:
    """Ask that what a boundary rests on stays in memory."""
    form.check_request("pin", chain)
    tokens = len(chain) if boundary is None else boundary
    if not 0 < tokens <= len(chain):
        raise ValueError(f"boundary {tokens} is outside the chain's {len(chain)} tokens")
    if not age_s > 0:
        raise ValueError(f"a pin lasts for some time, not {age_s} s")
    block = chain.block_tokens
    tail = chain.digest_at(tokens) if tokens % block else b""
    digests = chain.blocks()[: tokens // block * DIGEST_BYTES]
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        reply = yield from ask(
            session,
            guarding.Pin(
                session.number(), scope.lora, scope.salt, digests, tokens, tail, int(age_s * 1000)
            ),
        )
    except UnavailableError as fault:
        return Pinned(str(fault).partition(":")[0])
    return _pinned(reply)


def unpinning(number: int) -> Flow[Pinned]:
    """End a pin of this session."""
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        reply = yield from ask(session, guarding.Unpin(session.number(), number, ""))
    except UnavailableError as fault:
        return Pinned(str(fault).partition(":")[0])
    return _pinned(reply)


def _pinned(reply: object) -> Pinned:
    assert isinstance(reply, guarding.Pinned)
    return Pinned(reply.outcome, reply.number, reply.objects, reply.nbytes, reply.age_ms / 1000)
