"""The scheduler's side, without vLLM: what to answer, what to load, what to save. Nothing here waits."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from time import monotonic

from tiercache.client import Scope
from tiercache.state import Chain
from tiercache_vllm.geometry import Geometry
from tiercache_vllm.memory import Failures
from tiercache_vllm.planning import Answer, Question, name_of
from tiercache_vllm.requests import (
    Asker,
    Blocks,
    Entry,
    Offer,
    Phase,
    Scheduled,
    Sequenced,
    Watcher,
)
from tiercache_vllm.saving import Saving
from tiercache_vllm.settings import Item, Job, Settings, tagged

ANSWER_S = 20.0
"""How long an answer is good: leases have a maximum age."""

AHEAD_MAX = 64
"""Requests that are planned before vLLM asks for them: a long queue must not hold leases."""

IDLE_S = 0.008
"""How long an engine that has nothing to compute waits for an answer that is due, once a step: it must
not spin, and a step for nothing costs more than the answer."""


class Scheduling:
    """The requests of one engine. One thread calls everything here."""

    def __init__(
        self,
        geometry: Geometry,
        settings: Settings,
        asker: Asker,
        *,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.geometry = geometry
        self.counts: Counter[str] = Counter()
        self._settings = settings
        self._asker = asker
        self._reads = settings.reads
        self._writes = settings.writes
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._saving = Saving(geometry, settings, self.counts, watcher)
        self._failures = Failures(settings.failure_s)
        self._loads: list[Job] = []
        self._doomed: set[str] = set()
        self._waited = False

    def __contains__(self, request: str) -> bool:
        return request in self._entries

    def arrived(self, request: Sequenced, question: Callable[[], Question]) -> None:
        """A request was added; the node is asked ahead of vLLM, within limits."""
        if len(self._entries) < AHEAD_MAX:
            self._entry(request, question)

    def matched(
        self, request: Sequenced, question: Callable[[], Question], computed: int
    ) -> int | None:
        """Return how many tokens after the `computed` ones can be loaded; None: ask again later."""
        entry = self._entry(request, question)
        if entry.phase in (Phase.RUNNING, Phase.LOADING):
            # Asked again after it was scheduled: preempted, or its load failed.
            if entry.failed:
                entry.phase, entry.computed = Phase.ANSWERED, computed
                entry.answered_at = self._clock()
                return 0
            self._ask(entry)
        answer = self._answer(entry)
        if answer is None and self._alone():
            self.idle()
            answer = self._answer(entry)
        if answer is None:
            return None
        entry.computed = computed
        if entry.failed or not self._reads or computed % self.geometry.block_tokens:
            return 0
        if answer.boundary <= computed:
            return 0
        if self._failures.holds(self._digest(answer, answer.boundary), self._clock()):
            self.counts["hits_left_alone"] += 1
            return 0
        return answer.boundary - computed

    def allocated(self, request: Sequenced, blocks: Blocks, external: int) -> None:
        """Blocks were allocated; `external` tokens are to be loaded into them."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        if external and entry.phase is Phase.ANSWERED and entry.answer is not None:
            entry.phase = Phase.LOADING
            entry.resumed = entry.computed + external
            self._load(entry, entry.answer, blocks)
            return
        if entry.phase is Phase.ANSWERED:
            entry.resumed = entry.computed
            if entry.answer is not None:
                entry.answer.release()
        entry.phase = Phase.RUNNING

    def sources(self, request: str, external: int) -> tuple[int, int]:
        """Return how many of the external tokens came from host memory, and how many from disk."""
        entry = self._entries.get(request)
        if entry is None or sum(entry.sources) != external:
            return external, 0
        return entry.sources

    def take_loads(self) -> tuple[tuple[Job, ...], frozenset[str]]:
        """Return the loads to begin, and the requests whose load cannot."""
        loads, doomed = tuple(self._loads), frozenset(self._doomed)
        self._loads.clear()
        self._doomed.clear()
        self._waited = False
        return loads, doomed

    def saves(
        self,
        scheduled: Iterable[Scheduled],
        offers: Mapping[str, Sequence[Offer]],
        blocks_of: Callable[[str], Blocks | None],
    ) -> tuple[Job, ...]:
        """Return what a step completes and is worth saving: pages that become full, states on offer.

        Offers of requests that are not in the step are dropped: their blocks may be anybody's.
        """
        jobs = []
        for one in scheduled:
            entry = self._entries.get(one.request)
            if entry is None or not self._writes or entry.refused:
                continue
            if one.start + one.count < entry.due and one.request not in offers:
                continue  # Most steps complete nothing.
            job = self._saving.job(entry, one, offers.get(one.request, ()), blocks_of)
            if job is not None:
                jobs.append(job)
        return tuple(jobs)

    def asked(self, request: str) -> tuple[Chain, Scope] | None:
        """Return what a request was asked by: the chain of its prompt, as its pages are saved."""
        entry = self._entries.get(request)
        answer = entry.answer if entry is not None else None
        if answer is None or answer.chain is None or answer.scope is None:
            return None
        return answer.chain, answer.scope

    def ended(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Loads ended, on every worker; `failed` ones are in `finished` too."""
        lost = set(failed)
        for request in {*finished, *lost}:
            entry = self._entries.get(request)
            if entry is None:
                continue
            answer = entry.answer
            if request in lost:
                self._lost(entry)
            elif answer is not None:
                self.counts["hit_tokens"] += entry.resumed - entry.computed
                self.counts["host_tokens"] += entry.sources[0]
                self.counts["nvme_tokens"] += entry.sources[1]
            if answer is not None:
                answer.release()

    def _lost(self, entry: Entry) -> None:
        """A load failed: this request computes, and what it computes is offered again."""
        entry.failed = True
        answer = entry.answer
        entry.saved = dict.fromkeys(entry.saved, 0)
        entry.due = 0
        if answer is not None and answer.chain is not None:
            self._failures.add(self._digest(answer, answer.boundary), self._clock())
            self._saving.forget(answer, answer.chain)
        entry.resumed = 0

    def unsaved(self, digests: Iterable[bytes]) -> None:
        """Objects that were handed over are not stored: they are offered again when they come by. Their
        digests are `tagged`."""
        for digest in digests:
            self._saving.unsaved(digest)

    def finished(self, request: str) -> None:
        """A request is over, however it ended."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        entry.release()
        if entry.answer is not None:
            advised = {end for end in entry.answer.advice if end > entry.resumed}
            self.counts["advice_unfollowed"] += len(advised - entry.offered)

    def idle(self) -> None:
        """Nothing is computed in this step: wait a moment for an answer that is due, unless it has
        waited already."""
        if self._waited:
            return
        due = [e.future for e in self._entries.values() if e.future is not None]
        if due:
            self._waited = True
            wait(due, IDLE_S, FIRST_COMPLETED)

    def reset(self) -> None:
        """Everything that was handed over counts as gone; answers that are out are void."""
        self._saving.clear()
        for entry in self._entries.values():
            if entry.phase in (Phase.ASKING, Phase.ANSWERED):
                entry.release()
                entry.answer = None
                self._ask(entry)
            else:
                # It began under what was reset, and saves nothing any more.
                entry.refused = True

    def _alone(self) -> bool:
        """Whether waiting holds up nobody: no request computes or loads."""
        busy = (Phase.RUNNING, Phase.LOADING)
        return not self._waited and all(e.phase not in busy for e in self._entries.values())

    def _entry(self, request: Sequenced, question: Callable[[], Question]) -> Entry:
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = Entry(request, question, Phase.ASKING)
            self._entries[request.request_id] = entry
            self._ask(entry)
        return entry

    def _ask(self, entry: Entry) -> None:
        entry.release()
        entry.phase = Phase.ASKING
        entry.answer = None
        entry.future = self._asker.ask(entry.question())
        self.counts["questions"] += 1

    def _answer(self, entry: Entry) -> Answer | None:
        """Return the answer, asking again when it has become old."""
        if entry.phase is Phase.ANSWERED and self._clock() - entry.answered_at > ANSWER_S:
            self._ask(entry)
        if entry.phase is Phase.ASKING:
            if entry.future is None or not entry.future.done():
                return None
            fault = entry.future.exception()
            entry.answer = Answer(f"refused: {fault}") if fault else entry.future.result()
            entry.future = None
            entry.phase = Phase.ANSWERED
            entry.answered_at = self._clock()
            self._learn(entry, entry.answer)
        return entry.answer

    def _learn(self, entry: Entry, answer: Answer) -> None:
        entry.chain = answer.chain
        entry.refused = answer.chain is None
        entry.saved = dict.fromkeys(range(len(self.geometry.layout.parts)), answer.boundary)
        entry.due = 0
        self.counts["hits" if answer.boundary else "misses"] += 1
        if answer.scope is not None and answer.scope.source:
            self.counts["handed_over"] += 1
            self.counts["handed_over_short"] += answer.short
        if entry.refused:
            self.counts["refused"] += 1
        elif answer.chain is not None and answer.scope is not None:
            self._saving.compare(answer)

    def _digest(self, answer: Answer, tokens: int) -> bytes:
        assert answer.chain is not None
        assert answer.scope is not None
        scope = answer.scope
        return tagged(answer.chain.digest_at(tokens), scope.lora, scope.salt)

    def _load(self, entry: Entry, answer: Answer, blocks: Blocks) -> None:
        host = max(0, min(answer.ready, entry.resumed) - entry.computed)
        entry.sources = (host, entry.resumed - entry.computed - host)
        items = self._items(answer, entry.computed, entry.resumed, blocks)
        request = entry.request.request_id
        if items is None or entry.resumed != answer.boundary or answer.scope is None:
            self.counts["loads_doomed"] += 1
            self._doomed.add(request)
            return
        scope = answer.scope
        chain = b""
        if self._settings.reshard and answer.chain is not None:
            blocks_in = entry.resumed // answer.chain.block_tokens
            chain = b"".join(answer.chain.digests[1 : blocks_in + 1])
        name = name_of(request)
        self._loads.append(Job(request, name, scope.lora, scope.salt, items, chain=chain))

    def _items(
        self, answer: Answer, computed: int, boundary: int, blocks: Blocks
    ) -> tuple[Item, ...] | None:
        """Return what has to be loaded and where to; None when there is no place for some of it."""
        assert answer.chain is not None
        items = []
        for at, part in enumerate(self.geometry.layout.parts):
            if part.is_snapshot:
                ends = range(boundary, boundary + 1)
            else:
                first = computed
                if part.window is not None:
                    first = max(computed, boundary - part.window * part.block_tokens)
                ends = range(first + part.block_tokens, boundary + 1, part.block_tokens)
            for end in ends:
                places = self._saving.places(at, end, blocks)
                if places is None:
                    return None
                items.append(Item(at, end, answer.chain.digest_at(end), places))
        return tuple(items)
