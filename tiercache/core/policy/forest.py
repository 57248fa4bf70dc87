"""Prefixes that are held, as trees of runs: where they part, and where they can be resumed.

A `Node` is a run of blocks that no resume and no fork divides, and ends where one does. A `Point` is a
boundary at the end of a node that can be resumed: its checkpoint and all KV above it are there. Digests
are chained, so equal digests mean equal prefixes: following a path costs one comparison for each run,
and a binary search inside the last one.
"""

import math
from collections.abc import Hashable, Iterator

from tiercache.core.policy.reuse import Ghost
from tiercache.core.policy.visits import Path, Shape, Tree

HEIRS_MAX = 4
"""Evicted points whose reuse falls back on one that is held: more than these are not remembered."""


class Point:
    """A boundary that can be resumed. `used` is the tick of its last use, `hits` how many there were.

    `heirs` are points below it that were evicted: who would have used them comes here now.
    """

    __slots__ = ("ghost", "heirs", "hits", "node", "used")

    def __init__(self, node: "Node", ghost: Ghost, tick: int) -> None:
        self.node = node
        self.ghost = ghost
        self.used = tick
        self.hits = 0
        self.heirs: list[Ghost] = []


class Node:
    """A run of blocks `[start, end)` below its parent; `point` is at its end. `tree`: of a root only."""

    __slots__ = ("blocks", "children", "parent", "point", "shape", "start", "tree")

    def __init__(
        self, shape: Shape, parent: "Node | None", start: int, blocks: list[Hashable]
    ) -> None:
        self.shape = shape
        self.parent = parent
        self.start = start
        self.blocks = blocks
        self.children: dict[Hashable, Node] = {}
        self.point: Point | None = None
        self.tree: Hashable = None

    @property
    def end(self) -> int:
        """Blocks from the beginning of the prompt to the end of the run."""
        return self.start + len(self.blocks)

    @property
    def tokens(self) -> int:
        """Tokens from the beginning of the prompt to the end of the run."""
        return (self.start + len(self.blocks)) * self.shape.block_tokens

    def above(self) -> Point | None:
        """Return the nearest point above."""
        node = self.parent
        while node is not None and node.point is None:
            node = node.parent
        return None if node is None else node.point

    def freed(self) -> float:
        """Return the bytes that evicting the point here gives back: KV only if nothing else needs it."""
        own = 0 if self.children else len(self.blocks)
        return self.shape.state_bytes + own * self.shape.block_bytes

    def rests_on(self, depth: int, digest: Hashable) -> bool:
        """Return whether a digest is that of the block at `depth`, the first is 1, on the way to here."""
        if not 0 < depth <= self.end:
            return False
        node = self
        while node.start >= depth:
            assert node.parent is not None
            node = node.parent
        return node.blocks[depth - 1 - node.start] == digest

    def fits(self, budget: float) -> bool:
        """Return whether so many bytes hold what a resume here needs: its checkpoint, and all KV from the
        beginning. Without checkpoints the beginning alone is worth having."""
        shape = self.shape
        return not shape.state_bytes or shape.state_bytes + self.end * shape.block_bytes <= budget

    def gain(self) -> float:
        """Return the FLOPs that a resume here saves beyond the next best one."""
        shape = self.shape
        if not shape.state_bytes:
            return shape.work.extending(self.start * shape.block_tokens, self.tokens)
        above = self.above()
        return shape.work.extending(above.node.tokens if above else 0, self.tokens)

    def density(self) -> float:
        """Return the FLOPs saved for each byte given back; infinite when none is."""
        freed = self.freed()
        return self.gain() / freed if freed else math.inf

    def below(self) -> Iterator[Point]:
        """Yield the nearest points below. A few of many cost no more than a few."""
        stack = [iter(self.children.values())]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
            elif node.point is not None:
                yield node.point
            else:
                stack.append(iter(node.children.values()))


