"""What routers should know: which of vLLM's blocks can be had from the node. Needs vLLM.

vLLM's own hashes are published, since routers know no others; nothing is ever looked up by them. An event
says that blocks were handed over to be stored; when the node did not take them, or has lost them, and this
engine notices, their removal follows.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from tiercache_vllm.geometry import Geometry

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

OWNER = "tiercache"
LOCALITY = "LOCAL"
EVENTS_MAX = 65_536


class Events:
    """Events since the last look; bounded, so that an engine that publishes none keeps none."""

    def __init__(
        self, geometry: Geometry, kv_cache_config: "KVCacheConfig", block_tokens: int
    ) -> None:
        self._geometry = geometry
        self._groups = kv_cache_config.kv_cache_groups
        self._hash_tokens = kv_cache_config.hash_block_size or block_tokens
        self._pending: list[KVCacheEvent] = []
        self._published: OrderedDict[bytes, tuple[tuple[int, ...], list[ExternalBlockHash]]] = (
            OrderedDict()
        )

    def stored(self, request: "Request", part: int, end: int, key: bytes) -> None:
        """An object was handed over."""
        size = self._geometry.layout.parts[part].block_tokens or self._geometry.block_tokens
        step = self._hash_tokens
        start = end - size
        if (
            end % step
            or end // step > len(request.block_hashes)
            or len(self._pending) >= EVENTS_MAX
        ):
            return
        hashes = [
            maybe_convert_block_hash(h) for h in request.block_hashes[start // step : end // step]
        ]
        parent = request.block_hashes[start // step - 1] if start >= step else None
        lora = request.lora_request
        groups = self._geometry.groups(part)
        for group in groups:
            self._pending.append(
                BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=list(request.all_token_ids[start:end]),
                    block_size=step,
                    lora_id=None if lora is None else lora.lora_int_id,
                    medium=MEDIUM_CPU,
                    lora_name=None if lora is None else lora.lora_name,
                    group_idx=group,
                    kv_cache_spec_kind=get_kv_cache_spec_kind(
                        self._groups[group].kv_cache_spec
                    ).value,
                    locality=LOCALITY,
                    ownership=OWNER,
                )
            )
        self._published[key] = (groups, hashes)
        while len(self._published) > EVENTS_MAX:
            self._published.popitem(last=False)

    def lost(self, keys: Iterable[bytes]) -> None:
        """Objects are not with the node."""
        for key in keys:
            groups, hashes = self._published.pop(key, ((), []))
            for group in groups:
                self._pending.append(
                    BlockRemoved(
                        block_hashes=hashes,
                        medium=MEDIUM_CPU,
                        group_idx=group,
                        locality=LOCALITY,
                        ownership=OWNER,
                    )
                )

    def cleared(self) -> None:
        """Nothing that was handed over is found any more."""
        self._published.clear()
        self._pending = [AllBlocksCleared()]

    def take(self) -> list["KVCacheEvent"]:
        """Return the events since the last look."""
        found, self._pending = self._pending, []
        return found
