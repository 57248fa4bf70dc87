"""What holds for every test."""

import gc


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later collection of garbage.

    It is there until the end, and looking through it each time takes a fifth of the time of all tests.
    """
    gc.collect()
    gc.freeze()