class Forest:
    """The runs and points of all trees. `nbytes` is what they weigh by their shapes."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self.points = 0
        self.blocks = 0
        self.nbytes = 0.0

    def root(self, tree: Tree) -> Node:
        """Return the empty prefix of a tree."""
        root = self._roots.get(tree.name)
        if root is None:
            root = self._roots[tree.name] = Node(tree.shape, None, 0, [])
            root.tree = tree.name
        return root

    def follow(self, tree: Tree, path: Path) -> tuple[list[Node], int]:
        """Return the nodes that a path enters, its root first, and how many of its blocks are held.

        It may leave the last node before its end.
        """
        node, depth = self.root(tree), 0
        entered = [node]
        while depth < len(path):
            child = node.children.get(path[depth])
            if child is None:
                break
            entered.append(child)
            size = len(child.blocks)
            if depth + size <= len(path) and path[depth + size - 1] == child.blocks[-1]:
                node, depth = child, depth + size
                continue
            return entered, depth + _common(path, depth, child.blocks)
        return entered, depth

    def extend(self, entered: list[Node], path: Path, held: int, end: int) -> Node:
        """Hold a path up to `end` blocks, of which `held` are; return the node that ends there.

        `entered` is what `follow` returned; it is kept up to date.
        """
        if end <= held:
            return self.split(entered, end)
        above = self.split(entered, held)
        if entered[-1] is not above:
            entered.pop()  # The rest of a run that the path leaves.
        if above.point is None and above.parent is not None and not above.children:
            raise AssertionError("a run that nothing needs")
        node = Node(above.shape, above, held, list(path[held:end]))
        above.children[node.blocks[0]] = node
        entered.append(node)
        self._count(above.shape, end - held, 0)
        return node

    def split(self, entered: list[Node], end: int) -> Node:
        """Return the node on a path that ends after `end` blocks, made by splitting when none does."""
        low, high = 0, len(entered) - 1
        while low < high:
            middle = (low + high) // 2
            if entered[middle].end < end:
                low = middle + 1
            else:
                high = middle
        node = entered[low]
        if node.end == end:
            return node
        cut = end - node.start
        upper = Node(node.shape, node.parent, node.start, node.blocks[:cut])
        assert node.parent is not None
        node.parent.children[upper.blocks[0]] = upper
        node.blocks = node.blocks[cut:]
        node.start = end
        node.parent = upper
        upper.children[node.blocks[0]] = node
        entered.insert(low, upper)
        return upper

    def add(self, node: Node, ghost: Ghost, tick: int) -> Point:
        """Make the end of a node resumable."""
        assert node.point is None
        node.point = Point(node, ghost, tick)
        self._count(node.shape, 0, 1)
        return node.point

    def remove(self, point: Point) -> tuple[list[Hashable], Node | None]:
        """Take a point away, and the KV that only it needed.

        Return which blocks went, deepest first, and the node whose run grew since nothing divides it any
        more.
        """
        point.node.point = None
        node: Node = point.node
        gone: list[Hashable] = []
        while not node.children and node.point is None and node.parent is not None:
            gone.extend(reversed(node.blocks))
            del node.parent.children[node.blocks[0]]
            node = node.parent
        self._count(node.shape, -len(gone), -1)
        return gone, self._join(node)

    def points_of(self, tree: Hashable) -> list[Point]:
        """Return every point of a tree."""
        root = self._roots.get(tree)
        return [] if root is None else [node.point for node in _all(root) if node.point is not None]

    def forget(self, tree: Hashable) -> None:
        """A tree is gone."""
        root = self._roots.pop(tree, None)
        for node in () if root is None else _all(root):
            self._count(node.shape, -len(node.blocks), -(node.point is not None))

    def _count(self, shape: Shape, blocks: int, points: int) -> None:
        self.blocks += blocks
        self.points += points
        self.nbytes += blocks * shape.block_bytes + points * shape.state_bytes

    def _join(self, node: Node) -> Node | None:
        """A node that divides nothing becomes part of its only child."""
        if node.parent is None or node.point is not None or len(node.children) != 1:
            return None
        (child,) = node.children.values()
        child.blocks = node.blocks + child.blocks
        child.start = node.start
        child.parent = node.parent
        node.parent.children[child.blocks[0]] = child
        return child

    def __iter__(self) -> Iterator[Node]:
        """Yield every node but the roots."""
        for root in self._roots.values():
            yield from _all(root)

    def check(self) -> None:
        """Raise AssertionError if runs, points and sums do not agree."""
        points = blocks = 0
        nbytes = 0.0
        for node in self:
            parent = node.parent
            assert parent is not None
            assert node.start == parent.end
            assert parent.children[node.blocks[0]] is node
            assert node.point is None or node.point.node is node
            assert node.point is not None or len(node.children) > 1, "a run that nothing needs"
            points += node.point is not None
            blocks += len(node.blocks)
            nbytes += len(node.blocks) * node.shape.block_bytes
            nbytes += node.shape.state_bytes if node.point is not None else 0.0
        assert math.isclose(nbytes, self.nbytes, abs_tol=1.0)
        assert (points, blocks) == (self.points, self.blocks)


def _all(root: Node) -> Iterator[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _common(path: Path, depth: int, blocks: list[Hashable]) -> int:
    """Return how many of `blocks` the path has from `depth` on; the first one it has."""
    low, high = 1, min(len(blocks), len(path) - depth)
    while low < high:
        middle = (low + high + 1) // 2
        if path[depth + middle - 1] == blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
