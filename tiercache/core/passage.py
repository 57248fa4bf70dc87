"""What requests pass, as the eviction policies see it: the core's requests and objects in their words."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

from tiercache.core.catalog import Catalog, Entry, Item, Shelf
from tiercache.core.events import Offer, PlanAsked
from tiercache.core.limits import Limits
from tiercache.core.policy.base import Eviction
from tiercache.core.policy.lru import Lru
from tiercache.core.policy.meta import HYPER, INDEX, MARCONI, RECENT
from tiercache.core.policy.pointwise import Asking, Place, Pointwise
from tiercache.core.policy.standing import Standing
from tiercache.core.policy.visits import Shape, Tree, Visit
from tiercache.core.policy.whatif import WhatIf
from tiercache.core.sights import Request
from tiercache.core.tenants import Tenant
from tiercache.state import Care, Hint, Layout

FOLLOWED = (INDEX, HYPER, MARCONI, RECENT, "lru")


class Passage:
    """Tells the eviction policies which way requests go. With a plain LRU there is nobody to tell."""

    def __init__(self, limits: Limits, catalog: Catalog) -> None:
        self._catalog = catalog
        self._way_blocks_max = limits.way_blocks_max
        self._ways_max = limits.recent_requests_max
        self._way_blocks = 0
        evicting = limits.evicting
        self.standing: Standing | None = None
        if evicting.policy != "lru":
            budget = sum(limits.host_segments)
            self.standing = Standing(evicting.policy, budget, evicting.ghosts_max)
        self._declines = limits.nvme_bytes == 0
        self._orders: dict[Tenant | None, Pointwise[Item]] = {}
        self._trees: dict[bytes, tuple[Layout, Tree]] = {}
        # Of requests, how many blocks the policies were told of, and all that are known.
        self._ways: OrderedDict[Request, tuple[int, list[bytes]]] = OrderedDict()

    # --- the policies

    def make(self, tenant: Tenant | None) -> Eviction[Item]:
        """Return a new eviction policy, for a tenant with a share or (None) for all others."""
        if self.standing is None:
            return Lru()
        made = self._orders[tenant] = Pointwise(
            self.standing, _place, self._in_use, declines=self._declines
        )
        return made

    def left(self, tenant: Tenant) -> None:
        """A tenant is gone, or has no share any more, and its policy with it."""
        self._orders.pop(tenant, None)

    def _order(self, shelf: Shelf) -> Pointwise[Item]:
        return self._orders.get(shelf.tenant, self._orders[None])

    def _in_use(self, tree: Hashable, digest: Hashable) -> bool:
        """Return whether something that may not go now serves the boundary at a block."""
        assert isinstance(tree, bytes)
        assert isinstance(digest, bytes)
        shelf = self._catalog.shelves.get(tree)
        entry = shelf.entries.get(digest) if shelf is not None else None
        if shelf is None or entry is None:
            return False
        tails = (shelf.entries[tail.digest] for tail in entry.tails)
        return any(_is_busy(other) for other in (entry, *tails))

    def tenants(self) -> set[Tenant]:
        """Return those who have a policy of their own that follows requests."""
        return {tenant for tenant in self._orders if tenant is not None}

    # --- what requests do

    def visited(
        self,
        shelf: Shelf,
        request: Request,
        asked: PlanAsked,
        boundary: int,
        ends: Collection[int],
        now: float,
    ) -> None:
        """A new request resumes at `boundary` tokens and will take checkpoints at `ends`."""
        if self.standing is None:
            return
        tree = self._tree(shelf)
        step = tree.shape.block_tokens
        path = asked.digests
        blocks = {end // step for end in ends if asked.care.store}
        if asked.care.store and not tree.shape.state_bytes:
            blocks.add(len(path))
        blocks.add(boundary // step)
        known = tuple(sorted(end for end in blocks if 0 < end <= len(path)))
        visit = Visit(tree, path, asked.limit // step, known, now)
        order = self._order(shelf)
        order.settle()
        self.standing.visit(visit)
        order.visit(visit, boundary // step)
        self._go(request, len(path), path)

    def wrote(self, shelf: Shelf, request: Request, offers: Sequence[Offer], now: float) -> None:
        """A request offers objects: those beyond its prompt make its way longer."""
        if self.standing is None:
            return
        told, way = self._ways.get(request, (0, []))  # It may have planned nothing.
        tree = self._tree(shelf)
        step = tree.shape.block_tokens
        if any(_leaves(way, offer, step) for offer in offers):
            told, way = 0, []  # Another prompt under the same name.
        digests = {offer.end: offer.digest for offer in offers}
        longer = list(way)
        while (digest := digests.get((len(longer) + 1) * step)) is not None:
            longer.append(digest)
        end = len(longer)
        ends = not tree.shape.state_bytes or any(
            offer.end // step == end and (offer.base or _serves_boundary(shelf, offer))
            for offer in offers
        )
        if ends and end > told:
            visit = Visit(tree, longer, 0, (end,), now)
            if told:
                self.standing.grow(visit, told)
                self._order(shelf).grow(visit)
            else:
                self.standing.visit(visit)
                self._order(shelf).visit(visit, 0)
            told = end
        if longer:
            self._go(request, told, longer)

    def _go(self, request: Request, told: int, way: list[bytes]) -> None:
        self._way_blocks += len(way) - len(self._ways.pop(request, (0, ()))[1])
        if way:
            self._ways[request] = told, way
        while self._way_blocks > self._way_blocks_max or len(self._ways) > self._ways_max:
            self._way_blocks -= len(self._ways.popitem(last=False)[1][1])

    def asks(self, shelf: Shelf, offer: Offer, care: Care) -> None:
        """Room is wanted for what is offered, until `answered`."""
        if self.standing is not None:
            boundary = bool(offer.base) or _serves_boundary(shelf, offer)
            place = Place(shelf.digest, offer.base or offer.digest, boundary)
            depth = offer.end // self._tree(shelf).shape.block_tokens
            urgent = care.priority > 0 or care.hint is Hint.TOOL_CALL_PENDING
            order = self._order(shelf)
            order.asking = Asking(place, depth, urgent)
            order.outweighed = False

    def answered(self, shelf: Shelf) -> bool:
        """No more room is wanted. Return whether it was declined, since all that may go is worth more."""
        if self.standing is None:
            return False
        order = self._order(shelf)
        order.asking = None
        return order.outweighed

    def forget(self, shelf: Shelf) -> None:
        """A namespace is gone."""
        self._trees.pop(shelf.digest, None)
        if self.standing is not None:
            self.standing.forget(shelf.digest)
            for order in self._orders.values():
                order.forget(shelf.digest)

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return which policy is followed, what it remembers and what other sizes would save."""
        standing = self.standing
        followed = "lru" if standing is None else standing.current
        return {
            "eviction_policy": {name: float(name == followed) for name in FOLLOWED},
            "ghosts": {"": 0.0 if standing is None else len(standing.reuse)},
            "whatif_saved": WhatIf.curve_of(None if standing is None else standing.whatif),
        }

    def _tree(self, shelf: Shelf) -> Tree:
        layout = shelf.layout
        assert layout is not None
        known = self._trees.get(shelf.digest)
        if known is None or known[0] is not layout:
            known = self._trees[shelf.digest] = (layout, Tree(shelf.digest, _shape(shelf, layout)))
        return known[1]

    def check(self) -> None:
        """Raise AssertionError if a policy's sums are wrong."""
        for order in self._orders.values():
            order.check()
        blocks = sum(len(way) for _, way in self._ways.values())
        assert self._way_blocks == blocks <= self._way_blocks_max
        assert len(self._ways) <= self._ways_max


