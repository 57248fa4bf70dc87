"""When is a process gone for certain? Real processes, real sockets."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.runtime import peercred
from tiercache.runtime.peercred import Owners, credentials, is_dead, open_pidfd
from tiercache.testing.descriptors import open_descriptors

WAIT_S = 10.0
CLIENT = """
import socket, sys
connections = []
for _ in range(int(sys.argv[2])):
    connections.append(socket.socket(socket.AF_UNIX))
    connections[-1].connect(sys.argv[1])
sys.stdin.read()
"""


class Client:
    """A process that connected `count` times and then waits."""

    def __init__(self, path: Path, count: int = 1) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            listening.settimeout(WAIT_S)
            command = [sys.executable, "-S", "-c", CLIENT, str(path), str(count)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
            self.socks = [listening.accept()[0] for _ in range(count)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        for sock in self.socks:
            sock.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path / "s", 3)
    yield made
    made.close()


class Watched:
    """Owners whose news can be waited for."""

    def __init__(self, grace_s: float = 60.0) -> None:
        self.news: asyncio.Queue[int] = asyncio.Queue()
        self.owners = Owners(asyncio.get_running_loop(), self.news.put_nowait, grace_s)

    async def gone(self) -> int:
        return await asyncio.wait_for(self.news.get(), WAIT_S)


def test_the_kernel_says_who_connected(client: Client) -> None:
    peer = credentials(client.socks[0])
    assert (peer.pid, peer.uid) == (client.process.pid, os.geteuid())


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_process_descriptor_tells_life_from_death(
    client: Client, monkeypatch: pytest.MonkeyPatch, *, old_kernel: bool
) -> None:
    if old_kernel:
        monkeypatch.setattr(peercred, "SO_PEERPIDFD", 32_000)
    pidfd = open_pidfd(client.socks[0], client.process.pid)
    assert pidfd is not None
    assert not is_dead(pidfd)
    client.kill()
    assert is_dead(pidfd)
    os.close(pidfd)


def test_a_process_that_is_gone_already_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.kill()
    monkeypatch.setattr(peercred, "SO_PEERPIDFD", 32_000)
    with pytest.raises(ProcessLookupError):
        open_pidfd(client.socks[0], client.process.pid)
    assert open_pidfd(client.socks[0], 0) is None


async def test_a_session_whose_process_lives_is_not_let_go(client: Client) -> None:
    watched = Watched()
    owners = watched.owners
    for session, sock in enumerate(client.socks, 1):
        owners.add(session, sock)
    assert not owners.ended(1)
    assert not owners.ended(3)
    assert watched.news.empty()
    client.kill()
    assert {await watched.gone(), await watched.gone()} == {1, 3}
    assert owners.ended(2), "its process is known to be dead"
    owners.close()


async def test_a_session_whose_process_died_first_is_let_go_at_once(client: Client) -> None:
    watched = Watched()
    watched.owners.add(1, client.socks[0])
    client.kill()
    assert watched.owners.ended(1)
    assert watched.owners.ended(1), "there is nothing left to wait for"
    assert watched.news.empty()


async def test_who_lets_go_is_not_watched(client: Client) -> None:
    before = open_descriptors()
    watched = Watched()
    watched.owners.add(1, client.socks[0])
    assert open_descriptors() == before + 1
    watched.owners.let_go(1)
    assert open_descriptors() == before
    assert watched.owners.ended(1)


async def test_one_descriptor_per_process_however_often_it_connects(client: Client) -> None:
    watched = Watched()
    before = open_descriptors()
    for session in range(1, 301):
        watched.owners.add(session, client.socks[session % 3])
        assert not watched.owners.ended(session)
    assert open_descriptors() <= before + 1
    client.kill()
    assert sorted([await watched.gone() for _ in range(300)]) == list(range(1, 301))
    assert open_descriptors() == before


async def test_a_process_that_cannot_be_watched_is_gone_after_a_while(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peercred, "open_pidfd", lambda sock, pid: None)
    watched = Watched(grace_s=0.05)
    watched.owners.add(1, client.socks[0])
    watched.owners.add(2, client.socks[1])
    assert not watched.owners.ended(1)
    assert await watched.gone() == 1
    watched.owners.let_go(2)
    assert watched.owners.ended(2)
    watched.owners.close()


async def test_watching_is_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peercred, "PROCESSES_MAX", 2)
    watched = Watched()
    watched.owners.add(1, client.socks[0])
    assert not watched.owners.full
    watched.owners.add(2, client.socks[1])
    assert watched.owners.full
    watched.owners.close()
    assert not watched.owners.full


async def test_a_number_used_again_is_another_process(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    watched.owners.add(1, client.socks[0])
    assert not watched.owners.ended(1)
    os.kill(client.process.pid, signal.SIGKILL)
    client.process.wait(WAIT_S)
    other = Client(tmp_path / "t")
    pid = client.process.pid
    monkeypatch.setattr(peercred, "credentials", lambda sock: peercred.Peer(pid, 0, 0))
    watched.owners.add(2, other.socks[0])
    assert await watched.gone() == 1
    assert not watched.owners.ended(2)
    other.kill()
    assert await watched.gone() == 2
    other.close()
