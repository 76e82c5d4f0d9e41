"""The environment variable ``TVMBRIDGE_LOGS``."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib import import_module

import pytest

from tvmbridge.core.logs import TOPICS, set_logs

_PROGRAM = """
import torch, tvmbridge
module = torch.nn.Linear(3, 4).eval()
with torch.no_grad():
    tvmbridge.add_tvm_dispatch(module, torch.randn(2, 3))
    module(torch.randn(2, 3))
    module(torch.randn(5, 3))
"""


def _told(logs: str, folder: str) -> str:
    environment = {**os.environ, "TVMBRIDGE_LOGS": logs, "TVMBRIDGE_CACHE_DIR": folder}
    environment["TVMBRIDGE_CACHE"] = "1"
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stderr


def test_topics_are_told_as_the_variable_asks(tmp_path: object) -> None:
    told = _told("+guards,cache,compile,-fallbacks", str(tmp_path))
    assert "compiled Linear" in told
    assert "def guard(args, kwargs):" in told
    assert "compiled code: miss" in told
    assert "fallbacks" not in told


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
