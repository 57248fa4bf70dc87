"""A toy hybrid model in wrap-around integers, and the bytes of its state.

It has the parts of real ones: rows per token that attention reads (all of them, or a window), a
recurrent state and a short register of the last inputs. Every output depends on every earlier token
through each part, so one missing, foreign or shifted row changes all that follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercache.state import Layout, Part, Shard

MASK = (1 << 64) - 1
VALUE_BYTES = 8
CONV_COLUMNS = 3


def mix(a: int, b: int) -> int:
    """Return 64 bits that depend on both, and on their order."""
    x = ((a ^ (b * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def visible_from(part: Part, tokens: int) -> int:
    """Return the first token whose row this part reads when `tokens` have been seen."""
    if part.window is None:
        return 0
    return max(0, tokens // part.block_tokens - part.window) * part.block_tokens


@dataclass(slots=True)
class Snapshot:
    """What is known after some token: of snapshot parts each unit's values, of others their sum."""

    values: list[list[list[int]]]
    sums: list[list[int]]

    def copy(self) -> "Snapshot":
        """Return one that changes by itself."""
        values = [[list(cells) for cells in units] for units in self.values]
        return Snapshot(values, [list(units) for units in self.sums])


@dataclass(slots=True)
class Run:
    """One sequence under the model of one namespace: what was seen, and the state after it.

    `rows[part][unit]` are rows of tokens from `first[part]` on; `snapshots[n]` is kept for the token
    counts that `step` was told to keep.
    """

    layout: Layout
    seed: int
    tokens: list[int] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)
    rows: list[list[list[int]]] = field(init=False)
    first: list[int] = field(init=False)
    state: Snapshot = field(init=False)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.layout.parts
        self.first = [0] * len(parts)
        self.rows = [[[] for _ in range(part.units)] for part in parts]
        sums = [[0] * part.units for part in parts]
        self.state = Snapshot([[[0] * width(p) for _ in range(p.units)] for p in parts], sums)

    def fork(self, tokens: int) -> "Run":
        """Return a run over the first `tokens` tokens of this one, all of which it kept."""
        found = Run(self.layout, self.seed, self.tokens[:tokens])
        found.outputs = {at: self.outputs[at] for at in range(1, tokens + 1)}
        found.snapshots = {at: self.snapshots[at] for at in range(1, tokens + 1)}
        found.rows = [[row[:tokens] for row in units] for units in self.rows]
        if tokens:
            found.state = self.snapshots[tokens].copy()
        return found

    def step(self, token: int, *, keep: bool = True) -> int:
        """See one more token; return the output after it. `keep`: also its snapshot."""
        seen = len(self.tokens)
        context = self.outputs.get(seen) or self._context(seen)
        self.tokens.append(token)
        given = mix(mix(context, token), seen)
        for index, part in enumerate(self.layout.parts):
            snapshot = part.is_snapshot
            for unit in range(part.units):
                value = mix(given, index * 64 + unit + 1)
                if not snapshot:
                    self.rows[index][unit].append(value)
                    sums = self.state.sums[index]
                    sums[unit] = (sums[unit] * 31 + value) & MASK
                    continue
                cells = self.state.values[index][unit]
                if len(cells) > 1:
                    del cells[0]
                    cells.append(value)
                else:
                    cells[0] = (cells[0] * 0x5851F42D4C957F2D + value) & MASK
        if keep:
            self.snapshots[seen + 1] = self.state.copy()
        output = self._context(seen + 1)
        self.outputs[seen + 1] = output
        return output

    def _context(self, seen: int) -> int:
        context = self.seed
        for index, part in enumerate(self.layout.parts):
            for unit in range(part.units):
                if part.is_snapshot:
                    for cell in self.state.values[index][unit]:
                        context = mix(context, cell)
                elif part.window is None:
                    context = mix(context, self.state.sums[index][unit])
                else:
                    total = 0
                    start = visible_from(part, seen) - self.first[index]
                    for row in self.rows[index][unit][start:]:
                        total = (total * 31 + row) & MASK
                    context = mix(context, total)
        return context

    # --- bytes

    def encode(self, part: int, shard: Shard, start: int, end: int) -> bytes:
        """Return the native bytes of one object: rows `[start, end)`, or the snapshot at `end`."""
        units = range(shard.start, shard.stop)
        if self.layout.parts[part].is_snapshot:
            values = self.snapshots[end].values[part]
            return b"".join(packed(values[unit]) for unit in units)
        skipped = self.first[part]
        rows = self.rows[part]
        return b"".join(
            packed([rows[unit][at - skipped] for unit in units]) for at in range(start, end)
        )

    def put(
        self, part: int, shard: Shard, span: tuple[int, int], content: bytes, own: Shard
    ) -> None:
        """Take over an object's bytes, of the units of `own` only. Objects of one part must come in
        ascending order."""
        values = unpacked(content)
        count = shard.stop - shard.start
        for unit in range(max(shard.start, own.start), min(shard.stop, own.stop)):
            at = unit - shard.start
            if self.layout.parts[part].is_snapshot:
                each = len(values) // count
                self.state.values[part][unit] = values[at * each : (at + 1) * each]
                continue
            rows = self.rows[part][unit]
            if not rows:
                self.first[part] = span[0]
            assert self.first[part] + len(rows) == span[0], "rows do not follow one another"
            rows.extend(values[at::count])

    def resumed(self, tokens: Sequence[int]) -> None:
        """All objects were put: the state is the one after `tokens`."""
        self.tokens = list(tokens)
        for index, part in enumerate(self.layout.parts):
            if part.is_snapshot or part.window is not None:
                continue
            for unit in range(part.units):
                total = 0
                for row in self.rows[index][unit]:
                    total = (total * 31 + row) & MASK
                self.state.sums[index][unit] = total


def width(part: Part) -> int:
    """Return how many values one unit of a snapshot part has."""
    return part.tensors[0].shape[-1]


def packed(values: Sequence[int]) -> bytes:
    """Return values as little-endian bytes."""
    return b"".join(value.to_bytes(VALUE_BYTES, "little") for value in values)


def unpacked(content: bytes) -> list[int]:
    """Return the values of little-endian bytes."""
    return [
        int.from_bytes(content[at : at + VALUE_BYTES], "little")
        for at in range(0, len(content), VALUE_BYTES)
    ]
