"""Names of cached bytes: token chains, namespaces and keys.

A chain digest at n names exactly the first n tokens. Blocks are chained, so equal digests mean equal
prefixes; a digest at a token inside a block extends the chain there (a *tail*). A namespace holds all
that makes equal tokens mean different state; objects of different namespaces never meet.
"""

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tiercache.state.canonical import DIGEST_BYTES, digest, encode
from tiercache.state.layout import Layout, Shard

CHAIN_SCHEME = "sha256-u32le-1"
NATIVE = "native"
KEY_NAMESPACE_CHARS = 12
"""How much of a namespace's digest stands in the text of a key."""


def chain_scheme(block_tokens: int) -> str:
    """Return the name of this module's way to chain digests of blocks of that size."""
    return f"{CHAIN_SCHEME}/{block_tokens}"


def chain_start(scheme: str) -> bytes:
    """Return the digest of no tokens at all under a scheme: where every chain starts."""
    return digest("chain", scheme)


class Chain:
    """The chained digests of one token sequence.

    `extras` maps a token position to the content identity (full width, e.g. an image's SHA-256) of
    what stands at that placeholder; it becomes part of the digest of the block that holds it.
    """

    __slots__ = ("_blob", "_extras", "_tokens", "block_tokens", "digests")

    def __init__(
        self,
        tokens: Sequence[int],
        block_tokens: int,
        extras: Mapping[int, bytes] | None = None,
    ) -> None:
        if block_tokens < 1:
            raise ValueError("block_tokens must be at least 1")
        if isinstance(tokens, bytes | bytearray | memoryview):
            raise TypeError("tokens are numbers; an array would take bytes as packed ones")
        packed = array("I", tokens)  # Raises OverflowError for a token outside 0 .. 2**32 - 1.
        if packed.itemsize != 4:
            raise RuntimeError("this platform has no 32-bit unsigned array type")
        if sys.byteorder == "big":
            packed.byteswap()
        self._blob = packed.tobytes()
        self._tokens = len(packed)
        self._extras = dict(extras or {})
        if any(not 0 <= position < self._tokens for position in self._extras):
            raise ValueError("an extra lies outside the tokens")
        self.block_tokens = block_tokens
        previous = chain_start(chain_scheme(block_tokens))
        digests = [previous]
        for start in range(0, self._tokens - block_tokens + 1, block_tokens):
            previous = self._extend(b"block", previous, start, start + block_tokens)
            digests.append(previous)
        self.digests: tuple[bytes, ...] = tuple(digests)

    def __len__(self) -> int:
        """Tokens in the sequence."""
        return self._tokens

    def digest_at(self, tokens: int) -> bytes:
        """Return the digest (32 bytes) of the first `tokens` tokens."""
        if not 0 <= tokens <= self._tokens:
            raise ValueError(f"the chain has 0..{self._tokens} tokens, not {tokens}")
        block, rest = divmod(tokens, self.block_tokens)
        if rest == 0:
            return self.digests[block]
        return self._extend(b"tail%d:" % rest, self.digests[block], tokens - rest, tokens)

    def extended(self, tokens: Sequence[int]) -> "Chain":
        """Return the chain of this sequence followed by `tokens`; whole blocks are not hashed again."""
        more = Chain(tokens, self.block_tokens)
        longer = object.__new__(Chain)
        longer.block_tokens = self.block_tokens
        longer._blob = self._blob + more._blob
        longer._tokens = self._tokens + more._tokens
        longer._extras = self._extras
        digests = list(self.digests)
        while len(digests) * self.block_tokens <= longer._tokens:
            stop = len(digests) * self.block_tokens
            digests.append(longer._extend(b"block", digests[-1], stop - self.block_tokens, stop))
        longer.digests = tuple(digests)
        return longer

    def blocks(self) -> bytes:
        """Return the digests of all whole blocks, concatenated: what `plan` sends."""
        return b"".join(self.digests[1:])

    def _extend(self, what: bytes, previous: bytes, start: int, stop: int) -> bytes:
        # `what` fixes how many tokens follow, so that extras never read as tokens.
        hasher = hashlib.sha256(previous)
        hasher.update(what)
        hasher.update(self._blob[4 * start : 4 * stop])
        if self._extras:
            found = tuple(
                (position - start, content)
                for position, content in sorted(self._extras.items())
                if start <= position < stop
            )
            if found:
                hasher.update(encode(found))
        return hasher.digest()


