"""Handing a request over to another node, as a conversation without I/O."""

from tiercache.client.checks import Form
from tiercache.client.flows import Attach, Flow, ask
from tiercache.client.session import Session
from tiercache.client.values import Pushed, Scope
from tiercache.errors import UnavailableError
from tiercache.state import Chain
from tiercache.wire import sharing


def pushing(
    form: Form, request: str, chain: Chain, to: str, scope: Scope, wait_s: float
) -> Flow[Pushed]:
    """Have the node `to` take what is held of a prompt here."""
    form.check_request(request, chain)
    if not to:
        raise ValueError("a request is handed over to a node that has a name")
    try:
        session = yield Attach.ATTACH
        assert isinstance(session, Session)
        reply = yield from ask(
            session,
            sharing.Push(
                session.number(),
                request,
                scope.lora,
                scope.salt,
                chain.blocks(),
                len(chain) // chain.block_tokens * chain.block_tokens,
                list(scope.codecs),
                scope.reshard,
                to,
                max(0, int(wait_s * 1000)),
            ),
        )
        assert isinstance(reply, sharing.Pushed)
        if not 0 <= reply.boundary <= len(chain):
            raise session.fail(f"the node says {reply.boundary} of {len(chain)} tokens were taken")
    except UnavailableError as fault:
        return Pushed(0, str(fault))
    return Pushed(reply.boundary, reply.reason)
