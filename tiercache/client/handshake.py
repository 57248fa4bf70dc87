"""How a client attaches, without I/O: bytes and descriptors in, bytes out, a session at the end."""

import os
import secrets
from typing import Final

from tiercache.client.arena import Arena
from tiercache.client.checks import Form
from tiercache.client.session import Session
from tiercache.client.values import Options
from tiercache.errors import ProtocolError, RefusedError
from tiercache.wire import ClientSide
from tiercache.wire import messages as wire

HANDSHAKE_BYTES_MAX: Final = 1 << 20
"""Largest frame before the node has named its own limit: a layout fits."""

DESCRIPTORS_MAX: Final = 4096
"""Descriptors that are taken from a node."""


class Handshake:
    """One attempt. Send what `hello` returns, then what each `feed` returns, until `session` is
    there; `close` on every path."""

    def __init__(self, form: Form, options: Options) -> None:
        self.session: Session | None = None
        self._form = form
        self._options = options
        self._side = ClientSide(HANDSHAKE_BYTES_MAX)
        self._descriptors: list[int] = []
        self._welcome: wire.Welcome | None = None

    def hello(self) -> bytes:
        """Return the first bytes to send."""
        # In containers, every engine may be process 1.
        name = self._options.name or f"{os.uname().nodename}/{os.getpid()}/{secrets.token_hex(4)}"
        return self._side.send(wire.Hello(1, wire.PROTOCOL, name))

    def feed(self, chunk: bytes, descriptors: list[int]) -> bytes:
        """Take received bytes and return what to send next.

        Raises RefusedError with the node's reason, ProtocolError when it makes no sense, OSError
        when the arena cannot be mapped.
        """
        self._descriptors += descriptors
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"the node sent more than {DESCRIPTORS_MAX} descriptors")
        self._side.receive(chunk)
        answer = b""
        while (reply := self._side.next()) is not None:
            match reply:
                case wire.Welcome():
                    self._welcome = reply
                    answer = self._attach()
                case wire.Attached():
                    assert self._welcome is not None
                    taken, self._descriptors = self._descriptors, []
                    arena = Arena(taken, reply.segments, write=self._options.write)
                    self.session = Session(self._side, self._welcome, arena, calls=2)
                case wire.Failed():
                    raise RefusedError(reply.text)
                case _:
                    raise AssertionError(reply)
        return answer

    def close(self) -> None:
        """Let go of descriptors that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _attach(self) -> bytes:
        options = self._options
        try:
            return self._side.send(
                wire.Attach(
                    call=2,
                    namespace=self._form.namespace,
                    layout=self._form.layout,
                    ranks=options.ranks,
                    rank=options.rank,
                    write=options.write,
                    prefill_tokens_per_s=options.prefill_tokens_per_s,
                )
            )
        except ValueError as fault:
            raise RefusedError(f"the layout is too large for this node: {fault}") from fault
