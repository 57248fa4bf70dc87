"""Who is at the other end, and whether that process may still touch shared memory."""

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module.
PROCESSES_MAX = 4096
_UCRED = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """A connection's other end as the kernel knows it. `pid` is 0 when it is not visible here."""

    pid: int
    uid: int
    gid: int


def credentials(sock: socket.socket) -> Peer:
    """Return who connected `sock`."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(packed))


def open_pidfd(sock: socket.socket, pid: int) -> int | None:
    """Return a descriptor of the process that connected `sock`; None when there is no way to watch.

    Raises ProcessLookupError when that process is gone already.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except ProcessLookupError:
        raise
    except OSError:  # An older kernel. Here the number may have been reused since it connected.
        if pid <= 0:
            return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def is_dead(pidfd: int) -> bool:
    """Whether the process behind `pidfd` has ended, all its threads included."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@dataclass(slots=True)
class _Process:
    pidfd: int | None
    live: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    dead: bool = False


class Owners:
    """The processes that mapped the arena, by session, until each is gone or has let go.

    One descriptor per process, however often it connects. `gone(session)` is called once for each
    session that ended while its process lived, when that process has ended. A process that cannot
    be watched counts as gone `grace_s` after its session ended.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, gone: Callable[[int], None], grace_s: float
    ) -> None:
        self._loop = loop
        self._gone = gone
        self._grace_s = grace_s
        self._by_pid: dict[int, _Process] = {}
        self._of: dict[int, tuple[int, _Process]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    @property
    def full(self) -> bool:
        """Whether no further process can be watched."""
        return len(self._of) >= PROCESSES_MAX

    def add(self, session: int, sock: socket.socket) -> None:
        """Note that the process behind `sock` may touch the arena from now on."""
        pid = credentials(sock).pid or -session
        process = self._by_pid.get(pid)
        if process is not None and process.pidfd is not None and is_dead(process.pidfd):
            self._ended(pid, process)  # Its number was reused before we were told.
            process = None
        if process is None:
            try:
                process = _Process(open_pidfd(sock, pid))
            except ProcessLookupError:
                process = _Process(None, dead=True)
            self._by_pid[pid] = process
        process.live.add(session)
        self._of[session] = (pid, process)

    def let_go(self, session: int) -> None:
        """Note that the session's owner will not touch the arena again."""
        if session in self._of:
            pid, process = self._of.pop(session)
            process.live.discard(session)
            process.ended.discard(session)
            self._drop_if_idle(pid, process)

    def ended(self, session: int) -> bool:
        """Note that the session ended. True: nobody can touch the arena for it any more."""
        if session not in self._of:
            return True
        pid, process = self._of[session]
        if process.dead or (process.pidfd is not None and is_dead(process.pidfd)):
            self.let_go(session)
            return True
        process.live.discard(session)
        if process.pidfd is None:
            self._timers[session] = self._loop.call_later(self._grace_s, self._overdue, session)
        elif not process.ended:
            self._loop.add_reader(process.pidfd, self._ended, pid, process)
        process.ended.add(session)
        return False

    def close(self) -> None:
        """Watch nobody any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._of.clear()
        for pid, process in list(self._by_pid.items()):
            self._close(pid, process)

    def _overdue(self, session: int) -> None:
        del self._timers[session]
        self.let_go(session)
        self._gone(session)

    def _ended(self, pid: int, process: _Process) -> None:
        sessions = sorted(process.ended)
        process.dead = True
        for session in sessions:
            self.let_go(session)
        self._close(pid, process)
        for session in sessions:
            self._gone(session)

    def _drop_if_idle(self, pid: int, process: _Process) -> None:
        if not process.live and not process.ended:
            self._close(pid, process)

    def _close(self, pid: int, process: _Process) -> None:
        if self._by_pid.get(pid) is process:
            del self._by_pid[pid]
        if process.pidfd is not None:
            self._loop.remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None
