"""Tables of settings that are long enough for a file of their own; `config.py` has the others."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

MIB, GIB = 1024**2, 1024**3
KEY_NAMESPACE_CHARS = 12
"""As in a key's text."""
NAME = r"^[\w.-]{0,64}$"
NAME_EXTRA = {"words": "at most 64 letters, digits, `_`, `.` and `-`"}


class Protection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept, and who may take how much: see [policies](policies.md#protection)."""

    pinned_share_max: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="The part of host memory that may be pinned. A pin beyond it is refused.",
        ),
    ] = 0.2
    pin_s_max: Annotated[
        float, Meta(ge=1, le=604_800, description="The longest time that one pin may last.")
    ] = 3600.0
    shared_share_max: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="The part of host memory set aside for prefixes that many requests share, when "
            "they would be evicted. 0: none.",
        ),
    ] = 0.1
    shared_sights_min: Annotated[
        int, Meta(ge=2, description="Requests from which on a prefix counts as shared by many.")
    ] = 8
    shared_s_max: Annotated[
        float,
        Meta(
            ge=1,
            description="What was set aside and not used for so long is evicted like all else.",
        ),
    ] = 3600.0
    tool_call_s_max: Annotated[
        float,
        Meta(ge=0, description="How long a session that waits for a tool is favoured."),
    ] = 300.0
    ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            le=31_536_000,
            description="How long objects last whose request does not say. 0: until they are evicted.",
        ),
    ] = 0.0
    ttl_s_of: Annotated[
        dict[str, Annotated[float, Meta(ge=0, le=31_536_000)]],
        Meta(
            description="The same for some namespaces, by the model's name or by at least "
            f"{KEY_NAMESPACE_CHARS} digits that the namespace's digest begins with.",
            extra={"default": "`{}`"},
        ),
    ] = field(default_factory=dict)
    host_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="The part of host memory that one tenant may take, unless `host_shares` names "
            "it. 1: all, and nothing is kept for it.",
        ),
    ] = 1.0
    nvme_share: Annotated[
        float,
        Meta(ge=0, le=1, description="The same for the NVMe tier, unless `nvme_shares` names it."),
    ] = 1.0
    host_shares: Annotated[
        dict[str, Annotated[float, Meta(ge=0, le=1)]],
        Meta(
            description="The part of host memory of some tenants, by the eight digits that "
            "`tiercache stats` shows of a tenant; `-` is everybody without a salt.",
            extra={"default": "`{}`"},
        ),
    ] = field(default_factory=dict)
    nvme_shares: Annotated[
        dict[str, Annotated[float, Meta(ge=0, le=1)]],
        Meta(
            description="The same for the NVMe tier.",
            extra={"default": "`{}`"},
        ),
    ] = field(default_factory=dict)

    def misnamed(self) -> Iterator[tuple[str, str]]:
        """Yield the keys and names of `host_shares` and `nvme_shares` that cannot be tenants."""
        for key, shares in (("host_shares", self.host_shares), ("nvme_shares", self.nvme_shares)):
            for name in shares:
                if not re.fullmatch(r"-|[0-9a-f]{8}", name):
                    yield key, name


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other nodes to share with: see [clusters](cluster.md). Without `name` the node is alone."""

    name: Annotated[
        str,
        Meta(
            pattern=NAME,
            extra=NAME_EXTRA,
            description="The cluster's name: nodes that have it in common share what they hold.",
        ),
    ] = ""
    node: Annotated[
        str,
        Meta(
            pattern=NAME,
            extra=NAME_EXTRA,
            description="This node's own name in the cluster, the same after a restart. Empty: the host's "
            "name.",
        ),
    ] = ""
    listen: Annotated[
        str,
        Meta(
            description="Address and port where other nodes connect. An address that is not of the "
            "loopback needs `key_file` or certificates."
        ),
    ] = "127.0.0.1:7411"
    advertise: Annotated[
        str,
        Meta(description="What the others dial instead of `listen`, for instance behind a proxy."),
    ] = ""
    etcd: Annotated[
        tuple[str, ...],
        Meta(
            description="Base URLs of the etcd that says who is there. At least one in a cluster."
        ),
    ] = ()
    etcd_user: Annotated[str, Meta(description="User of that etcd, if it asks for one.")] = ""
    etcd_password_file: Annotated[
        str, Meta(description="File that holds the user's password, and nothing else.")
    ] = ""
    ttl_s: Annotated[
        int,
        Meta(
            ge=1,
            le=3600,
            description="After so long without a word a node is gone for the others. A node that etcd does "
            "not hear serves nothing that is shared once this has passed.",
        ),
    ] = 10
    key_file: Annotated[
        str,
        Meta(
            description="File with the secret, 32 bytes or more, that all nodes of the cluster share."
        ),
    ] = ""
    ca_file: Annotated[
        str, Meta(description="Certificates of who signs those of the nodes (PEM).")
    ] = ""
    cert_file: Annotated[str, Meta(description="This node's certificate (PEM).")] = ""
    cert_key_file: Annotated[str, Meta(description="The key of that certificate (PEM).")] = ""
    summary_s: Annotated[
        float,
        Meta(ge=0.05, le=60, description="How often nodes tell each other what they could resume."),
    ] = 0.5
    answer_s_max: Annotated[
        float,
        Meta(
            gt=0,
            le=5,
            description="How long a plan or a survey waits at most for what other nodes say, however many "
            "are asked. Only prompts that some node has told it could resume wait at all, and those of an "
            "engine on several machines. Keep it well below the deadline of an engine's calls (0.5 s with "
            "the adapters).",
        ),
    ] = 0.05
    transfer_s_max: Annotated[
        float, Meta(gt=0, le=300, description="How long one batch of objects may be on its way.")
    ] = 10.0
    boundaries_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Boundaries that this node tells, and that it remembers of each other node; about "
            "100 bytes each.",
        ),
    ] = 65_536

    def wrong(self) -> tuple[str, str, str] | None:
        """Return a key, its value and the fix, when these cannot work."""
        for key, value in (("listen", self.listen), ("advertise", self.advertise)):
            if (value or key == "listen") and not re.fullmatch(r"unix:.+|\S+:\d{1,5}", value):
                return key, value, "write host:port, [host]:port or unix:path"
        for url in self.etcd if self.etcd or not self.name else ("",):
            if not re.fullmatch(r"https?://\S+", url):
                return "etcd", url, "name at least one base URL, such as http://10.0.0.1:2379"
        return None


class Pool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A store that many nodes share: see [the pool](cluster.md#a-pool). Without `kind` there is none."""

    kind: Annotated[
        Literal["", "mooncake", "s3"],
        Meta(
            description="`mooncake`: Mooncake Store, which needs the extra `mooncake`. `s3`: any object "
            "store that speaks S3 and knows conditional writes; needs the extra `s3`. Empty: no pool."
        ),
    ] = ""
    name: Annotated[
        str,
        Meta(
            pattern=NAME,
            extra=NAME_EXTRA,
            description="Whose objects these are: nodes share what they have put there under the same "
            "name. Empty: the cluster's name, `tiercache` without one.",
        ),
    ] = ""
    secret_file: Annotated[
        str,
        Meta(
            description="File with a secret, 16 bytes or more, that all nodes of the pool share. With it "
            "objects of strangers are not taken for those of these nodes."
        ),
    ] = ""
    answer_s_max: Annotated[
        float,
        Meta(
            gt=0,
            le=30,
            description="How long a plan waits at most for what the pool says. Only prompts that it is "
            "known to hold wait at all. Keep it well below the deadline of an engine's calls (0.5 s with "
            "the adapters): a plan that is answered later is a miss, and makes the node look silent.",
        ),
    ] = 0.2
    transfer_s_max: Annotated[
        float, Meta(gt=0, le=300, description="How long one batch of objects may take to come.")
    ] = 10.0
    deposit_s_max: Annotated[
        float, Meta(gt=0, le=3600, description="How long a boundary may take on its way there.")
    ] = 60.0
    deposit_share_max: Annotated[
        float,
        Meta(
            gt=0,
            le=0.9,
            description="The part of host memory that may be on its way there at one time. A boundary "
            "that takes more stays here.",
        ),
    ] = 0.25
    deposit_bytes_per_s: Annotated[
        int, Meta(ge=MIB, description="At most so many bytes per second go there, on average.")
    ] = GIB
    resumes_min: Annotated[
        int,
        Meta(ge=1, description="A boundary goes there when it was resumed so many times here."),
    ] = 2
    refresh_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description="How often one looks what others have put there, and whether they have flushed. "
            "Costs about a dozen small requests for each namespace.",
        ),
    ] = 2.0
    boundaries_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Boundaries that are remembered of it, for each namespace.",
        ),
    ] = 65_536
    mooncake_master: Annotated[
        str,
        Meta(description="`host:port` of Mooncake's master, or `etcd://...` where it is elected."),
    ] = ""
    mooncake_host: Annotated[
        str, Meta(description="This node's address as Mooncake's store processes reach it.")
    ] = "127.0.0.1"
    mooncake_protocol: Annotated[
        Literal["tcp", "rdma"], Meta(description="How Mooncake moves bytes.")
    ] = "tcp"
    mooncake_devices: Annotated[
        str, Meta(description="Network cards for `rdma`, separated by commas.")
    ] = ""
    mooncake_replicas: Annotated[
        int, Meta(ge=1, le=8, description="Store processes that keep each object.")
    ] = 1
    s3_bucket: Annotated[str, Meta(description="The bucket; it must be there.")] = ""
    s3_endpoint: Annotated[
        str, Meta(description="Base URL of the server. Empty: Amazon's own in `s3_region`.")
    ] = ""
    s3_region: Annotated[str, Meta(description="Region of the bucket.")] = "us-east-1"
    s3_prefix: Annotated[
        str, Meta(description="What all names begin with: words with slashes between them.")
    ] = "tiercache"
    s3_access_key_file: Annotated[
        str,
        Meta(
            description="File that holds the id of the access key. Empty: credentials are looked for as "
            "Amazon's tools do."
        ),
    ] = ""
    s3_secret_key_file: Annotated[str, Meta(description="File that holds its secret.")] = ""

    def wrong(self) -> tuple[str, str, str] | None:
        """Return a key, its value and the fix, when these cannot work."""
        master = r"[^\s/]+:\d{1,5}|etcd://\S+"
        if self.kind == "mooncake" and not re.fullmatch(master, self.mooncake_master):
            fix = "write where Mooncake's master listens, as host:port"
            return "mooncake_master", self.mooncake_master, fix
        if self.kind == "s3" and not self.s3_bucket:
            return "s3_bucket", "", "name a bucket"
        if self.s3_endpoint and not re.fullmatch(
            r"https?://[^\s/?#@]+(/[^\s?#]*)?", self.s3_endpoint
        ):
            return "s3_endpoint", "", "write http:// or https://, a host, a port, and no more"
        if bool(self.s3_access_key_file) != bool(self.s3_secret_key_file):
            return "s3_secret_key_file", self.s3_secret_key_file, "name both files, or neither"
        return None


