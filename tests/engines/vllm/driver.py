"""One real engine in a process of its own, driven by JSON lines: orders come in, answers go out.

python driver.py '{"model": "qwen3next", "folder": "...", "socket": "..."}'
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypeAlias

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # The engine writes to its standard output as it likes.

Theirs: TypeAlias = Any
"""An object of the engine."""


class Driven:
    """The engine, and what is done with it."""

    def __init__(self, order: dict[str, Any]) -> None:
        from tests.engines.vllm import models, shims

        name = order["model"]
        folder = Path(order["folder"])
        models.build(name, folder, order.get("seed", 0))
        if name in models.SHIMMED:
            shims.register()
        if name == "kimilinear":
            shims.kimi_linear()
        if order.get("guessing"):
            shims.guessing()
        from vllm import LLM

        settings: dict[str, Any] = {
            "model": str(folder),
            "dtype": "bfloat16" if name in models.BFLOAT16 else "float32",
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 1024,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": order.get("cache_bytes", 32 << 20),
            "seed": 0,
            "disable_log_stats": False,
            "load_format": "dummy" if name == "kimilinear" else "auto",
        }
        settings |= order.get("settings", {})
        if order.get("socket"):
            connector = {"socket": order["socket"], "naming_wait_s": 60.0}
            connector |= order.get("connector", {})
            if name == "kimilinear":
                connector.setdefault("weights", "made up by vLLM, seed 1234")
            settings["kv_transfer_config"] = {
                "kv_connector": "TierCacheConnector",
                "kv_connector_module_path": "tiercache_vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": connector,
                **order.get("transfer", {}),
            }
        if order.get("encoder"):
            settings["ec_transfer_config"] = {
                "ec_connector": "TierCacheECConnector",
                "ec_role": "ec_both",
                "ec_connector_module_path": "tiercache_vllm.ec_connector",
                "ec_connector_extra_config": {"socket": order["encoder"], "retry_s": 0.05},
            }
        self._llm = LLM(**settings)
        self._engine = self._llm.llm_engine
        self._number = 0
        self._hooks: Theirs = None
        self._events: list[Any] = []
        if not order.get("processes"):
            self._collect_events()

    def generate(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Run prompts together; return tokens, logprobs and what was cached for each.

        `abort`: by prompt, after how many steps it is aborted. `allowed`: the tokens that answers are of.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        plain = SamplingParams(
            temperature=0,
            max_tokens=order.get("tokens", 8),
            ignore_eos=True,
            logprobs=5,
            allowed_token_ids=order.get("allowed"),
        )
        names = []
        for prompt in order["prompts"]:
            self._number += 1
            name = f"{os.getpid()}-{self._number}"
            names.append(name)
            given: dict[str, Any] = {"prompt_token_ids": prompt["ids"]}
            if prompt.get("sound") is not None:
                given["multi_modal_data"] = {"audio": _sound(prompt["sound"])}
            if prompt.get("salt"):
                given["cache_salt"] = prompt["salt"]
            params = plain.clone()
            if prompt.get("handed") is not None:
                params.extra_args = {"kv_transfer_params": prompt["handed"]}
            lora = LoRARequest(*prompt["lora"]) if prompt.get("lora") else None
            self._engine.add_request(name, given, params, lora_request=lora)
        aborts = {names[int(at)]: steps for at, steps in order.get("abort", {}).items()}
        found: dict[str, dict[str, Any]] = {}
        began = time.monotonic()
        steps = 0
        while self._engine.has_unfinished_requests():
            for name, at in list(aborts.items()):
                if steps >= at:
                    self._engine.abort_request([name])
                    found[name] = {"aborted": True}
                    del aborts[name]
            for output in self._engine.step():
                if output.finished:
                    found[output.request_id] = _told(output, time.monotonic() - began)
            steps += 1
        return [found.get(name, {"aborted": True}) for name in names]

    def timed(self, order: dict[str, Any]) -> dict[str, float]:
        """Run prompts together; return how long it took: by the clock, and of processor time that of all
        threads (`cpu`) and of the engine's own (`engine`)."""
        clocks = {
            "wall": time.perf_counter,
            "cpu": time.process_time,
            "engine": time.thread_time,
        }
        began = {name: clock() for name, clock in clocks.items()}
        self.generate(order)
        return {name: clock() - began[name] for name, clock in clocks.items()}

    def hook(self, order: dict[str, Any]) -> bool:
        """Change what the hooks do."""
        from tests.engines.vllm import hooks

        if self._hooks is None:
            self._hooks = hooks.Hooks(self._worker())
        self._hooks.folder = Path(order.get("folder", "."))
        self._hooks.part = order.get("part", "")
        self._hooks.mode = order["mode"]
        return True

    def objects(self, order: dict[str, Any]) -> dict[str, str]:
        """Return the SHA-256 of every object that the node has of a prompt, by part and end."""
        import hashlib

        from tiercache.client import Scope, Wanted
        from tiercache.state import Chain

        worker = self._worker()
        layout = worker.geometry.layout
        chain = Chain(order["ids"], layout.block_tokens)
        ends = [
            (part.name, end)
            for part in layout.parts
            for end in range(
                worker.geometry.block_tokens, len(chain) + 1, worker.geometry.block_tokens
            )
        ]
        wanted = [Wanted(part, chain.digest_at(end)) for part, end in ends]
        scope = Scope(salt=order.get("salt", ""))
        with worker._client.fetch("objects", wanted, scope=scope, wait_s=2.0) as holding:
            return {
                f"{part} {end}": hashlib.sha256(blob.data).hexdigest()
                for (part, end), blob in zip(ends, holding.blobs, strict=True)
                if blob is not None
            }

    def state(self, order: dict[str, Any]) -> list[float]:
        """Return a snapshot `part` that the node has at `end` tokens of a prompt; nothing where it has
        none. `columns`: how much of its last axis."""
        import torch

        from tiercache.client import Scope, Wanted
        from tiercache.state import Chain

        worker = self._worker()
        layout = worker.geometry.layout
        chain = Chain(order["ids"], layout.block_tokens)
        (part,) = (part for part in layout.parts if part.name == order["part"])
        wanted = [Wanted(part.name, chain.digest_at(order["end"]))]
        scope = Scope(salt=order.get("salt", ""))
        with worker._client.fetch("state", wanted, scope=scope, wait_s=2.0) as holding:
            (blob,) = holding.blobs or (None,)
            if blob is None:
                return []
            dtype = getattr(torch, part.tensors[0].dtype)
            values = torch.frombuffer(bytearray(blob.data), dtype=dtype)
            # A convolution of an engine that guesses has room for the guesses behind its window.
            rows = values.view(-1, part.tensors[0].shape[-1])[:, : order.get("columns")]
            return [float(value) for value in rows.flatten()]

    def described(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of the layout and the namespace."""
        worker = self._worker()
        return {
            "parts": {
                part.name: [str(part.kind), part.window, part.block_tokens, part.units]
                for part in worker.geometry.layout.parts
            },
            "block": worker.geometry.block_tokens,
            "namespace": worker._namespace.digest.hex() if worker._namespace else "",
        }

    def encoded(self, order: dict[str, Any]) -> dict[str, int]:
        """Return what the encoder's connector counted, once it has saved all."""
        from vllm.distributed.ec_transfer import get_ec_transfer

        saver = get_ec_transfer()._saver
        shelf = self._engine.engine_core.engine_core.scheduler.ec_connector._shelf
        if saver is not None:
            saver.flush(30.0)
        return {**(saver.counts if saver is not None else {}), **shelf.counts}

    def _worker(self) -> Theirs:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        children = getattr(group, "_connectors", [group])
        return next(c for c in children if hasattr(c, "_worker"))._worker._worker

    def flush(self, order: dict[str, Any]) -> bool:
        """Wait until all that was handed over is with the node."""
        worker = self._worker()
        done = bool(worker.flush(order.get("wait_s", 30.0)))
        worker._client.flush(durable=order.get("durable", False), wait_s=30.0)
        return done

    def reset_local(self, order: dict[str, Any]) -> bool:
        """Clear vLLM's own prefix cache; with `connector`, also ours."""
        return bool(self._engine.reset_prefix_cache(reset_connector=order.get("connector", False)))

    def sleep(self, order: dict[str, Any]) -> bool:
        """Sleep and wake. vLLM's worker for CPUs does nothing then; here it does what the one for GPUs
        does: it tells the connector, as vLLM 0.33 does, and what is in the caches is lost."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        ours, group = self._worker(), get_kv_transfer_group()
        worker = self._engine.engine_core.engine_core.model_executor.driver_worker.worker

        def lost(level: int) -> None:
            group.unregister_kv_caches()
            for part in ours._parts:
                for _, view in part._views:
                    view.fill_(0x55)

        def back(tags: Theirs = None) -> None:
            group.restore_kv_caches()

        worker.sleep, worker.wake_up = lost, back
        self._llm.sleep(level=order["level"])
        self._llm.wake_up()
        return True

    def counts(self, order: dict[str, Any]) -> dict[str, int]:
        """Return what the connector counted, from vLLM's own metrics."""
        return {
            m.name.removeprefix("vllm:tiercache_"): int(m.value)
            for m in self._llm.get_metrics()
            if m.name.startswith("vllm:tiercache_")
        }

    def events_of_steps(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events that were published since the last look."""
        found, self._events = self._events, []
        return [
            {
                "kind": type(event).__name__,
                "medium": getattr(event, "medium", None),
                "ownership": getattr(event, "ownership", None),
                "groups": getattr(event, "group_idx", None),
                "hashes": len(getattr(event, "block_hashes", ())),
            }
            for event in found
        ]

    def _collect_events(self) -> None:
        """Keep what the scheduler would publish."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        publish = scheduler.kv_event_publisher.publish

        def kept(batch: Theirs) -> None:
            self._events += batch.events
            publish(batch)

        scheduler.kv_event_publisher.publish = kept

    def metrics(self, order: dict[str, Any]) -> dict[str, float]:
        """Return vLLM's metrics that have a value."""
        return {
            f"{m.name}{sorted(m.labels.items())}": m.value
            for m in self._llm.get_metrics()
            if hasattr(m, "value")
        }

    def close(self, order: dict[str, Any]) -> bool:
        """End the engine."""
        self._engine.engine_core.shutdown()
        return True


def _sound(seed: int) -> Theirs:
    import numpy as np

    return np.random.default_rng(seed).standard_normal(16_000).astype("float32"), 16_000


def _told(output: Theirs, seconds: float) -> dict[str, Any]:
    (one,) = output.outputs
    return {
        "tokens": list(one.token_ids),
        "logprobs": [
            {str(token): value.logprob for token, value in step.items()} for step in one.logprobs
        ],
        "cached": output.num_cached_tokens,
        "seconds": seconds,
        "reason": one.finish_reason,
        "handed": output.kv_transfer_params,
    }


def main() -> None:
    """Serve one parent."""
    began = time.monotonic()
    driven = Driven(json.loads(sys.argv[1]))
    ANSWERS.write(json.dumps({"started": time.monotonic() - began}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(driven, order.pop("do"))(order)
        ANSWERS.write(json.dumps(answer) + "\n")
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=main, name="driver").run()
