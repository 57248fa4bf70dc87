"""A node without a process: what a client must answer, from a dict, for tests of adapters.

No leases over memory, no eviction, no tiers; it keeps what is saved until it is dropped. What can be
resumed is decided by `resolve`, as everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tiercache.client import Blob, Saved, Scope
from tiercache.errors import LayoutError
from tiercache.state import NATIVE, Chain, Key, Layout, Namespace, resolve


@dataclass(slots=True)
class LocalNode:
    """Holds objects of any number of namespaces. `tails`: boundaries inside blocks, by the digest of
    the block before them; `leases`: requests that have not released what they were shown."""

    objects: dict[Key, bytes] = field(default_factory=dict)
    tails: dict[tuple[bytes, bytes], set[tuple[int, bytes]]] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)

    def drop(self, part: str, digest: bytes) -> int:
        """Forget the objects of `part` that end at `digest`; return how many there were."""
        found = [key for key in self.objects if (key.part, key.digest) == (part, digest)]
        for key in found:
            del self.objects[key]
        return len(found)


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """As `tiercache.client.Plan`."""

    request: str
    boundary: int
    digest: bytes
    checkpoints: tuple[int, ...]
    reason: str
    blobs: tuple[Blob, ...]
    node: LocalNode
    ready: bool = True

    @property
    def ready_boundary(self) -> int:
        """All of it is in memory."""
        return self.boundary

    @property
    def held(self) -> bool:
        """Whether the lease stands."""
        return self.request in self.node.leases

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.node.leases.discard(self.request)


class LocalClient:
    """As `tiercache.client.Client`, for one rank that holds all of a model."""

    def __init__(self, node: LocalNode, namespace: Namespace, layout: Layout) -> None:
        if namespace.layout != layout.fingerprint:
            raise LayoutError("the namespace names another layout")
        self._node = node
        self._namespace = namespace
        self._layout = layout

    def plan(
        self, request: str, chain: Chain, *, limit: int | None = None, scope: Scope | None = None
    ) -> LocalPlan:
        """Return the deepest boundary up to `limit`, with its bytes."""
        scope = scope or Scope()
        deepest = len(chain) - 1 if limit is None else limit
        positions = self._positions(chain, deepest, scope)
        held = [
            [
                self._key(scope, part.name, chain.digest_at(at)) in self._node.objects
                for at in positions
            ]
            for part in self._layout.parts
        ]
        best = resolve(self._layout.parts, positions, held)
        boundary = positions[best] if best >= 0 else 0
        self._node.leases.add(request)
        return LocalPlan(
            request=request,
            boundary=boundary,
            digest=chain.digest_at(boundary) if boundary else b"",
            checkpoints=_checkpoints(len(chain), boundary, scope),
            reason="" if boundary else "nothing held",
            blobs=tuple(self._blobs(chain, boundary, scope)) if boundary else (),
            node=self._node,
        )

    def load(self, plan: LocalPlan, *, wait_s: float = 1.0) -> LocalPlan:
        """Return `plan`: everything is in memory."""
        del wait_s
        return plan

    def save(
        self,
        request: str,
        chain: Chain,
        blobs: Sequence[Blob],
        *,
        scope: Scope | None = None,
        parent: bytes = b"",
    ) -> Saved:
        """Keep `blobs`. Raises LayoutError for one of the wrong size, before any is kept."""
        del request, parent
        scope = scope or Scope()
        for blob in blobs:
            part = self._layout.part(blob.part)
            if blob.data.nbytes != part.nbytes(blob.end - blob.start, part.whole):
                raise LayoutError(f"{blob.data.nbytes} bytes for {blob.part!r} at {blob.end}")
        stored = 0
        for blob in blobs:
            digest = chain.digest_at(blob.end)
            key = self._key(scope, blob.part, digest)
            stored += key not in self._node.objects
            self._node.objects.setdefault(key, bytes(blob.data))
            block, inside = divmod(blob.end, chain.block_tokens)
            if inside:
                base = (key.namespace, chain.digests[block])
                self._node.tails.setdefault(base, set()).add((inside, digest))
        return Saved(stored=stored, held=len(blobs) - stored, declined={})

    def release(self, plan: LocalPlan) -> None:
        """Give the lease of `plan` back."""
        self._node.leases.discard(plan.request)

    def _key(self, scope: Scope, part: str, digest: bytes) -> Key:
        namespace = self._namespace.narrow(lora=scope.lora, salt=scope.salt)
        return Key(namespace.digest, part, self._layout.part(part).whole, NATIVE, digest)

    def _positions(self, chain: Chain, deepest: int, scope: Scope) -> list[int]:
        """Return every block edge, and every boundary inside a block that the chain really has."""
        namespace = self._namespace.narrow(lora=scope.lora, salt=scope.salt).digest
        found = set(range(chain.block_tokens, deepest + 1, chain.block_tokens))
        for block, base in enumerate(chain.digests):
            for inside, digest in self._node.tails.get((namespace, base), ()):
                at = block * chain.block_tokens + inside
                if at <= deepest and chain.digest_at(at) == digest:
                    found.add(at)
        return sorted(found)

    def _blobs(self, chain: Chain, boundary: int, scope: Scope) -> list[Blob]:
        blobs = []
        for part in self._layout.parts:
            step = part.block_tokens or boundary
            for start in range(0, boundary, step):
                end = min(start + step, boundary)
                content = self._node.objects[self._key(scope, part.name, chain.digest_at(end))]
                blobs.append(Blob(part=part.name, start=start, end=end, data=memoryview(content)))
        return blobs


def _checkpoints(tokens: int, resumed: int, scope: Scope) -> tuple[int, ...]:
    step = scope.capture.chunk_tokens
    ends = {tokens - 1, tokens, *(range(step, tokens, step) if step else ())}
    return tuple(sorted(end for end in ends if end > resumed))
