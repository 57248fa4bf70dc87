"""A Mooncake Store of a test's own: a master and store processes, which can be killed and frozen."""

import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tiercache.testing.etcd import free_port
from tiercache.tiers.remote_mooncake_client import MooncakeSettings

START_S = 30.0
HOST = "127.0.0.1"
RPC_S_MAX = 1.0
TRANSFER_S_MAX = 1.0
LEASE_MS = 1000
"""How long Mooncake keeps what was read from eviction; its default of 10 s is long for a test."""

CLIENT_TTL_S = 2
"""After so long without a sign of life the master forgets a store process, and its objects."""


def why_not() -> str:
    """Return why Mooncake cannot be started here, "" when it can."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake cannot be loaded ({error}): it needs libibverbs1 and libnuma1"
    return ""


class MooncakeServers:
    """A master, and store processes of `segment_bytes` each."""

    def __init__(self, folder: Path, *, segment_bytes: int, master: Sequence[str] = ()) -> None:
        self.port = free_port()
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._options = master
        self.elected = ""
        """Where masters are elected, when several stand by: clients ask there for their address."""
        self._master: subprocess.Popen[bytes] | None = None
        self.stores: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        """Where clients find the master."""
        return self.elected or f"{HOST}:{self.port}"

    @property
    def settings(self) -> MooncakeSettings:
        """How a node reaches it. Limits are short, and those of the process: every test has the same."""
        return MooncakeSettings(self.address, rpc_s_max=RPC_S_MAX, transfer_s_max=TRANSFER_S_MAX)

    @property
    def master(self) -> subprocess.Popen[bytes]:
        """The master's process."""
        assert self._master is not None
        return self._master

    def start(self, stores: int = 1) -> None:
        """Start a master and so many store processes; wait until they answer."""
        self.start_master()
        for _ in range(stores):
            self.start_store()

    def start_master(self) -> None:
        """Start a master, after the last one was killed too: it begins with nothing."""
        self._master = self._run_master(self.port)
        _wait_for(self._master, self.port)

    def _run_master(self, port: int) -> subprocess.Popen[bytes]:
        return self._run(
            "mooncake_master",
            f"--rpc_address={HOST}",
            f"--rpc_port={port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={free_port()}",
            f"--client_ttl={CLIENT_TTL_S}",
            f"--default_kv_lease_ttl={LEASE_MS}",
            "--put_start_discard_timeout_sec=2",
            *self._options,
        )

    def start_standby(self) -> subprocess.Popen[bytes]:
        """Start a second master, which takes over when the first one ends; until then it is silent."""
        standby = self._run_master(free_port())
        self.stores.append(standby)
        return standby

    def start_store(self) -> subprocess.Popen[bytes]:
        """Start one more store process."""
        port = free_port()
        process = self._run(
            "mooncake_client",
            f"--host={HOST}",
            f"--port={port}",
            f"--global_segment_size={self._segment_bytes}",
            f"--local_buffer_size={16 << 20}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--threads=1",
        )
        self.stores.append(process)
        _wait_for(process, port)
        return process

    def stop(self) -> None:
        """Kill them all."""
        for process in [*self.stores, *([self._master] if self._master else [])]:
            kill(process)
        self.stores.clear()

    def _run(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        found = importlib.util.find_spec("mooncake")
        assert found is not None
        assert found.origin is not None
        with (self._folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                [str(Path(found.origin).parent / program), "--logtostderr=true", *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Stop a process with SIGSTOP, and wait until all of it stands still."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with SIGKILL, frozen or not, and wait for its end."""
    process.send_signal(signal.SIGKILL)
    process.wait(START_S)


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((HOST, port), 1).close()
        except OSError:
            assert process.poll() is None, "it ended"
            assert time.monotonic() < until, "it does not answer"
            try:
                process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        else:
            return
