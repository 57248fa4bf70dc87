"""How an attachment ends: the node hears the last words, whenever it gets round to reading them.

A node believes that its memory is let go of only when it is told, or when this process is gone. So
what was begun is sent to its end, or all that was leased and reserved would stay set aside for as
long as the process lives.
"""

import contextlib
import select
import socket
import threading
from time import monotonic
from typing import Final

PARTING_S_MAX: Final = 60.0
"""How long a node that does not read is waited for, behind everybody's back."""


def part_from(sock: socket.socket, last_words: bytes) -> None:
    """Send `last_words` and shut the connection down, without waiting.

    What the node does not take at once goes out from a thread of its own. `sock` may be closed at
    once. Nothing is raised: a node that is gone needs to hear nothing.
    """
    sent = 0
    try:
        if last_words:
            sent = sock.send(last_words)
    except BlockingIOError:
        pass
    except OSError:
        sent = len(last_words)
    with contextlib.suppress(OSError):
        if sent == len(last_words):
            sock.shutdown(socket.SHUT_RDWR)
            return
        rest = memoryview(last_words)[sent:]
        thread = threading.Thread(
            target=_send_all, args=(sock.dup(), rest), name="tiercache-parting", daemon=True
        )
        thread.start()


def _send_all(sock: socket.socket, rest: memoryview) -> None:
    until = monotonic() + PARTING_S_MAX
    writable = select.poll()
    writable.register(sock, select.POLLOUT)
    with sock, contextlib.suppress(OSError):
        while rest and (left := until - monotonic()) > 0:
            if writable.poll(left * 1000):
                with contextlib.suppress(BlockingIOError):
                    rest = rest[sock.send(rest) :]
        sock.shutdown(socket.SHUT_RDWR)
