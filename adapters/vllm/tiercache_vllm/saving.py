"""What a request completes and is worth saving, and what is believed to be with the node already."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tiercache.state import Chain
from tiercache_vllm.geometry import Geometry
from tiercache_vllm.memory import Seen
from tiercache_vllm.planning import Answer, name_of
from tiercache_vllm.requests import Blocks, Entry, Offer, Scheduled, Watcher
from tiercache_vllm.settings import Item, Job, Settings, tagged


class Saving:
    """Chooses objects to save. Decisions only: nothing is copied here."""

    def __init__(
        self,
        geometry: Geometry,
        settings: Settings,
        counts: Counter[str],
        watcher: Watcher | None = None,
    ) -> None:
        self._geometry = geometry
        self._settings = settings
        self._counts = counts
        self._watcher = watcher
        self._seen = Seen(settings.seen_max)
        self._bytes = [
            part.nbytes(part.block_tokens, part.shards(geometry.ranks)[0])
            for part in geometry.layout.parts
        ]
        self._groups = [geometry.groups(at) for at in range(len(geometry.layout.parts))]
        self._sizes = {
            at: part.block_tokens
            for at, part in enumerate(geometry.layout.parts)
            if not part.is_snapshot
        }

    def job(
        self,
        entry: Entry,
        one: Scheduled,
        offers: Sequence[Offer],
        blocks_of: Callable[[str], Blocks | None],
    ) -> Job | None:
        """Return what a step of a request completes: pages that become full, states on offer."""
        answer, request = entry.answer, entry.request
        if answer is None or answer.scope is None or entry.chain is None:
            return None
        # Tokens that are not known yet (speculative ones, or still on their way) are not counted.
        end = min(one.start + one.count, request.num_tokens)
        self._grow(entry, end)
        items = [*self._states(entry, answer, offers, end)]
        if end >= entry.due and (blocks := blocks_of(one.request)) is not None:
            items += self._pages(entry, answer, end, blocks)
        if not items:
            return None
        for item in items:
            key = _key(answer, item.part, item.digest)
            self._seen.add(key)
            if self._watcher is not None:
                self._watcher.stored(request, item.part, item.end, key)
        resumed = entry.resumed
        parent = b""
        if resumed and resumed % entry.chain.block_tokens == 0 and resumed <= len(entry.chain):
            parent = entry.chain.digest_at(resumed)
        scope = answer.scope
        return Job(one.request, name_of(one.request), scope.lora, scope.salt, tuple(items), parent)

    def unsaved(self, tag: bytes) -> None:
        """Objects of a digest, `tagged`, are not with the node: they are offered again."""
        keys = [bytes((at,)) + tag for at in range(len(self._geometry.layout.parts))]
        self._seen.discard(keys)
        if self._watcher is not None:
            self._watcher.lost(keys)

    def forget(self, answer: Answer, chain: Chain) -> None:
        """Nothing of a chain is believed to be with the node any more."""
        for digest in chain.digests:
            self.unsaved(_tag(answer, digest))

    def clear(self) -> None:
        """Nothing at all is."""
        self._seen.clear()

    def compare(self, answer: Answer) -> None:
        """What was handed over up to a boundary that the node does not offer is there no more, or not
        yet: all of its chain is offered again."""
        chain = answer.chain
        if chain is None or answer.reason.startswith(("unavailable", "deadline")):
            return
        parts, block = self._geometry.layout.parts, self._geometry.block_tokens
        limit = (len(chain) - 1) // block * block
        snapshot = next((at for at, part in enumerate(parts) if part.is_snapshot), 0)
        ends = range(limit, answer.boundary, -block)
        if not self._geometry.layout.has_snapshots:
            # Every page is a boundary: the next one tells.
            ends = ends[-1:]
        for end in ends:
            if _key(answer, snapshot, chain.digest_at(end)) in self._seen:
                self.forget(answer, chain)
                self._counts["lost"] += 1
                return

    def _grow(self, entry: Entry, end: int) -> None:
        assert entry.chain is not None
        known = len(entry.chain)
        if end > known and end // entry.chain.block_tokens > known // entry.chain.block_tokens:
            entry.chain = entry.chain.extended(entry.request.all_token_ids[known:end])

    def _pages(self, entry: Entry, answer: Answer, end: int, blocks: Blocks) -> list[Item]:
        assert entry.chain is not None
        items: list[Item] = []
        room = self._settings.step_bytes_max
        for at, size in self._sizes.items():
            while entry.saved[at] + size <= end and room > 0:
                stop = entry.saved[at] // size * size + size
                digest = entry.chain.digest_at(stop)
                if _key(answer, at, digest) not in self._seen:
                    places = self.places(at, stop, blocks)
                    if places is not None:
                        items.append(Item(at, stop, digest, places))
                        room -= self._bytes[at]
                entry.saved[at] = stop
        entry.due = min(entry.saved[at] + size for at, size in self._sizes.items())
        return items

    def _states(
        self, entry: Entry, answer: Answer, offers: Sequence[Offer], end: int
    ) -> Iterable[Item]:
        """Yield the states on offer that are worth saving: where the node advised to, where another
        request left the same prefix, and after the prompt."""
        assert entry.chain is not None
        held: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            held.setdefault(tokens, {})[group] = block
        for tokens, blocks in held.items():
            if tokens % self._geometry.block_tokens or not 0 < tokens <= min(end, len(entry.chain)):
                self._counts["offers_unaligned"] += 1
                continue
            entry.offered.add(tokens)
            junction = tokens == entry.request.shared_prefix_boundary
            # What was decoded is beyond what the node was asked about.
            decoded = answer.chain is None or tokens > len(answer.chain)
            if not (tokens in answer.advice or junction or decoded):
                self._counts["offers_declined"] += 1
                continue
            digest = entry.chain.digest_at(tokens)
            for at, part in enumerate(self._geometry.layout.parts):
                if not part.is_snapshot or _key(answer, at, digest) in self._seen:
                    continue
                places = [blocks.get(group, 0) for group in self._groups[at]]
                if all(places):
                    yield Item(at, tokens, digest, tuple(places))
                else:
                    self._counts["offers_partial"] += 1

    def places(self, part: int, end: int, blocks: Blocks) -> tuple[int, ...] | None:
        """Return the block of each group that holds what ends at `end`; None where one is the null block
        (0) or beyond the table."""
        size = self._geometry.layout.parts[part].block_tokens or self._geometry.block_tokens
        places = []
        for group in self._groups[part]:
            index = end // size - 1
            table = blocks[group]
            if not 0 <= index < len(table) or not table[index]:
                return None
            places.append(table[index])
        return tuple(places)


def _tag(answer: Answer, digest: bytes) -> bytes:
    assert answer.scope is not None
    return tagged(digest, answer.scope.lora, answer.scope.salt)


def _key(answer: Answer, part: int, digest: bytes) -> bytes:
    return bytes((part,)) + _tag(answer, digest)
