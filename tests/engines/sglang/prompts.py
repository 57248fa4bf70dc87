"""Prompts that one tree computes and forgets, and what comes of them elsewhere."""

from collections.abc import Callable
from typing import Final

from tests.engines.sglang.trees import Restored, Tree

TOKENS: Final = 32
ALL: Final = Restored(TOKENS, TOKENS, TOKENS, True, True)
NOTHING: Final = Restored(0, 0, 0, True, True)

NewTree = Callable[..., Tree]
"""Makes a tree at a node: `new_tree(node, shape, server={...}, setting=...)`."""


def filled(tree: Tree, seed: int = 1) -> Tree:
    """Compute a prompt, and forget it."""
    tree.compute(seed, TOKENS)
    tree.settle()
    tree.forget()
    return tree
