"""The prompts of a history, and what the model gives on each when nothing interrupts it."""

import random
from dataclasses import dataclass

from tiercache.state import Chain, Layout, Namespace
from tiercache.testing.sim.model import Run

ALPHABET = 4
TOKENS_MAX = 40
TEXTS_MAX = 8


@dataclass(slots=True)
class Scope:
    """A namespace as narrowed by one adapter and tenant."""

    namespace: Namespace
    lora: str
    salt: str

    @property
    def narrowed(self) -> Namespace:
        """What the node makes of it."""
        return self.namespace.narrow(lora=self.lora, salt=self.salt)


class Texts:
    """Prompts that share beginnings, as conversations and templates do."""

    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self._layout = layout
        self._rng = rng
        self._tokens: list[list[int]] = []
        self._runs: dict[tuple[bytes, tuple[int, ...]], Run] = {}

    def draw(self) -> list[int]:
        """Return a prompt: new, one seen before, its continuation, or a sibling of it."""
        rng = self._rng
        fresh = [rng.randrange(ALPHABET) for _ in range(rng.randint(1, 12))]
        if not self._tokens or rng.random() < 0.1:
            tokens = fresh
        else:
            known = rng.choice(self._tokens)
            match rng.randrange(4):
                case 0:
                    tokens = list(known)
                case 1 | 2:
                    tokens = known + fresh
                case _:
                    tokens = known[: rng.randint(1, len(known))] + fresh
        tokens = tokens[:TOKENS_MAX]
        self.add(tokens)
        return tokens

    def add(self, tokens: list[int]) -> None:
        """Let later prompts build on these tokens."""
        if tokens not in self._tokens:
            self._tokens.append(tokens)
        if len(self._tokens) > TEXTS_MAX:
            del self._tokens[self._rng.randrange(TEXTS_MAX)]

    def chain(self, tokens: list[int]) -> Chain:
        """Return the digests of a prompt."""
        return Chain(tokens, self._layout.block_tokens)

    def reference(self, scope: Scope, tokens: list[int]) -> Run:
        """Return the uninterrupted run over exactly these tokens."""
        digest = scope.narrowed.digest
        whole = tuple(tokens)
        known = len(whole)
        while known and (digest, whole[:known]) not in self._runs:
            known -= 1
        if known:
            run = self._runs[digest, whole[:known]]
            if len(run.tokens) == known == len(whole):
                return run
            run = run.fork(known)
        else:
            run = Run(self._layout, int.from_bytes(digest[:8], "little"))
        for token in whole[known:]:
            run.step(token)
            self._runs[digest, tuple(run.tokens)] = run
        self._runs[digest, whole] = run
        return run
