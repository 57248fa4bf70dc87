"""The entry point `vllm.general_plugins`: the connectors are known by name in every process of vLLM."""


def register() -> None:
    """Make `TierCacheConnector` and `TierCacheECConnector` known to vLLM. Idempotent."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for factory, name, module in (
        (KVConnectorFactory, "TierCacheConnector", "tiercache_vllm.connector"),
        (ECConnectorFactory, "TierCacheECConnector", "tiercache_vllm.ec_connector"),
    ):
        if name not in factory._registry:
            factory.register_connector(name, module, name)
