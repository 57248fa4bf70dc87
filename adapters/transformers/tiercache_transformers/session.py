"""A transformers model that resumes from cached state.

A resumed run is bit for bit equal to an uninterrupted one only when both make the same calls: floating
point is not associative, and a prefill that is split elsewhere rounds elsewhere. So a prefill is
always cut at absolute multiples of `chunk_tokens` and at the two ends of the prompt, n - 1 and n,
whether or not there is a cache, and a resumed run makes exactly the calls that were left. A run that
resumes elsewhere (where another, shorter prompt ended) equals the run that went on from there.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from tiercache.client import Blob, Capture, Saved, Scope
from tiercache.errors import LayoutError, ProtocolError
from tiercache.state import Chain
from tiercache_transformers import hf
from tiercache_transformers.layout import Form
from tiercache_transformers.state import restore, take_blocks, take_states

_log = logging.getLogger(__name__)


class Resumable(Protocol):
    """What a client answers to `plan` and `load`; see `tiercache.client.Plan`."""

    @property
    def boundary(self) -> int:
        """Tokens that need not be computed."""
        ...

    @property
    def digest(self) -> bytes:
        """The chain's digest there."""
        ...

    @property
    def ready(self) -> bool:
        """Whether all of it is in host memory."""
        ...

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Token counts worth capturing."""
        ...

    @property
    def reason(self) -> str:
        """Why there is no more."""
        ...

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The objects, until the release."""
        ...

    @property
    def held(self) -> bool:
        """Whether the lease stood until now."""
        ...


PlanT = TypeVar("PlanT", bound=Resumable)


