"""Settings: what is accepted, what is refused and with which words."""

import resource
from pathlib import Path

import msgspec
import pytest

from tiercache import budget, config
from tiercache.config import Host, Limits, Node, Nvme, Settings
from tiercache.errors import ConfigError
from tiercache.settings import Cluster
from tiercache.tables import format_size, parse_size

GIB = 1024**3


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on how it was started."""
    for name in (config.CONFIG_VARIABLE, config.CRASH_VARIABLE, "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "tiercache.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> str:
    """Return the words with which a file is refused, without its path."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as error:
        config.load(path)
    words = str(error.value)
    assert words.startswith(f"{path}: ")
    return words.removeprefix(f"{path}: ")


def test_no_file_gives_the_defaults_and_they_pass_every_check() -> None:
    assert config.load() == Settings() == config.parse({}, "nothing")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert config.load(write(tmp_path, "")) == Settings()


def test_a_whole_file(tmp_path: Path) -> None:
    text = """
        [node]
        socket = "/run/x/t.sock"
        admin_uids = [0, 1000]
        [host]
        bytes = "1.5GiB"
        segment_bytes = 1048576
        [nvme]
        path = "/var/lib/x"
        cap_bytes = "1TiB"
        write_back = "eager"
        sync = true
        pause_s = 2
        [limits]
        lease_s_max = 0.5
        [metrics]
        bind = ""
    """
    settings = config.load(write(tmp_path, text))
    assert settings.node.admin_uids == (0, 1000)
    assert settings.host == Host(bytes=3 * GIB // 2, segment_bytes=1024**2)
    assert settings.nvme.cap_bytes == 1024 * GIB
    assert (settings.nvme.sync, settings.nvme.pause_s) == (True, 2.0)
    assert settings.limits == Limits(lease_s_max=0.5)
    assert settings.metrics.bind == ""


def test_the_environment_names_the_file_and_an_argument_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCACHE_CONFIG", str(write(tmp_path, "[policy]\ntails_max = 3")))
    assert config.load().policy.tails_max == 3
    other = tmp_path / "other.toml"
    other.write_text("[policy]\ntails_max = 4")
    assert config.load(other).policy.tails_max == 4


def test_the_crash_point_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCACHE_CRASH_AT", "after-write")
    assert config.load() == Settings(node=Node(crash_at="after-write"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nvmee]", "unknown table [nvmee]: did you mean nvme?"),
        ("[zzz]", f"unknown table [zzz]; there are {', '.join(Settings.__struct_fields__)}"),
        ("host = 3", "host is a table: write [host] and its keys below it"),
        ("[host]\nbyte = 1", "unknown key host.byte: did you mean bytes?"),
        ("[host]\nsync = true", "unknown key host.sync: it belongs under [nvme]"),
        ("[host]\nqqqq = 1", "unknown key host.qqqq; there are bytes, segment_bytes"),
        ("[host]\nbytes = '8GB'", "host.bytes = \"8GB\": expected a size such as \"8GiB\", "
         "at least 64KiB, or \"auto\""),
        ("[host]\nbytes = -1", "host.bytes = -1: expected a size such as \"8GiB\", "
         "at least 64KiB, or \"auto\""),
        ("[host]\nbytes = 70000", "host.bytes = 70000: use a multiple of 4096, such as 69632"),
        ("[nvme]\nread_threads = 0",
         "nvme.read_threads = 0: expected a whole number, at least 1, at most 64"),
        ("[nvme]\npause_s = nan",
         "nvme.pause_s = nan: expected a number of seconds, at least 0.01, at most 86400"),
        ("[nvme]\npause_s = inf",
         "nvme.pause_s = inf: expected a number of seconds, at least 0.01, at most 86400"),
        ("[policy]\nprefill_tokens_per_s = -1",
         "policy.prefill_tokens_per_s = -1: expected a number, at least 0"),
        ("[policy]\nprefill_tokens_per_s = inf",
         "policy.prefill_tokens_per_s = inf: expected a number, at least 0"),
        ("[pool]\nkind = 's3'\ns3_bucket = 'b'\ns3_endpoint = 'minio:9000'",
         "pool.s3_endpoint = \"\": write http:// or https://, a host, a port, and no more"),
        ("[cluster]\nname = 'a b'",
         "cluster.name = \"a b\": expected at most 64 letters, digits, `_`, `.` and `-`"),
        ("[cluster]\nname = 'a'",
         "cluster.etcd = \"\": name at least one base URL, such as http://10.0.0.1:2379"),
        ("[cluster]\netcd = ['http://a:2379', 'b:2379']",
         "cluster.etcd = \"b:2379\": name at least one base URL, such as http://10.0.0.1:2379"),
        ("[cluster]\nlisten = ''",
         "cluster.listen = \"\": write host:port, [host]:port or unix:path"),
        ("[cluster]\nadvertise = 'gpu-7'",
         "cluster.advertise = \"gpu-7\": write host:port, [host]:port or unix:path"),
        ("[pool]\nkind = 'mooncake'\nmooncake_master = 'm'",
         "pool.mooncake_master = \"m\": write where Mooncake's master listens, as host:port"),
        ("[nvme]\nsync = 1", "nvme.sync = 1: expected true or false"),
        ("[nvme]\nwrite_back = 'lazy'",
         "nvme.write_back = \"lazy\": expected \"eager\" or \"earned\""),
        ("[nvme]\npath = 'cache'",
         "nvme.path = \"cache\": write an absolute path, or nothing for no NVMe tier"),
        ("[record]\npath = 'traces'",
         "record.path = \"traces\": write an absolute path, or nothing for no trace"),
        ("[node]\nsocket = ''", "node.socket = \"\": write an absolute path"),
        ("[policy]\nretention = 'lru'",
         "policy.retention = \"lru\": expected \"chunk\" or \"dense\" or \"interval\" or "
         "\"marconi\" or \"minimal\" or \"strict\""),
        ("[nvme]\ncap_bytes = '1GiB'\nsegment_bytes = '512MiB'",
         "nvme.cap_bytes = 1073741824: raise it to 2GiB (4 segments), "
         "or lower nvme.segment_bytes to 256MiB"),
        ("[node]\nadmin_uids = [1, -1]",
         "node.admin_uids = [1, -1]: expected a list, each a whole number, at least 0"),
        ('[node]\nsocket = "/a\\u0000b"',
         'node.socket = "/a\\u0000b": leave the NUL character out'),
        ("[node]\nsocket = 'x.sock'", "node.socket = \"x.sock\": write an absolute path"),
        ("[limits]\nbatch_max = true",
         "limits.batch_max = true: expected a whole number, at least 1"),
        ("[events]\nbind = '5557'",
         'events.bind = "5557": write tcp://address:port or ipc:///absolute/path'),
        ("[events]\nreplay_bind = 'ipc://here'",
         'events.replay_bind = "ipc://here": write tcp://address:port or ipc:///absolute/path'),
        ("[events]\nbind = 'tcp://*:5557'",
         'events.replay_bind = "": set bind and replay_bind, or neither'),
        ("[events]\nreplay_bind = 'tcp://[::1]:1'",
         'events.replay_bind = "tcp://[::1]:1": set bind and replay_bind, or neither'),
        ("[events]\nbind = 'tcp://*:1'\nreplay_bind = 'tcp://*:1'",
         'events.replay_bind = "tcp://*:1": name another place than bind'),
        ("[metrics]\nbind = '9411'", "metrics.bind = \"9411\": write address:port, such as "
         "127.0.0.1:9411 or [::1]:9411"),
    ],
)  # fmt: skip
def test_what_is_refused_says_how_to_mend_it(tmp_path: Path, text: str, words: str) -> None:
    assert refused(tmp_path, text) == words


