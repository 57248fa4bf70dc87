"""A pointwise policy of short names, and what is held under it."""

from collections.abc import Hashable

from tiercache.core.cost import EVEN
from tiercache.core.policy.pointwise import Asking, Place, Pointwise
from tiercache.core.policy.standing import Standing
from tiercache.core.policy.visits import Shape, Tree, Visit

TREE = Tree("t", Shape(4, 10, 30, EVEN))


class Object:
    """A block's KV, or the checkpoint (`boundary`) at its end."""

    def __init__(self, name: str, *, boundary: bool) -> None:
        self.name = name
        self.boundary = boundary

    def __repr__(self) -> str:
        return self.name + ("*" if self.boundary else "")


class Bench:
    """A policy, and what is held under it."""

    def __init__(self, policy: str = "point-lru", *, declines: bool = True) -> None:
        self.busy: set[Hashable] = set()
        self.standing = Standing(policy, 1000, 100)
        self.policy: Pointwise[Object] = Pointwise(
            self.standing,
            lambda item: Place("t", item.name, item.boundary),
            lambda tree, digest: tree == "t" and digest in self.busy,
            declines=declines,
        )
        self.held: dict[str, list[Object]] = {}
        self.now = 0.0

    def visit(self, name: str, resumed: int = 0, fork: int = 0) -> None:
        self.now += 1
        path = [name[: depth + 1] for depth in range(len(name))]
        ends = tuple(sorted({fork, len(path), resumed} - {0}))
        self.policy.visit(Visit(TREE, path, len(path), ends, self.now), resumed)
        self.policy.check()

    def store(self, name: str, fork: int = 0, *, state: bool = True) -> None:
        """All blocks of a path that are not held yet, then the checkpoint at its end and its fork."""
        for depth in range(len(name)):
            block = name[: depth + 1]
            if block not in self.held:
                self.held[block] = [Object(block, boundary=False)]
                self.policy.add(self.held[block][0])
        for end in {len(name), fork} - {0} if state else ():
            state_ = Object(name[:end], boundary=True)
            self.held[name[:end]].append(state_)
            self.policy.add(state_)
        self.policy.check()

    def take(self, name: str, resumed: int = 0, fork: int = 0) -> None:
        self.visit(name, resumed, fork)
        self.store(name, fork=fork)

    def ask(self, name: str, *, boundary: bool = False, urgent: bool = False) -> None:
        """Room is wanted for a block, or for the checkpoint behind it."""
        self.policy.outweighed = False
        self.policy.asking = Asking(Place("t", name, boundary), len(name), urgent)

    def drop(self, count: int = 10**6) -> list[str]:
        """Drop so many items; return which, in order."""
        dropped: list[str] = []
        for item in self.policy.victims():
            if len(dropped) == count:
                break
            self.policy.remove(item)
            self.held[item.name].remove(item)
            if not self.held[item.name]:
                del self.held[item.name]
            dropped.append(repr(item))
            self.policy.check()
        return dropped

    def state(self, name: str) -> Object:
        return next(item for item in self.held[name] if item.boundary)
