"""The node's socket: one live owner per path, and nothing left that blocks the next start."""

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from tiercache.config import bind_address
from tiercache.errors import ConfigError

BACKLOG = 128


class Listener:
    """Owns `path` and listens there from construction to `close`.

    `shared`: every user may connect, and whoever accepts must ask the kernel who it is. `<path>.lock` is
    held for as long; the kernel lets go of it with the process, however that ends. A socket that a dead
    node left is replaced. Raises ConfigError when another program has the path.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        with contextlib.ExitStack() as undo:
            try:
                self._lock = _lock(path, 0o711 if shared else 0o700)
                undo.callback(os.close, self._lock)
                _remove_stale(path)
                self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(self.sock.close)
                self.sock.setblocking(False)
                # Never more open than it should be, not even between two calls.
                mask = os.umask(0o111 if shared else 0o177)
                try:
                    self.sock.bind(str(path))
                finally:
                    os.umask(mask)
                self.sock.listen(BACKLOG)
            except OSError as error:
                raise ConfigError(f"node.socket {path} cannot be used: {error.strerror}") from error
            undo.pop_all()

    def stop(self) -> None:
        """Stop listening and remove the socket; the path stays ours. Idempotent."""
        if self.sock.fileno() >= 0:
            self.sock.close()
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop, and let go of the path. Idempotent."""
        self.stop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock(path: Path, folder_mode: int) -> int:
    folder = path.parent
    folder.mkdir(mode=folder_mode, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner not in {0, os.geteuid()}:
        raise ConfigError(
            f"node.socket {path}: its directory belongs to user {owner}, who could replace the "
            f"socket. Choose a directory of this user"
        )
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(
            f"node.socket {path} belongs to a node that is running. Stop that one, or choose "
            f"another path"
        ) from error
    return lock


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"node.socket {path} is there and is no socket: it is left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # Somebody listens and is busy.
    raise ConfigError(f"node.socket {path}: another program listens there. Choose another path")


def listen_http(bind: str) -> socket.socket | None:
    """Return a socket that listens on "address:port"; None for "". Raises ConfigError."""
    address = bind_address(bind)
    if address is None:
        return None
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            f'metrics.bind "{bind}" cannot be used: {error.strerror}. Choose another port, or "" '
            f"for no metrics"
        ) from error
    return sock
