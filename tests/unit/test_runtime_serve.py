"""A node in this process: how it ends, whatever ends it."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiercache.config import Settings, parse
from tiercache.core import commands, events
from tiercache.core.machine import Machine
from tiercache.errors import ConfigError
from tiercache.runtime import serve as module
from tiercache.runtime.serve import EXIT_BROKEN, serve
from tiercache.testing.speaker import Speaker
from tiercache.wire import messages as wire

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A node's signals and hooks are the process's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hook = threading.excepthook
    yield
    gc.unfreeze()
    assert threading.excepthook is hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


def settings(folder: Path, nvme: str = "") -> Settings:
    return parse(
        {
            "node": {"socket": str(folder / "s")},
            "host": {"bytes": "1MiB", "segment_bytes": "1MiB"},
            "nvme": {"path": nvme, "cap_bytes": "64MiB", "segment_bytes": "1MiB"},
            "metrics": {"bind": ""},
        },
        "test",
    )


async def code_after(given: Settings, cause: Callable[[Path], object]) -> int:
    """Return the exit code of a node to which `cause` happens, in a thread, once it serves."""
    loop = asyncio.get_running_loop()
    path = Path(given.node.socket)
    happened: list[asyncio.Future[object]] = []

    def ready() -> None:
        happened.append(loop.run_in_executor(None, cause, path))

    code = await asyncio.wait_for(serve(given, ready=ready), WAIT_S)
    await asyncio.gather(*happened)
    return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    def cause(path: Path) -> None:
        with Speaker(path) as speaker:
            assert speaker.figures().node.nvme == "off"
            os.kill(os.getpid(), number)
            assert speaker.until_hung_up() == b""

    assert await code_after(settings(tmp_path), cause) == 0
    assert not (tmp_path / "s").exists()


async def test_a_machine_with_a_bug_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Machine.handle

    def handle(
        self: Machine, event: events.Event, now: float, wall: float = 0.0
    ) -> list[commands.Command]:
        assert not isinstance(event, events.ClearAsked), "the books do not add up"
        return right(self, event, now, wall)

    monkeypatch.setattr(Machine, "handle", handle)

    def cause(path: Path) -> None:
        with Speaker(path) as speaker:
            speaker.tell(wire.Clear(speaker.call(), ""))
            assert speaker.until_hung_up() == b""

    assert await code_after(settings(tmp_path), cause) == EXIT_BROKEN
    assert not (tmp_path / "s").exists()


async def test_a_thread_with_a_bug_ends_it(tmp_path: Path) -> None:
    def cause(path: Path) -> None:
        del path
        thread = threading.Thread(target=lambda: 1 // 0, name="seal-9")
        thread.start()
        thread.join()

    assert await code_after(settings(tmp_path), cause) == EXIT_BROKEN


async def test_a_disk_that_cannot_be_had_ends_it_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"nvme\.path"):
        await code_after(settings(tmp_path, str(tmp_path / "file")), lambda path: path)
    assert not (tmp_path / "s").exists()


async def test_a_thread_that_hangs_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    hangs = threading.Event()
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(
        "tiercache.runtime.prefault.HostArena.prefault", lambda *_: hangs.wait(WAIT_S) and 0
    )

    def cause(path: Path) -> None:
        del path
        os.kill(os.getpid(), signal.SIGTERM)

    await code_after(settings(tmp_path), cause)
    hangs.set()
    assert codes == [module.EXIT_STUCK]
    assert not (tmp_path / "s").exists()
