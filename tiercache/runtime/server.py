"""Connections in, answers out: what clients say becomes events, what the core answers goes back."""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tiercache.core import commands, events
from tiercache.errors import ProtocolError
from tiercache.runtime.log import LOG, Seldom, say
from tiercache.runtime.node import Node
from tiercache.runtime.peercred import Owners, credentials
from tiercache.runtime.session import RECEIVE_BYTES, Session, SlowReaderError, refuse
from tiercache.runtime.telemetry import Tally
from tiercache.runtime.translate import Caller, Telling, to_event, to_reply
from tiercache.tiers import crash
from tiercache.wire import clustering
from tiercache.wire import messages as wire

ACCEPTS_PER_WAKEUP = 64
ACCEPT_REST_S = 0.5
"""How long nobody is accepted after the process ran out of descriptors."""

CLIENT_NAME_CHARACTERS_MAX = 256
PENDING_FRAMES_MAX = 2
"""Unread answers that wait for a slow reader, in units of the largest frame."""


AskCluster: TypeAlias = Callable[[clustering.Request, Callable[[wire.Reply], None]], None]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a server grants its clients. `descriptors(write)` are those of the arena's segments."""

    uids: frozenset[int]
    sessions_max: int
    frame_bytes_max: int
    batch_max: int
    boot: str
    version: str
    segments: tuple[int, ...]
    descriptors: Callable[[bool], Sequence[int]]

    def welcome(self, call: int) -> wire.Welcome:
        """Return the answer to a client's first word."""
        return wire.Welcome(
            call,
            wire.PROTOCOL,
            self.boot,
            self.version,
            self.frame_bytes_max,
            self.batch_max,
        )


