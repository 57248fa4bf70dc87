"""Where vLLM finds `TierCacheConnector`: a vLLM that is not understood is refused here, in one sentence."""

from tiercache_vllm.gate import refuse_unknown

refuse_unknown()

from tiercache_vllm.kv_connector import TierCacheConnector  # noqa: E402  # It imports vLLM.

__all__ = ["TierCacheConnector"]
