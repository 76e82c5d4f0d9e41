"""Compile the C++ halves before any test runs, and load the checks where tests run.

The process that hands tests to workers runs none: it does not load the checks, whose imports take
seconds in which no worker runs.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest

from tvmbridge.core import compiled_half

# Tests load the user's compiled C++ halves, also if a test sets a cache folder of its own.
os.environ.setdefault(compiled_half.FOLDER, str(compiled_half.halves_folder()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--watch-state",
        action="store_true",
        help="compare PyTorch's global state before and after each refusal, which takes longer",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Compile the missing C++ halves, once for all workers; load the checks into the others."""
    is_worker = hasattr(config, "workerinput")
    if compiled_half.word() == "build" and not is_worker:
        compiled_half.build_halves()
        os.environ[compiled_half.SWITCH] = "load"
    if is_worker or config.getoption("dist", "no") == "no":
        gc.disable()  # until tests are collected: imports free few of the objects that they create
        config.pluginmanager.import_plugin("tests.checks")


def pytest_report_header() -> list[str]:
    """Report which compiled C++ halves the tests run with."""
    return [f"compiled half {state}" for state in compiled_half.states()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the seconds of each folder of tests, if pytest is asked for ``--durations``."""
    if terminalreporter.config.getoption("durations") is None:
        return
    seconds: Counter[str] = Counter()
    for report in (r for found in terminalreporter.stats.values() for r in found):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            seconds["/".join(file.split("/")[:2])] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, count in seconds.most_common():
        terminalreporter.write_line(f"{count:8.1f}s {folder}")