def _leaves(way: list[bytes], offer: Offer, step: int) -> bool:
    """Return whether an offer is of another prompt than a way of blocks of `step` tokens."""
    depth = offer.end // step
    return 0 < depth <= len(way) and way[depth - 1] != (offer.base or offer.digest)


def _shape(shelf: Shelf, layout: Layout) -> Shape:
    step = layout.block_tokens
    block = state = 0.0
    for part in layout.parts:
        (whole,) = part.shards(1)
        if part.is_snapshot:
            state += part.nbytes(0, whole)
        else:
            block += part.nbytes(part.block_tokens, whole) * step / part.block_tokens
    return Shape(step, block, state, shelf.work)


def _place(item: Item) -> Place:
    entry = item.entry
    shelf = entry.shelf
    boundary = bool(entry.base) or _is_snapshot(shelf, item.slot.part)
    return Place(shelf.digest, entry.base or entry.digest, boundary)


def _is_busy(entry: Entry) -> bool:
    """Return whether something here that serves a boundary alone is in memory, and may not go."""
    shelf = entry.shelf
    alone = bool(entry.base) or shelf.layout is None or not shelf.layout.has_snapshots
    return any(
        not item.idle
        and (item.host is not None or item.target is not None)
        and (alone or _is_snapshot(shelf, item.slot.part))
        for item in entry.items.values()
    )


def _is_snapshot(shelf: Shelf, part: str) -> bool:
    return shelf.layout is not None and shelf.layout.part(part).is_snapshot


def _serves_boundary(shelf: Shelf, offer: Offer) -> bool:
    layout = shelf.layout
    if layout is None or not 0 <= offer.part < len(layout.parts):
        return False
    return layout.parts[offer.part].is_snapshot
