"""A chain that grows names the same prefixes as one made at once."""

import pytest

from tiercache.state import Chain

TOKENS = tuple(range(7, 60))


@pytest.mark.parametrize("first", [0, 1, 7, 8, 9, 16, 52, 53])
@pytest.mark.parametrize("steps", [1, 3, 8, 40])
def test_growing_changes_no_digest(first: int, steps: int) -> None:
    extras = {position: b"x" * 32 for position in (0, 3, 6) if position < first}
    chain = Chain(TOKENS[:first], 8, extras)
    for at in range(first, len(TOKENS), steps):
        chain = chain.extended(TOKENS[at : at + steps])
    whole = Chain(TOKENS, 8, extras)
    assert len(chain) == len(whole)
    assert chain.digests == whole.digests
    assert [chain.digest_at(n) for n in range(54)] == [whole.digest_at(n) for n in range(54)]


def test_the_shorter_chain_stays_as_it_was() -> None:
    chain = Chain(TOKENS[:12], 8)
    before = chain.digest_at(12)
    longer = chain.extended(TOKENS[12:30])
    assert (len(chain), chain.digest_at(12)) == (12, before)
    assert longer.digest_at(12) == before


def test_nothing_more_is_the_same_chain() -> None:
    chain = Chain(TOKENS[:16], 8)
    assert chain.extended(()).digests == chain.digests