class StateClient(Protocol[PlanT]):
    """The calls of `tiercache.client.Client` that a session makes. None raises for a fault."""

    def plan(self, request: str, chain: Chain, *, scope: Scope) -> PlanT:
        """Say where a request can resume."""
        ...

    def load(self, plan: PlanT, *, wait_s: float) -> PlanT:
        """Wait for what is not in host memory."""
        ...

    def save(
        self, request: str, chain: Chain, blobs: Sequence[Blob], *, scope: Scope, parent: bytes
    ) -> Saved:
        """Offer objects."""
        ...

    def release(self, plan: PlanT) -> None:
        """Give the lease back."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How a session runs a model.

    `chunk_tokens`: tokens of one prefill call. `wait_s`: how long a prompt may wait for state that
    is not in host memory. `decode_end`: also save the state after the last generated token, which
    serves a conversation's next turn. `lora`, `salt`: see `tiercache.state.Namespace`.
    """

    chunk_tokens: int = 512
    wait_s: float = 1.0
    decode_end: bool = True
    lora: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError("chunk_tokens must be at least 1")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that has been run: `cache` holds all of it, `logits` [vocab] are the last token's.

    `reused` tokens came from the cache and the others were computed; `reason` says why no more were
    reused. `waited`: the state was not in host memory. `ttft_s` is the time until `logits` were
    there. `unfollowed` counts checkpoints that were advised where this run makes no cut.
    """

    request: str
    tokens: tuple[int, ...]
    cache: DynamicCache
    logits: torch.Tensor
    reused: int
    ttft_s: float
    waited: bool
    reason: str
    unfollowed: int
    saved: Saved | None

    @property
    def recomputed(self) -> int:
        """Tokens of the prompt that were computed."""
        return len(self.tokens) - self.reused


@dataclass(frozen=True, slots=True)
class Generated:
    """Greedy tokens after a prompt, and the logits [tokens, vocab] that each was chosen from."""

    prompt: Prefilled
    tokens: tuple[int, ...]
    logits: torch.Tensor
    saved: Saved | None


@dataclass(slots=True)
class _Start:
    """Where a prefill starts and what the node advised."""

    cache: DynamicCache
    boundary: int = 0
    digest: bytes = b""
    checkpoints: frozenset[int] = frozenset()
    waited: bool = False
    reason: str = ""


@dataclass(slots=True)
class _Run:
    """A prefill under way: the logits of its last call and what it captured."""

    logits: torch.Tensor
    captured: list[int] = field(default_factory=list)
    states: list[Blob] = field(default_factory=list)


def cuts(start: int, tokens: int, chunk_tokens: int) -> list[int]:
    """Return where the calls of a prefill of `tokens` tokens end that begins at `start`, ascending."""
    ends = {*range(chunk_tokens, tokens, chunk_tokens), tokens - 1, tokens}
    return sorted(end for end in ends if end > start)


class CachedModel(Generic[PlanT]):
    """Runs prompts on a model, resuming from and saving to a node. Not thread-safe.

    Without a client, or when the node is away, slow or refusing, everything is computed: no call
    raises because of the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        form: Form,
        client: StateClient[PlanT] | None,
        pace: Pace | None = None,
    ) -> None:
        self._model = model
        self._form = form
        self._client = client
        self._pace = pace or Pace()
        self._scope = Scope(
            lora=self._pace.lora,
            salt=self._pace.salt,
            capture=Capture(chunk_tokens=self._pace.chunk_tokens, grain=0),
        )

    def prefill(self, tokens: Sequence[int], request: str = "") -> Prefilled:
        """Run a prompt of at least one token. `request` is its id: retries of it share one."""
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        started = time.perf_counter()
        request = request or uuid.uuid4().hex
        chain = self._chain(tokens)
        start = self._start(request, chain)
        run = self._compute(tokens, start)
        ttft_s = time.perf_counter() - started
        if len(tokens) in start.checkpoints:
            self._capture(run, start.cache, len(tokens))
        saved = self._save(request, chain, start, run)
        return Prefilled(
            request=request,
            tokens=tuple(tokens),
            cache=start.cache,
            logits=run.logits,
            reused=start.boundary,
            ttft_s=ttft_s,
            waited=start.waited,
            reason=start.reason,
            unfollowed=len(start.checkpoints.difference(run.captured)),
            saved=saved,
        )

    def generate(self, tokens: Sequence[int], count: int, request: str = "") -> Generated:
        """Run a prompt and choose `count` tokens (at least one) greedily."""
        if count < 1:
            raise ValueError("nothing to generate")
        prompt = self.prefill(tokens, request)
        logits = [prompt.logits]
        chosen = [int(prompt.logits.argmax())]
        while len(chosen) < count:
            logits.append(hf.forward(self._model, chosen[-1:], prompt.cache))
            chosen.append(int(logits[-1].argmax()))
        saved = self._save_decode_end(prompt, chosen)
        return Generated(prompt, tuple(chosen), torch.stack(logits), saved)

    def _chain(self, tokens: Sequence[int]) -> Chain:
        return Chain(tokens, self._form.layout.block_tokens)

    def _start(self, request: str, chain: Chain) -> _Start:
        """Return the deepest state that the node has for the prompt, restored; empty without one."""
        if self._client is None:
            return _Start(hf.new_cache(self._model), reason="no client")
        plan = self._client.plan(request, chain, scope=self._scope)
        try:
            waited = plan.boundary > 0 and not plan.ready
            held = self._client.load(plan, wait_s=self._pace.wait_s) if waited else plan
            advice = frozenset(plan.checkpoints + held.checkpoints)
            start = self._restored(held)
        finally:
            self._client.release(plan)
        start.checkpoints = frozenset(end for end in advice if end > start.boundary)
        start.waited = waited
        return start

    def _restored(self, plan: PlanT) -> _Start:
        empty = _Start(hf.new_cache(self._model), reason=plan.reason)
        if not plan.boundary:
            return empty
        try:
            cache = restore(self._model, self._form, plan.boundary, plan.blobs)
        except (LayoutError, ProtocolError) as error:
            _log.warning("what the node returned does not fit; computing instead: %s", error)
            empty.reason = f"does not fit: {error}"
            return empty
        if not plan.held:
            empty.reason = "the lease was lost while its bytes were copied"
            return empty
        return _Start(cache, plan.boundary, plan.digest, reason=plan.reason)

    def _compute(self, tokens: Sequence[int], start: _Start) -> _Run:
        """Run the calls that are left; capture at advised cuts but the last, after which time counts."""
        run = _Run(torch.empty(0))
        begin = start.boundary
        for end in cuts(begin, len(tokens), self._pace.chunk_tokens):
            run.logits = hf.forward(self._model, list(tokens[begin:end]), start.cache)
            if end in start.checkpoints and end < len(tokens):
                self._capture(run, start.cache, end)
            begin = end
        return run

    def _capture(self, run: _Run, cache: DynamicCache, end: int) -> None:
        run.captured.append(end)
        run.states += take_states(cache, self._form, end)

    def _save(self, request: str, chain: Chain, start: _Start, run: _Run) -> Saved | None:
        if self._client is None or not run.captured:
            return None
        blobs = [*self._blocks(start.cache, start.boundary, run.captured), *run.states]
        return self._client.save(request, chain, blobs, scope=self._scope, parent=start.digest)

    def _save_decode_end(self, prompt: Prefilled, chosen: list[int]) -> Saved | None:
        """Save after the last token that the model has seen; the last chosen one it has not."""
        seen = (*prompt.tokens, *chosen[:-1])
        if self._client is None or not self._pace.decode_end or len(chosen) < 2:
            return None
        blobs = [
            *self._blocks(prompt.cache, len(prompt.tokens), [len(seen)]),
            *take_states(prompt.cache, self._form, len(seen)),
        ]
        return self._client.save(
            prompt.request, self._chain(seen), blobs, scope=self._scope, parent=b""
        )

    def _blocks(self, cache: DynamicCache, held: int, boundaries: list[int]) -> list[Blob]:
        """Return the whole blocks after `held` tokens up to the last boundary, and partial ones."""
        size = self._form.layout.block_tokens
        first, last = held // size * size, max(boundaries) // size * size
        blobs = take_blocks(cache, self._form, first, last) if last > first else []
        for boundary in boundaries:
            if boundary % size:
                blobs += take_blocks(cache, self._form, boundary // size * size, boundary)
        return blobs
