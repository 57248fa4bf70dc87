"""A process that lends, which a test can stop and kill: `python -m tiercache.testing.lending KIND`.

KIND is "tcp" or "ucx". It writes its address, and lends the objects in `SIZES` until it is killed.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import uvloop

import tiercache
from tiercache.testing.lenders import Lender
from tiercache.transport.handshake import End
from tiercache.transport.security import SharedKey
from tiercache.transport.tcp import TcpTransport
from tiercache.transport.ucx import UcxTransport

KEY = SharedKey(bytes(range(32)))
SIZES = {b"tiny": 1, b"small": 64 << 10, b"large": 64 << 20}
STOP_S_MAX = 20.0
LISTENS = "listens at "


class LendingProcess:
    """A process that lends, and its `address`."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tiercache.testing.lending", kind],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(tiercache.__file__).parents[1],
        )
        assert self.process.stdout is not None
        said = (line.partition(LISTENS) for line in self.process.stdout)  # UCX warns there too.
        self.address = next((address.strip() for _, found, address in said if found), "")
        assert self.address, "it did not start"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait(STOP_S_MAX)
        assert self.process.stdout is not None
        self.process.stdout.close()


async def lend(kind: str) -> None:
    """Lend for ever."""
    end = End("child", KEY)
    transport = UcxTransport(end) if kind == "ucx" else TcpTransport(end)
    listener = await transport.listen("127.0.0.1:0", Lender(SIZES))
    sys.stdout.write(f"{LISTENS}{listener.address}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(lend(sys.argv[1]))