def test_a_socket_path_longer_than_the_kernel_takes_is_refused(tmp_path: Path) -> None:
    longest = "/" + "s" * (config.SOCKET_PATH_BYTES_MAX - 1)
    assert config.parse({"node": {"socket": longest}}, "x").node.socket == longest
    assert refused(tmp_path, f"[node]\nsocket = '{longest}s'").endswith("use at most 107 bytes")


def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        config.load(tmp_path / "none.toml")
    assert refused(tmp_path, "[host").startswith("is not TOML: ")
    assert refused(tmp_path, f"x = {'[' * 5000}").startswith("is not TOML: ")
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        config.load(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("7B", 7), ("1KiB", 1024), ("1.5 MiB", 3 * 2**19), ("2TiB", 2**41)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "1GB", "1gib", "-1", "1.1B", "1e3", "0x10", "\u0661MiB"]
)
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_where_a_node_listens_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 1234)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert config.default_socket() == "/tmp/tiercache-1234/tiercache.sock"
    monkeypatch.setattr("os.access", lambda *_: True)
    assert config.default_socket() == "/run/tiercache/tiercache.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert Settings().node.socket == "/run/user/1234/tiercache.sock"
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert config.default_socket() == "/run/tiercache/tiercache.sock"


@pytest.mark.parametrize(
    ("bind", "address"),
    [
        ("", None),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9411", ("::1", 9411)),
        ("localhost:65535", ("localhost", 65_535)),
    ],
)
def test_where_metrics_are_served(bind: str, address: tuple[str, int] | None) -> None:
    assert config.bind_address(bind) == address


@pytest.mark.parametrize("bind", ["x", ":1", "x:", "x:65536", "x:-1", "x:²"])
def test_where_metrics_cannot_be_served(bind: str) -> None:
    with pytest.raises(ValueError, match="address:port"):
        config.bind_address(bind)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().host.bytes = 1  # type: ignore[misc]


