"""The connector on one machine that stands for two: the ranks from 1 on have a node of their own."""

import os
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tiercache_vllm.connector import TierCacheConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SECOND = "TIERCACHE_TEST_SECOND_SOCKET"


class SeatedConnector(TierCacheConnector):
    """As if rank 1 ran on a machine where the same path leads to another node."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        if role == KVConnectorRole.WORKER and vllm_config.parallel_config.rank > 0:
            transfer.kv_connector_extra_config["socket"] = os.environ[SECOND]
        super().__init__(vllm_config, role, kv_cache_config)
