"""Where vLLM finds `TierCacheECConnector`: a vLLM that is not understood is refused, in one sentence."""

from tiercache_vllm.gate import refuse_unknown

refuse_unknown()

from tiercache_vllm.encoder_connector import TierCacheECConnector  # noqa: E402  # It imports vLLM.

__all__ = ["TierCacheECConnector"]
