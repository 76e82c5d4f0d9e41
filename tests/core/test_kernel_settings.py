"""Settings of PyTorch's kernels, tested in a separate process.

PyTorch cannot undo every mixture of its older and newer settings, and its test utilities, which
other tests import, forbid assignments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_settings_are_read_and_followed() -> None:
    cases = Path(__file__).with_name("kernel_settings_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(cases)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
