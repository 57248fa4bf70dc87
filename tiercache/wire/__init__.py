"""The control protocol, without I/O: messages, frames, and the order they come in."""

from tiercache.wire.connection import CALLS_MAX, ClientSide, ServerSide

__all__ = ["CALLS_MAX", "ClientSide", "ServerSide"]