def test_every_key_is_documented() -> None:
    text = config.document()
    for table in msgspec.structs.fields(Settings):
        assert f"## [{table.name}]" in text
        for key in msgspec.structs.fields(getattr(Settings(), table.name)):
            assert f"| `{key.name}` |" in text


# --- memory


def machine(root: Path, files: dict[str, str]) -> Path:
    """Lay out what the kernel would show below `root`."""
    for name, text in {"proc/meminfo": "MemTotal:       16777216 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert budget.memory_limit(machine(tmp_path, {})) == 16 * GIB


@pytest.mark.parametrize(
    "files",
    [
        {  # v2, the limit on the process's own cgroup
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/pod/memory.max": "max\n",
        },
        {  # v2, the limit on an ancestor
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{GIB}\n",
        },
        {  # v2, a throttle below the limit
            "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/pod/memory.high": f"{GIB}\n",
        },
        {  # v2 in a container: its own cgroup is the root of the mount
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
        },
        {  # v2 beside v1
            "proc/self/cgroup": "4:memory:/\n0::/pod\n",
            "sys/fs/cgroup/unified/pod/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        {  # v1
            "proc/self/cgroup": "9:cpu,cpuacct:/pod\n4:memory:/pod/app\n",
            "sys/fs/cgroup/memory/pod/app/memory.limit_in_bytes": f"{GIB}\n",
        },
        {  # v1 in a container whose path the mount does not show
            "proc/self/cgroup": "4:memory:/docker/0123\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        },
        {  # v1, the limit only visible as an ancestor's
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.stat": f"cache 5\nhierarchical_memory_limit {GIB}\n",
        },
    ],
)
def test_the_least_limit_counts(tmp_path: Path, files: dict[str, str]) -> None:
    assert budget.memory_limit(machine(tmp_path, files)) == GIB


def test_a_cgroup_above_the_machine_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": f"{64 * GIB}\n",
    }
    assert budget.memory_limit(machine(tmp_path, files)) == 16 * GIB


def test_a_machine_that_says_nothing_is_an_error_not_a_guess(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set host\.bytes"):
        budget.memory_limit(tmp_path)


def test_auto_takes_a_quarter_in_whole_segments() -> None:
    assert budget.resolve_host_bytes(Settings(), 17 * GIB) == 4 * GIB
    small = budget.resolve_host_bytes(Settings(), 3 * GIB + 5)
    assert small == 3 * GIB // 4 // 4096 * 4096


def test_a_size_the_memory_limit_does_not_allow_names_both() -> None:
    settings = Settings(host=Host(bytes=2 * GIB))
    assert budget.resolve_host_bytes(settings, 3 * GIB) == 2 * GIB
    with pytest.raises(ConfigError) as error:
        budget.resolve_host_bytes(settings, 2 * GIB)
    assert "2.00 GiB" in str(error.value)
    assert "1.62 GiB" in str(error.value)
    assert "Lower host.bytes" in str(error.value)


# --- descriptors


def test_descriptors_grow_with_sessions_and_what_the_arena_takes() -> None:
    settings = Settings(limits=Limits(sessions_max=10))
    base = budget.descriptors_needed(settings, 6)
    assert base == budget.DESCRIPTORS_BASE + 2 * 10 + 6
    disk = msgspec.structs.replace(settings, nvme=Nvme(path="/x", cap_bytes=GIB))
    assert budget.descriptors_needed(disk, 6) == base + budget.DESCRIPTORS_NVME
    member = msgspec.structs.replace(settings, cluster=Cluster(name="prod"))
    assert budget.descriptors_needed(member, 6) == base + budget.DESCRIPTORS_CLUSTER


def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert budget.raise_descriptor_limit(4096) == 4096
    assert set_to == [(4096, 4096)]
    with pytest.raises(ConfigError, match="may open 4096 files and needs up to 4097"):
        budget.raise_descriptor_limit(4097)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert budget.raise_descriptor_limit(10**9) == resource.RLIM_INFINITY


def test_tenants_are_named_by_their_digits(tmp_path: Path) -> None:
    """A salt is a secret: it is not to be written down."""
    assert "never write a salt down" in refused(
        tmp_path, '[protection]\nhost_shares = { "my secret" = 0.5 }'
    )
    assert "a table of names, each with a number, at least 0, at most 1" in refused(
        tmp_path, '[protection]\nnvme_shares = { "-" = 1.5 }'
    )
    loaded = config.load(
        write(tmp_path, '[protection]\nhost_shares = { "-" = 0.5, "0123abcd" = 0.25 }')
    )
    assert loaded.protection.host_shares == {"-": 0.5, "0123abcd": 0.25}
