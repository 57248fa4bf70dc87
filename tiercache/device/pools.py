"""The two pools: private states of running requests, and idle checkpoints.

Both hold every snapshot part of the layout in one slot number: a checkpoint that left one of a slot's
states behind would be worse than none. What a slot number means, and for how long, is said by a handle;
a stale one is answered with `Stale` before anything is read or written. Not thread-safe.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tiercache.device.codecs import Codec, codec_in, encoded
from tiercache.device.slots import Numbers, Private, Room, Shared, SlotTable, Stale
from tiercache.device.stacks import Store, snapshot_parts, stacks_of
from tiercache.errors import LayoutError
from tiercache.state import Layout, Part, Shard


@dataclass(frozen=True, slots=True)
class Space:
    """Where a pool's slots lie: `slots` numbers from `room`, in `memory` (flat uint8, slots `stride`
    bytes apart), or in tensors of the pool's own when that is None."""

    room: Room
    slots: int
    memory: torch.Tensor | None = None
    stride: int = 0

    @classmethod
    def own(cls, slots: int) -> "Space":
        """Return a space of so many slots in tensors of their own."""
        return cls(Numbers(slots), slots)


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank's slots hold: the snapshot parts of `layout` as rank `rank` of `ranks` has them, on
    `device`."""

    layout: Layout
    ranks: int = 1
    rank: int = 0
    device: torch.device | str = "cpu"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The snapshot parts."""
        return snapshot_parts(self.layout)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """This rank's shard of each of them."""
        return tuple(part.shards(self.ranks)[self.rank] for part in self.parts)

    def store(self, parts: Sequence[Part], space: Space) -> Store:
        """Return tensors for `parts`, which are these, encoded or not."""
        memory = None if space.memory is None else (space.memory, space.stride)
        slots = space.slots
        return Store(parts, self.shards, slots, device=self.device, memory=memory)


if TYPE_CHECKING:
    from tiercache.device.engine_states import EngineStates

Freed = Callable[[Store, int], None]
"""Called with a store and the number of one of its slots that has just become free."""


def _untouched(store: Store, number: int) -> None:
    """A freed slot keeps its bytes: whoever takes it next writes all of them."""


class ActivePool:
    """States of running requests, as the engine computes on them: native precision, private, writable.

    `store.tensors` are what kernels index by slot number. A slot that is taken holds whatever was there
    before: zero it, or write all of it.
    """

    def __init__(self, seat: Seat, space: Space | int, freed: Freed = _untouched) -> None:
        space = Space.own(space) if isinstance(space, int) else space
        self.seat = seat
        self.store = seat.store(seat.parts, space)
        self.table = SlotTable(space.room, lambda number: freed(self.store, number))

    def take(self) -> Private | None:
        """Return a free slot; None when there is none."""
        return self.table.take()

    def zero(self, slot: Private) -> Stale | None:
        """Set a slot to the state before the first token."""
        if not self.table.valid(slot):
            return Stale("slot")
        self.store.fill(slot.number, 0)
        return None

    def state(self, name: str) -> torch.Tensor:
        """Return one tensor of the layout in all slots, live: `[slots, *shape]`."""
        for stack, tensor in zip(self.store.stacks, self.store.tensors, strict=True):
            if name in stack.names:
                return tensor[stack.names.index(name)]
        raise LayoutError(f"no tensor {name!r} is in a slot")


@dataclass(frozen=True, slots=True)
class _Route:
    """A native stack with the names of its layers, and the encoded stacks that hold it, as indices."""

    native: int
    names: tuple[str, ...]
    forms: tuple[int, ...]


