"""The scheduler's side as vLLM sees it: uncached until it knows what to call its objects."""

import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from tiercache.client import Client, Options
from tiercache.state import Namespace
from tiercache_vllm.events import Events
from tiercache_vllm.geometry import Geometry
from tiercache_vllm.handover import SOURCE, destination_of, source_of
from tiercache_vllm.identity import Adapter, Feature
from tiercache_vllm.naming import engine_name, namespace_of
from tiercache_vllm.planning import Planner, Question
from tiercache_vllm.pushing import Pusher
from tiercache_vllm.requests import Scheduled
from tiercache_vllm.scheduling import IDLE_S, Scheduling
from tiercache_vllm.settings import Job, Settings, Work
from tiercache_vllm.stats import ATTACHED
from tiercache_vllm.worker_side import Described
from tiercache_vllm.working import Report

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class SchedulerSide:
    """One engine."""

    def __init__(
        self, vllm_config: "VllmConfig", settings: Settings, kv_cache_config: "KVCacheConfig"
    ) -> None:
        self._config = vllm_config
        transfer = vllm_config.kv_transfer_config
        self._settings = msgspec.structs.replace(
            settings,
            reads=settings.reads and transfer.is_kv_consumer,
            writes=settings.writes and transfer.is_kv_producer,
        )
        self._caches = kv_cache_config
        self._began = monotonic()
        self._counts: Counter[str] = Counter()
        self._attached = False
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "tiercache: a request whose load fails will fail: set kv_load_failure_policy to "
                '"recompute" in --kv-transfer-config'
            )
        self._geometry: Geometry | None = None
        self._naming: Future[Namespace] | None = None
        self._names = ThreadPoolExecutor(1, thread_name_prefix="tiercache-names")
        self._namespace: Namespace | None = None
        self._planner: Planner | None = None
        self._pusher: Pusher | None = None
        self._destinations: dict[str, str] = {}
        self._scheduling: Scheduling | None = None
        self._events: Events | None = None
        self._off = ""
        self._epoch = ""

    def described(self, ranks: Sequence[Described]) -> None:
        """Workers told what they have. All of them hold the same, or nothing is cached."""
        if self._geometry is not None or self._off or not ranks:
            return
        forms = {(d.geometry.layout.fingerprint if d.geometry else "") for d in ranks}
        first = min(ranks, key=lambda d: d.rank)
        if len(forms) != 1 or first.geometry is None:
            self._give_up(first.why or "the ranks of this engine have different layouts")
            return
        self._geometry = first.geometry
        self._began = monotonic()
        self._naming = self._names.submit(
            namespace_of, self._config, first.geometry.layout, self._settings, first.facts
        )

    def arrived(self, request: "Request") -> None:
        """A request was added."""
        if (scheduling := self._ready()) is not None:
            scheduling.arrived(request, lambda: self._question(request))
        destination = destination_of(request.kv_transfer_params) if self._settings.writes else ""
        if destination is None:
            self._counts["destinations_ignored"] += 1
        elif destination:
            self._destinations[request.request_id] = destination

    def matched(self, request: "Request", computed: int) -> int | None:
        """See `Scheduling`."""
        scheduling = self._ready()
        if scheduling is None:
            waited = monotonic() - self._began > self._settings.naming_wait_s
            return 0 if self._off or waited else None
        return scheduling.matched(request, lambda: self._question(request), computed)

    def allocated(self, request: "Request", blocks: Sequence[Sequence[int]], external: int) -> None:
        """See `Scheduling`."""
        if self._scheduling is not None:
            self._scheduling.allocated(request, blocks, external)

    def sources(self, request: "Request", external: int) -> tuple[int, int]:
        """See `Scheduling`."""
        if self._scheduling is None:
            return external, 0
        return self._scheduling.sources(request.request_id, external)

    def step(self, output: "SchedulerOutput") -> tuple[Work, bool]:
        """Return what a step asks of the workers, and whether they shall describe themselves."""
        scheduling = self._scheduling
        if scheduling is None:
            if self._naming is not None and not output.num_scheduled_tokens:
                wait([self._naming], IDLE_S)
            return Work(), self._geometry is None and not self._off
        loads, doomed = scheduling.take_loads()
        saves: tuple[Job, ...] = ()
        state = output.kv_connector_block_state
        if state is not None and output.num_scheduled_tokens:
            saves = scheduling.saves(
                _scheduled(output), state.boundary_state_offloads, state.get_block_ids
            )
            self._push(scheduling, saves)
        idle = not output.num_scheduled_tokens
        if idle and not loads:
            scheduling.idle()
        return Work(self._namespace, loads, saves, doomed, idle), False

    def reported(self, report: Report) -> None:
        """A worker told what happened."""
        self._counts.update(report.counts)
        if self._scheduling is not None:
            self._scheduling.unsaved(report.unsaved)

    def ended(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """See `Scheduling`."""
        if self._scheduling is not None:
            self._scheduling.ended(finished, failed)

    def finished(self, request: str) -> dict[str, str] | None:
        """See `Scheduling`. Returns what a proxy should hand to the engine that goes on with the request:
        where it was prefilled, when this engine saves and knows what its node is called."""
        self._destinations.pop(request, None)
        if self._scheduling is None:
            return None
        self._scheduling.finished(request)
        if self._pusher is not None:
            self._pusher.over(request)
        named = self._settings.node and self._settings.writes
        return {SOURCE: self._settings.node} if named else None

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Return what routers should know."""
        return () if self._events is None else self._events.take()

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last look, and whether there is a node."""
        if self._pusher is not None:
            self._counts.update(self._pusher.take_counts())
        ours = self._scheduling.counts if self._scheduling is not None else None
        attached = self._planner is not None and self._planner.status == ATTACHED
        if not self._counts and not ours and attached == self._attached:
            return {}  # Most steps count nothing.
        counts, self._counts = self._counts, Counter()
        if ours is None:
            return dict(counts)
        counts.update(ours)
        ours.clear()
        if not any(counts.values()) and attached == self._attached:
            return {}
        self._attached = attached
        return {**{name: n for name, n in counts.items() if n}, ATTACHED: int(attached)}

    def reset(self) -> bool:
        """Nothing that was saved until now is found any more by this engine, whether or not the node
        can be reached to drop it."""
        self._epoch = uuid.uuid4().hex
        if self._planner is not None:
            self._planner.clear()
        if self._scheduling is not None:
            self._scheduling.reset()
        if self._events is not None:
            self._events.cleared()
        return True

    def close(self) -> None:
        """Stop."""
        self._names.shutdown(wait=False, cancel_futures=True)
        if self._pusher is not None:
            self._pusher.close()
        if self._planner is not None:
            self._planner.close()

    def _ready(self) -> Scheduling | None:
        if self._scheduling is None and self._naming is not None and self._naming.done():
            naming, self._naming = self._naming, None
            # Whatever went wrong, the engine serves.
            fault = naming.exception()
            if fault is None:
                self._open(naming.result())
            else:
                self._give_up(str(fault) or type(fault).__name__)
        return self._scheduling

    def _open(self, namespace: Namespace) -> None:
        assert self._geometry is not None
        parallel = self._config.parallel_config
        options = Options(
            ranks=parallel.tensor_parallel_size,
            write=False,
            name=engine_name(self._config),
            deadline_s=self._settings.deadline_s,
            retry_s=self._settings.retry_s,
        )
        client = Client(self._settings.socket, namespace, self._geometry.layout, options)
        grid = self._config.cache_config.prefix_cache_retention_interval or 0
        self._planner = Planner(client, self._geometry, self._settings, grid)
        self._pusher = Pusher(client, self._settings.source_wait_s)
        self._namespace = namespace
        _log.info(
            "tiercache: boundaries are multiples of %d tokens; parts %s; node %s; model %s",
            self._geometry.block_tokens,
            ", ".join(part.name for part in self._geometry.layout.parts),
            self._settings.socket,
            namespace.digest.hex()[:12],
        )
        events = self._config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            block = self._config.cache_config.block_size
            self._events = Events(self._geometry, self._caches, block)
        self._scheduling = Scheduling(
            self._geometry,
            self._settings,
            self._planner,
            watcher=self._events,
        )

    def _push(self, scheduling: Scheduling, saves: Iterable[Job]) -> None:
        """Have the nodes that requests name take what these steps complete."""
        if not self._destinations or self._pusher is None or self._geometry is None:
            return
        block = self._geometry.block_tokens
        for job in saves:
            destination = self._destinations.get(job.request)
            asked = scheduling.asked(job.request) if destination else None
            if not destination or asked is None:
                continue
            chain, scope = asked
            goal = (len(chain) - 1) // block * block
            if any(item.end <= goal for item in job.items):
                self._pusher.saving(job.request, chain, scope, destination, goal)

    def _give_up(self, why: str) -> None:
        self._off = why
        _log.error("tiercache: this engine runs uncached: %s", why)

    def _question(self, request: "Request") -> Question:
        lora = request.lora_request
        adapter = (
            Adapter(lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace)
            if lora is not None
            else None
        )
        # Embeddings given in place of tokens have no identity, and the tokens of a session that takes
        # more input may still change.
        unnamed = (
            request.prompt_embeds is not None
            or request.prompt_is_token_ids is not None
            or request.resumable
        )
        features = tuple(
            Feature(f.modality, f.identifier, f.mm_position.offset) for f in request.mm_features
        )
        limit = 0 if request.skip_reading_prefix_cache else request.num_tokens - 1
        # One that was preempted has tokens that were computed here and nowhere else.
        fresh = request.num_tokens == request.num_prompt_tokens
        wanted = fresh and self._settings.reads
        source = source_of(request.kv_transfer_params) if wanted else ""
        if source is None:
            self._counts["sources_ignored"] += 1
        return Question(
            request.request_id,
            list(request.all_token_ids),
            limit,
            request.cache_salt or "",
            self._epoch,
            adapter,
            None if unnamed else features,
            source or "",
        )


def _scheduled(output: "SchedulerOutput") -> Iterable[Scheduled]:
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.num_computed_tokens, counts[new.req_id])
    cached = output.scheduled_cached_reqs
    for request, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield Scheduled(request, start, counts.get(request, 0))
