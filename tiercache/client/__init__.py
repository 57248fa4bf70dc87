"""How an engine uses its node: plan, load, save, release.

    client = Client.attach("/run/tiercache/tiercache.sock", namespace, layout)
    chain = Chain(tokens, layout.block_tokens)
    with client.load(client.plan("request-7", chain)) as plan:
        for blob in plan.blobs:                # Read-only views of shared memory.
            restore(blob.part, blob.start, blob.end, blob.data)
    compute(tokens[plan.boundary:])
    client.save("request-7", chain, [Blob("kv", end=64, data=kv), Blob("state", end=64, data=s)])

Importing this loads no torch.
"""

from tiercache.client.aio import AsyncClient
from tiercache.client.arena import copy_into
from tiercache.client.plan import Holding, Plan, Survey
from tiercache.client.sync import Client
from tiercache.client.values import (
    Blob,
    Cleared,
    Flushed,
    Options,
    Pinned,
    Place,
    Places,
    Pushed,
    Saved,
    Scope,
    Wanted,
)
from tiercache.state import Hint
from tiercache.state.seats import RanksOf
from tiercache.wire.messages import Capture

__all__ = [
    "AsyncClient",
    "Blob",
    "Capture",
    "Cleared",
    "Client",
    "Flushed",
    "Hint",
    "Holding",
    "Options",
    "Pinned",
    "Place",
    "Places",
    "Plan",
    "Pushed",
    "RanksOf",
    "Saved",
    "Scope",
    "Survey",
    "Wanted",
    "copy_into",
]
