"""Every setting of a node, what it means and what it may be; the only reader of the environment.

Settings come from one TOML file, or are the defaults. A file with an unknown key, a wrong type or a
value that cannot work is refused as a whole: one error that names the file, the key and the fix.
`docs/config.md` is this file as a table: `document()`.
"""

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct, field

from tiercache.budget import PAGE_BYTES
from tiercache.errors import ConfigError
from tiercache.settings import Cluster, Events, Pool, Protection, Record, wrong
from tiercache.tables import describe, format_size, read, toml_text

KIB, MIB, GIB = 1024, 1024**2, 1024**3
NVME_SEGMENTS_MIN = 4
SOCKET_PATH_BYTES_MAX = 107  # The kernel's sun_path, less its final zero.
CONFIG_VARIABLE = "TIERCACHE_CONFIG"
CRASH_VARIABLE = "TIERCACHE_CRASH_AT"


def default_socket() -> str:
    """Return where a node of this user listens unless told otherwise."""
    uid = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if uid and runtime:
        return f"{runtime}/tiercache.sock"
    if not uid or os.access("/run/tiercache", os.W_OK):
        return "/run/tiercache/tiercache.sock"
    return f"/tmp/tiercache-{uid}/tiercache.sock"


class Node(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may talk to the node, and where."""

    socket: Annotated[
        str,
        Meta(
            description="Unix socket that clients connect to; its directory is made when missing. "
            "Only this user, root and `admin_uids` may connect. Beside it lies `<socket>.lock`, which "
            "stays after a stop and is harmless.",
            extra={
                "default": "`$XDG_RUNTIME_DIR/tiercache.sock`, for root or a service "
                "`/run/tiercache/tiercache.sock`, else `/tmp/tiercache-<uid>/tiercache.sock`"
            },
        ),
    ] = field(default_factory=default_socket)
    admin_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(
            description="User ids that may connect besides the node's own. With any of them the "
            "socket's mode is 0666, and the node itself refuses everybody else; the socket's "
            "directory must let them through."
        ),
    ] = ()
    log: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least serious message that is logged."),
    ] = "info"
    crash_at: Annotated[
        str,
        Meta(
            description="For tests only: the node kills itself with SIGKILL at this named point. "
            f"The environment variable `{CRASH_VARIABLE}` sets it too."
        ),
    ] = ""


class Host(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host tier: memory shared with the engines."""

    bytes: Annotated[
        Annotated[int, Meta(ge=16 * PAGE_BYTES)] | Literal["auto"],
        Meta(
            description="Size of the arena: all that this host gives, not per engine or rank. It "
            "counts as memory of the node's process. `auto` takes a quarter of what the cgroup "
            "(else the machine) allows; more than the cgroup allows is refused."
        ),
    ] = "auto"
    segment_bytes: Annotated[
        int,
        Meta(
            ge=PAGE_BYTES,
            description="The arena is made of segments of this size; no object is larger.",
        ),
    ] = GIB


class Nvme(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The NVMe tier: a directory on a local disk."""

    path: Annotated[
        str,
        Meta(
            description="Directory that one node owns and may fill. Absolute. Empty: no NVMe tier."
        ),
    ] = ""
    cap_bytes: Annotated[
        int,
        Meta(
            ge=NVME_SEGMENTS_MIN * PAGE_BYTES,
            description="Most space the directory ever takes, index included; at least "
            f"{NVME_SEGMENTS_MIN} segments.",
        ),
    ] = 64 * GIB
    segment_bytes: Annotated[
        int,
        Meta(
            ge=PAGE_BYTES,
            description="Size of one file of objects. A file takes its whole size at once, and space is "
            "given back in whole files.",
        ),
    ] = 256 * MIB
    write_back: Annotated[
        Literal["earned", "eager"],
        Meta(
            description="`earned`: objects go to disk once a second request has reached their "
            "prefix. `eager`: at once."
        ),
    ] = "earned"
    write_bytes_per_s: Annotated[
        int, Meta(ge=MIB, description="Most bytes written back per second.")
    ] = GIB
    read_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that read from the disk.")
    ] = 2
    sync: Annotated[
        bool,
        Meta(
            description="Make writes durable against loss of power, not only against the death of "
            "the process. Slower, and never needed for correctness: damage is a miss."
        ),
    ] = False
    pause_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=86_400,
            description="How long writing rests after the disk was full; reads go on.",
        ),
    ] = 5.0


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered of requests, and where checkpoints are taken."""

    sights_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Prefixes whose visits are remembered; the oldest are forgotten first.",
        ),
    ] = 262_144
    eviction: Annotated[
        Literal["auto", "index", "hyper", "marconi", "point-lru", "lru"],
        Meta(
            description="What goes first from memory ([policies](policies.md#eviction)). `index`: learned "
            "reuse, saved work and size. `hyper`: uses over age, likewise. `marconi`: as the paper. "
            "`point-lru`, `lru`: least recently used, by restore point or by object. `auto` runs "
            "`index` and `point-lru` on metadata and follows the one that saves more."
        ),
    ] = "auto"
    ghosts_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Boundaries whose reuse is remembered, held or not. Some 700 bytes each.",
        ),
    ] = 65_536
    tails_max: Annotated[
        int,
        Meta(ge=0, description="Boundaries inside one block that are remembered, newest first."),
    ] = 8
    retention: Annotated[
        Literal["marconi", "strict", "minimal", "interval", "chunk", "dense"],
        Meta(
            description="Which checkpoints are taken and stored ([policies](policies.md#retention)). "
            "`marconi`: prompt and decode ends at first sight, forks at the second. `strict`: all at "
            "their second sight. `minimal`: the prompt's last boundary before its end, and forks. "
            "`interval`, `chunk`: as `marconi`, and boundaries in between. `dense`: every block's end."
        ),
    ] = "marconi"
    retention_interval_tokens: Annotated[
        int,
        Meta(ge=1, description="Distance of the checkpoints that `interval` adds."),
    ] = 8192
    decode_interval_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="While decoding, checkpoints at multiples of it are stored too. 0: only the "
            "last one. `strict` and `minimal` take no notice of it.",
        ),
    ] = 0
    checkpoints_per_path_max: Annotated[
        int,
        Meta(
            ge=0,
            description="`interval`, `chunk` and `dense` add checkpoints to a prompt while its way "
            "holds fewer than these; the ends and forks do not count.",
        ),
    ] = 64
    prefill_tokens_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description="How fast engines compute the start of a prompt that do not say so when they "
            "attach. What comes from disk, other nodes or a pool more slowly is declined. 0: not known, "
            "nothing is.",
        ),
    ] = 0.0


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one node accepts. Beyond a limit it refuses or declines; it never grows."""

    frame_bytes_max: Annotated[
        int, Meta(ge=64 * KIB, le=GIB, description="Largest message on the socket.")
    ] = 16 * MIB
    batch_max: Annotated[int, Meta(ge=1, description="Objects named in one message.")] = 65_536
    sessions_max: Annotated[int, Meta(ge=1, description="Connections at one time.")] = 256
    namespaces_max: Annotated[int, Meta(ge=1, description="Namespaces known at one time.")] = 1_024
    objects_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Objects known at one time, in both tiers. Each takes about 1 KiB of the "
            "node's own memory, beside the arena.",
        ),
    ] = 262_144
    request_bytes_max: Annotated[
        int, Meta(ge=1, description="Longest request id, in bytes of UTF-8.")
    ] = 256
    leases_per_session_max: Annotated[
        int, Meta(ge=1, description="Objects that one session leases at one time.")
    ] = 1_048_576
    lease_s_max: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400,
            description="Age from which a lease counts as overdue, and others may store what a write "
            "reservation was made for. Bytes stay set aside until their owner is gone or has let "
            "go; a process that cannot be watched counts as gone this long after it disconnected.",
        ),
    ] = 60.0
    plans_max: Annotated[int, Meta(ge=1, description="Requests that hold leases at one time.")] = (
        65_536
    )
    write_back_queue_max: Annotated[
        int, Meta(ge=1, description="Objects waiting to be written to disk; more are dropped.")
    ] = 65_536
    evictions_per_reserve_max: Annotated[
        int, Meta(ge=1, description="Objects evicted to make room for one reservation.")
    ] = 4_096


class Metrics(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the node is observed."""

    bind: Annotated[
        str,
        Meta(
            description="`address:port` that serves `/metrics`, `/health` and `/ready` over HTTP. "
            "Port 0 takes a free one. Empty: not served."
        ),
    ] = "127.0.0.1:9411"


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one node."""

    node: Node = field(default_factory=Node)
    host: Host = field(default_factory=Host)
    nvme: Nvme = field(default_factory=Nvme)
    policy: Policy = field(default_factory=Policy)
    protection: Protection = field(default_factory=Protection)
    cluster: Cluster = field(default_factory=Cluster)
    pool: Pool = field(default_factory=Pool)
    events: Events = field(default_factory=Events)
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    record: Record = field(default_factory=Record)


def load(path: str | Path | None = None) -> Settings:
    """Return the settings in the TOML file at `path`, else in the file `TIERCACHE_CONFIG` names.

    With neither, the defaults. Raises ConfigError for anything that is not exactly right.
    """
    chosen = str(path) if path else os.environ.get(CONFIG_VARIABLE, "")
    settings = parse(_toml(chosen), chosen) if chosen else Settings()
    crash_at = os.environ.get(CRASH_VARIABLE, "")
    if crash_at:
        node = msgspec.structs.replace(settings.node, crash_at=crash_at)
        settings = msgspec.structs.replace(settings, node=node)
    return settings


def parse(raw: Mapping[str, object], source: str) -> Settings:
    """Return the settings that `raw`, a parsed TOML document, describes.

    `source` names the document in errors. Raises ConfigError.
    """
    settings = read(raw, Settings, source)
    _check(settings, source)
    return settings


def bind_address(bind: str) -> tuple[str, int] | None:
    """Return the host and port of an "address:port" text; None for "". Raises ValueError."""
    if not bind:
        return None
    host, _, port = bind.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) < 65_536):
        raise ValueError("write address:port, such as 127.0.0.1:9411 or [::1]:9411")
    return host.removeprefix("[").removesuffix("]"), int(port)


def document() -> str:
    """Return the reference of all settings as Markdown: `docs/config.md`."""
    lines = [
        "# Settings",
        "",
        "<!-- Made from tiercache/config.py by `make docs`. -->",
        "",
        "One TOML file, named by `tiercache serve --config FILE` or by the environment variable "
        f"`{CONFIG_VARIABLE}`. Every key has a default, so no file is needed. Sizes are numbers "
        'of bytes or texts such as `"512MiB"` and `"8GiB"`. An unknown key, a wrong type or a '
        "value that cannot work is refused before anything starts.",
        *describe(Settings),
    ]
    return "\n".join(lines) + "\n"


def _toml(path: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def _check(settings: Settings, source: str) -> None:
    """Refuse values that are fine by themselves and cannot work here or together."""
    node, host, nvme = settings.node, settings.host, settings.nvme

    def refuse(key: str, value: object, fix: str) -> NoReturn:
        raise ConfigError(f"{source}: {key} = {toml_text(value)}: {fix}")

    for key, name, none in (
        ("node.socket", node.socket, ""),
        ("nvme.path", nvme.path, ", or nothing for no NVMe tier"),
        ("record.path", settings.record.path, ", or nothing for no trace"),
    ):
        if "\0" in name:
            refuse(key, name, "leave the NUL character out")
        if not name.startswith("/") and (name or not none):
            refuse(key, name, f"write an absolute path{none}")
    if len(os.fsencode(node.socket)) > SOCKET_PATH_BYTES_MAX:
        refuse("node.socket", node.socket, f"use at most {SOCKET_PATH_BYTES_MAX} bytes")
    for key, size in (
        ("host.bytes", host.bytes),
        ("host.segment_bytes", host.segment_bytes),
        ("nvme.segment_bytes", nvme.segment_bytes),
    ):
        if isinstance(size, int) and size % PAGE_BYTES:
            near = size // PAGE_BYTES * PAGE_BYTES
            refuse(key, size, f"use a multiple of {PAGE_BYTES}, such as {near}")
    if nvme.cap_bytes < NVME_SEGMENTS_MIN * nvme.segment_bytes:
        largest = format_size(nvme.cap_bytes // NVME_SEGMENTS_MIN // PAGE_BYTES * PAGE_BYTES)
        least = format_size(NVME_SEGMENTS_MIN * nvme.segment_bytes)
        fix = f"raise it to {least} ({NVME_SEGMENTS_MIN} segments), or lower "
        refuse("nvme.cap_bytes", nvme.cap_bytes, f"{fix}nvme.segment_bytes to {largest}")
    for key, text, fix in wrong(
        settings.protection, settings.cluster, settings.events, settings.pool
    ):
        refuse(key, text, fix)
    try:
        bind_address(settings.metrics.bind)
    except ValueError as error:
        refuse("metrics.bind", settings.metrics.bind, str(error))


if __name__ == "__main__":
    sys.stdout.write(document())
