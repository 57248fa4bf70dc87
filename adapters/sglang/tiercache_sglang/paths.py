"""SGLang's page hashes as paths, and names for requests that SGLang does not name.

A page hash is the hex SHA-256 of the page's token ids, chained over the pages before it; LoRA and
`cache_salt` seed the chain. So one hash names a whole prefix, and the scheme's name is all that the
namespace needs.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import chain
from typing import Final

from tiercache.state.canonical import DIGEST_BYTES

SCHEME: Final = "sglang-page-sha256"
"""SGLang's way to chain page hashes, as of 0.5.23."""

RETRY_S: Final = 2.0
"""SGLang asks again for a request that waits; the same question within this time is that request's."""

REQUESTS_MAX: Final = 4096
"""Questions that are remembered."""

PAGES_MAX: Final = 65_536
"""Pages that are remembered as missing or saved."""

PATHS_MAX: Final = 64
"""Look-ups whose paths are remembered."""

BACK_MAX: Final = 4096
"""How many pages before a saved one are looked at for its request."""


def scheme_of(page_tokens: int, *, bigram: bool) -> str:
    """Return the name of the chain scheme. `bigram`: pages hash pairs of tokens (EAGLE)."""
    return f"{SCHEME}{'-bigram' if bigram else ''}/{page_tokens}"


def path_of(keys: Sequence[str]) -> bytes | None:
    """Return the digests, concatenated; None when they are no SHA-256 in hex."""
    if set(map(len, keys)) - {2 * DIGEST_BYTES}:
        return None
    try:
        path = bytes.fromhex("".join(keys))
    except ValueError:
        return None
    return path if len(path) == DIGEST_BYTES * len(keys) else None


class Requests:
    """Names look-ups and saves, so that all that one request does is one sight, its ranks' included, and
    knows where pages stand.

    A request looks its prompt up, perhaps several times, and saves later what was missing. Ranks of one
    engine ask in the same order, and so arrive at the same names; where they do not, or a page cannot be
    told to be of a request, a prefix earns its place on NVMe a little earlier or later.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._pages: OrderedDict[str, tuple[str, int | None]] = OrderedDict()
        self._asked: deque[tuple[int, Sequence[str]]] = deque(maxlen=PATHS_MAX)
        self._unasked = 0

    def asking(self, keys: Sequence[str], now: float) -> str:
        """Return the name of the request that asks at `now` (seconds) for a path."""
        key = keys[-1]
        count, at = self._last.pop(key, (0, -RETRY_S))
        if now - at >= RETRY_S:
            count += 1
        self._last[key] = (count, now)
        if len(self._last) > REQUESTS_MAX:
            self._last.popitem(last=False)
        return f"{key}/{count}"

    def stands(self, first: int, keys: Sequence[str]) -> None:
        """This many pages come before a path."""
        self._asked.append((first, keys))

    def missed(self, name: str, keys: Sequence[str], first: int | None = None) -> None:
        """That request will compute these pages, or has; `first` pages come before them, if it is known
        how many."""
        for number, key in enumerate(keys[:PAGES_MAX]):
            _, known = self._pages.pop(key, ("", None))
            self._pages[key] = (name, known if first is None else first + number)
        while len(self._pages) > PAGES_MAX:
            self._pages.popitem(last=False)

    def saving(self, before: Sequence[str], keys: Sequence[str]) -> str:
        """Return the name of the request that saves `keys`, which come after `before`.

        It is the one that looked up the deepest page of them; generated pages follow its prompt.
        """
        deepest = chain(reversed(keys), reversed(before[-BACK_MAX:]))
        name = next((self._pages[key][0] for key in deepest if key in self._pages), "")
        if not name:
            self._unasked += 1
            name = f"saved/{self._unasked}"
        return name

    def position(self, key: str) -> int | None:
        """Return how many pages come before a page, if it was saved or found not long ago."""
        _, known = self._pages.get(key, ("", None))
        if known is not None:
            return known
        for first, keys in reversed(self._asked):
            if key in keys:
                return first + keys.index(key)
        return None
