"""What every registry must do. Subclass, say what it stands on, and pytest runs it all.

class TestMyRegistry(RegistryContract):
    @pytest.fixture
    async def ground(self) -> Ground: ...
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import pytest

from tiercache.errors import ConfigError, UnavailableError
from tiercache.registry.base import Member, Registry, TenantShare, View

WAIT_S = 20.0


def member(name: str, boot: str = "boot-1") -> Member:
    """Return a node as others see it."""
    return Member(name=name, boot=boot, address=f"{name}.example:7480", protocols=(1, 1))


class Ground(Protocol):
    """What registries under test stand on."""

    ttl_s: float

    def registry(self, member: Member) -> Registry:
        """Return a new registry of one node."""
        ...

    async def cut(self, name: str) -> None:
        """The node of that name reaches nobody any more, and is told nothing."""
        ...

    async def heal(self, name: str) -> None:
        """It can be reached again."""
        ...

    async def lapse(self) -> None:
        """Let more than the time to live pass."""
        ...


class Watcher:
    """One node that is a member: its registry, and all it was told."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._told = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def changed(self, view: View) -> None:
        """Hear of a new view."""
        assert view == self.registry.view
        self._told.set()

    async def until(self, holds: Callable[[View], bool]) -> View:
        """Return the first view for which `holds`."""
        async with asyncio.timeout(WAIT_S):
            while not holds(self.registry.view):
                self._told.clear()
                await self._told.wait()
        return self.registry.view

    async def leave(self) -> None:
        """Stop being a member, in good order."""
        assert self.task is not None
        self.task.cancel()
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([self.task])
        assert self.task.cancelled()


@contextlib.asynccontextmanager
async def joined(ground: Ground, *members: Member) -> AsyncIterator[list[Watcher]]:
    """Make these nodes members; each knows all of them."""
    watchers = [Watcher(ground.registry(each)) for each in members]
    names = {each.name for each in members}
    async with asyncio.TaskGroup() as tasks:
        for watcher in watchers:
            watcher.task = tasks.create_task(watcher.registry.run(watcher.changed))
        for watcher in watchers:
            await watcher.until(lambda view: names <= view.members.keys())
        try:
            yield watchers
        finally:
            for watcher in watchers:
                await watcher.leave()


async def _refusal(registry: Registry) -> str:
    """Return why a node must not be a member any more."""
    try:
        await registry.run(lambda _: None)
    except ConfigError as fault:
        return str(fault)
    raise AssertionError("nobody said so")


