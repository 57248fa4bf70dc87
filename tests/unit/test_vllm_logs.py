"""Our lines and vLLM's come out at one place, once."""

import logging

import pytest

from tiercache_vllm import logs


def test_lines_come_out_where_vllms_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Sink(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    theirs = logging.getLogger("vllm")
    monkeypatch.setattr(theirs, "handlers", [Sink()])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    for name in logs.NAMES:
        ours = logging.getLogger(name)
        monkeypatch.setattr(ours, "handlers", [])
        monkeypatch.setattr(ours, "propagate", True)
        monkeypatch.setattr(ours, "level", logging.NOTSET)
    logs.join()
    logs.join()
    logging.getLogger("tiercache.client").warning("away")
    logging.getLogger("tiercache_vllm.working").info("saved")
    logging.getLogger("tiercache_vllm.working").debug("no")
    assert seen == ["away", "saved"]


def test_without_vllms_log_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    before = {name: logging.getLogger(name).propagate for name in logs.NAMES}
    levels = {name: logging.getLogger(name).level for name in logs.NAMES}
    logs.join()
    assert before == {name: logging.getLogger(name).propagate for name in logs.NAMES}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
