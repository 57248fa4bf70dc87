"""Brings the NVMe tier up behind a node that serves already."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tiercache.config import Nvme
from tiercache.core import events
from tiercache.errors import StorageFault
from tiercache.runtime.executor import Executor
from tiercache.runtime.log import say
from tiercache.runtime.node import Node
from tiercache.tiers.base import Found

if TYPE_CHECKING:
    from tiercache.tiers.nvme import NvmeTier

FOUND_BATCH = 128
"""Objects that the core takes in at a time: between two batches it answers clients."""


class Disk:
    """The NVMe tier from its opening to its end. All methods run on the loop's thread.

    `state` is "off", "opening", "scanning", "ready" or "failed: why"; `found` counts the objects of
    earlier starts.
    """

    def __init__(self, settings: Nvme) -> None:
        self.state = "opening" if settings.path else "off"
        self.found = 0
        self._settings = settings
        # One thread: what it was told last, to close, it does last.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nvme-start")
        self._tier: NvmeTier | None = None

    async def start(self, node: Node, executor: Executor) -> None:
        """Open the tier, then tell the core what is there.

        Raises ConfigError when the directory cannot be had. A device that fails leaves the node with
        what was found until then, to be read and not added to, and `state` says why.
        """
        loop = asyncio.get_running_loop()
        try:
            tier = await loop.run_in_executor(self._thread, self._open)
            executor.use(tier)
            namespaces = await loop.run_in_executor(self._thread, tier.namespaces)
            node.hear(events.NvmeOpened(tier.segment_bytes(), namespaces))
            self.state = "scanning"
            pages = tier.scan(FOUND_BATCH)
            while page := await loop.run_in_executor(self._thread, _next, pages):
                self.found += len(page)
                node.hear(events.Found([(record, extent) for record, extent in page]))
            node.hear(events.ScanEnded())
        except StorageFault as fault:
            self.state = f"failed: {fault}"
            say(logging.ERROR, "nvme failed", reason=str(fault))
            node.hear(events.NvmeFailed(fault.fault))
            return
        self.state = "ready"
        met = tier.recovery
        say(
            logging.INFO,
            "nvme scanned",
            objects=self.found,
            dropped=met.dropped,
            orphans=met.orphans,
            rebuilt=met.rebuilt,
        )

    async def close(self, timeout_s: float) -> bool:
        """Let go of the tier, after everybody who uses it has ended; False when it took too long."""
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        done, _ = await asyncio.wait([closing], timeout=timeout_s)
        self._thread.shutdown(wait=False)
        return bool(done)

    def _close(self) -> None:
        if self._tier is not None:
            self._tier.close()

    def _open(self) -> "NvmeTier":
        # Imported here: RocksDB takes a while, and a node without a disk does without.
        from tiercache.tiers.nvme import NvmeTier

        settings = self._settings
        tier = NvmeTier(
            Path(settings.path),
            cap_bytes=settings.cap_bytes,
            segment_bytes=settings.segment_bytes,
            sync=settings.sync,
        )
        self._tier = tier
        return tier


def _next(pages: Iterator[list[Found]]) -> list[Found] | None:
    return next(pages, None)
