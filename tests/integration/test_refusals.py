"""A client that is refused learns why, however early the node hangs up."""

import pytest

from tiercache.client import Client, Options
from tiercache.client.handshake import Handshake
from tiercache.errors import RefusedError
from tiercache.testing import toy
from tiercache.testing.nodes import NewNode, eventually
from tiercache.testing.speaker import Speaker


def test_a_refusal_is_heard_by_a_client_that_had_not_asked_yet(
    new_node: NewNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = new_node(limits={"sessions_max": 1})
    node.start()
    # The probe that found the node listening.
    assert eventually(lambda: "event=disconnected session=1" in node.said())
    hello = Handshake.hello
    with Speaker(node.socket) as speaker:
        speaker.attach(toy.NAMESPACE, toy.LAYOUT)

        def after_the_node_hung_up(handshake: Handshake) -> bytes:
            said = hello(handshake)
            assert eventually(lambda: "connections=1" in node.said())
            return said

        monkeypatch.setattr(Handshake, "hello", after_the_node_hung_up)
        with pytest.raises(RefusedError, match="sessions_max"):
            Client.attach(
                node.socket,
                toy.NAMESPACE,
                toy.LAYOUT,
                options=Options(deadline_s=20, required=True),
            )
