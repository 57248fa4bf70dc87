"""Carries out the flushes of the cluster here: what is from before one is given to nobody from then on."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from tiercache.core import commands, events
from tiercache.core.cluster import events as ev
from tiercache.errors import UnavailableError
from tiercache.runtime.cluster.calls import Calls
from tiercache.runtime.cluster.flushed import Flushed, is_digest
from tiercache.runtime.log import say

RETRY_S = 1.0
"""Pause before a flush that could not be carried out, or told, is tried again."""

OWN = "self"
"""Whose session it is when the node asks itself."""


class Dropping(Protocol):
    """Where a node says that it carried out a flush."""

    async def dropped(self, namespace: str, flush: int) -> None:
        """See `Registry.dropped`."""
        ...


class Carrying:
    """The flushes that are under way here.

    A node counts as one that heard of every flush only when nothing from before one can be found in it
    any more: `is_sure`. `changed` is called when that has become so later than `heard`.
    """

    def __init__(self, calls: Calls, flushed: Flushed, changed: Callable[[], None]) -> None:
        self._calls = calls
        self._flushed = flushed
        self._changed = changed
        self._under_way: dict[str, int] = {}
        self._findable: set[str] = set()

    @property
    def is_sure(self) -> bool:
        """Whether nothing from before a flush that was heard of can be found here."""
        return not self._findable

    def load(self) -> ev.FlushesKnown:
        """Return what earlier starts carried out. Raises ConfigError."""
        self._flushed.load()
        return ev.FlushesKnown(
            {bytes.fromhex(name): number for name, number in self._flushed.all().items()}
        )

    def heard(
        self, flushes: Mapping[str, int], registry: Dropping, tasks: asyncio.TaskGroup
    ) -> None:
        """Carry out what of these was not. When this returns nothing old can be found, if `is_sure`."""
        for namespace, number in self._flushed.due(flushes).items():
            if self._under_way.get(namespace, 0) < number and is_digest(namespace):
                self._under_way[namespace] = number
                first = self._drop(namespace, number)
                tasks.create_task(self._carry_out(registry, namespace, number, first))

    async def _carry_out(
        self, registry: Dropping, namespace: str, number: int, first: asyncio.Future[bool]
    ) -> None:
        """Drop what is from before a flush, for certain, and say so; try until it is done."""
        attempt, why = first, ""
        while self._under_way[namespace] == number:
            try:
                if await attempt:
                    await asyncio.to_thread(self._flushed.done, namespace, number)
                    await registry.dropped(namespace, number)
                    say(logging.INFO, "flushed", namespace=namespace, flush=number)
                    return
                fault = "a tier could not forget it"
            except (UnavailableError, OSError) as error:
                fault = str(error)
            if fault != why:
                why = fault
                say(logging.WARNING, "a flush is not done yet", namespace=namespace, why=why)
            await asyncio.sleep(RETRY_S)
            attempt = self._drop(namespace, number)

    def _drop(self, namespace: str, number: int) -> asyncio.Future[bool]:
        """Have the machine drop a namespace from every tier; False when a tier could not."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        refused = False

        def answered(body: commands.ReplyBody) -> None:
            nonlocal refused
            refused = not isinstance(body, commands.Evicted)
            if not done.done():  # Whoever waited may be cancelled.
                done.set_result(isinstance(body, commands.Evicted) and not body.failed)

        name = self._calls.session(OWN), self._calls.number()
        self._calls.ask(events.ClearAsked(*name, namespace, number), name, answered)
        # What was not refused is out of sight, even if the disk has not forgotten it yet.
        was_sure = self.is_sure
        if refused:
            self._findable.add(namespace)
        else:
            self._findable.discard(namespace)
        if self.is_sure and not was_sure:
            self._changed()
        return done
