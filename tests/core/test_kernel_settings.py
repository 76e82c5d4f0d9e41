"""Settings of PyTorch's kernels, tested in a separate process.

PyTorch cannot undo every mixture of its older and newer settings, and its test utilities, which
other tests import, forbid assignments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_settings_are_read_and_followed() -> None:
    cases = Path(__file__).with_name("kernel_settings_cases.py")
    # Without the conftest and other plugins, whose imports take longer than the cases.
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "pytest_timeout"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, str(cases)], capture_output=True, text=True, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
