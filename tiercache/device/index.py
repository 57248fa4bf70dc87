"""Checkpoints by what they are checkpoints of: whose tokens, and how many of them.

A *name* is the digest of a namespace and the digest of a boundary, 64 bytes. Equal tokens under another
adapter or another tenant's salt have another name, so that they never meet.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tiercache.client import Scope
from tiercache.errors import LayoutError
from tiercache.state import Chain, Namespace
from tiercache.state.keys import chain_scheme

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one request, and whose they are.

    `request`: its id, as the node is told it. `scope`: its adapter and salt, and what `save` is told.
    """

    request: str
    chain: Chain
    scope: Scope = field(default_factory=Scope)


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One checkpoint: what holds it, and the first `tokens` tokens of whose prompt it contains."""

    held: T
    prompt: Prompt
    tokens: int


class Index(Generic[T]):
    """Entries by name. Says nothing of where bytes are.

    Each entry hangs below the next shallower one of its prefix; the first ones, below their namespace.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._entries: dict[bytes, Entry[T]] = {}
        self._names: dict[T, bytes] = {}
        self._depths: dict[bytes, Counter[int]] = {}  # By namespace.
        self._base: dict[bytes, bytes] = {}
        self._above: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def name(self, prompt: Prompt, tokens: int) -> bytes:
        """Return the name of the first `tokens` tokens.

        Raises ValueError when there are not as many, LayoutError for a chain in blocks of another size
        than the namespace's.
        """
        if chain_scheme(prompt.chain.block_tokens) != self.namespace.chain:
            raise LayoutError(
                f"a chain in blocks of {prompt.chain.block_tokens} tokens, under {self.namespace.chain!r}"
            )
        return self._whose(prompt) + prompt.chain.digest_at(tokens)

    def get(self, name: bytes) -> Entry[T] | None:
        """Return what has that name."""
        return self._entries.get(name)

    def name_of(self, held: T) -> bytes | None:
        """Return the name of what is held; None when it is not known here."""
        return self._names.get(held)

    def prefixes(self, prompt: Prompt, limit: int) -> Iterator[tuple[bytes, Entry[T]]]:
        """Yield the entries of prefixes of up to `limit` tokens, the deepest first.

        What was yielded may be removed meanwhile.
        """
        whose = self._whose(prompt)
        for tokens in sorted(self._depths.get(whose, ()), reverse=True):
            if tokens <= min(limit, len(prompt.chain)):
                name = whose + prompt.chain.digest_at(tokens)
                entry = self._entries.get(name)
                if entry is not None:
                    yield name, entry

    def add(self, name: bytes, entry: Entry[T]) -> None:
        """Add an entry; nothing of that name may be there."""
        assert name not in self._entries
        assert entry.held not in self._names
        whose, digest = self._whose(entry.prompt), entry.prompt.chain.digest_at(entry.tokens)
        found = next(self.prefixes(entry.prompt, entry.tokens - 1), None)
        base = whose if found is None else found[0]
        self._entries[name] = entry
        self._names[entry.held] = name
        self._depths.setdefault(whose, Counter())[entry.tokens] += 1
        block = entry.tokens // entry.prompt.chain.block_tokens
        edge = entry.prompt.chain.digests[block]
        for other in list(self._above.get(base, ())):
            above = self._entries[other]
            if above.tokens <= entry.tokens or above.prompt.chain.digests[block] != edge:
                continue  # The edge first: to look it up costs nothing, a tail is hashed.
            if above.prompt.chain.digest_at(entry.tokens) == digest:
                self._hang(other, name)
        self._hang(name, base)

    def remove(self, name: bytes) -> Entry[T] | None:
        """Forget what has that name, and return it."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        del self._names[entry.held]
        whose = self._whose(entry.prompt)
        depths = self._depths[whose]
        depths[entry.tokens] -= 1
        if not depths[entry.tokens]:
            del depths[entry.tokens]
        if not depths:
            del self._depths[whose]
        for other in list(self._above.get(name, ())):
            self._hang(other, self._base[name])
        self._unhang(name)
        return entry

    def marginal(self, name: bytes) -> int:
        """Return the tokens between an entry and the next shallower one of its prefix."""
        below = self._entries.get(self._base[name])
        return self._entries[name].tokens - (0 if below is None else below.tokens)

    def _whose(self, prompt: Prompt) -> bytes:
        scope = prompt.scope
        return self.namespace.narrow(lora=scope.lora, salt=scope.salt).digest

    def _hang(self, name: bytes, base: bytes) -> None:
        self._unhang(name)
        self._base[name] = base
        self._above.setdefault(base, set()).add(name)

    def _unhang(self, name: bytes) -> None:
        base = self._base.pop(name, None)
        if base is not None:
            self._above[base].discard(name)
            if not self._above[base]:
                del self._above[base]
