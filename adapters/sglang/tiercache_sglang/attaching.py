"""From SGLang's configuration and pools to a store: who this rank is, and with whom it may share."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import sglang
import torch
from huggingface_hub import try_to_load_from_cache
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_lora, get_memory, get_server_args, get_serving

from tiercache.client import Client, Options
from tiercache.errors import RefusedError
from tiercache.state import NATIVE, Layout, Shard
from tiercache_sglang.figures import Figures
from tiercache_sglang.geometry import Pools, layout_of
from tiercache_sglang.identity import engine_name, namespace_of
from tiercache_sglang.int8 import CODEC, Int8States
from tiercache_sglang.pools import HostPool, Pages, Slots, StatePool, pools_of
from tiercache_sglang.settings import Settings
from tiercache_sglang.store import Pace, Store
from tiercache_sglang.weights import tokenizer_of, weights_of

_log = logging.getLogger(__name__)

TESTED: Final = "0.5.23"
"""The SGLang that `tests/engines/run sglang` drives."""

_ARITHMETIC: Final = (
    "quantization",
    "kv_cache_dtype",
    "dtype",
    "speculative_algorithm",
    "mamba_ssm_dtype",
    "json_model_override_args",
    "quantization_param_path",
    "modelopt_quant",
    "model_impl",
)
"""Server arguments that change what a model's state is, beside its weights."""


def attach(
    settings: Settings,
    config: HiCacheStorageConfig,
    kv: HostPool,
    states: StatePool | None,
    figures: Figures,
) -> Store:
    """Return the store of one rank.

    Raises LayoutError or ConfigError when this engine's state cannot be kept or told from others', and
    RefusedError when the node refuses; UnavailableError when it is away only if it is `required`.
    """
    if sglang.__version__ != TESTED:
        _log.warning("tiercache: tested with SGLang %s, this is %s", TESTED, sglang.__version__)
    pools = pools_of(kv, states, replicated=config.is_mla_model)
    ranks = config.tp_size
    layout = layout_of(pools, ranks)
    _check_sizes(layout, kv, states)
    args = get_server_args()
    namespace = namespace_of(
        layout,
        model=config.model_name or args.model_path,
        weights=settings.weights or weights_of(_folder(args.model_path, args.revision)),
        tokenizer=settings.tokenizer
        or tokenizer_of(_folder(args.tokenizer_path or args.model_path, args.revision)),
        facts=_facts(config, pools, args),
        bigram=getattr(args, "speculative_algorithm", None) in {"EAGLE", "EAGLE3", "NEXTN"},
    )
    client = Client.attach(
        settings.socket,
        namespace,
        layout,
        options=Options(
            ranks=ranks,
            rank=config.tp_rank,
            write=settings.write,
            name=engine_name(settings.engine, config.dp_rank),
            deadline_s=settings.deadline_s,
            required=settings.required,
        ),
    )
    status = client.status
    if status.startswith("refused"):
        client.close()
        raise RefusedError(f"the node at {settings.socket} {status}")
    _log.info(
        "tiercache: %s at %s, namespace %s", client.status, settings.socket, namespace.digest.hex()
    )
    return Store(client, layout, _pace(settings, pools), figures)


def _folder(path: str, revision: str | None) -> str:
    """Return the folder of a model: itself, or the Hub's snapshot of it that was downloaded."""
    if Path(path).is_dir():
        return path
    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except ValueError:  # No name that the Hub could have.
        return path
    return str(Path(found).parent) if isinstance(found, str) else path


def _check_sizes(layout: Layout, kv: HostPool, states: StatePool | None) -> None:
    page, *parts = (part.nbytes(part.block_tokens, Shard(0, 1)) for part in layout.parts)
    Pages(kv).check(page)
    if states is not None:
        Slots(states).check(sum(parts))


def weights_version() -> str:
    """Return what SGLang calls the weights that it runs now: users name them when they update them."""
    return str(get_serving().weight_version)


def _adapters() -> list[str]:
    """Return the adapters of `--lora-paths` with their contents.

    SGLang names them by name and path, not by content, and keys say the name. An adapter that is loaded
    later has a name that is never used again.
    """
    return sorted(
        f"lora {ref.lora_id} {weights_of(_folder(ref.lora_path, None))}"
        for ref in get_lora().lora_paths or ()
    )


def _loaded(args: object) -> str:
    """Return how the weights came to be, where that is not from their files."""
    if getattr(args, "load_format", None) == "dummy":
        return f"dummy {getattr(args, 'random_seed', None)}"
    return "files"


def _facts(config: HiCacheStorageConfig, pools: Pools, args: object) -> Sequence[str]:
    return (
        f"sglang {sglang.__version__}",
        f"weights version {weights_version()}",
        f"loaded {_loaded(args)}",
        *_adapters(),
        f"order {pools.order}",
        f"tp {config.tp_size}",
        f"pp {config.pp_rank}/{config.pp_size}",
        f"cp {config.attn_cp_rank}/{config.attn_cp_size}",
        *(f"{name} {getattr(args, name, None)}" for name in _ARITHMETIC),
    )


def _pace(settings: Settings, pools: Pools) -> Pace:
    exact = get_memory().hicache_host_memory_mode != "buffer_only"
    pace = Pace(settings.wait_s, settings.hold_s, exact_prefixes=exact)
    if settings.states == NATIVE or not pools.temporal:
        return pace
    (temporal,) = pools.temporal
    codec = Int8States(temporal.shape, getattr(torch, temporal.dtype))
    return replace(pace, codec_name=CODEC, codec=codec)
