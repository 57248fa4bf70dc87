"""Seeded histories of one node: engines, a disk and their faults around the very same `Machine`.

Nothing here waits for real time or real I/O; all chance comes from one seed, so every history can be
run again, event by event. The engines run a toy hybrid model whose output changes with any byte of its
state: a history passes when every resumed request gives what the uninterrupted one gives, when each call
got its one answer, and when nothing is held at the end.
"""

from tiercache.testing.sim.world import History, HistoryError, World, run_seed

__all__ = ["History", "HistoryError", "World", "run_seed"]