class GivenChain(Chain):
    """A chain of digests that an engine made: of consecutive whole blocks, the first of which is block
    `first` of its sequence (0 for the first one).

    Its scheme is the engine's, and belongs into the namespace. The tokens are not known, so there are
    no boundaries inside blocks; nor are the digests before the first given block.
    """

    __slots__ = ("_first",)

    def __init__(self, path: bytes, block_tokens: int, first: int = 0) -> None:
        """`path`: the digests, concatenated. Raises ValueError when it is no whole number of them."""
        if block_tokens < 1 or first < 0:
            raise ValueError("block_tokens must be at least 1, first at least 0")
        if len(path) % DIGEST_BYTES:
            raise ValueError(f"digests are {DIGEST_BYTES} bytes each, not {len(path)} in all")
        self._blob = path
        self._first = first
        self._tokens = (first + len(path) // DIGEST_BYTES) * block_tokens
        self._extras = {}
        self.block_tokens = block_tokens
        self.digests = ()

    def digest_at(self, tokens: int) -> bytes:
        """Return the digest of the first `tokens` tokens: whole blocks, from the first given one on."""
        block, rest = divmod(tokens, self.block_tokens)
        if rest or not self._first < block <= self._tokens // self.block_tokens:
            raise ValueError(f"no digest at {tokens} tokens was given")
        at = (block - self._first - 1) * DIGEST_BYTES
        return self._blob[at : at + DIGEST_BYTES]

    def blocks(self) -> bytes:
        """Return the given digests, concatenated."""
        return self._blob


def tenant_of(salt: str) -> str:
    """Return the label of everybody who uses a salt: eight digits that do not reveal it, "-" for none."""
    return digest("tenant", salt).hex()[:8] if salt else "-"


@dataclass(frozen=True)
class Namespace:
    """Everything that makes equal tokens mean different state.

    `model` is a name, `weights` a revision or fingerprint of the weights, `tokenizer` a fingerprint,
    `lora` the *content* identity of the adapter ("" for none), `salt` the tenant's secret ("" for
    none), `layout` the fingerprint of the canonical layout, `chain` the scheme of the digests with
    its block size.
    """

    model: str
    weights: str
    tokenizer: str
    layout: str
    chain: str
    lora: str = ""
    salt: str = ""

    @classmethod
    def of(cls, layout: Layout, *, model: str, weights: str, tokenizer: str) -> "Namespace":
        """Return the namespace of a model with `layout` whose chains are `Chain`s."""
        if not (model and weights and tokenizer):
            raise ValueError("model, weights and tokenizer must all be named: they are identity")
        return cls(model, weights, tokenizer, layout.fingerprint, chain_scheme(layout.block_tokens))

    def narrow(self, *, lora: str = "", salt: str = "") -> "Namespace":
        """Return this namespace for one adapter and one tenant."""
        return replace(self, lora=lora, salt=salt)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 (32 bytes) over every field."""
        return digest(
            "namespace",
            self.model,
            self.weights,
            self.tokenizer,
            self.layout,
            self.chain,
            self.lora,
            self.salt,
        )

    @cached_property
    def tenant(self) -> str:
        """A label for accounting that does not reveal the salt; "-" when there is none."""
        return tenant_of(self.salt)

    def label(self) -> "Label":
        """Return what may be shown and stored of this namespace: everything but the salt."""
        return Label(self.digest, self.model, self.weights, self.tokenizer, self.lora, self.tenant)


@dataclass(frozen=True, slots=True)
class Label:
    """A namespace as people and disks may see it."""

    digest: bytes
    model: str
    weights: str
    tokenizer: str
    lora: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Key:
    """Names one object: the bytes of one part, for one shard, in one codec, ending at one digest."""

    namespace: bytes
    part: str
    shard: Shard
    codec: str
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.namespace) != DIGEST_BYTES or len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"digests are {DIGEST_BYTES} bytes")

    def encode(self) -> bytes:
        """Return canonical bytes, sorted on disk by namespace, then digest."""
        tail = encode((self.part, self.shard.start, self.shard.stop, self.codec))
        return self.namespace + self.digest + tail

    def __str__(self) -> str:
        namespace = self.namespace.hex()[:KEY_NAMESPACE_CHARS]
        return f"{namespace}/{self.digest.hex()}/{self.part}/{self.shard}/{self.codec}"
