"""One log: what tiercache says inside vLLM comes out where vLLM's own lines do."""

import logging

NAMES = ("tiercache", "tiercache_vllm")


def join() -> None:
    """Give our loggers the handlers and the level of vLLM's. Idempotent."""
    theirs = logging.getLogger("vllm")
    for name in NAMES:
        ours = logging.getLogger(name)
        ours.setLevel(theirs.getEffectiveLevel())
        for handler in theirs.handlers:
            if handler not in ours.handlers:
                ours.addHandler(handler)
                ours.propagate = False
