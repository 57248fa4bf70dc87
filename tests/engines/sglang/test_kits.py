"""SGLang's own test kit for storage backends, as far as it is in the wheel, aimed at ours.

The kit knows the `file` backend only: what it starts is replaced, and what it calls the backend's folder is
the socket of a node.
"""

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from tests.engines.sglang.stand_ins import cpu_plugin
from tiercache.testing.nodes import NodeProcess

# Of SGLang's test tools the kit needs a base class only; importing them needs packages for evaluation.
_tools: Any = ModuleType("sglang.test.test_utils")
_tools.CustomTestCase = TestCase
sys.modules[_tools.__name__] = _tools

from sglang.test.kits.unified_radix_cache import fixtures, mixins  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CONFIGS  # noqa: E402
from sglang.test.kits.unified_radix_cache.storage import (  # noqa: E402
    UnifiedRadixCacheStorageFixtures,
)

PAGES = 3
KITS = [config for config in CONFIGS if not (config.has_swa or config.is_eagle)]


class Kit(UnifiedRadixCacheStorageFixtures, TestCase):
    """The kit's fixtures for one configuration."""

    def runTest(self) -> None:  # noqa: N802
        """Nothing: the tests below use it."""


def arguments_with(node: NodeProcess, build: Any) -> Any:
    """Return what builds server arguments, with our backend for SGLang's."""

    def ours(**named: Any) -> Any:
        if named.get("hicache_storage_backend") == "file":
            named["hicache_storage_backend"] = "dynamic"
            table = {"socket": str(node.socket), "weights": "kit", "tokenizer": "none"}
            named["served_model_name"] = "kit"
            named["hicache_storage_backend_extra_config"] = json.dumps(
                {
                    "backend_name": "tiercache",
                    "module_path": "tiercache_sglang.backend",
                    "class_name": "TierCacheStorage",
                    "interface_v1": 1,
                    "hicache_storage_pass_prefix_keys": True,
                    "tiercache": table,
                }
                | json.loads(named["hicache_storage_backend_extra_config"] or "{}")
            )
        return build(**named)

    return ours


@pytest.fixture
def kit(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The kit, for the configuration that the test is run with."""
    cpu_plugin.register()
    kit: Any = Kit()
    kit.cfg = request.param
    with (
        mock.patch.object(mixins, "ServerArgs", arguments_with(node, mixins.ServerArgs)),
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
    ):
        yield kit
        kit.doCleanups()


def handle(name: str) -> CacheRequestHandle:
    """Return a request."""
    return CacheRequestHandle(name, 0)


@pytest.mark.parametrize("kit", KITS, ids=[config.label for config in KITS], indirect=True)
def test_what_a_producer_wrote_a_consumer_reads(kit: Any, node: NodeProcess) -> None:
    tokens = kit._make_seq(1, PAGES)
    keys, values = kit._l3_produce(str(node.socket), tokens, marker=5)
    cache, allocator, requests = kit._l3_consumer(str(node.socket))
    kit._consume_prefetch(cache, tokens, handle("consumer"))
    assert cache.pop_prefetch_loaded_tokens(handle("consumer")) == len(tokens)
    match = fixtures.match_prefix(cache, tokens)
    request = kit._make_req(requests) if kit.cfg.has_mamba else None
    kit._load_back_node(cache, match.best_match_node, request)
    there = fixtures.match_prefix(cache, tokens)
    assert there.device_prefix_len == len(tokens)
    indices = cache.path_device_indices(there.last_device_node)
    found = kit._snapshot_full_kv(allocator, indices)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


FULL = [config for config in KITS if not config.has_mamba]


@pytest.mark.parametrize("kit", FULL, ids=[config.label for config in FULL], indirect=True)
def test_the_same_without_a_host_cache(kit: Any, node: NodeProcess) -> None:
    tokens = kit._make_seq(1, PAGES)
    _, (keys, values) = kit._produce_buffer_l3(str(node.socket), tokens, marker=9)
    cache, allocator, _ = kit._build_buffer_hicache_fixture(str(node.socket))
    before = kit._host_avail_sizes(cache)
    cache.prefetch_from_storage(
        handle("consumer"), cache.root_node_handle(), fixtures.array("q", tokens), None, []
    )
    kit._run_prefetch_to_completion(cache, handle("consumer"))
    there = fixtures.match_prefix(cache, tokens)
    assert there.device_prefix_len == len(tokens)
    indices = cache.path_device_indices(there.last_device_node)
    found = kit._snapshot_full_kv(allocator, indices)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    assert kit._host_avail_sizes(cache) == before
