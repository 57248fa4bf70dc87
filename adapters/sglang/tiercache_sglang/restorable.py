"""Which prefixes of a look-up can be restored, by SGLang's hit policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiercache.state import Layout, Part, resumable
from tiercache_sglang.geometry import KV

EVERY_PAGE = None
"""The window of a pool that needs all its pages (SGLang's ALL_PAGES)."""


@dataclass(frozen=True, slots=True)
class Hits:
    """The answer to one look-up, in pages from its first key.

    `kv`: leading pages that are held. `pools`: for each further pool, the longest prefix it allows (0:
    none). `prefixes`: every length at which KV and all pools can be restored, ascending.
    """

    kv: int
    pools: Mapping[str, int]
    prefixes: list[int]

    @property
    def longest(self) -> int:
        """The longest prefix that can be restored."""
        return self.prefixes[-1] if self.prefixes else 0


NO_HITS = Hits(0, {}, [])


def hits_of(
    layout: Layout,
    found: Sequence[bytes],
    pools: Mapping[str, Sequence[str]],
    windows: Mapping[str, int | None],
) -> Hits:
    """Return the hits in what a survey found.

    `found`: per part of the layout, one byte per page. `pools`: the parts of each pool asked for.
    `windows`: how many trailing pages each of them needs, EVERY_PAGE for all.
    """
    held = dict(zip((part.name for part in layout.parts), found, strict=True))
    kv = _leading(held[KV])
    page = layout.block_tokens
    positions = range(page, (kv + 1) * page, page)
    parts: list[Part] = []
    flags: list[bytes] = []
    longest: dict[str, int] = {}
    for pool, names in pools.items():
        own = [_windowed(layout.part(name), windows[pool], page) for name in names]
        own_flags = [held[name][:kv] for name in names]
        longest[pool] = next(resumable(own, positions, own_flags), -1) + 1
        parts += own
        flags += own_flags
    # What is rare comes first: most positions are out after one look.
    parts.append(layout.part(KV))
    flags.append(held[KV][:kv])
    return Hits(kv, longest, [at + 1 for at in resumable(parts, positions, flags)][::-1])


def _leading(flags: bytes) -> int:
    gap = flags.find(0)
    return len(flags) if gap < 0 else gap


def _windowed(part: Part, window: int | None, page: int) -> Part:
    """Return the part with the window that SGLang asks for; one state is a window of one."""
    if part.is_snapshot and window == 1:
        return part
    return replace(part, window=window, block_tokens=page)
