"""What a worker's cache groups hold, as parts of a layout, and which bytes of which block belong to a part.

vLLM keeps a model's state in groups: layers that share one block table. All groups address one pool
of blocks, and their tensors overlay the same memory, so that a place is (group, block) and never a
block alone. Here groups of one kind become one part of the canonical layout:

    kv        pages of full attention, per token [head, keys then values]
    latent    pages of multi-head latent attention, equal on every rank, stored once
    window<n> pages of sliding-window attention over n tokens
    recurrent, conv, state   what a linear-attention layer holds at a boundary

Pure values, no vLLM and no torch: a worker describes what it was given, and the scheduler gets the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from tiercache.errors import LayoutError
from tiercache.state import Kind, Layout, Part, Tensor

_AXES = {"recurrent": ("head", "value", "key"), "conv": ("channel", "column")}


@dataclass(frozen=True, slots=True)
class Pages:
    """The attention pages of one layer on this rank: per token `heads` rows of `width` values.

    `units`: how many heads there are over all ranks. `latent`: every rank holds the same rows.
    """

    layer: str
    dtype: str
    heads: int
    width: int
    units: int
    latent: bool = False


@dataclass(frozen=True, slots=True)
class Substate:
    """One tensor of what a linear-attention layer holds, as it lies on this rank.

    `offset`: its first byte in the layer's packed page. `shape` as vLLM has it. `order`: which axis of
    it is which axis of the canonical form (`(1, 0)`: transposed). `segments`: the pieces of the
    canonical first axis over all ranks that are split one by one. `units`: into how many equal pieces
    the first axis splits over all ranks; 0 when that is not known, 1 when every rank holds the same.
    """

    layer: str
    what: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    segments: tuple[int, ...] = ()
    units: int = 0

    @property
    def local(self) -> tuple[int, ...]:
        """Its shape in canonical order on this rank."""
        return tuple(self.shape[axis] for axis in self.order)


@dataclass(frozen=True, slots=True)
class Group:
    """One cache group. `window`: tokens that its attention looks back, None for all of them."""

    number: int
    block_tokens: int
    pages: tuple[Pages, ...] = ()
    states: tuple[Substate, ...] = ()
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of a part is: the group whose block table leads there, and the tensor."""

    group: int
    what: Pages | Substate


@dataclass(frozen=True)
class Geometry:
    """The layout of a model and where each of its tensors is, by part and in the layout's order.

    `block_tokens`: boundaries are multiples of it (vLLM's scheduler block).
    """

    layout: Layout
    places: tuple[tuple[Place, ...], ...]
    ranks: int
    block_tokens: int

    def groups(self, part: int) -> tuple[int, ...]:
        """Return the groups that one object of a part is spread over, ascending."""
        return tuple(sorted({place.group for place in self.places[part]}))


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor that is not split yet, and into how many units it can be."""

    place: Place
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    units: int
    segments: tuple[int, ...] = ()

    def tensor(self, units: int) -> Tensor:
        """Return it as part of something that splits into `units`."""
        what = self.place.what
        name = f"{what.layer}.{what.what if isinstance(what, Substate) else 'kv'}"
        if units == 1:
            return Tensor(name, what.dtype, self.shape, self.axes)
        return Tensor(name, what.dtype, self.shape, self.axes, 0, self.segments)


_Form = tuple[Kind, int | None, int]


def geometry_of(groups: Sequence[Group], ranks: int) -> Geometry:
    """Return the geometry of a rank's groups.

    Raises LayoutError for groups that cannot be described.
    """
    if not groups:
        raise LayoutError("the engine has no cache group that can be stored")
    found: dict[tuple[str, _Form], list[_Found]] = {}
    for group in groups:
        for page in group.pages:
            found.setdefault(_form_of_pages(group, page), []).append(_pages(group, page))
        for state in group.states:
            kind = Kind.CONV if state.what == "conv" else Kind.RECURRENT
            one = _state(group, state, ranks)
            name = state.what if one.units > 1 or ranks == 1 else f"{state.what}_copy"
            found.setdefault((name, (kind, 1, 0)), []).append(one)
    parts, places = [], []
    for (name, (kind, window, block)), tensors in sorted(found.items()):
        units = gcd(*(one.units for one in tensors))
        if units % ranks and ranks % units:
            raise LayoutError(f"part {name!r}: {units} units do not split over {ranks} ranks")
        split = tuple(one.tensor(units) for one in tensors)
        parts.append(Part(name, kind, window, block, units, split))
        places.append(tuple(one.place for one in tensors))
    blocks = [group.block_tokens for group in groups]
    return Geometry(Layout(tuple(parts), gcd(*blocks)), tuple(places), ranks, lcm(*blocks))


def _form_of_pages(group: Group, page: Pages) -> tuple[str, _Form]:
    """Return the part that a layer's pages belong to, and its form. The window is in blocks: the token
    at the boundary is computed, and looks at the `window - 1` tokens before it."""
    base = f"{'latent' if page.latent else 'kv'}{group.block_tokens}"
    if group.window is None:
        return base, (Kind.KV, None, group.block_tokens)
    blocks = max(1, -(-(group.window - 1) // group.block_tokens))
    return f"{base}_window{group.window}", (Kind.KV, blocks, group.block_tokens)


def _pages(group: Group, page: Pages) -> _Found:
    place = Place(group.number, page)
    if page.latent:
        shape = (page.heads, page.width)
        return _Found(place, shape, ("copy", "latent"), 1)
    return _Found(place, (page.units, page.width), ("head", "keys_values"), page.units)


def _state(group: Group, state: Substate, ranks: int) -> _Found:
    """Return the canonical tensor over all ranks.

    Where it is not known how ranks split it, the first axis is theirs: each rank reads what that rank
    wrote, and only at the same number of ranks.
    """
    units = state.units or ranks
    width = state.local[0] * (1 if units == 1 else ranks)
    axes = _AXES.get(state.what, ())
    if len(axes) != len(state.shape):
        axes = tuple(f"axis{index}" for index in range(len(state.shape)))
    if state.segments and sum(state.segments) != width:
        raise LayoutError(f"{state.layer}: {state.segments} are not the pieces of {width}")
    shape = (width, *state.local[1:])
    return _Found(Place(group.number, state), shape, axes, units, state.segments)
