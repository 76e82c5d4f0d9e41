"""The environment variable ``TVMBRIDGE_LOGS``."""

from __future__ import annotations

import logging
from importlib import import_module

import pytest

from tvmbridge.core.logs import TOPICS, set_logs


def test_each_topic_is_of_loggers_that_there_are() -> None:
    for names in TOPICS.values():
        for name in names:
            import_module(f"tvmbridge.{name}".rstrip("."))


def test_an_unknown_topic_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no topic \+guard; the topics are all, cache"):
        set_logs("compile, +guard")


def test_nothing_is_set_where_nothing_is_asked_for() -> None:
    logger = logging.getLogger("tvmbridge")
    before = logger.level, list(logger.handlers)
    set_logs("")
    assert (logger.level, list(logger.handlers)) == before


def test_a_topic_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("tvmbridge.runtime.fallbacks")
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr("tvmbridge.core.logs._write_to_standard_error", lambda logger: None)
    set_logs("-fallbacks")
    assert logger.level == logging.ERROR
