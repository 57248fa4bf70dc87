"""A model's state on its whole way: active slot, checkpoint, arena, NVMe, and back into another slot.

Uses the Hugging Face adapter to run a model, the device tier with pools so small that the policy has to
demote, and a node that is killed in between. Needs the extra `transformers`.
"""

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from transformers import DynamicCache, PreTrainedModel

from tiercache.cli.admin import Admin
from tiercache.cli.documents import statistics_of
from tiercache.client import Blob, Client, Options, Scope
from tiercache.device import (
    ActivePool,
    Checkpoint,
    CheckpointPool,
    DeviceTier,
    DirectOutlet,
    Outward,
    Ownership,
    Policies,
    Prompt,
    Restored,
    Seat,
    codec_named,
    lane_for,
)
from tiercache.errors import TiercacheError
from tiercache.state import NATIVE, Chain, Layout, Namespace
from tiercache.testing.quality import Probe
from tiercache.testing.quality.scores import Logits
from tiercache.testing.recall import load_model
from tiercache_transformers.demo_processes import POLL_S, NodeProcess
from tiercache_transformers.identity import namespace_of
from tiercache_transformers.layout import Form, form_of
from tiercache_transformers.state import restore, take_blocks, take_states

ACTIVE_SLOTS: Final = 2
IDLE_SLOTS: Final = 3
HOST_BYTES_MAX: Final = 64 << 20
DEADLINE_S: Final = 30.0


class LostError(TiercacheError):
    """A state did not come back, so that nothing can be said of its quality."""