class CheckpointPool:
    """Idle checkpoints, in one codec. Read-only once written.

    A taking is one *block* of `per_block` places, which lie side by side; with 1, a block is one
    checkpoint. See `blocks` for blocks with several.
    """

    def __init__(
        self,
        seat: Seat,
        codec: Codec,
        space: Space | int,
        *,
        per_block: int = 1,
        freed: Freed = _untouched,
    ) -> None:
        if per_block < 1:
            raise ValueError("a block holds at least one checkpoint")
        space = Space.own(space) if isinstance(space, int) else space
        self.seat = seat
        self.codec = codec
        self.per_block = per_block
        parts = [encoded(codec, part) for part in seat.parts]
        if space.stride % per_block:
            raise LayoutError(f"blocks of {space.stride} bytes do not split into {per_block}")
        places = Space(space.room, space.slots * per_block, space.memory, space.stride // per_block)
        self.store = seat.store(parts, places)
        self.lossy = codec.lossy and any(codec_in(codec, part) == codec.name for part in seat.parts)
        self._routes = _routes(seat, codec, self.store)
        self.table = SlotTable(space.room, lambda block: self._free(freed, block))

    def take(self) -> Private | None:
        """Return a free block; None when there is none."""
        return self.table.take()

    def place(self, block: Private | Shared, index: int = 0) -> int:
        """Return the number in `store` of one place of a block."""
        if not 0 <= index < self.per_block:
            raise ValueError(f"a block has {self.per_block} places, not {index}")
        return block.number * self.per_block + index

    def encode(
        self, active: ActivePool, source: Private | Shared, target: Private, index: int = 0
    ) -> Stale | None:
        """Write a checkpoint of an active slot into one place of a block."""
        if not (active.table.valid(source) and self.table.valid(target)):
            return Stale("slot")
        theirs = active.store.index(source.number)
        ours = self.store.index(self.place(target, index))
        for route in self._routes:
            forms = [self.store.tensors[at] for at in route.forms]
            self.codec.encode(active.store.tensors[route.native], theirs, forms, ours)
        return None

    def decode(
        self, source: Private | Shared, active: ActivePool, target: Private, index: int = 0
    ) -> Stale | None:
        """Write one place of a block into an active slot."""
        if not (self.table.valid(source) and active.table.valid(target)):
            return Stale("slot")
        theirs = active.store.index(target.number)
        ours = self.store.index(self.place(source, index))
        for route in self._routes:
            forms = [self.store.tensors[at] for at in route.forms]
            self.codec.decode(forms, ours, active.store.tensors[route.native], theirs)
        return None

    def encode_from(self, states: "EngineStates", slot: int, target: Private) -> Stale | None:
        """Write a checkpoint of an engine's own slot into a block of one place."""
        if not self.table.valid(target):
            return Stale("slot")
        ours = self.store.index(self.place(target))
        for name, forms in self._layers():
            view, theirs = states.layer(name), self.store.index(slot)
            if not states.dense(name):
                view, theirs = view[:, slot : slot + 1].contiguous(), self.store.index(0)
            self.codec.encode(view, theirs, forms, ours)
        return None

    def decode_into(self, source: Shared, states: "EngineStates", slot: int) -> Stale | None:
        """Write a block of one place into an engine's own slot."""
        if not self.table.valid(source):
            return Stale("slot")
        ours = self.store.index(self.place(source))
        for name, forms in self._layers():
            view = states.layer(name)
            if states.dense(name):
                self.codec.decode(forms, ours, view, self.store.index(slot))
            else:
                row = view[:, slot : slot + 1]
                dense = torch.empty(row.shape, dtype=row.dtype, device=row.device)
                self.codec.decode(forms, ours, dense, self.store.index(0))
                row.copy_(dense)
        return None

    def _layers(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield each native tensor's name, with the tensors `[1, slots, ...]` that hold it."""
        for route in self._routes:
            for at, name in enumerate(route.names):
                yield name, [self.store.tensors[form][at : at + 1] for form in route.forms]

    def codec_in(self, part: str) -> str:
        """Return the codec's name in the keys of `part`."""
        return codec_in(self.codec, self.seat.layout.part(part))

    def _free(self, freed: Freed, block: int) -> None:
        for index in range(self.per_block):
            freed(self.store, block * self.per_block + index)


def _routes(seat: Seat, codec: Codec, store: Store) -> tuple[_Route, ...]:
    """Return for each native stack the encoded stacks that hold it, form by form."""
    native = [
        stack
        for part, shard in zip(seat.parts, seat.shards, strict=True)
        for stack in stacks_of(part, shard)
    ]
    found = {(stack.part, stack.names): at for at, stack in enumerate(store.stacks)}
    tensors = {(p.name, tensor.name): tensor for p in seat.parts for tensor in p.tensors}
    routes = []
    for at, stack in enumerate(native):
        forms = [codec.forms(tensors[stack.part, name]) for name in stack.names]
        columns = [tuple(form.name for form in column) for column in zip(*forms, strict=True)]
        if any((stack.part, names) not in found for names in columns):
            raise LayoutError(
                f"codec {codec.name!r} mixes states of {stack.part!r} that are kept apart"
            )
        routes.append(_Route(at, stack.names, tuple(found[stack.part, names] for names in columns)))
    return tuple(routes)
