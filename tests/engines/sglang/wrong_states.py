"""A backend that restores every state as zeros: what a test must notice to be worth anything."""

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName

from tiercache_sglang.backend import TierCacheStorage


class WrongStates(TierCacheStorage):
    """Says that it restored states, and did not."""

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Zero what was read."""
        done = super().batch_get_v2(transfers, extra_info)
        pool = self.registered_pools[PoolName.MAMBA]
        for transfer in transfers:
            pool.temporal_buffer[transfer.host_indices] = 0
            for buffer in pool.conv_buffer:
                buffer[transfer.host_indices] = 0
        return done
