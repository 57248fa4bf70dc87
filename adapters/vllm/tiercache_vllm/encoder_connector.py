"""`TierCacheECConnector`: encoder embeddings from a node and to it, for vLLM's encode/prefill split.

--ec-transfer-config '{"ec_connector": "TierCacheECConnector", "ec_role": "ec_both",
        "ec_connector_module_path": "tiercache_vllm.ec_connector",
        "ec_connector_extra_config": {"socket": "/run/tiercache/tiercache.sock"}}'

vLLM believes that an embedding which is announced can be loaded, and stops when it cannot. So the scheduler
fetches it into private memory first, and its bytes travel with the step: nothing can be lost in between.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from tiercache.client import Client, Options
from tiercache.state import Namespace
from tiercache_vllm import logs
from tiercache_vllm.embeddings import LAYOUT, Saver, Shelf, unpacked
from tiercache_vllm.naming import namespace_of
from tiercache_vllm.settings import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


@dataclass
class EmbeddingsMetadata(ECConnectorMetadata):
    """The embeddings of one step, packed, by identifier; and what they are filed under."""

    loads: dict[str, bytes] = field(default_factory=dict)
    namespace: Namespace | None = None


class TierCacheECConnector(ECConnectorBase):
    """Keeps embeddings by the identity of what was encoded, and by the encoder."""

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        logs.join()
        transfer = vllm_config.ec_transfer_config
        self._settings = settings_of(transfer.ec_connector_extra_config)
        self._name = f"vllm-ec-{transfer.engine_id}"
        self._loads: dict[str, bytes] = {}
        self._namespace: Namespace | None = None
        self._naming: Future[Namespace] | None = None
        self._shelf: Shelf | None = None
        self._saver: Saver | None = None
        if role == ECConnectorRole.SCHEDULER:
            self._names = ThreadPoolExecutor(1, thread_name_prefix="tiercache-names")
            release = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
            facts = (f"vllm {release}", "encoder")
            self._naming = self._names.submit(
                namespace_of, vllm_config, LAYOUT, self._settings, facts
            )

    # Scheduler

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """See the base class. False while the node is asked."""
        shelf = self._shelf_now()
        if shelf is None or not self.is_consumer:
            return True
        known = [
            shelf.wants(request.request_id, feature.identifier)
            for feature in request.mm_features
            if _keepable(feature.identifier)
            and feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        return all(known)

    def has_cache_item(self, identifier: str) -> bool:
        """See the base class: whether it is here, in private memory."""
        return self._shelf is not None and self._shelf.get(identifier) is not None

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        """See the base class."""
        identifier = request.mm_features[index].identifier
        data = self._shelf.get(identifier) if self._shelf is not None else None
        if data is not None:
            self._loads[identifier] = data

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ECConnectorMetadata:
        """See the base class."""
        shelf = self._shelf_now()
        if shelf is not None and not scheduler_output.num_scheduled_tokens:
            shelf.idle()
        loads, self._loads = self._loads, {}
        return EmbeddingsMetadata(loads, self._namespace)

    def request_finished(self, request: "Request") -> tuple[bool, None]:
        """See the base class."""
        if self._shelf is not None:
            self._shelf.forget(request.request_id)
        return False, None

    # Worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        """See the base class."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, EmbeddingsMetadata)
        device = self._vllm_config.device_config.device
        for identifier, data in meta.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = unpacked(data).to(device)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object
    ) -> None:
        """See the base class. Ranks hold the same, so the first one saves."""
        saver = self._saver_now()
        if saver is not None and self.is_producer and _keepable(mm_hash):
            saver.save(mm_hash, encoder_cache[mm_hash])

    def shutdown(self) -> None:
        """See the base class."""
        for one in (self._shelf, self._saver):
            if one is not None:
                one.close()

    def _shelf_now(self) -> Shelf | None:
        if self._naming is not None and self._naming.done():
            naming, self._naming = self._naming, None
            fault = naming.exception()
            if fault is not None:
                _log.error("tiercache: embeddings are not kept: %s", fault)
                return None
            self._namespace = naming.result()
            self._shelf = Shelf(
                self._client(self._namespace),
                bytes_max=self._settings.save_bytes_max,
                wait_s=self._settings.plan_wait_s,
                threads=self._settings.planners,
            )
        return self._shelf

    def _saver_now(self) -> Saver | None:
        meta = self._connector_metadata
        namespace = meta.namespace if isinstance(meta, EmbeddingsMetadata) else None
        if self._saver is None and namespace is not None and get_tensor_model_parallel_rank() == 0:
            client = self._client(namespace)
            self._saver = Saver(client, bytes_max=self._settings.save_bytes_max)
        return self._saver

    def _client(self, namespace: Namespace) -> Client:
        options = Options(
            name=self._name,
            deadline_s=self._settings.deadline_s,
            retry_s=self._settings.retry_s,
        )
        return Client(self._settings.socket, namespace, LAYOUT, options)


def _keepable(identifier: str | None) -> bool:
    """Whether an identifier says all: one with an adapter's name before it does not say its content."""
    return bool(identifier) and ":" not in str(identifier)
