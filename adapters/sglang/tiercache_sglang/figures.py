"""What a backend counts: for SGLang's metrics, for people, for tests."""

import threading
from collections import Counter
from dataclasses import dataclass

GB = 1e9
TRANSFERS_MAX = 4096
"""Transfers that are kept until SGLang asks for them."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages moved by one call, and at how many gigabytes a second."""

    pages: int
    gb_per_s: float


class Figures:
    """Counts by name, and the transfers since they were last asked for. Thread-safe.

    Counted are `<call>` (calls), `<call>_pages` and `<call>_bytes` of `get` and `set`, `hit_pages`,
    `missed_calls`, `faults:<reason>`, `errors:<call>` (exceptions that SGLang was not shown),
    `states_offered`, `states_stored`, `no_position` (saves that came without prefix keys) and
    `other_weights` (calls after the engine's weights were updated).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._transfers: dict[str, list[Transfer]] = {"get": [], "set": []}

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] += amount

    def moved(self, call: str, pages: int, nbytes: int, seconds: float) -> None:
        """Count a transfer. `call` is "get" or "set"."""
        with self._lock:
            self._counts[f"{call}_pages"] += pages
            self._counts[f"{call}_bytes"] += nbytes
            kept = self._transfers[call]
            if pages and len(kept) < TRANSFERS_MAX:
                kept.append(Transfer(pages, nbytes / GB / max(seconds, 1e-9)))

    def counts(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)

    def take(self, call: str) -> list[Transfer]:
        """Return the transfers since this was last called."""
        with self._lock:
            taken, self._transfers[call] = self._transfers[call], []
            return taken