class RegistryContract:
    """Nodes find one another, notice who is gone, and agree on flushes."""

    @pytest.fixture
    async def ground(self) -> Ground:
        """What the registries stand on."""
        raise NotImplementedError

    async def test_members_see_one_another(self, ground: Ground) -> None:
        """All views show all members."""
        async with joined(ground, member("a"), member("b")) as (a, b):
            assert a.registry.view.members == {"a": member("a"), "b": member("b")}
            assert b.registry.view.members == a.registry.view.members

    async def test_nobody_is_a_member_before_it_joined(self, ground: Ground) -> None:
        """A registry promises nothing by itself."""
        registry = ground.registry(member("a"))
        assert registry.held_until == 0
        assert registry.view == View()

    async def test_one_that_leaves_is_gone_at_once(self, ground: Ground) -> None:
        """A goodbye is not waited for."""
        async with joined(ground, member("a"), member("b")) as (a, b):
            await b.leave()
            await a.until(lambda view: "b" not in view.members)

    async def test_one_that_is_silent_is_gone_after_its_time(self, ground: Ground) -> None:
        """It knows so itself before the others do."""
        async with joined(ground, member("a"), member("b")) as (a, b):
            held = b.registry.held_until
            await ground.cut("b")
            await ground.lapse()
            await a.until(lambda view: "b" not in view.members)
            assert b.registry.held_until <= max(held, a.registry.held_until)
            await ground.heal("b")
            await a.until(lambda view: "b" in view.members)
            await b.until(lambda _: b.registry.held_until > held)

    async def test_a_restart_takes_the_name_over(self, ground: Ground) -> None:
        """The start that came last has the name; the other one is told."""
        async with joined(ground, member("a")) as (a,), asyncio.TaskGroup() as tasks:
            older = ground.registry(member("b", "boot-1"))
            ended = tasks.create_task(_refusal(older))
            await a.until(lambda view: "b" in view.members)
            async with joined(ground, member("b", "boot-2")):
                await a.until(lambda view: view.members["b"].boot == "boot-2")
                assert "'b'" in await ended
                assert a.registry.view.members["b"].boot == "boot-2"

    async def test_flushes_count_up_and_everybody_hears(self, ground: Ground) -> None:
        """No two flushes have one number."""
        async with joined(ground, member("a"), member("b")) as (a, b):
            numbers = await asyncio.gather(*(w.registry.flush("ns") for w in (a, b) * 4))
            assert len(set(numbers)) == len(numbers)
            last = max(numbers)
            await b.until(lambda view: view.flushes.get("ns") == last)
            assert await a.registry.flush("other") > 0
            await b.until(lambda view: "other" in view.flushes)
            assert b.registry.view.flushes["ns"] == last

    async def test_who_has_not_dropped_yet_is_named(self, ground: Ground) -> None:
        """A flush is done when nobody is behind."""
        async with joined(ground, member("a"), member("b")) as (a, b):
            flush = await a.registry.flush("ns")
            await a.until(lambda view: view.flushes.get("ns") == flush)
            assert a.registry.view.behind("ns", flush) == ("a", "b")
            await b.registry.dropped("ns", flush)
            await a.until(lambda view: view.behind("ns", flush) == ("a",))
            await a.registry.dropped("ns", flush)
            await a.until(lambda view: view.behind("ns", flush) == ())
            assert a.registry.view.behind("ns", flush + 1) == ("a", "b")

    async def test_what_was_dropped_before_joining_is_heard(self, ground: Ground) -> None:
        """What is said early is said again."""
        registry = ground.registry(member("b"))
        await registry.dropped("ns", 7)
        async with joined(ground, member("a")) as (a,), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(registry.run(lambda _: None))
            await a.until(lambda view: view.dropped.get("b") == {"ns": 7})
            task.cancel()

    async def test_an_earlier_start_has_dropped_nothing_for_this_one(self, ground: Ground) -> None:
        """It may have found old objects on its disk."""
        async with joined(ground, member("a"), member("b", "boot-1")) as (a, b):
            flush = await a.registry.flush("ns")
            await b.registry.dropped("ns", flush)
            await a.until(lambda view: "b" not in view.behind("ns", flush))
            await b.leave()
            async with joined(ground, member("b", "boot-2")):
                await a.until(lambda view: view.members.get("b") == member("b", "boot-2"))
                assert "b" in a.registry.view.behind("ns", flush)

    async def test_cut_off_it_keeps_what_it_knows_and_promises_nothing_new(
        self, ground: Ground
    ) -> None:
        """Calls fail, and nothing is held for longer than it was."""
        async with joined(ground, member("a"), member("b")) as (a, b):
            await ground.cut("a")
            held, view = a.registry.held_until, a.registry.view
            with pytest.raises(UnavailableError):
                await a.registry.flush("ns")
            assert (a.registry.held_until, a.registry.view) == (held, view)
            flush = await b.registry.flush("ns")
            await ground.heal("a")
            await a.until(lambda view: view.flushes.get("ns") == flush)

    async def test_what_tenants_may_take_is_the_same_everywhere(self, ground: Ground) -> None:
        """Each value is set by itself, and stays until nothing is said any more."""
        async with joined(ground, member("a"), member("b")) as (a, b):
            assert await a.registry.share("-", TenantShare(host=0.5)) == TenantShare(host=0.5)
            both = TenantShare(host=0.5, nvme=0.0)
            assert await b.registry.share("-", TenantShare(nvme=0.0)) == both
            assert await b.registry.share("0123abcd", TenantShare(host=1.0)) is not None
            for each in (a, b):
                await each.until(lambda view: view.shares.get("-") == both)
                await each.until(lambda view: set(view.shares) == {"-", "0123abcd"})
            assert await a.registry.share("-", None) is None
            assert await a.registry.share("-", None) is None
            await b.until(lambda view: set(view.shares) == {"0123abcd"})
            changes = [TenantShare(host=0.1), TenantShare(nvme=0.2)] * 3
            await asyncio.gather(*(b.registry.share("-", change) for change in changes))
            await a.until(lambda view: view.shares.get("-") == TenantShare(host=0.1, nvme=0.2))
            await ground.cut("a")
            with pytest.raises(UnavailableError):
                await a.registry.share("-", None)
            assert "-" in a.registry.view.shares
            await ground.heal("a")

    @pytest.mark.parametrize("name", ["", "a/b", "a b", "ä", "x" * 129, "a\0"])
    async def test_names_that_cannot_be_keys_are_refused(self, ground: Ground, name: str) -> None:
        """Names come from settings, and from labels of models."""
        with pytest.raises(ConfigError):
            ground.registry(member(name))
        registry = ground.registry(member("a"))
        with pytest.raises(ConfigError):
            await registry.flush(name)
        with pytest.raises(ConfigError):
            await registry.dropped(name, 1)
        with pytest.raises(ConfigError):
            await registry.share(name, None)
