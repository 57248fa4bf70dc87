"""What engines ship: one LRU over objects, pages of KV and checkpoints alike.

A page goes when no page behind it is held; a request makes all pages on its way new, of checkpoints only
the one it resumed at. The baseline: a node does not use it.
"""

import heapq
from typing import TypeAlias

from tiercache.core.policy.shadow import Tally
from tiercache.core.policy.visits import Path, Tree, Visit

_Entry: TypeAlias = tuple[int, int, int, "_Run"]


class _Run:
    """Pages that were used by the same requests. `used`: by which one last; `state`: likewise for the
    checkpoint at its end, -1: there is none."""

    __slots__ = ("children", "pages", "parent", "start", "state", "used")

    def __init__(self, parent: "_Run | None", start: int, pages: list[object]) -> None:
        self.parent = parent
        self.start = start
        self.pages = pages
        self.children: dict[object, _Run] = {}
        self.used = 0
        self.state = -1

    @property
    def end(self) -> int:
        return self.start + len(self.pages)


class Objects:
    """A cache of `budget` bytes; it answers like a `Shadow`."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.used = 0.0
        self.tally = Tally()
        self._root = _Run(None, 0, [])
        self._leaves: list[_Entry] = []
        self._states: list[_Entry] = []
        self._tick = 0
        self._number = 0

    def resident(self, tree: Tree, path: Path) -> int:
        """Return how many pages of a path are held; there is one tree."""
        return self._follow(path)[1]

    def visit(self, visit: Visit) -> int:
        """Take in one request; return after how many pages it could resume."""
        path, shape = visit.path, visit.tree.shape
        runs, held = self._follow(path)
        depth = 0
        for run in reversed(runs):
            if run.state >= 0 and run.end <= min(held, visit.usable):
                depth = run.end
                self._touch(run)
                self.tally.hits += 1
                self.tally.saved += shape.work.flops(depth * shape.block_tokens)
                break
        if held < len(path):
            above = self._cut(runs, held)
            if runs and runs[-1] is not above:
                runs.pop()  # The rest of a run that the path leaves.
            run = _Run(above, held, list(path[held:]))
            above.children[run.pages[0]] = run
            runs.append(run)
            self.used += (len(path) - held) * shape.block_bytes
        new = []
        for end in visit.ends:
            if end > depth:
                run = self._cut(runs, end)
                if run.state < 0:
                    self._touch(run)
                    self.used += shape.state_bytes
                    new.append(run)
        if runs and runs[-1].end > len(path):
            self._cut(runs, len(path))
        for run in runs:
            if run.end <= len(path):
                run.used = self._tick
        if runs and not runs[-1].children:
            self._push(self._leaves, runs[-1], runs[-1].used)
        self._make_room(visit.tree)
        self._count(visit, new, held)
        self._tick += 1
        return depth

    def _touch(self, run: _Run) -> None:
        run.state = self._tick
        self._push(self._states, run, self._tick)

    def _push(self, heap: list[_Entry], run: _Run, used: int) -> None:
        self._number += 1
        heapq.heappush(heap, (used, -run.end, self._number, run))

    def _follow(self, path: Path) -> tuple[list[_Run], int]:
        node, depth, runs = self._root, 0, []
        while depth < len(path):
            child = node.children.get(path[depth])
            if child is None:
                break
            runs.append(child)
            size = len(child.pages)
            if path[depth : depth + size] != child.pages:
                same = 1
                while depth + same < len(path) and path[depth + same] == child.pages[same]:
                    same += 1
                return runs, depth + same
            node, depth = child, depth + size
        return runs, depth

    def _cut(self, runs: list[_Run], end: int) -> _Run:
        """Return the run on a path that ends at `end`, made by cutting one in two."""
        at = next((at for at, run in enumerate(runs) if run.end >= end), len(runs))
        if end == 0:
            return self._root
        run = runs[at]
        if run.end == end:
            return run
        assert run.parent is not None
        upper = _Run(run.parent, run.start, run.pages[: end - run.start])
        upper.used = run.used
        run.parent.children[upper.pages[0]] = upper
        run.pages = run.pages[end - run.start :]
        run.start = end
        run.parent = upper
        upper.children[run.pages[0]] = run
        runs.insert(at, upper)
        return upper

    def _make_room(self, tree: Tree) -> None:
        shape = tree.shape
        while self.used > self.budget:
            leaf = self._first_leaf()
            state = self._first_state()
            if leaf is None and state is None:
                return
            if state is None or (leaf is not None and leaf[:2] <= state[:2]):
                assert leaf is not None
                self._trim(leaf, state, tree)
            else:
                heapq.heappop(self._states)
                state[3].state = -1
                self.used -= shape.state_bytes

    def _trim(self, leaf: _Entry, state: _Entry | None, tree: Tree) -> None:
        """Drop pages from the end of a leaf, as many as must go and go before that checkpoint."""
        run, shape = leaf[3], tree.shape
        heapq.heappop(self._leaves)
        if run.state >= 0:
            run.state = -1
            self.used -= shape.state_bytes
        over = self.used - self.budget
        count = max(1, min(len(run.pages), int(-(-over // shape.block_bytes))))
        if state is not None and state[3] is not run and state[0] == leaf[0]:
            count = min(count, max(1, run.end + state[1] + 1))
        del run.pages[len(run.pages) - count :]
        self.used -= count * shape.block_bytes
        self.tally.evictions += count
        if run.pages:
            self._push(self._leaves, run, run.used)
            return
        parent = run.parent
        assert parent is not None
        for first, child in parent.children.items():
            if child is run:
                del parent.children[first]
                break
        if not parent.children and parent is not self._root:
            self._push(self._leaves, parent, parent.used)

    def _first_leaf(self) -> _Entry | None:
        while self._leaves:
            used, end, _, run = self._leaves[0]
            if run.pages and not run.children and run.used == used and run.end == -end:
                return self._leaves[0]
            heapq.heappop(self._leaves)
        return None

    def _first_state(self) -> _Entry | None:
        while self._states:
            used, end, _, run = self._states[0]
            if run.state == used and run.end == -end:
                return self._states[0]
            heapq.heappop(self._states)
        return None

    def _count(self, visit: Visit, new: list[_Run], held: int) -> None:
        tally, shape = self.tally, visit.tree.shape
        tally.state_bytes += shape.state_bytes * len(new)
        tally.kv_bytes += shape.block_bytes * max(len(visit.path) - held, 0)
