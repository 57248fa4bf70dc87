"""A machine in a test's hands: commands wait until the test has them done, books are checked always.

For tests of single decisions, where `World` is for whole histories. No bytes are moved: a checksum is
the number of the job and the place in it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.limits import Limits, Retaining
from tiercache.core.machine import Machine
from tiercache.errors import Fault
from tiercache.state import NATIVE, Chain, Kind, Layout, Namespace, Part, Piece, Tensor
from tiercache.state.seats import RanksOf
from tiercache.testing.sim.watch import REQUESTS

PAGE = 4096
BLOCK = 4
Body = TypeVar("Body")
Work = TypeVar("Work")


def part(name: str, kind: Kind, window: int | None, block: int, units: int = 1) -> Part:
    """Return a part whose native objects are 8 bytes per unit, and per token if it has blocks."""
    tensor = Tensor("values", "int64", (units,), ("head",), 0 if units > 1 else None)
    return Part(name, kind, window, block, units, (tensor,))


def hybrid(units: int = 1) -> Layout:
    """Return a layout of attention rows in blocks of 4, a recurrent state, and a convolution state."""
    return Layout(
        (
            part("kv", Kind.KV, None, BLOCK),
            part("recurrent", Kind.RECURRENT, 1, 0, units),
            part("conv", Kind.CONV, 1, 0, units),
        ),
        BLOCK,
    )


def small(pages: int = 64, nvme_pages: int = 0) -> Limits:
    """Return limits with one host segment and NVMe segments of four pages. What is offered is kept."""
    return Limits(
        (pages * PAGE,),
        nvme_bytes=nvme_pages * PAGE,
        nvme_segment_bytes=4 * PAGE,
        retaining=Retaining(mode="dense", checkpoints_per_path_max=0),
    )


class Rig:
    """Hands events to a machine; keeps its answers, and its commands as `work`."""

    def __init__(self, limits: Limits | None = None, *, opened: bool = True) -> None:
        self.limits = limits or small()
        self.machine = Machine(self.limits)
        self.now = 100.0
        self.answers: dict[tuple[int, int], cm.ReplyBody] = {}
        self.work: list[cm.Command] = []
        self._numbers = 0
        if opened and self.limits.nvme_bytes:
            self.tell(ev.NvmeOpened({}, []))
            self.tell(ev.ScanEnded())

    def wall(self) -> float:
        """Return what the wall clock shows."""
        return 1e9 + self.now

    def number(self) -> int:
        """Return a number that was never used: of a call, or of a session."""
        self._numbers += 1
        return self._numbers

    def tell(self, event: ev.Event) -> list[cm.Command]:
        """Let the machine decide; return all it answered and commanded."""
        out = self.machine.handle(event, self.now, self.wall())
        for command in out:
            if isinstance(command, cm.Reply):
                name = (command.session, command.call)
                assert name not in self.answers, f"a second answer: {command}"
                self.answers[name] = command.body
            else:
                self.work.append(command)
        self.machine.check()
        return out

    def ask(self, event: ev.Event, kind: type[Body]) -> Body:
        """Return the answer to a request, which must come at once and be of that kind."""
        answer = self.later(event)
        assert isinstance(answer, kind), answer
        return answer

    def later(self, event: ev.Event) -> cm.ReplyBody | None:
        """Return the answer to a request; None when it does not come at once."""
        self.tell(event)
        assert isinstance(event, REQUESTS), event
        return self.answers.get((event.session, event.call))

    def take(self, kind: type[Work]) -> list[Work]:
        """Take all commands of one kind out of `work`, for the test to have them done."""
        taken: list[Work] = [command for command in self.work if isinstance(command, kind)]
        self.work = [command for command in self.work if not isinstance(command, kind)]
        return taken

    def run(self, fault: Fault | None = None) -> list[cm.Command]:
        """Have all work done, and the work that comes of it; return it. `fault`: how all of it fails."""
        done: list[cm.Command] = []
        while self.work:
            command = self.work.pop(0)
            done.append(command)
            outcome = outcome_of(command, fault)
            if outcome is not None:
                self.tell(outcome)
        return done

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick at its end if one is due."""
        self.now += seconds
        due = self.machine.wakeup()
        if due is not None and due <= self.now:
            self.tell(ev.Tick())

    def count(self, name: str, label: str = "") -> int:
        """Return a counter."""
        return self.machine.counters[name][label]

    def gauge(self, name: str, label: str = "") -> float:
        """Return a gauge."""
        return self.machine.gauges()[name][label]