class Server:
    """All connections of one node. Everything here runs on the loop's thread.

    `ask_cluster` answers questions about the cluster; it may be set.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        terms: Terms,
        tally: Tally,
        telling: Callable[[], Telling],
        grace_s: float,
    ) -> None:
        self._loop = loop
        self._terms = terms
        self._tally = tally
        self._telling = telling
        self._owners = Owners(loop, self._gone, grace_s)
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._unsent: dict[Session, None] = {}
        self._doomed: dict[Session, None] = {}
        self._buffer = bytearray(RECEIVE_BYTES)
        self._seldom = Seldom()
        self._listening: socket.socket | None = None
        self._node: Node | None = None
        self.ask_cluster: AskCluster = _no_cluster

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._sessions)

    @property
    def listening(self) -> bool:
        """Whether new clients are let in."""
        return self._listening is not None

    def start(self, listening: socket.socket, node: Node) -> None:
        """Let clients in, and tell `node` what they say."""
        self._node = node
        self._listening = listening
        self._loop.add_reader(listening, self._accept)

    def stop_accepting(self) -> None:
        """Let nobody in any more; those inside stay."""
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening = None

    def close(self) -> None:
        """End every connection without telling the core: the node ends as well."""
        self.stop_accepting()
        for session in list(self._sessions.values()):
            self._drop(session)
        self._owners.close()

    # --- from the core

    def reply(self, command: commands.Reply) -> None:
        """Hold an answer ready; one for a session that has ended has nobody to go to."""
        session = self._sessions.get(command.session)
        if session is None:
            return
        body = command.body
        try:
            if session.attaching is not None and session.attaching.call == command.call:
                self._attached(session, session.attaching, body)
            else:
                session.answer(to_reply(command.call, body, self._telling))
        except SlowReaderError:
            self._doomed[session] = None
        self._unsent[session] = None

    def flush(self) -> None:
        """Send all answers that are ready."""
        while self._unsent or self._doomed:
            if self._doomed:
                self._tally.add("slow_readers")
                self._fail(self._doomed.popitem()[0], "slow reader", "it does not read its answers")
                continue
            session, _ = self._unsent.popitem()
            try:
                if not session.flush():
                    self._loop.add_writer(session.sock, self._writable, session)
            except OSError as error:
                self._end(session, str(error))

    def _attached(self, session: Session, asked: wire.Attach, body: commands.ReplyBody) -> None:
        session.attaching = None
        fields: dict[str, str | int] = {
            "client": session.caller.writer,
            "pid": session.peer.pid,
            "model": asked.namespace.model,
            "rank": f"{asked.rank}/{asked.ranks}",
        }
        if not isinstance(body, commands.Accepted):
            reply = to_reply(asked.call, body, self._telling)
            reason = reply.text if isinstance(reply, wire.Failed) else ""
            self._warn("attach refused", **fields, reason=reason)
            session.answer(reply)
            return
        self._owners.add(session.number, session.sock)
        descriptors = self._terms.descriptors(False)
        if asked.write:
            descriptors = [*descriptors, *self._terms.descriptors(True)]
        say(logging.INFO, "attached", session=session.number, write=asked.write, **fields)
        session.answer(wire.Attached(asked.call, list(self._terms.segments)), descriptors)
        crash.reach("runtime.after_attach")

    # --- from clients

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_WAKEUP):
            if self._listening is None:
                return
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._rest(error)
                return
            sock.setblocking(False)
            self._welcome(sock)

    def _rest(self, error: OSError) -> None:
        """Out of descriptors or memory: what is pending stays pending, and asking again at once
        would only spin."""
        self._warn("cannot accept", error=str(error))
        listening = self._listening
        if listening is not None:
            self._loop.remove_reader(listening)
            self._loop.call_later(ACCEPT_REST_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if self._listening is listening:
            self._loop.add_reader(listening, self._accept)

    def _welcome(self, sock: socket.socket) -> None:
        terms = self._terms
        peer = credentials(sock)
        if peer.uid not in terms.uids:
            self._tally.add("connections", "uid")
            self._warn("refused", uid=peer.uid, pid=peer.pid)
            refuse(sock, f"user {peer.uid} may not use this node: see node.admin_uids")
            return
        if len(self._sessions) >= terms.sessions_max:
            self._tally.add("connections", "too_many")
            self._warn("refused", connections=len(self._sessions), pid=peer.pid)
            refuse(sock, f"{terms.sessions_max} clients are connected: see limits.sessions_max")
            return
        self._tally.add("connections", "accepted")
        session = Session(
            next(self._numbers),
            sock,
            peer,
            self._buffer,
            frame_bytes_max=terms.frame_bytes_max,
            pending_bytes_max=PENDING_FRAMES_MAX * terms.frame_bytes_max,
        )
        self._sessions[session.number] = session
        self._loop.add_reader(sock, self._readable, session)

    def _readable(self, session: Session) -> None:
        if session.number not in self._sessions:
            return
        try:
            more = session.receive()
            while not session.detached and (message := session.next()) is not None:
                self._hear(session, message)
        except ProtocolError as error:
            self._tally.add("protocol_errors")
            self._fail(session, "protocol error", str(error))
        except OSError as error:
            self._end(session, str(error))
        except Exception:  # noqa: BLE001
            # The top of a connection: a bug that one client met must not reach the others.
            LOG.exception("internal error")
            self._end(session, "internal error")
        else:
            if session.detached or not more:
                self._end(session, "")
            elif session.ends():
                # uvloop calls once after an error, such as a client that died with answers unread;
                # what lies behind the bytes just received would never be seen.
                self._loop.call_soon(self._readable, session)
        self.flush()

    def _hear(self, session: Session, message: wire.FromClient) -> None:
        self._tally.add("requests")
        match message:
            case wire.Hello():
                self._greet(session, message)
                return
            case wire.Detach():
                session.detached = True
                return
            case clustering.ClearAll() | clustering.Members() | clustering.ShareAll():
                self.ask_cluster(message, partial(self._of_cluster, session.number))
                return
            case wire.Attach(call) if self._owners.full:
                text = "too many processes hold the arena: end some that have disconnected"
                self._answer(session, wire.Failed(call, "refused", text))
                return
            case wire.Commit(tickets=items) | wire.Cancel(items) | wire.Release(items):
                if len(items) > self._terms.batch_max:
                    raise ProtocolError(
                        f"{len(items)} items at once, {self._terms.batch_max} at most"
                    )
                if isinstance(message, wire.Commit):
                    crash.reach("runtime.after_seal_before_handle")
            case wire.Attach():
                session.attaching = message
            case _:
                pass
        try:
            event = to_event(message, session.caller, time.monotonic())
        except ValueError as error:
            if not isinstance(message, wire.Request):
                raise ProtocolError(str(error)) from error
            self._answer(session, wire.Failed(message.call, "invalid", str(error)))
            return
        self._take(event)

    def _greet(self, session: Session, hello: wire.Hello) -> None:
        session.caller = Caller(session.number, hello.client[:CLIENT_NAME_CHARACTERS_MAX])
        self._answer(session, self._terms.welcome(hello.call))

    def _of_cluster(self, number: int, reply: wire.Reply) -> None:
        """The answer to a question about the cluster; whoever asked may be gone."""
        session = self._sessions.get(number)
        if session is not None:
            self._answer(session, reply)
            self._loop.call_soon(self.flush)

    def _answer(self, session: Session, reply: wire.Reply) -> None:
        try:
            session.answer(reply)
        except SlowReaderError:
            self._doomed[session] = None
        self._unsent[session] = None

    def _writable(self, session: Session) -> None:
        self._loop.remove_writer(session.sock)
        self._unsent[session] = None
        self.flush()

    # --- ends

    def _fail(self, session: Session, event: str, text: str) -> None:
        self._warn(event, pid=session.peer.pid, client=session.caller.writer, reason=text)
        session.farewell()
        self._end(session, text)

    def _end(self, session: Session, reason: str) -> None:
        if session.number not in self._sessions:
            return
        self._drop(session)
        if session.detached:
            self._owners.let_go(session.number)
            acknowledged = True
        else:
            acknowledged = self._owners.ended(session.number)
        say(
            logging.DEBUG,
            "disconnected",
            session=session.number,
            client=session.caller.writer,
            acknowledged=acknowledged,
            reason=reason,
        )
        self._take(events.Closed(session.number, acknowledged))

    def _drop(self, session: Session) -> None:
        del self._sessions[session.number]
        self._unsent.pop(session, None)
        self._doomed.pop(session, None)
        self._loop.remove_reader(session.sock)
        self._loop.remove_writer(session.sock)
        session.close()

    def _gone(self, session: int) -> None:
        self._take(events.Gone(session))
        self.flush()

    def _take(self, event: events.Event) -> None:
        if self._node is None:
            raise AssertionError("a client before the node")
        self._node.take(event)

    def _warn(self, event: str, **fields: str | int) -> None:
        held = self._seldom.due(event, time.monotonic())
        if held is not None:
            say(logging.WARNING, event, **fields, held_back=held)


def _no_cluster(message: clustering.Request, done: Callable[[wire.Reply], None]) -> None:
    text = "this node is in no cluster: see [cluster] in its settings"
    done(wire.Failed(message.call, "refused", text))
