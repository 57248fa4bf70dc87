"""What the node counts. Every name and label is there from the start, at 0."""

NAMES: dict[str, tuple[str, ...]] = {
    "lookups": ("hit_host", "hit_nvme", "miss", "declined", "aborted"),
    "misses": ("unknown_prefix", "no_state", "incomplete", "elsewhere", "beyond_limit"),
    "hit_tokens": ("host", "nvme"),
    "lookup_tokens": ("",),
    "lost_tokens": (
        "unseen",
        "not_held",
        "no_state",
        "incomplete",
        "elsewhere",
        "beyond_limit",
        "slower_than_recompute",
        "late",
        "aborted",
    ),
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
        "evicted_own",
        "quota",
        "do_not_store",
        "not_admitted",
        "outweighed",
    ),
    "checkpoints": ("followed", "unfollowed", "unadvised"),
    "commits": ("",),
    "committed_bytes": ("",),
    "commits_lost": ("",),
    "evictions": ("host", "nvme"),
    "evicted_bytes": ("host", "nvme"),
    "quota_evictions": ("host", "nvme"),
    "expired": ("",),
    "pins": ("pinned", "nothing", "incomplete", "too_many", "over_budget", "invalid"),
    "pins_ended": ("unpinned", "expired", "session"),
    "writeback_bytes": ("",),
    "writeback_dropped": (
        "queue_full",
        "no_room",
        "no_space",
        "io",
        "gone",
        "quota",
        "slower_than_recompute",
    ),
    "nvme_read_bytes": ("",),
    "nvme_faults": ("no_space", "io", "damaged", "missing"),
    "damaged": ("host", "nvme"),
    "isolated": ("",),
    "pushes": ("taken", "not_taken", "unknown_node", "busy", "unavailable", "deadline"),
    "peer_asked": ("found", "not_found", "failed", "late", "slower"),
    "agreements": ("found", "not_found", "failed", "late"),
    "peer_answered": ("found", "not_found"),
    "peer_faults": ("no_space", "io", "damaged", "missing"),
    "peer_read_bytes": ("",),
    "peer_lent_bytes": ("",),
    "pool_asked": ("found", "not_found", "failed", "late", "slower"),
    "pool_faults": ("no_space", "io", "damaged", "missing"),
    "pool_read_bytes": ("",),
    "deposits": (
        "stored",
        "absent",
        "ends",
        "mixed",
        "too_large",
        "slower",
        "busy",
        "too_fast",
        "no_space",
        "io",
        "damaged",
        "missing",
    ),
    "deposited_bytes": ("",),
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
