"""What an engine that prefills and one that decodes tell each other, through whoever routes requests.

The keys are in `kv_transfer_params`. The answer of the first names the source, and so does the request to
the second. The request to the first may name a destination.
"""

import re
from collections.abc import Mapping

SOURCE = "tiercache_source"
"""Names the node, of the cluster, that has what was prefilled."""

DESTINATION = "tiercache_destination"
"""Names the node that is to take what is prefilled, while it is."""

NODE_NAME = re.compile(r"[\w.-]{1,64}")
"""What a node can be called in its cluster."""


def source_of(params: object) -> str | None:
    """Return the node that a request's `kv_transfer_params` name as its source, "" when they name none.

    A client may send anything: None for what cannot be the name of a node.
    """
    return _named(params, SOURCE)


def destination_of(params: object) -> str | None:
    """Likewise, the node that is to take what is prefilled."""
    return _named(params, DESTINATION)


def _named(params: object, key: str) -> str | None:
    if not isinstance(params, Mapping) or (name := params.get(key)) is None:
        return ""
    known = isinstance(name, str) and NODE_NAME.fullmatch(name)
    return name if known else None
