"""A connector that never has anything, to stand beside ours under MultiConnector."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

Theirs: TypeAlias = Any
"""An object of vLLM, which has no types here."""


@dataclass
class Nothing(KVConnectorMetadata):
    """What it asks of workers."""


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """MultiConnector passes on the first child's handshake only, which is this one."""


class SilentConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers what is asked, and does nothing."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return Hello()

    def get_num_new_matched_tokens(
        self, request: Theirs, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Theirs, blocks: Theirs, num_external_tokens: int
    ) -> None:
        return None

    def build_connector_meta(self, scheduler_output: Theirs) -> KVConnectorMetadata:
        return Nothing()

    def request_finished_all_groups(self, request: Theirs, block_ids: Theirs) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Theirs, **kwargs: Theirs) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Theirs, attn_metadata: Theirs, **kwargs: Theirs
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        return None
