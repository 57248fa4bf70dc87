"""A pytest plugin for vLLM's own tests: what they build has `TierCacheConnector`. See `upstream`.

POINTING_MODELS is a folder of tiny models, POINTING_SOCKET a node's socket; without the latter the tests
run as they are, but for the model.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import pytest
import torch

Theirs: TypeAlias = Any
"""An object of vLLM, which has no types here."""

_MODELS = os.environ["POINTING_MODELS"]
_SOCKET = os.environ.get("POINTING_SOCKET", "")
_EXTRA = {
    "socket": _SOCKET,
    "weights": "none",
    "tokenizer": "none",
    "model": "vLLM's tests",
    "naming_wait_s": 60.0,
    "deadline_s": 5.0,
}
_STOOD_IN = "SimpleCPUOffloadConnector"
"""A connector of vLLM for several groups, as ours is."""

_CHILD = "MockHMAConnector"
_HUB = {
    "facebook/opt-125m": "llama",
    "llava-hf/llava-1.5-7b-hf": "qwen2audio",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2audio",
}
"""Models that tests name, of which only the configuration matters, and ours that stand for them."""


def pytest_configure(config: pytest.Config) -> None:
    """Change what tests build their schedulers of, before they are imported."""
    from vllm.config import model

    theirs = model.ModelConfig.__init__

    def here(self: Theirs, *args: Theirs, **named: Theirs) -> None:
        name = named.get("model", "")
        if name in _HUB:
            folder = os.path.join(_MODELS, _HUB[name])
            named |= {"model": folder, "tokenizer": folder}
        theirs(self, *args, **named)

    model.ModelConfig.__init__ = here
    if _SOCKET:
        _point_schedulers()
        _point_connectors()


def _point_schedulers() -> None:
    """Give every scheduler that has no connector ours, attached to a node, and told of its caches."""
    from vllm.config import KVTransferConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    from tiercache_vllm.planning import Planner

    theirs, ask = Scheduler.__init__, Planner.ask

    def pointed(self: Theirs, *args: Theirs, **named: Theirs) -> None:
        config: Theirs = named.get("vllm_config", args[0] if args else None)
        ours = config.kv_transfer_config is None
        if ours:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="TierCacheConnector",
                kv_connector_module_path="tiercache_vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=_EXTRA,
            )
        theirs(self, *args, **named)
        if ours:
            _described(self)

    def at_once(self: Theirs, question: Theirs) -> Theirs:
        # These tests count steps: none may be spent on asking again.
        answer = ask(self, question)
        answer.result()
        return answer

    Scheduler.__init__ = pointed
    Planner.ask = at_once  # type: ignore[method-assign]


def _described(scheduler: Theirs) -> None:
    from tiercache.errors import LayoutError
    from tiercache_vllm.facts import groups_of
    from tiercache_vllm.geometry import geometry_of
    from tiercache_vllm.worker_side import Described

    config = scheduler.kv_cache_config
    tensors = {
        layer: torch.empty(
            (config.num_blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size),
            dtype=spec.dtype,
            device="meta",
        )
        for group in config.kv_cache_groups
        for spec in (group.kv_cache_spec,)
        if hasattr(spec, "num_kv_heads")
        for layer in group.layer_names
    }
    side = scheduler.connector._scheduler
    try:
        geometry = geometry_of(groups_of(config, tensors, scheduler.vllm_config), 1)
    except LayoutError as fault:
        side.described((Described(0, None, why=str(fault)),))
        return
    side.described((Described(0, geometry, ("a test",)),))
    side._naming.result()
    assert side._ready() is not None


def _point_connectors() -> None:
    """Put ours in the places of connectors that tests name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from tiercache_vllm.connector import TierCacheConnector
    from tiercache_vllm.kv_connector import StepMetadata

    # What the connector of these tests calls that which its steps ask for.
    StepMetadata.requests = property(lambda self: self.work.loads)
    KVConnectorFactory._registry[_STOOD_IN] = lambda: TierCacheConnector


def _ours() -> Callable[..., Theirs]:
    from tiercache_vllm.connector import TierCacheConnector

    class Pointed(TierCacheConnector):
        """Ours, whatever options a test has for its own."""

        def __init__(self, vllm_config: Theirs, role: Theirs, kv_cache_config: Theirs) -> None:
            vllm_config.kv_transfer_config.kv_connector_extra_config = _EXTRA
            super().__init__(vllm_config, role, kv_cache_config)

    return Pointed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put ours in the places that tests have in their own modules."""
    if not _SOCKET:
        return
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "TestExampleConnector"):
            # It records what is called on what it wraps: here, on ours.
            where: Theirs = import_module(module.TestExampleConnector.__module__)
            where.ExampleConnector = _ours()
        if hasattr(module, "ExampleConnectorMetadata"):
            from tiercache_vllm.kv_connector import StepMetadata

            module.ExampleConnectorMetadata = StepMetadata
        if hasattr(module, _CHILD):
            where = import_module("tests.v1.kv_connector.unit.utils")
            where.ExampleConnector = _ours()
            setattr(module, _CHILD, _ours())
