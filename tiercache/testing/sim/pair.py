"""Machines that are nodes of one cluster, in a test's hands: nothing passes between them by itself.

No bytes are moved. What one node lends is compared with what the other one expects: an object that is
lent with another checksum than it was announced with is damaged.
"""

from math import inf

import msgspec

from tiercache.core.cluster import commands as cm
from tiercache.core.cluster import events as ev
from tiercache.core.commands import ReplyBody
from tiercache.core.limits import Clustering, Limits
from tiercache.errors import Fault
from tiercache.testing.sim.rig import Rig, small

CLUSTERED = Clustering(peers_max=8)
ANSWER_S = 1.0
HOLD_S = 30.0


def clustered(pages: int = 64, nvme_pages: int = 0, **changes: float) -> Limits:
    """Return limits of a node that has others. `changes` to how it deals with them."""
    clustering = msgspec.structs.replace(CLUSTERED, **changes)
    return msgspec.structs.replace(small(pages, nvme_pages), clustering=clustering)


class Nodes:
    """Rigs by name. `boots` says which start of each is running."""

    def __init__(self, **rigs: Rig) -> None:
        self.rigs = rigs
        self.boots = dict.fromkeys(rigs, "1")
        for name in rigs:
            self.meet(name)

    def meet(self, name: str) -> None:
        """Tell a node who else is there."""
        others = {other: boot for other, boot in self.boots.items() if other != name}
        self.rigs[name].tell(ev.MembersSeen(others))
        self.rigs[name].tell(ev.StandingHeld(inf))

    def gossip(self, source: str, *, whole: bool = True) -> None:
        """Tell all others what a node could resume."""
        rig, boot = self.rigs[source], self.boots[source]
        for name, other in self.rigs.items():
            if name != source:
                since = -1 if whole else other.machine.cluster.version_of(source)
                told = _answer(rig, ev.SummaryAsked(-1, rig.number(), since))
                assert isinstance(told, cm.Summarised)
                other.tell(
                    ev.PeerTold(
                        source, boot, told.version, told.whole, told.added, told.removed, since
                    )
                )

    def locate(self, name: str, fault: Fault | None = None) -> list[cm.Located]:
        """Have all that a node asks of others answered; return the answers that came at once."""
        answers = []
        for command in self.rigs[name].take(cm.Locate):
            answer = self.ask(name, command)
            if answer is not None:
                answers.append(answer)
                self.answer(name, command.job, answer, fault)
        return answers

    def ask(self, name: str, command: cm.Locate) -> cm.Located | None:
        """Bring a question to the node it is for; None when it does not answer at once."""
        rig = self.rigs[command.peer]
        asked = ev.LocateAsked(
            -1,
            rig.number(),
            name,
            command.request,
            command.namespace,
            command.digests,
            command.limit,
            command.whole,
            command.ranks,
            command.codecs,
            command.reshard,
            command.flush,
            rig.now + ANSWER_S,
            rig.now + HOLD_S,
            command.partial,
            command.first,
            command.stop,
            command.some,
        )
        answer = _answer(rig, asked)
        assert answer is None or isinstance(answer, cm.Located)
        return answer

    def answer(self, name: str, job: int, answer: cm.Located, fault: Fault | None = None) -> None:
        """Bring an answer back; with `fault`, the news that there is none."""
        boundary, records = (0, []) if fault else (answer.boundary, answer.records)
        self.rigs[name].tell(ev.LocateEnded(job, boundary, records, fault))

    def agree(self, name: str, fault: Fault | None = None) -> list[list[int]]:
        """Have the others asked what their ranks have, and their answers brought back; return those. With
        `fault`, the news that there is none."""
        answers = []
        for command in self.rigs[name].take(cm.Agree):
            ends = self.assent(name, command)
            answers.append(ends)
            self.rigs[name].tell(ev.AgreeEnded(command.job, [] if fault else ends, fault))
        return answers

    def assent(self, name: str, command: cm.Agree) -> list[int]:
        """Bring a question to the node it is for; return its answer, which comes at once."""
        call = self.assenting(name, command)
        ends = self.assented(command, call)
        assert ends is not None, "it asks others first"
        return ends

    def assenting(self, name: str, command: cm.Agree) -> int:
        """Bring a question to the node it is for; return the number of the call."""
        rig = self.rigs[command.peer]
        fields = msgspec.structs.asdict(command)
        for own in ("job", "peer", "boot", "wait_s"):
            del fields[own]
        asked = ev.AgreeAsked(
            session=-1,
            call=rig.number(),
            peer=name,
            deadline=rig.now + command.wait_s,
            until=rig.now + HOLD_S,
            **fields,
        )
        rig.tell(asked)
        return asked.call

    def assented(self, command: cm.Agree, call: int) -> list[int] | None:
        """Return what a node answered to such a call; None while it has not."""
        answer = self.rigs[command.peer].answers.get((-1, call))
        assert answer is None or isinstance(answer, cm.Agreed)
        return answer.ends if answer is not None else None

    def announce(self, name: str) -> list[tuple[cm.Announce, int]]:
        """Tell the others what a node wants them to take; return each with the number of its call."""
        told = []
        for command in self.rigs[name].take(cm.Announce):
            rig = self.rigs[command.peer]
            call = rig.number()
            rig.tell(
                ev.Announced(
                    -1,
                    call,
                    name,
                    command.request,
                    command.namespace,
                    command.digests,
                    command.limit,
                    command.ranks,
                    command.codecs,
                    command.reshard,
                    command.flush,
                    rig.now + command.wait_s,
                )
            )
            told.append((command, call))
        return told

    def taken(self, name: str, command: cm.Announce, call: int) -> int | None:
        """Bring the answer of a node that was told to take something; None when there is none yet."""
        answer = self.rigs[command.peer].answers.get((-1, call))
        if answer is None:
            return None
        assert isinstance(answer, cm.Taken)
        self.rigs[name].tell(ev.AnnounceEnded(command.job, answer.boundary, None))
        return answer.boundary

    def pull(self, name: str, fault: Fault | None = None) -> int:
        """Have all that a node fetches from others brought; return how many objects came."""
        count = 0
        for command in self.rigs[name].take(cm.Pull):
            faults: list[Fault | None] = [fault] * len(command.objects)
            if fault is None:
                faults = self.lent(command)
            count += sum(each is None for each in faults)
            self.rigs[name].tell(ev.Pulled(command.job, faults))
        return count

    def lent(self, command: cm.Pull) -> list[Fault | None]:
        """Have a node lend what another one fetches; return what becomes of each object."""
        rig, call = self.rigs[command.peer], self.rigs[command.peer].number()
        wanted = [(record.key, record.nbytes) for record, _ in command.objects]
        lent = _answer(rig, ev.LendAsked(-1, call, wanted))
        assert isinstance(lent, cm.Lent)
        faults: list[Fault | None] = []
        for (record, _), found in zip(command.objects, lent.objects, strict=True):
            if found is None:
                faults.append(Fault.MISSING)
            else:
                faults.append(None if found[2] == record.checksum else Fault.DAMAGED)
        rig.tell(ev.LoanOver(-1, call))
        return faults


def _answer(rig: Rig, asked: ev.SummaryAsked | ev.LocateAsked | ev.LendAsked) -> ReplyBody | None:
    """Return a node's answer to another one; None when it does not come at once."""
    rig.tell(asked)
    return rig.answers.get((asked.session, asked.call))
