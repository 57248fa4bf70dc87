"""This node as a member of its cluster: from the first word to the last."""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from tiercache.config import Settings
from tiercache.core import commands
from tiercache.core.cluster import events as ev
from tiercache.errors import ConfigError
from tiercache.registry.base import Member, Registry, View
from tiercache.registry.etcd import Etcd
from tiercache.registry.etcd_registry import EtcdRegistry
from tiercache.runtime.cluster.calls import Calls
from tiercache.runtime.cluster.carrying import Carrying
from tiercache.runtime.cluster.documents import PoolRow
from tiercache.runtime.cluster.flushed import Flushed
from tiercache.runtime.cluster.lender import Lender
from tiercache.runtime.cluster.links import Links, Times
from tiercache.runtime.cluster.operating import Answered, Operating
from tiercache.runtime.cluster.security import read_secret, security_of
from tiercache.runtime.cluster.sharing import Sharing
from tiercache.runtime.log import say
from tiercache.runtime.node import Node
from tiercache.settings import Cluster
from tiercache.tiers.base import Arena
from tiercache.transport.base import Limits
from tiercache.transport.handshake import End
from tiercache.transport.messages import PROTOCOL
from tiercache.transport.pool import Pool
from tiercache.transport.tcp import TcpTransport
from tiercache.wire import clustering

FRAME_BYTES_MIN = 8 << 20
"""A question names every block of a prompt, an answer every object."""

CONNECTIONS_MAX = 1_024
"""That others may open: two for each of them."""

NAME_FRAME_BYTES = 9
"""What one boundary takes in a summary, at most."""

STANDINGS_PER_TTL = 10
"""How often in its time to live a node says to itself how long it is a member."""


class Capacity(NamedTuple):
    """What the tiers of this node can hold, in bytes."""

    host: int
    nvme: int


class Service:
    """Keeps this node a member until it is cancelled.

    Summaries, flushes and membership come in here; what the machine wants of other nodes goes out.
    Everything runs on the loop's thread.
    """

    def __init__(
        self,
        settings: Settings,
        boot: str,
        capacity: Capacity,
        arena: Arena,
        node: Node,
    ) -> None:
        cluster = settings.cluster
        self._settings = cluster
        self._capacity = capacity
        self._arena = arena
        self._node = node
        self._boot = boot
        self._name = cluster.node or socket.gethostname()
        frame = max(FRAME_BYTES_MIN, NAME_FRAME_BYTES * cluster.boundaries_max)
        self._limits = Limits(frame_bytes_max=frame, connections_max=CONNECTIONS_MAX)
        self._transport = TcpTransport(End(self._name, security_of(cluster), self._limits))
        loop = asyncio.get_running_loop()
        self.calls = Calls(node.hear)
        self._carrying = Carrying(self.calls, Flushed(settings.nvme.path), self._stand)
        self._lender = Lender(arena, self.calls, loop.time, cluster.transfer_s_max)
        self._registry: Registry | None = None
        self._links: Links | None = None
        self._others: frozenset[str] = frozenset()
        self._sharing = Sharing(node.hear, node.machine.limits.protecting.shares_max)
        self._operating = Operating(cluster.name, self._name, cluster.ttl_s, node.machine)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Listen, join, and stay. Raises ConfigError when this node must not be a member."""
        cluster = self._settings
        etcd = _etcd(cluster)
        self._node.hear(self._carrying.load())
        listener = await self._transport.listen(cluster.listen, self._lender)
        member = Member(
            name=self._name,
            boot=self._boot,
            address=cluster.advertise or listener.address,
            protocols=(PROTOCOL, PROTOCOL),
            host_bytes=self._capacity.host,
            nvme_bytes=self._capacity.nvme,
        )
        try:
            self._registry = EtcdRegistry(etcd, member, cluster=cluster.name, ttl_s=cluster.ttl_s)
            say(logging.INFO, "in a cluster", cluster=cluster.name, node=self._name,
                address=member.address)  # fmt: skip
            await self._belong(self._registry)
        except* ConfigError as faults:
            raise faults.exceptions[0] from None
        finally:
            self._operating.close()
            self._tasks = None
            self._node.hear(ev.MembersSeen({}))
            if self._links is not None:
                await self._links.close()
            await listener.close()
            await etcd.close()

    async def _belong(self, registry: Registry) -> None:
        cluster = self._settings
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._links = Links(
                self._arena,
                self._node.hear,
                partial(Pool, self._transport),
                tasks,
                Times(cluster.answer_s_max, cluster.transfer_s_max),
                self._limits.batch_max,
            )
            self._node.reach_with(self._links.execute)
            tasks.create_task(registry.run(partial(self._changed, registry, tasks)))
            tasks.create_task(self._gossip(self._links))
            tasks.create_task(self._go_on_standing())
            self._operating.open(registry, tasks)

    def answered(self, reply: commands.Reply) -> None:
        """The machine answers a session from `PEERS` down."""
        self.calls.answered(reply)

    def ask(self, message: clustering.Request, done: Answered) -> None:
        """Answer an operator's question about the cluster, now or later."""
        self._operating.ask(message, done)

    def carry(self, flushes: Mapping[str, int]) -> None:
        """Carry out flushes that the pool knows of; what cannot be begun now is heard of again."""
        if self._registry is not None and self._tasks is not None:
            self._carrying.heard(flushes, self._registry, self._tasks)
            self._stand()

    def tells_of(self, pool: Callable[[], PoolRow]) -> None:
        """Tell operators of the pool too."""
        self._operating.pool = pool

    # --- who is there

    def _changed(self, registry: Registry, tasks: asyncio.TaskGroup, view: View) -> None:
        others = {
            name: member
            for name, member in view.members.items()
            if name != self._name and member.protocols[0] <= PROTOCOL <= member.protocols[1]
        }
        assert self._links is not None
        self._links.meet(others)
        self._node.hear(ev.MembersSeen({name: member.boot for name, member in others.items()}))
        for name in self._others - others.keys():
            self._lender.left(name)
        self._others = frozenset(others)
        self._sharing.heard(view.shares)
        # First what others count on, then the word that it is done.
        self._carrying.heard(view.flushes, registry, tasks)
        self._stand()

    async def _gossip(self, links: Links) -> None:
        """Ask every node what it could resume, again and again."""
        while True:
            links.gossip(self._node.machine.cluster.version_of)
            await asyncio.sleep(self._settings.summary_s)

    async def _go_on_standing(self) -> None:
        while True:
            self._stand()
            await asyncio.sleep(self._settings.ttl_s / STANDINGS_PER_TTL)

    def _stand(self) -> None:
        """Say how long this node is a member that has heard of every flush."""
        held = self._registry.held_until if self._registry is not None else 0.0
        self._node.hear(ev.StandingHeld(held if self._carrying.is_sure else 0.0))


def _etcd(cluster: Cluster) -> Etcd:
    if not cluster.etcd:
        raise ConfigError(
            "[cluster] etcd: name at least one base URL, for example http://10.0.0.1:2379"
        )
    password = ""
    if cluster.etcd_password_file:
        secret = read_secret(cluster.etcd_password_file, "[cluster] etcd_password_file")
        password = secret.decode()
    return Etcd(
        cluster.etcd,
        deadline_s=max(0.5, cluster.ttl_s / 3),
        user=cluster.etcd_user,
        password=password,
    )