@dataclass(frozen=True)
class Subject:
    """A model with what the cache knows of it."""

    name: str
    model: PreTrainedModel
    form: Form
    namespace: Namespace

    @classmethod
    def load(cls, name: str) -> "Subject":
        """Return one of the recall models."""
        model = load_model(name)
        form = form_of(model)
        return cls(name, model, form, namespace_of(model, form.layout, "token ids", name=name))

    @property
    def layout(self) -> Layout:
        """The model's layout."""
        return self.form.layout

    @torch.no_grad()
    def run(self, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Run tokens on top of `cache`, in one call; return logits `[tokens, vocabulary]`."""
        ids = torch.tensor([list(tokens)], dtype=torch.long)
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        logits = output.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits

    def answer(self, probe: Probe, cache: DynamicCache) -> Logits:
        """Continue a probe from its boundary; return the logits of what is asked."""
        logits: Logits = self.run(probe.rest, cache)[list(probe.asked)].double().numpy()
        return logits


class Engine:
    """An engine process's view of one subject: a client and a device tier, in one codec."""

    def __init__(self, subject: Subject, socket: Path, codec: str) -> None:
        self._subject = subject
        self._scope = Scope(salt=codec, codecs=tuple(dict.fromkeys((codec, NATIVE))))
        options = Options(name=f"quality-{codec}", deadline_s=DEADLINE_S, required=True)
        self.client = Client.attach(socket, subject.namespace, subject.layout, options=options)
        seat = Seat(subject.layout)
        active = ActivePool(seat, ACTIVE_SLOTS)
        self.outlet = DirectOutlet(self.client)
        self.tier = DeviceTier(
            Ownership(active, CheckpointPool(seat, codec_named(codec), IDLE_SLOTS)),
            lane_for(active.store.device),
            Policies.named("least_recent"),
            self.outlet,
            namespace=subject.namespace,
            host_bytes_max=HOST_BYTES_MAX,
        )

    def prompt(self, request: str, chain: Chain) -> Prompt:
        """Return a request of this engine."""
        return Prompt(request, chain, self._scope)

    def keep(
        self, request: str, chain: Chain, cache: DynamicCache, boundary: int, rounded: int = 0
    ) -> None:
        """Take the state at `boundary` into an active slot and keep a checkpoint of it; its KV goes to
        the node at once, the checkpoint when the policy says so.

        `rounded`: how often the state in the cache has been quantised.
        """
        form = self._subject.form
        states = [replace(blob, requantised=rounded) for blob in take_states(cache, form, boundary)]
        prompt = self.prompt(request, chain)
        found = self.tier.restore(prompt, boundary, states)
        if not isinstance(found, Restored):
            raise LostError(f"{request}: no slot for a state: {found}")
        kept = self.tier.keep(found.run, prompt, boundary)
        if not isinstance(kept, Checkpoint):
            raise LostError(f"{request}: no checkpoint: {kept}")
        self.tier.owner.clear(found.run)
        self.save_blocks(prompt, cache, boundary)

    def save_blocks(self, prompt: Prompt, cache: DynamicCache, boundary: int) -> None:
        """Give the KV of the first `boundary` tokens to the node."""
        blocks = take_blocks(cache, self._subject.form, 0, boundary)
        saved = self.client.save(prompt.request, prompt.chain, blocks, scope=prompt.scope)
        if saved.declined:
            raise LostError(f"{prompt.request}: the node declined KV: {dict(saved.declined)}")

    def drain(self) -> None:
        """Move every checkpoint to the node, and wait until all is on NVMe."""
        while self.tier.make_room():
            pass
        done = self.client.flush(durable=True, wait_s=DEADLINE_S)
        outcomes = dict(+self.outlet.outcomes)
        if done.waiting or done.lost or done.reason or outcomes.keys() - {"stored", "held"}:
            raise LostError(f"the node did not store everything: {done}, {outcomes}")

    def fetch(self, request: str, chain: Chain, boundary: int) -> DynamicCache:
        """Return a cache at `boundary`, its states through the device tier."""
        plan = self.client.plan(request, chain, limit=boundary, scope=self._scope)
        try:
            plan = self.client.load(plan, wait_s=DEADLINE_S)
            if plan.boundary != boundary:
                raise LostError(f"{request}: {plan.boundary} of {boundary} tokens: {plan.reason}")
            parts = {part.name: part.is_snapshot for part in self._subject.layout.parts}
            states = [blob for blob in plan.blobs if parts[blob.part]]
            blocks = [blob for blob in plan.blobs if not parts[blob.part]]
            native = self._through(request, chain, boundary, states)
            return restore(
                self._subject.model, self._subject.form, boundary, [*map(_whole, blocks), *native]
            )
        finally:
            self.client.release(plan)

    def _through(
        self, request: str, chain: Chain, boundary: int, states: Sequence[Blob]
    ) -> list[Blob]:
        """Restore into a fresh active slot; return what is in it, native, in memory of its own."""
        found = self.tier.restore(self.prompt(request, chain), boundary, states)
        if not isinstance(found, Restored):
            raise LostError(f"{request}: no slot for a state: {found}")
        copy = self.tier.export(found.run, boundary)
        if not isinstance(copy, Outward):
            raise LostError(f"{request}: no copy of a slot: {copy}")
        copy.wait()
        native = [_own(blob) for blob in copy.blobs()]
        copy.close()
        self.tier.owner.clear(found.run)
        return native


@dataclass(frozen=True)
class Answers:
    """Logits for every probe: of the uninterrupted run, and by codec."""

    exact: list[Logits]
    restored: Mapping[str, list[Logits]]


def measure(
    names: Sequence[str], codecs: Sequence[str], probes: Sequence[Probe]
) -> dict[str, Answers]:
    """Return the logits of every probe on each model, in each codec, after the whole way."""
    torch.set_num_threads(1)  # More threads sum in another order from one call to the next.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    subjects = [Subject.load(name) for name in names]
    with _node() as node:
        exact = {subject.name: _store(subject, node.socket, codecs, probes) for subject in subjects}
        node.kill()
        node.start()
        _wait_for_disk(node)
        return {
            subject.name: Answers(
                exact[subject.name],
                {codec: _answers(subject, node.socket, codec, probes) for codec in codecs},
            )
            for subject in subjects
        }


def _store(
    subject: Subject, socket: Path, codecs: Sequence[str], probes: Sequence[Probe]
) -> list[Logits]:
    """Prefill every probe, keep its state in each codec, and go on without interruption."""
    engines = [Engine(subject, socket, codec) for codec in codecs]
    exact = []
    for number, probe in enumerate(probes):
        cache = DynamicCache(config=subject.model.config)
        subject.run(probe.context, cache)
        for engine in engines:
            chain = Chain((*probe.context, *probe.rest), subject.layout.block_tokens)
            engine.keep(f"probe-{number}", chain, cache, len(probe.context))
        exact.append(subject.answer(probe, cache))
    for engine in engines:
        engine.drain()
        engine.client.close()
    return exact


def _answers(subject: Subject, socket: Path, codec: str, probes: Sequence[Probe]) -> list[Logits]:
    engine = Engine(subject, socket, codec)
    try:
        return [
            subject.answer(
                probe,
                engine.fetch(
                    f"again-{number}",
                    Chain((*probe.context, *probe.rest), subject.layout.block_tokens),
                    len(probe.context),
                ),
            )
            for number, probe in enumerate(probes)
        ]
    finally:
        engine.client.close()


@contextmanager
def _node() -> Iterator[NodeProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="tiercache-") as directory,  # Short: it holds a socket.
        NodeProcess(Path(directory), write_back="eager") as node,
    ):
        node.start()
        yield node


def _wait_for_disk(node: NodeProcess) -> None:
    """Return once the node knows all that is on its disk: until then a plan may be a miss."""
    until = time.monotonic() + DEADLINE_S
    with Admin(str(node.socket), DEADLINE_S) as admin:
        while statistics_of(admin.stats()).node.nvme != "ready":
            if time.monotonic() > until or not node.runs_for(POLL_S):
                raise LostError("the node did not read its disk in time")


def _own(blob: Blob) -> Blob:
    """Return a blob in memory of its own."""
    return Blob(blob.part, blob.end, memoryview(bytes(blob.data)), blob.start)


def _whole(blob: Blob) -> Blob:
    return Blob(blob.part, blob.end, blob.data, blob.start)
