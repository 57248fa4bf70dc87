"""What operators ask of a whole cluster, through one node. Part of the protocol in `messages.py`."""

import msgspec


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


class ClearAll(_Message, frozen=True, tag="clear_all"):
    """Drops the namespace of that whole hexadecimal digest from every node of the cluster. Answered when
    all have, after `wait_ms` at the latest: then with the names of those that have not said so."""

    call: int
    namespace: str
    wait_ms: int


class Members(_Message, frozen=True, tag="members"):
    """Asks which nodes are in the cluster, and what this one knows of them."""

    call: int


class ShareAll(_Message, frozen=True, tag="share_all"):
    """Sets what a tenant may take on every node, 0 to 1: of memory, of the disk. None: as it is. With
    neither: nothing is said of it any more, and each node's own settings count."""

    call: int
    tenant: str
    host: float | None
    nvme: float | None


Request = ClearAll | Members | ShareAll