def outcome_of(command: cm.Command, fault: Fault | None = None) -> ev.Event | None:
    """Return what comes of a command that is done, or that fails."""
    match command:
        case cm.Seal(job, objects):
            return ev.Sealed(job, [b"%8d%8d" % (job, at) for at in range(len(objects))])
        case cm.Store(job, objects):
            return ev.Stored(job, [fault] * len(objects))
        case cm.Fill(job, objects):
            return ev.Filled(job, [fault] * len(objects))
        case cm.Check(job, checks):
            return ev.Checked(job, [fault] * len(checks))
        case cm.Wipe(job, _):
            return ev.Wiped(job, fault)
        case _:
            return ev.TierFailed(fault) if fault is not None else None


class Client:
    """One session on a rig. `layout` and the rest are those it attaches with."""

    def __init__(self, rig: Rig, layout: Layout, *, ranks: int = 1, rank: int = 0) -> None:
        self.rig = rig
        self.layout = layout
        self.session = rig.number()
        self.ranks = ranks
        self.rank = rank
        self.namespace = Namespace.of(layout, model="m", weights="w", tokenizer="t")
        self.writer = "engine"
        self.write = True
        self.codecs: tuple[str, ...] = (NATIVE,)
        self.lora = ""
        self.salt = ""
        self.all_ranks = False
        self.reshard = False
        self.seats: list[RanksOf] = []
        self.planned: dict[str, tuple[int, bytes]] = {}

    def attach(self) -> "Client":
        """Attach; the node must accept. Return the client."""
        self.rig.ask(self.attaching(), cm.Accepted)
        return self

    def attaching(self) -> ev.Attached:
        """Return the event that attaches."""
        return ev.Attached(
            self.session,
            self.rig.number(),
            self.namespace,
            self.layout,
            self.ranks,
            self.rank,
            self.write,
            self.writer,
        )

    def chain(self, tokens: Iterable[int]) -> Chain:
        """Return the digests of tokens."""
        return Chain(list(tokens), self.layout.block_tokens)

    # --- saving

    def offers(
        self, chain: Chain, end: int, *, start: int = 0, parts: Sequence[str] = ()
    ) -> list[ev.Offer]:
        """Return offers of all that a boundary at `end` rests on, from `start` on, of this rank.

        `parts`: only these; all when empty.
        """
        found: list[ev.Offer] = []
        for index, each in enumerate(self.layout.parts):
            if parts and each.name not in parts:
                continue
            block = each.block_tokens
            ends = [end] if block == 0 else [*range(block, end + 1, block)]
            if block and end % block:
                ends.append(end)
            found.extend(self.offer(chain, index, stop) for stop in ends if stop > start)
        return found

    def offer(self, chain: Chain, index: int, end: int, codec: str = NATIVE) -> ev.Offer:
        """Return the offer of one object of this rank that ends at `end`."""
        each = self.layout.parts[index]
        shard = each.shards(self.ranks)[self.rank]
        block = each.block_tokens
        start = end - (end % block or block) if block else 0
        inside = end % chain.block_tokens
        base = chain.digests[end // chain.block_tokens] if inside else b""
        digest, nbytes = chain.digest_at(end), each.nbytes(end - start, shard)
        return ev.Offer(index, shard, codec, digest, base, start, end, nbytes, b"", 0)

    def reserve(self, request: str, offers: list[ev.Offer]) -> list[cm.Granted]:
        """Return the grants."""
        event = ev.ReserveAsked(
            self.session, self.rig.number(), request, self.lora, self.salt, offers
        )
        return self.rig.ask(event, cm.Reserved).grants

    def commit(self, grants: Iterable[cm.Granted]) -> None:
        """Commit what was granted."""
        tickets = [grant.ticket for grant in grants if grant.outcome == "granted"]
        self.rig.tell(ev.Committed(self.session, tickets))

    def save(self, request: str, offers: list[ev.Offer]) -> list[cm.Granted]:
        """Reserve, commit, and have sealed; other work waits on."""
        grants = self.reserve(request, offers)
        self.commit(grants)
        for seal in self.rig.take(cm.Seal):
            sealed = outcome_of(seal)
            assert sealed is not None
            self.rig.tell(sealed)
        return grants

    # --- planning

    def planning(
        self,
        request: str,
        chain: Chain,
        *,
        limit: int | None = None,
        tails: Sequence[ev.Tail] = (),
        capture: ev.Capture | None = None,
    ) -> ev.PlanAsked:
        """Return the event that plans. `limit`: the prompt's length minus one when None."""
        return ev.PlanAsked(
            self.session,
            self.rig.number(),
            request,
            self.lora,
            self.salt,
            list(chain.digests[1:]),
            len(chain),
            len(chain) - 1 if limit is None else limit,
            list(tails),
            self.codecs,
            capture or ev.Capture(0, 1),
            self.all_ranks,
            self.reshard,
            seats=self.seats,
        )

    def plan(
        self,
        request: str,
        chain: Chain,
        *,
        limit: int | None = None,
        tails: Sequence[ev.Tail] = (),
    ) -> cm.Planned:
        """Return the plan."""
        event = self.planning(request, chain, limit=limit, tails=tails)
        planned = self.rig.ask(event, cm.Planned)
        self.planned[request] = (planned.boundary, chain.digest_at(planned.boundary))
        return planned

    def loading(self, request: str, wait_s: float = 1.0) -> ev.LoadAsked:
        """Return the event that loads what `plan` returned last."""
        boundary, digest = self.planned.get(request, (0, b""))
        return ev.LoadAsked(
            self.session,
            self.rig.number(),
            request,
            self.lora,
            self.salt,
            boundary,
            digest,
            self.rig.now + wait_s,
        )

    def fetching(self, request: str, wanted: list[ev.Wanted], wait_s: float = 1.0) -> ev.FetchAsked:
        """Return the event that fetches."""
        until = self.rig.now + wait_s
        return ev.FetchAsked(
            self.session, self.rig.number(), request, self.lora, self.salt, wanted, until
        )

    def surveying(
        self, request: str, digests: Sequence[bytes], hold_s: float = 10.0
    ) -> ev.SurveyAsked:
        """Return the event that surveys a path."""
        until = self.rig.now + hold_s
        return ev.SurveyAsked(
            self.session,
            self.rig.number(),
            request,
            self.lora,
            self.salt,
            list(digests),
            self.codecs,
            until,
        )

    def survey(self, request: str, digests: Sequence[bytes], hold_s: float = 10.0) -> list[bytes]:
        """Return what is held along a path."""
        return self.rig.ask(self.surveying(request, digests, hold_s), cm.Surveyed).held

    def wanted(self, chain: Chain, index: int, end: int) -> ev.Wanted:
        """Return the name of one object of this rank."""
        shard = self.layout.parts[index].shards(self.ranks)[self.rank]
        return ev.Wanted(index, shard, NATIVE, chain.digest_at(end))

    def flushing(self, *, durable: bool = False, wait_s: float = 1.0) -> ev.FlushAsked:
        """Return the event that flushes."""
        return ev.FlushAsked(self.session, self.rig.number(), durable, self.rig.now + wait_s)

    def release(self, *requests: str) -> None:
        """Release requests."""
        self.rig.tell(ev.Released(self.session, list(requests)))

    def close(self, *, acknowledged: bool = True) -> None:
        """End the session."""
        self.rig.tell(ev.Closed(self.session, acknowledged))


def spans(pieces: Iterable[Piece | None]) -> list[tuple[int, int, int]]:
    """Return part, start and end of the pieces that are there, sorted."""
    return sorted((p.part, p.start, p.end) for p in pieces if p is not None)


# --- what many tests begin with

TOKENS = list(range(20))
ADMIN = 900
"""The session of an operator, which never attaches."""


def saved(client: Client, *ends: int, tokens: list[int] | None = None) -> None:
    """Save all that a boundary at each of these ends rests on."""
    chain = client.chain(tokens or TOKENS)
    for end in ends:
        client.save(f"save-{end}", client.offers(chain, end))


def boundary(client: Client, tokens: list[int] | None = None, limit: int | None = None) -> int:
    """Plan as a request of its own; release it; return its boundary."""
    request = f"ask-{client.rig.number()}"
    planned = client.plan(request, client.chain(tokens or TOKENS), limit=limit)
    client.release(request)
    return planned.boundary


def evict(rig: Rig, tier: str = "host") -> cm.Evicted:
    """Have an operator drop all that nobody uses from a tier."""
    return rig.ask(ev.EvictAsked(ADMIN, rig.number(), "", tier, 0), cm.Evicted)


def on_disk(client: Client, *ends: int) -> None:
    """Save, have it stored, and drop it from memory."""
    saved(client, *ends)
    client.rig.run()
    dropped = evict(client.rig)
    assert dropped.objects == client.rig.gauge("objects", "nvme")
    assert client.rig.gauge("objects", "host") == 0


def outcomes(grants: Iterable[cm.Granted]) -> Counter[str]:
    """Return how often each outcome came."""
    return Counter(grant.outcome for grant in grants)
