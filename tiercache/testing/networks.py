"""Machines of a test's own: network namespaces on one bridge, where a link can be cut. Needs root."""

import os
import shutil
import subprocess
from contextlib import ExitStack
from types import TracebackType
from typing import Self

START_S = 20.0
PREFIX = "10.77.0"
BRIDGE_ADDRESS = f"{PREFIX}.1"


def why_not() -> str:
    """Return why there can be no such network here; "" when there can."""
    for command in ("unshare", "nsenter", "ip"):
        if shutil.which(command) is None:
            return f"{command} is not installed (Debian: util-linux, iproute2)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespace: {tried.stderr.decode().strip()}"


class _Namespace:
    """One namespace; it is gone when the process that holds it is."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "no namespace"
        self.inside = ("nsenter", "--target", str(self._holder.pid), "--net")

    @property
    def pid(self) -> int:
        """The process that holds it."""
        return self._holder.pid

    def ip(self, words: str) -> None:
        """Run `ip` inside."""
        done = subprocess.run(
            [*self.inside, "ip", *words.split()], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"ip {words}: {done.stderr}"

    def close(self) -> None:
        """End it."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(START_S)
        self._holder.stdout.close()


class Network:
    """Machines by name, each with an address of its own; the bridge between them has one too."""

    def __init__(self, *names: str) -> None:
        self._open = ExitStack()
        self._hub = self._add()
        self._hub.ip("link add br0 type bridge")
        self._hub.ip(f"address add {BRIDGE_ADDRESS}/24 dev br0")
        self._hub.ip("link set br0 up")
        self._numbers = {name: number for number, name in enumerate(names, 11)}
        self._machines = {name: self._join(number) for name, number in self._numbers.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def inside(self, name: str = "") -> tuple[str, ...]:
        """Return what a command starts with that runs on a machine; "" is where the bridge is."""
        return (self._machines[name] if name else self._hub).inside

    def address(self, name: str) -> str:
        """Return a machine's address."""
        return f"{PREFIX}.{self._numbers[name]}"

    def cut(self, name: str) -> None:
        """Unplug a machine."""
        self._hub.ip(f"link set v{self._numbers[name]} down")

    def heal(self, name: str) -> None:
        """Plug it in again."""
        self._hub.ip(f"link set v{self._numbers[name]} up")

    def _add(self) -> _Namespace:
        made = _Namespace()
        self._open.callback(made.close)
        return made

    def _join(self, number: int) -> _Namespace:
        machine, hub = self._add(), self._hub
        hub.ip(f"link add v{number} type veth peer name eth0 netns {machine.pid}")
        hub.ip(f"link set v{number} master br0 up")
        machine.ip(f"address add {PREFIX}.{number}/24 dev eth0")
        machine.ip("link set eth0 up")
        return machine
