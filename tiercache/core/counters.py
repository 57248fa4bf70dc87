"""What the node counts. Every name and label is there from the start, at 0."""

NAMES: dict[str, tuple[str, ...]] = {
    "lookups": ("hit_host", "hit_nvme", "miss", "declined", "aborted"),
    "misses": ("unknown_prefix", "no_state", "incomplete", "beyond_limit"),
    "hit_tokens": ("host", "nvme"),
    "lookup_tokens": ("",),
    "fetches": ("host", "nvme", "miss"),
    "reserves": (
        "granted",
        "held",
        "busy",
        "full",
        "too_large",
        "invalid",
        "too_many",
        "read_only",
    ),
    "commits": ("",),
    "commits_lost": ("",),
    "evictions": ("host", "nvme"),
    "evicted_bytes": ("host", "nvme"),
    "writeback_bytes": ("",),
    "writeback_dropped": ("queue_full", "no_room", "no_space", "io", "gone"),
    "nvme_read_bytes": ("",),
    "nvme_faults": ("no_space", "io", "damaged", "missing"),
    "damaged": ("host", "nvme"),
}


class Counters:
    """Monotonic counts by name and label. An unknown name or label is a bug, not a new series."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, int]] = {
            name: dict.fromkeys(labels, 0) for name, labels in NAMES.items()
        }

    def add(self, name: str, label: str = "", amount: int = 1) -> None:
        """Count `amount` more."""
        self.values[name][label] += amount
        assert label in NAMES[name]
