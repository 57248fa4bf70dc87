"""Asking where a prompt could be resumed, as a conversation without I/O."""

from tiercache.client.checks import Form
from tiercache.client.flows import Attach, Flow, ask
from tiercache.client.session import Session
from tiercache.client.values import Place, Places, Scope
from tiercache.errors import UnavailableError
from tiercache.state import Chain
from tiercache.wire import sharing


def locating(form: Form, chain: Chain, limit: int | None, scope: Scope) -> Flow[Places]:
    """Ask where a prompt could be resumed; nothing is kept or counted for it."""
    step = chain.block_tokens
    if step != form.layout.block_tokens:
        raise ValueError(
            f"the chain has blocks of {step} tokens, the layout {form.layout.block_tokens}"
        )
    most = max(0, len(chain) - 1) if limit is None else limit
    if not 0 <= most <= len(chain):
        raise ValueError(f"a limit of {most} tokens for a prompt of {len(chain)}")
    path = chain.blocks()
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        reply = yield from ask(
            session,
            sharing.Where(
                session.number(),
                b"",
                scope.lora,
                scope.salt,
                path,
                step,
                most,
                list(scope.codecs),
                scope.reshard,
            ),
        )
        assert isinstance(reply, sharing.Places)
        if not reply.places or not all(0 <= place.boundary <= most for place in reply.places):
            raise session.fail("what the node says of where a prompt lies makes no sense")
    except UnavailableError as fault:
        return Places((), str(fault))
    found = tuple(
        Place(
            place.node,
            place.boundary,
            place.tier,
            place.nbytes,
            place.absent_bytes,
            place.seconds,
            place.compute_s,
            place.health,
        )
        for place in reply.places
    )
    return Places(found, reply.reason)
