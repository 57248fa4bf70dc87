"""The plainest model of protection: what was asked of a node, and what it must not do then."""

from dataclasses import dataclass, field
from typing import TypeAlias

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core import guard_events
from tiercache.core.machine import Machine
from tiercache.state import Key, Layout, Namespace, Record, Shard

Name: TypeAlias = tuple[bytes, bytes, str, Shard, str]
Request: TypeAlias = tuple[bytes, str, str]


@dataclass(slots=True)
class Guard:
    """Raises AssertionError when a node stores what it must not, loses count, or passes a share.

    `remembers`: whether it has room to remember all requests that are not to be stored.
    """

    remembers: bool
    layout: Layout
    unstored: set[Request] = field(default_factory=set)
    ending: set[Name] = field(default_factory=set)
    offers: int = 0
    lowered: set[str] = field(default_factory=set)

    def restarted(self) -> None:
        """The node was started anew, and has forgotten what it was told."""
        self.unstored.clear()
        self.ending.clear()
        self.offers = 0
        self.lowered.clear()

    def found(self, event: ev.Found) -> None:
        """What lies on the disk was stored by requests that gave it no end."""
        self.ending.difference_update(_name(record.key) for record, _ in event.objects)

    def fetched(self, record: Record) -> None:
        """What another node gives away has no end."""
        self.ending.discard(_name(record.key))

    def lent(self, record: Record) -> None:
        """What has an end of its own is given to no other node, which would not know of it."""
        assert _name(record.key) not in self.ending, f"lent: {record}"

    def planned(self, asked: ev.PlanAsked, namespace: Namespace, writer: str) -> None:
        """A request may say that nothing of it is to be stored."""
        if not asked.care.store:
            self.unstored.add((namespace.digest, writer, asked.request))

    def reserved(
        self, asked: ev.ReserveAsked, answer: cm.ReplyBody, namespace: Namespace, writer: str
    ) -> None:
        """Offers are answered one by one, and none of a request that is not to be stored."""
        request = (namespace.digest, writer, asked.request)
        if not asked.care.store:
            self.unstored.add(request)
        if not isinstance(answer, cm.Reserved):
            return
        self.offers += len(answer.grants)
        outcomes = {grant.outcome for grant in answer.grants}
        if not asked.care.store or (self.remembers and request in self.unstored):
            assert outcomes <= {"do_not_store"}, f"stored against its will: {asked}"
            return
        for offer, grant in zip(asked.offers, answer.grants, strict=True):
            assert not grant.own or grant.outcome in {"granted", "full", "quota"}
            part = self.layout.parts[offer.part].name
            name = (namespace.digest, offer.digest, part, offer.shard, offer.codec)
            if grant.outcome == "granted" and asked.care.ttl_ms:
                self.ending.add(name)
            elif grant.outcome in {"granted", "held", "busy"} and not asked.care.ttl_ms:
                self.ending.discard(name)  # Somebody wants it to last.

    def stored(self, command: cm.Store) -> None:
        """What has an end of its own is not written to a disk, which would not know of it."""
        for record, _, _ in command.objects:
            assert _name(record.key) not in self.ending, f"written: {record}"

    def answered(
        self, asked: guard_events.SharesAsked | guard_events.PinsAsked, answer: cm.ReplyBody
    ) -> None:
        """Sums are within what was promised."""
        match answer:
            case cm.PinRows(rows, _, nbytes, nbytes_max):
                assert nbytes <= nbytes_max
                assert all(row.left_s > 0 for row in rows), "a pin that has ended"
            case cm.ShareRows(tenants=rows):
                if isinstance(asked, guard_events.SharesAsked) and asked.tenant:
                    self.lowered.add(asked.tenant)
                for row in rows:
                    within = row.taken["host"] <= row.allowed["host"] or row.host == 1
                    assert within or row.tenant in self.lowered, f"beyond its share: {row}"
            case _:
                pass

    def ended(self, machine: Machine) -> None:
        """Each offer had exactly one outcome, and no pin is left."""
        assert sum(machine.counters["reserves"].values()) == self.offers
        gauges = machine.gauges()
        for name in ("pins_open", "pinned_bytes", "pinned_objects"):
            assert not gauges[name][""], f"{name} without an owner"


def _name(key: Key) -> Name:
    return (key.namespace, key.digest, key.part, key.shard, key.codec)
