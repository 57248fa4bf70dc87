"""What an engine that prefills and one that decodes tell each other, through whoever routes requests.

The key is in `kv_transfer_params`: the answer of the first has it, and the request to the second.
"""

import re
from collections.abc import Mapping

SOURCE = "tiercache_source"
"""Names the node, of the cluster, that has what was prefilled."""

NODE_NAME = re.compile(r"[\w.-]{1,64}")
"""What a node can be called in its cluster."""


def source_of(params: object) -> str | None:
    """Return the node that a request's `kv_transfer_params` name, "" when they name none.

    A client may send anything: None for what cannot be the name of a node.
    """
    if not isinstance(params, Mapping) or (source := params.get(SOURCE)) is None:
        return ""
    known = isinstance(source, str) and NODE_NAME.fullmatch(source)
    return source if known else None
