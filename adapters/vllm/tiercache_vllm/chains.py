"""Digests without their tokens: what a worker knows of a request."""

from collections.abc import Mapping

from tiercache.state import Chain


class KnownChain(Chain):
    """A chain of which only some digests are known, by token count; they were computed elsewhere.

    It stands for a chain where objects are saved, and nowhere else: `digests` are not there.
    """

    __slots__ = ("_known",)

    def __init__(self, known: Mapping[int, bytes], block_tokens: int) -> None:
        super().__init__((), block_tokens)
        self._known = dict(known)

    def __len__(self) -> int:
        return max(self._known, default=0)

    def digest_at(self, tokens: int) -> bytes:
        """Return a digest that is known; ValueError for any other."""
        try:
            return self._known[tokens]
        except KeyError:
            raise ValueError(f"the digest at {tokens} tokens is not known here") from None