class Events(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What routers hear of this node: see [routers](routers.md). Needs the extra `events`."""

    bind: Annotated[
        str,
        Meta(
            description="Where a ZMQ PUB socket tells which boundaries can be resumed here, as "
            "`tcp://127.0.0.1:5557` or `ipc:///run/tiercache/events`. Whoever can connect is told: keep "
            "it inside. Empty: nothing is told."
        ),
    ] = ""
    replay_bind: Annotated[
        str,
        Meta(
            description="Where a ZMQ ROUTER socket answers who missed something. Set both or neither."
        ),
    ] = ""
    interval_s: Annotated[
        float,
        Meta(
            ge=0.01,
            le=60,
            description="Changes are told together, so often, and who missed something is answered.",
        ),
    ] = 0.1

    def wrong(self) -> tuple[str, str, str] | None:
        """Return a key, its value and the fix, when these cannot work."""
        for key, value in (("bind", self.bind), ("replay_bind", self.replay_bind)):
            if value and not re.fullmatch(r"tcp://\S+:\d{1,5}|ipc:///[^\0]+", value):
                return key, value, "write tcp://address:port or ipc:///absolute/path"
        if bool(self.bind) != bool(self.replay_bind):
            return "replay_bind", self.replay_bind, "set bind and replay_bind, or neither"
        if self.bind and self.bind == self.replay_bind:
            return "replay_bind", self.replay_bind, "name another place than bind"
        return None


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace of what the node is asked, for `tiercache replay`: times, lengths, and which blocks requests
    have in common. Neither tokens nor digests, names or salts."""

    path: Annotated[
        str,
        Meta(
            description="Directory for traces, made when missing. Each start writes a file of its own for "
            "each size of blocks, for the node's user only. Absolute. Empty: nothing is recorded."
        ),
    ] = ""
    bytes_max: Annotated[
        int, Meta(ge=65_536, description="Recording ends when one start has written so much.")
    ] = 268_435_456


def wrong(
    protection: Protection, cluster: Cluster, events: Events, pool: Pool
) -> Iterator[tuple[str, str, str]]:
    """Yield the keys, values and fixes of what cannot work in tables that check themselves."""
    for key, tenant in protection.misnamed():
        fix = "name tenants by eight hexadecimal digits, or -; never write a salt down"
        yield f"protection.{key}", tenant, fix
    for table, found in (
        ("cluster", cluster.wrong()),
        ("events", events.wrong()),
        ("pool", pool.wrong()),
    ):
        if found is not None:
            yield f"{table}.{found[0]}", found[1], found[2]
