"""What this machine lets one process have: memory as its cgroup allows it, and descriptors.

Both are checked at start, where an error is a sentence; later they would be SIGKILL or EMFILE.
"""

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.config import Settings

PAGE_BYTES = 4096
PROCESS_BYTES = 128 * 1024**2
"""What the node needs beyond its arena and its objects: code, buffers, clients."""

OBJECT_BYTES = 1024
"""What the catalog takes for one object: 0.96 KB each with a million of them."""

HOST_SHARE = 4
"""`host.bytes = "auto"` takes one part in this many of the memory limit."""

DESCRIPTORS_BASE = 256
"""Descriptors beyond sessions and the arena: code, logs, HTTP, clients that ended and are watched."""

DESCRIPTORS_PER_SESSION = 2
"""The connection, and the process that holds it."""

DESCRIPTORS_NVME = 256
"""What the NVMe tier keeps open: a bounded number of segment files, and its index."""

DESCRIPTORS_CLUSTER = 3_072
"""Connections of 1,024 other nodes, as many of strangers, and those that go out."""

_LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")


def memory_limit(root: str | Path = "/") -> int:
    """Return the bytes of memory this process may use: the least of the machine and its cgroups.

    Reads cgroup v1 and v2, every ancestor included, below `root`. A limit that cannot be read is
    no limit; without any, the machine's memory counts.
    """
    base = Path(root)
    limits = [_machine_bytes(base)]
    for folder in _cgroup_folders(base):
        limits += [_number(_text(folder / name)) for name in _LIMIT_FILES]
        # Under v1 a container sees the limits of the ancestors only as this line.
        limits += [
            _number(line.split()[1])
            for line in _text(folder / "memory.stat").splitlines()
            if line.startswith("hierarchical_memory_limit ")
        ]
    known = [limit for limit in limits if limit]
    if not known:
        raise ConfigError(f"{base}/proc/meminfo says nothing of memory: set host.bytes")
    return min(known)


def resolve_host_bytes(settings: "Settings", limit: int) -> int:
    """Return the size of the arena under a memory `limit`, whole pages. Raises ConfigError."""
    asked = settings.host.bytes
    if asked == "auto":
        share = limit // HOST_SHARE
        whole = share // settings.host.segment_bytes * settings.host.segment_bytes
        return whole or max(share // PAGE_BYTES, 16) * PAGE_BYTES
    held = asked + (settings.nvme.cap_bytes if settings.nvme.path else 0)
    objects = min(settings.limits.objects_max, held // PAGE_BYTES)
    process = PROCESS_BYTES + OBJECT_BYTES * objects
    most = max(limit - process, 0) // PAGE_BYTES * PAGE_BYTES
    if asked > most:
        raise ConfigError(
            f"host.bytes = {asked} ({_gib(asked)}) is more than the {most} ({_gib(most)}) that "
            f"this process may take: the memory limit is {limit} ({_gib(limit)}), and the node "
            f"itself needs {_gib(process)} for {objects} objects. Lower host.bytes or "
            "limits.objects_max, or raise the cgroup's limit"
        )
    return asked


def descriptors_needed(settings: "Settings", arena: int) -> int:
    """Return how many open files a node may come to need; `arena`: those of its memory."""
    needed = DESCRIPTORS_BASE + DESCRIPTORS_PER_SESSION * settings.limits.sessions_max + arena
    if settings.nvme.path:
        needed += DESCRIPTORS_NVME
    if settings.cluster.name:
        needed += DESCRIPTORS_CLUSTER
    return needed


def raise_descriptor_limit(needed: int) -> int:
    """Raise this process's limit of open files as far as it may, and return it.

    Raises ConfigError when that is below `needed`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"this process may open {hard} files and needs up to {needed}: raise the hard limit "
            "(ulimit -Hn, LimitNOFILE=), or lower limits.sessions_max, or use larger segments"
        )
    return hard


def _machine_bytes(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups and of all their ancestors.

    A path that the mount does not show (another cgroup namespace) ends at the mount's own root.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = (mounts, mounts / "unified")
        elif "memory" in controllers.split(","):
            tops = (mounts / "memory", mounts / controllers)
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:
            inner = PurePosixPath()
        for top in tops:
            for part in (inner, *inner.parents):
                yield top / part


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int:
    """A limit file holds a number, or "max" for none."""
    found = text.strip()
    return int(found) if found.isdecimal() else 0


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
