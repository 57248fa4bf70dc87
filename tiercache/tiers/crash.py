"""Named places where a test may kill the process, to see that nothing acknowledged is lost there.

Nothing happens at any of them unless the place was armed; a user never arms one.
"""

import os
import signal

CRASH_POINTS = (
    "nvme.owned",
    "nvme.before_write",
    "nvme.segment_created",
    "nvme.after_write_before_index",
    "nvme.after_index",
    "nvme.after_remember",
    "nvme.after_forget",
    "nvme.mid_reclaim_after_forget",
    "nvme.mid_reclaim_after_remove",
    "nvme.mid_scan",
    "nvme.after_orphan_removed",
    "runtime.listening",
    "runtime.after_attach",
    "runtime.after_seal_before_handle",
    "runtime.after_store_before_handle",
    "runtime.stopping",
)
"""Every name that `arm` and `reach` accept."""

_armed: dict[str, int] = {}


def arm(name: str, count: int = 1) -> None:
    """Kill this process with SIGKILL when it reaches the place `name` for the `count`th time."""
    if name not in CRASH_POINTS:
        raise ValueError(f"no crash point {name!r}; there are {', '.join(CRASH_POINTS)}")
    if count < 1:
        raise ValueError("count must be at least 1")
    _armed[name] = count


def disarm() -> None:
    """Make every place harmless again."""
    _armed.clear()


def reach(name: str) -> None:
    """Die here if armed."""
    if not _armed:
        return
    assert name in CRASH_POINTS, name
    left = _armed.get(name, 0)
    if left == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif left:
        _armed[name] = left - 1
